"""What suits a CPU: decided by what products take, tried once, kept beside compiled programs."""

import json
import os

import pytest
from engines import checkpoint, make, run, tokens
from oracle import numpy_llama

from shiftjax.arch.presets import PRESETS
from shiftjax.config import EngineConfig
from shiftjax.core.request import SamplingParams
from shiftjax.costs.buckets import doubling, worthwhile
from shiftjax.deploy.deployment import Devices
from shiftjax.deploy.resolve import Suited, resolve
from shiftjax.device import cpu_probe
from shiftjax.device.cpu_probe import choose, suited_to_cpu
from shiftjax.local_deployment import deploy
from shiftjax.settings import num_cores

ROWS = (*cpu_probe.FEW_ROWS, cpu_probe.MANY_ROWS)


def table(*milliseconds: float) -> dict[int, float]:
    return {rows: each / 1e3 for rows, each in zip(ROWS, milliseconds, strict=True)}


# A Xeon with AMX and bfloat16 instructions; and one as a CPU with AVX2 alone is, whose products
# widen every weight: 3.5 GB/s of bfloat16 at 8 rows, 5 at 2 rows, 11 of float32 at 1 row.
WITH_BFLOAT16 = {
    "bfloat16": table(10.1, 9.4, 9.2, 9.6, 9.8, 10.1, 10.5, 12.0, 12.9, 27.1),
    "float32": table(14.6, 15.5, 17.5, 19.2, 21.1, 24.2, 27.7, 30.0, 32.4, 89.6),
}
WITHOUT = {
    "bfloat16": table(17.0, 20.1, 24.3, 30.0, 33.0, 41.0, 54.0, 81.0, 108, 400),
    "float32": table(17.2, 20.0, 24.4, 29.0, 33.5, 40.0, 54.0, 78.0, 102, 380),
}


def test_a_cpu_with_bfloat16_instructions_keeps_it_and_the_sizes_that_double_from_8():
    assert choose(WITH_BFLOAT16) == Suited("bfloat16", (8, 16, 32, 64))


def test_a_cpu_without_gets_small_steps_and_sizes_between():
    """As both formats are as quick, it stays with that of half the memory."""
    assert choose(WITHOUT) == Suited("bfloat16", (2, 8, 16, 24, 32, 48, 64))
    slower = {rows: 1.5 * seconds for rows, seconds in WITHOUT["bfloat16"].items()}
    suited = choose(WITHOUT | {"bfloat16": slower})
    assert suited == Suited("float32", (2, 8, 16, 24, 32, 48, 64))


def test_no_step_is_of_one_row():
    """However quick its products are, the LM head of one row is slow."""
    quick = {rows: rows / 1e3 for rows in ROWS}
    assert min(choose({"float32": quick}).few_tokens) == 2


def test_a_size_is_worth_its_program_for_a_fifth_of_the_time():
    assert worthwhile({4: 8.1, 8: 10, 12: 12.1, 16: 15.0}) == (8, 16)
    assert worthwhile({4: 7.9, 8: 10, 12: 11.9, 16: 15.0}) == (4, 8, 12, 16)


def test_sizes_double_from_the_last_one_that_was_tried():
    assert doubling(100) == (8, 16, 32, 64, 100)
    assert doubling(100, (2, 8, 16, 24, 32)) == (2, 8, 16, 24, 32, 64, 100)
    assert doubling(20, (2, 8, 16, 24, 32)) == (2, 8, 16, 20)
    assert doubling(2, (2, 8)) == (2,)


@pytest.fixture
def little(monkeypatch):
    """A trial of some milliseconds; and none is remembered in this process."""
    monkeypatch.setattr(cpu_probe, "SHAPE", (16, 8))
    monkeypatch.setattr(cpu_probe, "NUM_LAYERS", 1)
    monkeypatch.setattr(cpu_probe, "NUM_ROUNDS", 1)
    suited_to_cpu.cache_clear()
    yield
    suited_to_cpu.cache_clear()


