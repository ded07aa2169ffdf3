"""Weights that change while an engine runs: every mode, width, stage and phase sees them."""

import gc
import itertools
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from engines import MOE, RandomPolicy, build_tiny, checkpoint, make, run, tokens
from harness import held_bytes
from rollouts_kit import GREEDY, OPTIONS, PROMPTS, directory_of, expected, other_weights, spread
from safetensors.numpy import save_file
from spent import exhaustive, thorough

from shiftjax import LLM
from shiftjax.core.request import Request, SamplingParams
from shiftjax.device import groups
from shiftjax.phases.resharding import ReshardingState
from shiftjax.rollouts.control import RolloutError
from shiftjax.rollouts.weights_device import Stage
from shiftjax.weights.errors import CheckpointError

PREFIX = list(range(20, 44))


def answers(built, prompts=PROMPTS) -> list[list[int]]:
    events = run(built.engine, prompts, [GREEDY] * len(prompts))
    return [tokens(events[i, 0]) for i in range(len(prompts))]


def cached(events) -> int:
    """Prompt tokens that were found computed."""
    metrics = events[-1].metrics
    assert metrics is not None
    return metrics.num_cached_tokens


def update(built, given, **how) -> None:
    built.rollouts.update(given, 0.0, **how)
    assert not built.rollouts.take_events()


def seen(built) -> dict:
    """What the steps of every mode and group are given, as values."""
    return {
        (number, mode): [np.asarray(array) for array in runner.memory.params(mode)]
        for number, runner in enumerate(built.runners)
        for mode in runner.step.weights.modes
    }


def assert_as_fresh(built, new, *degrees, **options) -> None:
    """All that steps of any mode and group are given is what a new engine would give them."""
    overrides = options.pop("overrides", {})
    fresh = make(directory_of(new, **overrides), *degrees, **options)
    others = seen(fresh)
    for key, found in seen(built).items():
        for one, other in zip(found, others[key], strict=True):
            np.testing.assert_array_equal(one, other, err_msg=str(key))


@pytest.mark.costs(14)
@pytest.mark.parametrize(
    ("degrees", "overrides", "options", "is_joined"),
    [
        ((2, 2), {}, {}, False),
        *exhaustive(((4, 2), {}, {}, True), ((1, 2), {}, {"dp": 2}, False)),
        *thorough(
            ((3, 2), {"attention_bias": True}, {}, False),
            ((2, 2), MOE, {}, False),
            ((2, 2), {}, {"weights": "gather"}, False),
            ((2, 2), {}, {"quantization": "fp8"}, True),
            ((1, 2), {}, {"pp": 2}, False),
            ((None, 2), {}, {"fleet": True, "devices": 4}, True),
        ),
    ],
)
def test_no_step_of_any_mode_sees_an_old_weight(
    monkeypatch, degrees, overrides, options, is_joined
):
    if is_joined:
        monkeypatch.setattr(groups, "JOINED_ON", ("cpu",))
    directory, _, old = checkpoint(**overrides)
    new = other_weights(1, **overrides)
    built = make(directory, *degrees, **options)
    built.engine.policy = RandomPolicy(1)
    is_exact = "quantization" not in options
    before = answers(built)
    assert not is_exact or before == [expected(old, p, **overrides) for p in PROMPTS]
    seen(built)  # views of every mode are held
    update(built, spread(new, 4))
    assert_as_fresh(built, new, *degrees, **options, overrides=overrides)
    after = answers(built)
    assert after != before
    assert not is_exact or after == [expected(new, p, **overrides) for p in PROMPTS]


@pytest.mark.costs(25)
@pytest.mark.thorough
def test_phases_have_new_weights_from_one_copy():
    """The phase that is on has them at once, the other one when it is loaded next."""
    directory, *_ = checkpoint(num_hidden_layers=4)
    sizes = {"num_blocks": 41, "max_model_len": 96, "token_buckets": [16]}
    sizes |= {"host_memory": "200KB", "max_num_batched_tokens": 16}
    built = build_tiny(directory, phases="pp2tp2:tp4", **sizes)
    weights = {seed: other_weights(seed, num_hidden_layers=4) for seed in (0, 1, 2)}
    for seed in (0, 1, 2):
        if seed:
            update(built, spread(weights[seed], 4) if seed == 1 else weights[seed])
        found = answers(built)
        assert found == [expected(weights[seed], p, num_hidden_layers=4) for p in PROMPTS]
    state = built.engine.stats().find(ReshardingState)
    assert state is not None and state.num_switches >= 3


