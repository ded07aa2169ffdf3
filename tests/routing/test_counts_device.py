"""What a running engine counts: each token that steps compute, once, in every way of serving."""

import numpy as np
import pytest
from engines import MOE, RandomPolicy, checkpoint, make, run, tokens
from oracle import numpy_experts, numpy_llama

from shiftjax.core.request import SamplingParams
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
