"""A start takes the size of pool that an earlier one compiled, so that it finds its programs."""

from collections import Counter

import jax
import pytest
from engines import checkpoint, make
from jax.experimental.compilation_cache import compilation_cache

from shiftjax.config import EngineConfig
from shiftjax.deploy.deployment import Deployment, Devices, stable
from shiftjax.deploy.resolve import resolve
from shiftjax.device import pool_sizes, sizing
from shiftjax.device.pool_sizes import LEAST_WORKSPACE_BYTES, MOST_SIZES, PoolSizes
from shiftjax.options import ConfigError
from shiftjax.weights.locate import open_source, resolve_model

TOTAL = 8 << 30
BORDER = 1024  # blocks: with a byte less 960 are taken
LEAST = LEAST_WORKSPACE_BYTES
OPTIONS = {
    "dtype": "float32",
    "max_model_len": 128,
    "block_size": 4,
    "num_blocks": None,
    "memory_fraction": 1.0,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 64,
    "token_buckets": [64],
}


def deployment(**options) -> Deployment:
    """Of a tiny model on one device, its pool not sized."""
    model = open_source(resolve_model(str(checkpoint()[0]))).config
    config = EngineConfig.from_options(sp=1, tp=1, **OPTIONS | options)
    return resolve(config, model, Devices(1, TOTAL, TOTAL))


@pytest.fixture
def free(monkeypatch):
    """Sets the memory that is free beside the weights: for so many blocks, and some bytes.

    It is a limit, as on devices with memory of their own.
    """
    monkeypatch.setattr(pool_sizes, "MOST_SHARE_ON_CPU", 1)

    def set_free(num_blocks: int, more_bytes: int = 0) -> None:
        free = num_blocks * deployment().block_bytes + LEAST + more_bytes
        monkeypatch.setattr(pool_sizes, "measure", lambda *_: Devices(1, TOTAL, free))

    return set_free


def sizes_in(directory, **options) -> PoolSizes:
    return PoolSizes(deployment(**options), jax.devices()[:1], directory)


def size(directory, workspace: int = LEAST, **options) -> tuple[int, int]:
    sized, room = sizes_in(directory, **options).size(workspace)
    return sized.num_blocks, room