@pytest.mark.costs(12)
def test_beside_all_weights_there_are_two_copies_of_one(monkeypatch):
    """Also where the weights of all layers are one array: it is written in place."""
    monkeypatch.setattr(groups, "JOINED_ON", ("cpu",))
    directory, _, _ = checkpoint(num_hidden_layers=4)
    built = make(directory, 2, 2)
    new = spread(other_weights(1, num_hidden_layers=4), 4)
    update(built, new)  # compiles
    seen(built)
    store: Any = built.rollouts._store
    largest = max(
        sum(shard.data.nbytes for shard in array.addressable_shards) / len(members)
        for (stage,) in [store._stages]
        for array, members in zip(stage.arrays(), stage.weights.arrays, strict=True)
        if array is not None
    )
    peaks, put = [], Stage.put

    def total() -> int:
        return sum(held_bytes(jax.live_arrays()).values())

    def put_and_look(self, weight, array):
        peaks.append(total())
        put(self, weight, array)
        del array

    monkeypatch.setattr(Stage, "put", put_and_look)
    gc.collect()
    before = total()
    update(built, new)
    gc.collect()
    assert before < max(peaks) <= before + 2 * largest
    assert total() == before


def test_a_trainer_may_do_with_its_arrays_what_it_likes():
    """It donates them to its next step: what the engine holds is its own."""
    directory, _, _ = checkpoint()
    built = make(directory, 1, 1)
    new = other_weights(1)
    mine = {name: jax.device_put(array, jax.devices()[0]) for name, array in new.items()}
    update(built, mine)
    jax.block_until_ready([jax.jit(lambda x: x * 0, donate_argnums=0)(x) for x in mine.values()])
    assert answers(built) == [expected(new, p) for p in PROMPTS]


@pytest.mark.costs(12)
def test_weights_come_from_files_and_pairs(tmp_path):
    directory, _, _ = checkpoint()
    built = make(directory, 2, 1)
    weights = {seed: other_weights(seed) for seed in (1, 2, 3)}
    update(built, directory_of(weights[1]))
    assert answers(built) == [expected(weights[1], p) for p in PROMPTS]
    update(built, iter(weights[2].items()))
    assert answers(built) == [expected(weights[2], p) for p in PROMPTS]
    save_file(weights[3], tmp_path / "some.safetensors")
    update(built, str(tmp_path / "some.safetensors"))
    assert answers(built) == [expected(weights[3], p) for p in PROMPTS]
    layer = {n: a for n, a in weights[1].items() if n.startswith("model.layers.1.self_attn.")}
    nested = {"model": {"layers": {"1": {"self_attn": {}}}}}
    for name, array in layer.items():
        *_, last, kind = name.split(".")
        nested["model"]["layers"]["1"]["self_attn"][last] = {kind: array}
    update(built, nested)
    assert answers(built) == [expected(weights[3] | layer, p) for p in PROMPTS]
    assert built.rollouts.version == 4


GATE = "model.layers.0.mlp.gate_proj.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t | {"model.norm.wight": t["model.norm.weight"]}, "no such tensor"),
        (lambda t: t | {GATE: t[GATE].T}, "expected shape"),
        (lambda t: t | {GATE: t[GATE] * np.nan}, "finite"),
    ],
)
def test_a_tree_that_is_not_the_models_changes_nothing(change, words):
    directory, _, old = checkpoint()
    built = make(directory, 1, 1)
    with pytest.raises(CheckpointError, match=words):
        update(built, change(other_weights(1)))
    assert built.rollouts.version == 0 and not built.rollouts.is_paused
    assert answers(built, PROMPTS[:1]) == [expected(old, PROMPTS[0])]


def test_an_update_that_ends_in_the_middle_holds_the_engine_until_a_whole_one():
    directory, _, _ = checkpoint()
    built = make(directory, 1, 1)
    new = other_weights(1)
    with pytest.raises(CheckpointError, match="finite"):
        update(built, iter((new | {GATE: new[GATE] * np.nan}).items()))
    assert built.rollouts.is_paused and built.rollouts.version == 0
    with pytest.raises(RolloutError, match="lacks weights"):
        built.rollouts.resume()
    update(built, new)
    assert answers(built) == [expected(new, p) for p in PROMPTS]


