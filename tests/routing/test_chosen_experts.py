"""Which experts tokens chose, told to who asks: those of an oracle, in every way of serving."""

import re
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from engines import MOE, RandomPolicy, build_tiny, checkpoint, make
from lean import greedy_steps
from oracle import numpy_experts, numpy_llama

from shiftjax import LLM
from shiftjax.config import EngineConfig
from shiftjax.core.notes import Notes
from shiftjax.core.request import Request, RequestError, SamplingParams
from shiftjax.drafts.speculation import DraftStats
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


COLLECTIVE = re.compile(r" (?:all-|reduce-scatter|collective-)[a-z-]*\(")


@pytest.mark.costs(30)
def test_experts_are_those_of_the_oracle_in_every_mode(monkeypatch):
    """Of chunks and whole prompts, with prefix hits and after preemptions, in modes at random."""
    directory = checkpoint(**DEEP)
    built = build_tiny(directory[0], routed_experts=True, sp=2, tp=2, num_blocks=33)
    assert {mode.label for mode in built.engine.lanes[0].modes} == {"base", "shift"}
    for seed in range(3):
        built.engine.policy = RandomPolicy(seed)
        answers = asked(built, prompts(seed), replace(GREEDY, max_tokens=30), prefix=f"s{seed}x")
        check(directory, answers, monkeypatch)
        again = prompts(seed)[4]  # what is before the last token is found in the cache
        for last in (0, 1):
            answers = asked(built, [[*again, last]], prefix=f"s{seed}a{last}x")
            check(directory, answers, monkeypatch)
    stats = built.engine.stats()
    assert min(stats.steps_by_mode.values()) > 2
    assert stats.num_prefix_hit_tokens > 40
    assert sum(stats.num_preemptions.values()) > 0
    twins = asked(built, prompts(5)[2:3], replace(GREEDY, n=3), prefix="n")
    check(directory, twins, monkeypatch)


@pytest.mark.thorough
@pytest.mark.parametrize("way", WAYS)
def test_experts_are_those_of_the_oracle(way, monkeypatch):
    directory = checkpoint(**DEEP)
    built = build_tiny(directory[0], routed_experts=True, **WAYS[way])
    for seed in range(2):
        built.engine.policy = RandomPolicy(seed)
        given = prompts(seed)
        if way == "drafts":
            given = [3 * each[:8] for each in given]
        check(directory, asked(built, given, prefix=f"s{seed}x"), monkeypatch)
    stats = built.engine.stats()
    if way == "fleet":
        steps = stats.steps
        assert min(steps["shift", 1], steps["base", 2] + steps["shift", 2]) > 0, steps
    if way == "drafts":
        drafts = stats.find(DraftStats)
        assert drafts is not None
        (counts,) = drafts.by_drafter.values()
        assert min(counts.values()) > 0, counts


@pytest.mark.thorough
def test_modes_with_the_same_bits_tell_the_same_experts():
    """Strict numerics gather tokens always, and tell of all in every mode."""
    directory, *_ = checkpoint(**DEEP)
    found = []
    for sp in (1, 4):
        strict: dict[str, Any] = {"numerics": "invariant", "dtype": "bfloat16"}
        built = make(directory, sp, 1, routed_experts=True, **strict)
        built.engine.policy = RandomPolicy(1)
        found.append(asked(built, prompts()))
    for key, (text, told) in found[0].items():
        assert found[1][key][0] == text
        np.testing.assert_array_equal(found[1][key][1], told)


@pytest.mark.costs(16)
def test_steps_tell_nothing_by_default_and_exchange_no_more_if_they_do():
    directory, *_ = checkpoint(**DEEP)
    plain, telling = (build_tiny(directory, sp=2, tp=2, routed_experts=on) for on in (False, True))
    assert not plain.deployment.routed_experts
    assert not plain.engine.limits.keeps_notes
    assert type(plain.engine.lanes[0].scheduler.notes) is Notes
    for one, other in zip(plain.runners[0].programs, telling.runners[0].programs, strict=True):
        for mode, step in one.steps.items():
            texts = [str(each.as_text()) for each in (step, other.steps[mode])]
            assert len({len(COLLECTIVE.findall(text)) for text in texts}) == 1
            outputs = [
                len(jax.tree.leaves(each.output_shardings)) for each in (step, other.steps[mode])
            ]
            assert outputs[1] == outputs[0] + 1


@pytest.mark.costs(15)
def test_outputs_of_the_python_api_have_them(monkeypatch):
    directory = checkpoint(**DEEP)
    sizes = {"max_model_len": 128, "num_blocks": 200, "max_num_seqs": 6, "token_buckets": [32]}
    with greedy_steps():
        llm = LLM(
            str(directory[0]),
            **{"sp": 2, "tp": 2, "dtype": "float32", "block_size": 4, "cache_dir": "none"},
            **{"routed_experts": True, "max_num_batched_tokens": 32, **sizes},
        )
    given = prompts()[:3]
    found = {}
    for number, output in enumerate(llm.generate(given, GREEDY, return_routed_experts=True)):
        (one,) = output.outputs
        found[number, 0] = [*given[number], *one.token_ids], one.routed_experts
    check(directory, found, monkeypatch)
    assert llm.generate(given, GREEDY)[0].outputs[0].routed_experts is None
    llm.engine.limits = replace(llm.engine.limits, keeps_notes=False)
    with pytest.raises(RequestError, match="--enable-return-routed-experts"):
        llm.generate(given, GREEDY, return_routed_experts=True)
    llm.close()


def test_experts_are_refused_by_name():
    dense, *_ = checkpoint()
    with pytest.raises(ConfigError, match=r"routed_experts cannot be had with .* no experts"):
        build_tiny(dense, sp=1, tp=1, routed_experts=True)
    with pytest.raises(ConfigError, match="hosts = 2 cannot be had with routed_experts = True"):
        EngineConfig.from_options(
            hosts=2, coordinator="a:1", routed_experts=True, host_secret_file="x"
        )