def test_a_trial_is_kept_beside_the_programs(little, tmp_path):
    first = suited_to_cpu(None, tmp_path)
    (path,) = (tmp_path / "cpu").iterdir()
    kept = json.loads(path.read_text())
    seconds = kept["seconds"]
    assert set(seconds) == {"bfloat16", "float32"}
    assert all(
        set(map(int, each)) == set(ROWS) and min(each.values()) > 0 for each in seconds.values()
    )
    for name, measured in WITHOUT.items():  # what is kept is what counts
        seconds[name] = measured
    path.write_text(json.dumps(kept))
    assert suited_to_cpu(None, tmp_path) == first  # in this process
    suited_to_cpu.cache_clear()
    assert suited_to_cpu(None, tmp_path) == choose(WITHOUT)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"key": 1, "seconds": {}}', "no seconds"])
def test_what_cannot_be_read_is_measured_again(text, little, tmp_path):
    suited_to_cpu("float32", tmp_path)
    (path,) = (tmp_path / "cpu").iterdir()
    whole = json.loads(path.read_text())
    path.write_text(text if text != "no seconds" else json.dumps(whole | {"seconds": 3}))
    suited_to_cpu.cache_clear()
    suited_to_cpu("float32", tmp_path)
    assert set(json.loads(path.read_text())["seconds"]) == {"float32"}


def test_another_number_of_virtual_devices_is_the_same_cpu(little, tmp_path):
    for flags in ("--xla_force_host_platform_device_count=8", "", "--xla_cpu_max_isa=AVX2"):
        suited_to_cpu("float32", tmp_path, flags)
    assert len(list((tmp_path / "cpu").iterdir())) == 2


def test_settings_come_before_what_suits():
    config = PRESETS["tiny"]
    here, suited = Devices(1, 2**34, 2**34), Suited("float32", (2, 8, 12))
    chosen = resolve(EngineConfig.from_options(max_num_batched_tokens=64), config, here, suited)
    assert (chosen.formats.weights, chosen.formats.kv) == ("float32", "float32")
    assert [bucket.tokens for bucket in chosen.buckets] == [2, 8, 12, 24, 48, 64]
    asked = EngineConfig.from_options(dtype="float16", token_buckets=[16, 2048])
    chosen = resolve(asked, config, here, suited)
    assert chosen.formats.weights == "float16"
    assert [bucket.tokens for bucket in chosen.buckets] == [16, 2048]


def test_only_a_model_that_caches_cannot_hold_is_worth_a_trial(little, tmp_path, monkeypatch):
    config = PRESETS["tiny"]
    deploy(EngineConfig.from_options(), config, tmp_path)
    assert not (tmp_path / "cpu").exists()
    monkeypatch.setattr("shiftjax.local_deployment.LEAST_PARAMETERS", 1)
    _, (deployment,) = deploy(EngineConfig.from_options(dtype="float32"), config, tmp_path)
    few = suited_to_cpu("float32", tmp_path, os.environ["XLA_FLAGS"], num_cores()).few_tokens
    assert deployment.token_buckets == doubling(deployment.max_num_batched_tokens, few)
    assert len(list((tmp_path / "cpu").iterdir())) == 1
    given = EngineConfig.from_options(dtype="bfloat16", token_buckets=[2048])
    deploy(given, config, tmp_path)  # nothing is left open
    assert len(list((tmp_path / "cpu").iterdir())) == 1


@pytest.mark.thorough
def test_steps_of_one_and_two_tokens_give_the_same_tokens():
    directory, config, tensors = checkpoint()
    built = make(directory, 1, 1, token_buckets=[1, 2, 32], max_num_batched_tokens=32)
    prompts = [[5, 6, 7] * 3, [9, 2, 4]]
    for together in (1, 2):
        greedy = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
        events = run(built.engine, prompts[:together], [greedy] * together)
        for number, prompt in enumerate(prompts[:together]):
            assert tokens(events[number, 0]) == numpy_llama.greedy(config, tensors, prompt, 5)
