"""Prefixes that fall out of host memory are found on the disk, whatever happens to it.

Blocks hold the tokens whose KV would be there, in files, too; runners look at what each step
attends to. So what a damaged, lost or foreign file brings would fail at the step that reads it.
"""

import pytest
from disk_kit import with_disk
from echo_kit import HOST_BLOCK_BYTES, generate, make_request, reference, runner_of
from hypothesis import event, given, settings
from hypothesis import strategies as st
from spent import examples
from traffic_kit import FAST, Client, check_tokens, play

from shiftjax.core.request import SamplingParams
from shiftjax.disk_tier import disk as disk_module
from shiftjax.disk_tier.disk_stats import DiskStats
from shiftjax.disk_tier.waits import Rate

STEMS = [[stem] * 5 + list(range(12)) + [stem] * 7 for stem in range(6)]  # 24 tokens
TIGHT = {"block_size": 4, "num_blocks": 9, "num_host_blocks": 13}  # one stem, and two


@st.composite
def repeated(draw):
    """Requests that come again and again with the same few beginnings."""
    clients = []
    for number in range(draw(st.integers(12, 20))):
        prompt = draw(st.sampled_from(STEMS))[: draw(st.sampled_from([24, 24, 13]))]
        prompt = prompt + draw(st.lists(st.integers(0, 12), max_size=3))
        salt = draw(st.sampled_from(["a", "a", "a", "a", "b"]))
        sampling = {"max_tokens": 4, "seed": number, "cache_salt": salt}
        request = make_request(f"r{number}", prompt, float(3 * number), **sampling)
        cancel = 3 * number + draw(st.integers(0, 3)) if draw(st.integers(0, 9)) == 9 else None
        clients.append(Client(request, 3 * number, cancel))
    return clients


