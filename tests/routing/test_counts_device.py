"""What a running engine counts: each token that steps compute, once, in every way of serving."""

import numpy as np
import pytest
from engines import MOE, RandomPolicy, build_tiny, checkpoint, make, run, tokens
from oracle import numpy_experts, numpy_llama

from shiftjax.core.request import SamplingParams
from shiftjax.device.runner import DeviceRunner
from shiftjax.routing import counts_device
from shiftjax.routing.history import RoutingState

LENGTHS = 7, 12, 60, 3, 33, 1  # some take several steps, and no step is full but by chance
NUM = 8  # tokens of an answer


@pytest.fixture(autouse=True)
def every_step_counts(monkeypatch):
    monkeypatch.setattr(counts_device, "EVERY", 1)


def prompts(seed: int = 3) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 199, length).tolist() for length in LENGTHS]


def served(built, given=None, seed: int = 0) -> list[list[int]]:
    """Prompts and answers in modes drawn at random, less the tokens that no step computes."""
    given = given or prompts()
    built.engine.policy = RandomPolicy(seed)
    greedy = SamplingParams(temperature=0, max_tokens=NUM, ignore_eos=True)
    events = run(built.engine, given, [greedy] * len(given))
    return [[*each, *tokens(events[i, 0])[:-1]] for i, each in enumerate(given)]


def counted(built) -> np.ndarray:
    """What the engine has counted, `[layers, experts]`; nothing is old enough to count less."""
    for runner in built.runners:
        if runner.counted is not None:
            runner.counted.flush()
    state = built.engine.stats().find(RoutingState)
    assert state is not None
    return state.counts


def recounted(config: dict, tensors: dict, texts, monkeypatch) -> np.ndarray:
    """The experts that a NumPy oracle's tokens choose, by layer."""
    layers = [i for i in range(config["num_hidden_layers"]) if numpy_experts.has_experts(config, i)]
    found, choose = np.zeros((len(layers), numpy_experts.sizes(config)[0])), numpy_experts.choose
    routers = [tensors[f"model.layers.{i}.mlp.gate.weight"] for i in layers]

    def choose_and_count(x, router, config):
        chosen, weights = choose(x, router, config)
        found[
            next(i for i, each in enumerate(routers) if np.array_equal(each, router)), chosen
        ] += 1
        return chosen, weights

    with monkeypatch.context() as patched:
        patched.setattr(numpy_experts, "choose", choose_and_count)
        for text in texts:
            numpy_llama.forward(config, tensors, text)
    return found


@pytest.mark.costs(30)
@pytest.mark.parametrize(("sp", "tp"), [(1, 1), (2, 2), (4, 2)])
def test_counts_are_those_of_the_oracle(sp, tp, monkeypatch):
    directory, config, tensors = checkpoint(**MOE)
    built = make(directory, sp, tp, prefix_caching=False)
    texts = [*served(built), *served(built, prompts(4), seed=1)]
    expected = recounted(config, tensors, texts, monkeypatch)
    np.testing.assert_allclose(counted(built), expected, rtol=2e-3)
    state = built.engine.stats().find(RoutingState)
    assert state is not None
    assert state.num_tokens == sum(map(len, texts)) == expected[0].sum() // 3
    assert sorted(state.skews) == [ways for ways in (2, 4, 8) if sp * tp % ways == 0 and ways >= tp]


DEEP = MOE | {"num_hidden_layers": 4}  # of which two have experts
WAYS = {
    "pipeline": {"pp": 2, "sp": 2, "tp": 1},
    "phases": {"phases": "tp2:pp2", "num_blocks": 60, "host_memory": "2MB"},
    "fleet": {
        "fleet": True,
        "devices": 2,
        "fleet_policy": "load",
        "bind_at": 1.0,
        "release_at": 2.0,
    },
    "serial": {"sp": 2, "tp": 1, "overlap": False},
}
DRAFTS = {"speculation": "suffix", "controls": {"fixed_drafts": True}}


@pytest.mark.thorough
@pytest.mark.parametrize("way", WAYS)
def test_stages_phases_and_groups_count_every_token_once(way, monkeypatch):
    directory, config, tensors = checkpoint(**DEEP)
    built = build_tiny(directory, prefix_caching=False, **WAYS[way])
    texts = [text for seed in range(3) for text in served(built, prompts(seed), seed)]
    if way == "fleet":
        steps = built.engine.stats().steps
        assert min(steps["shift", 1], steps["base", 2] + steps["shift", 2]) > 0, steps
    expected = recounted(config, tensors, texts, monkeypatch)
    np.testing.assert_allclose(counted(built), expected, rtol=2e-3)


@pytest.mark.thorough
@pytest.mark.parametrize("options", [DRAFTS, {"prefix_caching": True}])
def test_what_steps_compute_counts_and_nothing_else(options, monkeypatch):
    """Drafts count, whether they are accepted or not; tokens that a cache has do not."""
    directory, *_ = checkpoint(**MOE)
    built = make(directory, 2, 2, **{"prefix_caching": False, **options})
    computed, prepare = [], DeviceRunner.prepare

    def prepare_and_note(self, plan):
        computed.append(plan.num_tokens)
        return prepare(self, plan)

    monkeypatch.setattr(DeviceRunner, "prepare", prepare_and_note)
    given = [10 * each[:6] for each in prompts()]
    texts = [*served(built, given), *served(built, given)]
    num_texts, num = sum(map(len, texts)), counted(built).sum() / 3
    assert num == pytest.approx(sum(computed), rel=2e-3)
    assert num > num_texts if "speculation" in options else num < num_texts