@pytest.fixture
def found(tmp_path):
    """What was found in the compilation cache in `tmp_path`, or missed there, counted."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    names += ("jax_persistent_cache_min_entry_size_bytes",)
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update(names[0], str(tmp_path))
    compilation_cache.reset_cache()  # which one there is is asked once
    events: Counter[str] = Counter()

    def count(event: str, **_: str | int) -> None:
        if event.startswith("/jax/compilation_cache/cache_"):
            events[event.rpartition("_")[2]] += 1

    jax.monitoring.register_event_listener(count)
    yield events
    jax.monitoring.unregister_event_listener(count)
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.mark.costs(8)
def test_a_second_start_on_the_other_side_of_a_border_compiles_nothing(free, found, tmp_path):
    def start() -> int:
        jax.clear_caches()  # as in a new process
        found.clear()
        built = make(checkpoint()[0], 1, 1, tmp_path, **OPTIONS)
        return built.deployment.num_blocks

    free(BORDER, -1)
    assert start() == 960 and found["misses"] > 0
    free(BORDER)
    assert start() == 960 and found["misses"] == 0 < found["hits"]
    free(960)
    assert start() == 960 and found["misses"] == 0 < found["hits"]
    free(600)
    assert start() == stable(600) and found["misses"] > 0


def test_a_pool_on_a_cpu_is_a_share_of_what_weights_leave(monkeypatch):
    """However little of the memory is available: a machine half full has room for a small model."""
    monkeypatch.setattr(sizing, "host_memory", lambda: (4 * TOTAL, TOTAL))
    here = sizing.measure(jax.devices()[:4])
    assert (here.total_bytes, here.free_bytes) == (TOTAL, TOTAL // 4)
    assert not here.is_priced  # that it is a CPU does not say how fast it is
    mostly_used = deployment(memory_fraction=0.9)
    left = mostly_used.memory(here._replace(pool_share=1.0)).kv_bytes
    assert mostly_used.memory(here).kv_bytes == int(sizing.CPU_SHARE * left) > 0


def test_a_size_is_taken_where_it_fits_and_is_not_too_small(free, tmp_path):
    free(BORDER)
    sizes_in(tmp_path).keep(BORDER, LEAST)
    for num_blocks, taken in ((1365, 1024), (1366, 1024), (1407, 1024), (1408, 1408), (1023, 960)):
        free(num_blocks)
        assert size(tmp_path)[0] == taken


def test_a_cpu_takes_a_size_that_is_a_quarter_more_than_its_share(free, tmp_path, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(pool_sizes, "measure", lambda *_: Devices(1, TOTAL, free_bytes))
    sizes_in(tmp_path).keep(BORDER, LEAST)
    for num_blocks, taken in ((1023, 1024), (820, 1024), (819, 768)):
        free_bytes = num_blocks * deployment().block_bytes + LEAST
        assert size(tmp_path)[0] == taken


def test_the_largest_that_fits_of_several(free, tmp_path):
    for num_blocks in (960, 1000, 900, 1000):
        sizes_in(tmp_path).keep(num_blocks, LEAST)
    assert [free(n) or size(tmp_path)[0] for n in (1024, 999, 959)] == [1000, 960, 900]
    for num_blocks in range(2, 20):
        sizes_in(tmp_path).keep(num_blocks, LEAST)
    (file,) = (tmp_path / pool_sizes.FOLDER).iterdir()
    assert file.read_text().count(str(LEAST)) == MOST_SIZES


def test_what_steps_needed_is_remembered_and_left_free(free, tmp_path):
    needed = LEAST + 100 * deployment().block_bytes
    sizes_in(tmp_path).keep(900, needed)
    free(1000)
    assert size(tmp_path) == (900, needed)
    assert size(tmp_path, needed + 1) == (stable(899), needed + 1)  # more than was known
    free(999)
    assert size(tmp_path) == (stable(999), LEAST)


def test_settings_and_versions_have_their_own_sizes(free, tmp_path, monkeypatch):
    free(BORDER)
    sizes_in(tmp_path).keep(1000, LEAST)
    assert size(tmp_path)[0] == 1000
    assert size(tmp_path, max_num_seqs=63)[0] == BORDER
    assert size(tmp_path, num_blocks=77)[0] == 77
    assert size(None)[0] == BORDER
    monkeypatch.setattr(jax, "__version__", "0.0")
    assert size(tmp_path)[0] == BORDER


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "[" * 100_000,
        '{"key": 1}',
        '{"key": KEY}',
        '{"key": KEY, "sizes": 5}',
        '{"key": KEY, "sizes": [5]}',
        '{"key": KEY, "sizes": [[1e999, 0]]}',
        '{"key": KEY, "sizes": [["a", null]]}',
        '{"key": KEY, "sizes": [[-1000, 0], [1, 0], [1000, -1]]}',
    ],
)
def test_a_file_that_is_none_is_not_there(free, tmp_path, text):
    free(BORDER)
    sizes_in(tmp_path).keep(1000, LEAST)
    (file,) = (tmp_path / pool_sizes.FOLDER).iterdir()
    key = file.read_text().partition('"key": ')[2].rpartition("}")[0]
    file.write_text(text.replace("KEY", key))
    assert size(tmp_path)[0] == BORDER
    sizes_in(tmp_path).keep(1000, LEAST)
    assert size(tmp_path)[0] == 1000
    assert list(file.parent.iterdir()) == [file]


def test_nothing_is_kept_where_nothing_can_be_written_or_is_wanted(free, tmp_path, caplog):
    free(BORDER)
    sizes_in(tmp_path, num_blocks=77).keep(77, LEAST)
    sizes_in(None).keep(1000, LEAST)
    assert not list(tmp_path.iterdir()) and not caplog.records
    (tmp_path / pool_sizes.FOLDER).write_text("a file")
    sizes_in(tmp_path).keep(1000, LEAST)
    assert "not kept" in caplog.text
    assert size(tmp_path)[0] == BORDER


def test_no_room_for_blocks_is_said(free, tmp_path):
    sizes_in(tmp_path).keep(1000, LEAST)
    free(1)
    with pytest.raises(ConfigError, match="no memory for KV blocks"):
        size(tmp_path)