def damage(directory, kinds):
    """Cut, flip, and remove files."""
    for path, kind in zip(sorted(directory.glob("*.kv")), kinds, strict=False):
        data = path.read_bytes()
        if kind == "gone":
            path.unlink()
        elif kind == "cut":
            path.write_bytes(data[: len(data) // 2])
        elif kind == "flip":
            path.write_bytes(data[:-9] + bytes([data[-9] ^ 4]) + data[-8:])


DAMAGE = st.lists(st.sampled_from(["none", "none", "gone", "cut", "flip"]), max_size=6)


@settings(FAST, max_examples=examples(80))
@given(
    st.data(),
    repeated(),
    st.dictionaries(st.integers(0, 40), st.sampled_from(["run", "fetch"]), max_size=2),
    st.lists(st.integers(0, 3), min_size=1, max_size=5),
)
def test_three_tiers_change_no_token(tmp_path_factory, data, clients, faults, pace):
    directory = tmp_path_factory.mktemp("disk") / "new"
    options = {
        "dp": data.draw(st.integers(1, 2)),
        "overlap": data.draw(st.booleans()),
        "num_host_blocks": data.draw(st.sampled_from([9, 13, 20])),
        "preemption": data.draw(st.sampled_from(["swap", "recompute"])),
        "max_num_batched_tokens": data.draw(st.sampled_from([8, 40])),
        "watermark": 0.0,
        "hash_size": 2,
    }
    num_bytes = data.draw(st.sampled_from([9_000, 40_000, 1 << 20]))
    num_tokens = 4 * data.draw(st.integers(9, 17))
    hits = 0
    for life in range(2):  # the second one finds what the first has left
        options["block_size"] = data.draw(st.sampled_from([2, 4, 4]))
        options["num_blocks"] = 1 + num_tokens // options["block_size"]
        engine, disk = with_disk(directory, num_bytes, pace, **options)
        runners = [runner_of(engine, group) for group in range(len(engine.lanes))]
        for runner in runners:
            runner.faults = dict(faults)
        accepted, listener = play(engine, clients, extra_steps=2000)
        failed = set().union(*(runner.failed_requests for runner in runners))
        check_tokens(engine, accepted, listener, errors=failed)
        disk.settle()
        engine.check()
        files = sum(path.stat().st_size for path in directory.glob("*.kv"))
        assert files == disk.index.num_used_bytes <= num_bytes
        hits += engine.stats().find(DiskStats).num_hit_tokens
        if life and data.draw(st.booleans()):
            engine.flush_prefix_cache()
            disk.settle()
            assert not list(directory.glob("*.kv"))
        engine.close()
        damage(directory, data.draw(DAMAGE))
    event(f"hits: {hits > 0}")


def ask(engine, stem: int, name: str) -> int:
    """Serve a prompt alone; returns how many of its tokens were cached."""
    request = make_request(name, STEMS[stem], max_tokens=2, seed=1)
    outcome = generate(engine, request)[name, 0]
    assert outcome.token_ids == reference(engine, request, 0, 0)[0]
    return outcome.last.metrics.num_cached_tokens


def told(engine) -> DiskStats:
    return engine.stats().find(DiskStats)


def filled(directory, **options):
    """An engine that has served six stems: three have fallen out of host memory."""
    engine, disk = with_disk(directory, **TIGHT, **options)
    assert [ask(engine, stem, f"a{stem}") for stem in range(6)] == [0] * 6
    disk.settle()
    return engine, disk


def test_a_prefix_that_fell_out_of_host_memory_is_read(tmp_path):
    engine, _ = filled(tmp_path)
    assert ask(engine, 0, "again") == 20
    stats = told(engine)
    assert stats.num_hit_tokens > 0 and stats.num_read_bytes > 0
    assert stats.num_hit_tokens <= stats.num_query_tokens <= 20


def test_it_is_there_after_a_restart_for_the_same_model_alone(tmp_path, monkeypatch):
    filled(tmp_path)[0].close()
    engine, disk = with_disk(tmp_path, **TIGHT)
    disk.settle()
    assert ask(engine, 0, "again") == 20 == told(engine).num_hit_tokens
    engine.close()
    other, disk = with_disk(tmp_path, **TIGHT)
    disk._place = disk._place._replace(identity="another")
    disk.settle()
    assert ask(other, 0, "again") == 0 and not disk.index
    assert disk.index.num_used_bytes > 0  # which takes room, and goes first


def test_what_is_read_leaves_the_rest_of_the_prefix_in_host_memory(tmp_path):
    engine, disk = with_disk(tmp_path, **(TIGHT | {"num_host_blocks": 9}))
    for stem in range(4):
        ask(engine, stem, f"a{stem}")
        disk.settle()
    tier = engine.lanes[0].scheduler.tables.tier
    assert sum(each.writer is tier for each in tier.memory.idle) > 0 and disk.index
    assert ask(engine, 1, "again") == 20  # its beginning was the oldest in host memory
    assert 0 < told(engine).num_hit_tokens < 20


def test_others_go_on_while_one_waits(tmp_path):
    filled(tmp_path)[0].close()
    engine, disk = with_disk(tmp_path, pace=[0], **(TIGHT | {"num_blocks": 20}))
    disk.settle()
    disk.pause = lambda: None
    engine.add_request(make_request("old", STEMS[0], max_tokens=2, seed=1))
    engine.add_request(make_request("new", [9] * 6, max_tokens=3, seed=1))
    ended = [e.request_id for _ in range(30) for e in engine.step(0.0) if e.is_last]
    assert ended == ["new"]
    disk.settle()
    ended = [e for _ in range(10) for e in engine.step(0.0) if e.is_last]
    assert ended[0].metrics.num_cached_tokens == 20


@pytest.mark.parametrize(("seconds", "waits"), [(1e-9, False), (1e3, True)])
def test_what_computes_sooner_than_it_is_read_does_not_wait(tmp_path, seconds, waits):
    engine, disk = filled(tmp_path)
    tier = engine.lanes[0].scheduler.tables.tier
    disk.watch(1 << 20, 1.0)
    tier._waits.prompts = Rate(1, seconds)
    tier.learn_step = lambda *_: None
    assert ask(engine, 0, "again") == (20 if waits else 0)
    assert (told(engine).num_slow_tokens > 0) == (not waits)


def test_a_read_that_never_ends_is_waited_for_a_while(tmp_path):
    engine, disk = filled(tmp_path)
    disk.pace, disk.pause = [0], lambda: None
    now = [0.0]
    engine.lanes[0].scheduler.tables.tier._waits._clock = lambda: now[0]
    engine.add_request(make_request("again", STEMS[0], max_tokens=2, seed=1))
    assert not [e for _ in range(9) for e in engine.step(0.0)]
    now[0] = 60.0
    assert [e for _ in range(9) for e in engine.step(0.0)][-1].is_last


@pytest.mark.parametrize("kind", ["gone", "cut", "flip"])
def test_a_damaged_file_is_dropped_and_counted(tmp_path, kind):
    engine, disk = filled(tmp_path)
    damage(tmp_path, [kind] * 20)
    assert ask(engine, 0, "again") == 0
    disk.settle()
    assert told(engine).num_bad_chunks > 0
    assert ask(engine, 0, "then") == 20  # on the device


def test_a_disk_that_fails_is_not_written_any_more(tmp_path, monkeypatch, caplog):
    engine, disk = filled(tmp_path)

    def full(*_):
        raise OSError(28, "No space left on device")

    before = set(tmp_path.iterdir())
    monkeypatch.setattr(disk_module, "write_chunk", full)
    for stem in (4, 5, 1, 0, 4):
        ask(engine, stem, f"b{stem}")
    disk.settle()
    assert told(engine).num_lost_writes > 0 and not told(engine).is_writing
    assert caplog.text.count("No space") == 1
    assert set(tmp_path.iterdir()) == before
    assert ask(engine, 0, "still") == 20  # read as before


def test_a_directory_that_cannot_be_made_harms_nobody(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    engine, _ = with_disk(tmp_path / "file" / "cache", **TIGHT)
    for stem in (0, 1, 2, 3, 0):
        ask(engine, stem, "a")
    assert not told(engine).is_writing and "not written" in caplog.text


def test_a_second_process_reads_what_there_was_and_writes_nothing(tmp_path, caplog):
    engine, _ = filled(tmp_path)
    second, other = with_disk(tmp_path, **TIGHT)
    other.settle()
    files = set(tmp_path.iterdir())
    assert ask(second, 0, "again") == 20
    second.flush_prefix_cache()
    other.settle()
    assert set(tmp_path.iterdir()) == files and "another process" in caplog.text
    engine.close()


def test_a_step_that_failed_is_not_fed_the_same_file_again(tmp_path):
    engine, _ = filled(tmp_path)
    runner = runner_of(engine)
    runner.faults = {len(runner.plans): "run"}
    engine.add_request(make_request("fails", STEMS[0], max_tokens=2, seed=1))
    events = [e for _ in range(20) for e in engine.step(0.0)]
    assert events[-1].error_code == "step_failed"
    assert told(engine).num_bad_chunks > 0
    assert [ask(engine, 0, name) for name in "ab"] == [0, 20]


def test_what_leaves_is_bounded(tmp_path, monkeypatch):
    """Extents that wait for the disk take memory beside the budget: so many bytes at most."""
    monkeypatch.setattr(disk_module, "MOST_UNWRITTEN", 8 * HOST_BLOCK_BYTES)
    engine, disk = with_disk(tmp_path, pace=[0], **TIGHT)
    disk.pause = lambda: None
    for stem in range(6):
        ask(engine, stem, f"a{stem}")
        assert disk._num_unwritten <= 8 * HOST_BLOCK_BYTES
    assert told(engine).num_lost_writes > 0


def test_prompts_that_are_scored_do_not_wait(tmp_path):
    engine, _ = filled(tmp_path)
    request = make_request("scored", STEMS[0], max_tokens=1, prompt_logprobs=1, seed=1)
    assert isinstance(request.sampling, SamplingParams)
    generate(engine, request)
    assert told(engine).num_query_tokens == 0
