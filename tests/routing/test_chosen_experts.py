"""Which experts tokens chose, told to who asks: those of an oracle, in every way of serving."""

import numpy as np
import pytest
from engines import MOE, RandomPolicy, build_tiny, checkpoint, make
from oracle import numpy_experts, numpy_llama

from shiftjax.core.request import Event, Request, SamplingParams
from shiftjax.options import ConfigError

LENGTHS = 7, 12, 60, 3, 33, 1
NUM = 8  # tokens of an answer
DEEP = MOE | {"num_hidden_layers": 4}  # of which two have experts
GREEDY = SamplingParams(temperature=0, max_tokens=NUM, ignore_eos=True)


def prompts(seed: int = 3) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 199, length).tolist() for length in LENGTHS]


def asked(built, given, sampling=GREEDY, *, wants=True, prefix="r") -> dict[tuple[int, int], tuple]:
    """Texts and their experts, by (prompt, continuation); all are served together."""
    engine, texts, told = built.engine, {}, {}
    for number, ids in enumerate(given):
        engine.add_request(Request(f"{prefix}{number}", ids, sampling, wants_notes=wants))
        for index in range(sampling.n):
            texts[number, index] = list(ids)
    turn = 0
    while engine.has_work():
        for event in engine.step(float(turn)):
            assert event.error is None
            key = int(event.request_id.removeprefix(prefix)), event.index
            texts[key] += event.token_ids
            if event.finish_reason is not None:
                told[key] = event.notes
        turn += 1
    engine.check()
    return {key: (texts[key], told[key]) for key in texts}


def recounted(directory: tuple, text: list[int], monkeypatch) -> np.ndarray:
    """The experts that the oracle's tokens choose, `[tokens, layers, k]`; sorted."""
    _, config, tensors = directory
    layers = [i for i in range(config["num_hidden_layers"]) if numpy_experts.has_experts(config, i)]
    routers = [tensors[f"model.layers.{i}.mlp.gate.weight"] for i in layers]
    found, choose = [[] for _ in layers], numpy_experts.choose

    def choose_and_note(x, router, config):
        chosen, weights = choose(x, router, config)
        layer = next(i for i, each in enumerate(routers) if np.array_equal(each, router))
        found[layer].append(chosen)
        return chosen, weights

    with monkeypatch.context() as patched:
        patched.setattr(numpy_experts, "choose", choose_and_note)
        numpy_llama.forward(config, tensors, text)
    return np.array(found).swapaxes(0, 1)


def check(directory: tuple, answers: dict, monkeypatch) -> None:
    """All experts of all tokens but the last, in the order of their weights."""
    for text, told in answers.values():
        assert told is not None and told.dtype == np.uint8
        expected = recounted(directory, text[:-1], monkeypatch)
        assert told.shape == expected.shape
        np.testing.assert_array_equal(told, expected)


WAYS = {
    "alone": {"sp": 1, "tp": 1},
    "modes": {"sp": 2, "tp": 2},
    "eight": {"sp": 4, "tp": 2, "token_buckets": [8, 32]},
    "serial": {"sp": 2, "tp": 1, "overlap": False},
    "pipeline": {"pp": 2, "sp": 2, "tp": 1},
    "two": {"dp": 2, "sp": 1, "tp": 2},
    "drafts": {"sp": 2, "tp": 1, "speculation": "suffix", "controls": {"fixed_drafts": True}},
    "whole": {"sp": 2, "tp": 2, "experts": "whole"},
    "phases": {"phases": "tp2:pp2", "num_blocks": 60, "host_memory": "2MB"},
    "fleet": {
        "fleet": True,
        "devices": 2,
        "fleet_policy": "load",
        "bind_at": 1.0,
        "release_at": 2.0,
    },
}


@pytest.mark.costs(30)
@pytest.mark.parametrize("way", WAYS)
def test_experts_are_those_of_the_oracle(way, monkeypatch):
    directory = checkpoint(**DEEP)
    built = build_tiny(directory[0], routed_experts=True, **WAYS[way])
    for seed in range(2):
        built.engine.policy = RandomPolicy(seed)
        answers = asked(built, prompts(seed), prefix=f"s{seed}x")
        check(directory, answers, monkeypatch)
