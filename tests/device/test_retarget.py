"""Programs are compiled for one group and loaded on the others, or compiled where that fails."""

from itertools import count

import pytest
from engines import checkpoint, make, run, tokens
from oracle import numpy_llama

from shiftjax.core.request import SamplingParams
from shiftjax.device import programs

PROMPTS = [[5, 6, 7] * 3, [9, 2, 4]]


@pytest.fixture
def compiled_modes(monkeypatch, uncached) -> list:
    """Notes every step that is compiled; what comes out of the cache could not be loaded."""
    noted, compile_it = [], programs.add_mode

    def add_mode(step, pool, program, mode):
        noted.append((step.mesh.devices.flat[0].id, mode.label))
        compile_it(step, pool, program, mode)

    monkeypatch.setattr(programs, "add_mode", add_mode)
    return noted


def check_tokens(engine, config, tensors) -> None:
    """Both groups serve, and say what the oracle says."""
    greedy = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    events = run(engine, PROMPTS, [greedy] * 2)
    for number, prompt in enumerate(PROMPTS):
        assert tokens(events[number, 0]) == numpy_llama.greedy(config, tensors, prompt, 5)
    assert all(lane.scheduler.tables.num_prefix_query_tokens for lane in engine.lanes)


def test_a_second_group_compiles_nothing(compiled_modes):
    directory, config, tensors = checkpoint()
    built = make(directory, 1, 2, dp=2, token_buckets=[32])
    assert compiled_modes == [(0, "shift")]
    check_tokens(built.engine, config, tensors)
    assert len(compiled_modes) == 1


# The steps of the first group are tried as they were compiled, those of the second as loaded.
@pytest.mark.parametrize(("where", "failing"), [("load_on", 0), ("DeviceRunner._try_out", 1)])
def test_what_cannot_be_loaded_or_does_not_run_is_compiled(
    where, failing, compiled_modes, monkeypatch
):
    calls = count()

    def fail(*_):
        if next(calls) == failing:
            raise RuntimeError("not on this backend")

    module = "programs" if where == "load_on" else "runner"
    monkeypatch.setattr(f"shiftjax.device.{module}.{where}", fail)
    directory, config, tensors = checkpoint()
    built = make(directory, 1, 2, dp=2, token_buckets=[32])
    assert compiled_modes == [(0, "shift"), (2, "shift")]
    check_tokens(built.engine, config, tensors)