def test_old_keys_and_values_are_not_found_any_more():
    """Nor those that a request which runs through the update enters after it."""
    directory, _, _ = checkpoint()
    built = make(directory, 2, 1)
    engine, new = built.engine, other_weights(1)
    (first,) = run(engine, [PREFIX], [GREEDY]).values()
    assert cached(first) == 0
    (again,) = run(engine, [PREFIX], [GREEDY]).values()
    assert cached(again) == 20
    longer = [*PREFIX, *range(50, 70)]  # two chunks of a prompt: the update is between them
    engine.add_request(Request("on its way", longer, SamplingParams(temperature=0, max_tokens=9)))
    while not any(lane.scheduler.running for lane in engine.lanes):
        engine.step(0.0)
    engine.step(0.0)
    built.rollouts.update(new, 0.0)
    while engine.has_work():
        engine.step(0.0)
    for prompt in (PREFIX, longer):
        (events,) = run(engine, [prompt], [GREEDY]).values()
        assert tokens(events) == expected(new, prompt)
        assert cached(events) == (0 if prompt is PREFIX else 24)


def test_a_block_that_old_weights_have_begun_is_not_found():
    """Its first tokens were computed with the old ones, and it is full after the update."""
    directory, _, _ = checkpoint()
    built = make(directory, 1, 1)
    engine, new = built.engine, other_weights(1)
    engine.add_request(Request("begun", [5, 6, 7], GREEDY))
    found = engine.step(0.0)
    built.rollouts.update(new, 0.0)
    found += built.rollouts.take_events()
    while engine.has_work():
        found += engine.step(0.0)
    again = [5, 6, 7, *tokens(found)[:6]]
    (events,) = run(engine, [again], [GREEDY]).values()
    assert tokens(events) == expected(new, again)
    assert cached(events) == 0


@pytest.mark.parametrize("recompute", [True, *thorough(False)])
def test_a_request_in_flight_says_which_weights_made_which_token(monkeypatch, recompute):
    directory, _, old = checkpoint()
    llm = LLM(str(directory), sp=2, tp=1, **OPTIONS)
    new = other_weights(1)
    turns, turn_of = itertools.count(), llm._turn

    def turn_or_update():
        if next(turns) == 6:
            assert llm.update_weights(new, version=7, recompute=recompute) == 7
        return turn_of()

    monkeypatch.setattr(llm, "_turn", turn_or_update)
    (answer,) = llm.generate([PREFIX], replace(GREEDY, max_tokens=12))
    output = answer.outputs[0]
    (start, first), (turn, second) = output.versions
    assert (start, first, second, output.weight_version) == (0, 0, 7, 7)
    assert 0 < turn < 12
    assert output.token_ids[:turn] == expected(old, PREFIX, turn)
    if recompute:
        rest = expected(new, [*PREFIX, *output.token_ids[:turn]], 12 - turn)
        assert output.token_ids[turn:] == rest
    (fresh,) = llm.generate([PREFIX], GREEDY)
    assert fresh.outputs[0].versions == [(0, 7)]
    assert fresh.outputs[0].token_ids == expected(new, PREFIX)
    with pytest.raises(RolloutError, match="larger than 7"):
        llm.update_weights(new, version=7)
    llm.close()


def test_finished_texts_of_old_weights_are_no_drafts():
    directory, _, _ = checkpoint()
    drafts = {"speculation": "suffix", "suffix_corpus_tokens": 1000}
    built = make(directory, 1, 1, **drafts)
    lookahead: Any = built.engine.lanes[0].scheduler.lookahead
    answers(built)
    keys = list(lookahead._drafting._corpora._corpora)
    update(built, other_weights(1))
    answers(built)
    assert [*keys, (None, None, 1)] == list(lookahead._drafting._corpora._corpora)
    assert keys == [(None, None, 0)]


@pytest.mark.thorough
def test_all_experts_of_a_layer_come_together():
    directory, *_ = checkpoint(**MOE)
    built = make(directory, 1, 2)
    new = other_weights(1, **MOE)
    last = max(name for name in new if ".experts." in name)
    with pytest.raises(CheckpointError, match="is one weight with"):
        update(built, {name: array for name, array in new.items() if name != last})
    assert built.rollouts.is_paused
    update(built, new)
    assert answers(built) == [expected(new, p, **MOE) for p in PROMPTS]
