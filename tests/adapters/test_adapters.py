"""Adapters in engines: each request gets the tokens of a model with its adapter in the weights."""

import itertools
import random
import re
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from adapters_kit import GREEDY, adapter, expected, merged, modules, pool_of, requests, said, serve
from echo_pools import Told
from engines import MOE, RandomPolicy, build_tiny, checkpoint, crowd, make, run, tokens
from hlo import collectives
from oracle import numpy_speculator
from rollouts_kit import directory_of
from spent import exhaustive, thorough

from shiftjax.adapters import slots_device
from shiftjax.adapters.adapter import AdapterError
from shiftjax.core.request import Event, Request, RequestError, SamplingParams
from shiftjax.device.programs import CompileCounter
from shiftjax.drafts.speculation import DraftStats
from shiftjax.fleet.fleet_policy import Wish
from shiftjax.fleet.regrouping import Fleet
from shiftjax.options import ConfigError
from shiftjax.parallel.arrangements import equal_groups

SEEDS = 1, 2, 3, 4, 5, 6, 7, 8
SPECULATOR = {
    "architectures": ["ArcticLSTMSpeculatorPreTrainedModel"],
    "method": "sum_lstm",
    "vocab_size": 199,
    "n_predict": 3,
    "tie_weights": True,
    "scale_input": True,
    "input_hidden_dim": 48,
    "tie_lstm_embs": True,
    "emb_dim": 48,
    "inner_dim": 48,
    "proj_dim": 48,
}
FEW = {"num_hidden_layers": 1}
CODED = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "head_dim": 32}
CODED |= {"num_key_value_heads": 4}


def prompts(seed: int, count: int = 12) -> list[tuple[list[int], int | None]]:
    """Prompts with shared beginnings, with one of eight adapters or none."""
    draw = random.Random(seed)
    return [(prompt, draw.choice((None, *SEEDS))) for prompt in crowd(seed, count)]


def right(wanted, **overrides) -> list[list[int]]:
    return [expected(tuple(prompt), seed, **overrides) for prompt, seed in wanted]


def lora(seeds=SEEDS, **overrides) -> dict:
    """Settings with some adapters of a model."""
    return {"enable_lora": True, "max_lora_rank": 8, "lora_modules": modules(*seeds, **overrides)}


@pytest.mark.costs(30)
@pytest.mark.parametrize(
    ("sp", "tp", "overrides", "options"),
    [
        (2, 2, {}, {"max_loras": 4, "num_blocks": 36}),
        *thorough(
            (1, 1, {}, {"token_buckets": [8, 32]}),
            (1, 8, {}, {}),
            (3, 2, {}, {"max_loras": 3}),
            (2, 2, MOE, {"max_loras": 4}),
            (2, 2, {}, {"preemption": "swap", "host_memory": "1MiB", "num_blocks": 36}),
            (2, 2, {}, {"speculation": "suffix", "max_loras": 3}),
            (2, 2, {"num_key_value_heads": 1}, {"kv_split": "position"}),
            (1, 2, {}, {"pp": 2, "max_loras": 2}),
            (1, 2, {}, {"dp": 2, "max_loras": 2}),
        ),
        *exhaustive(
            (4, 2, {}, {}),
            (2, 4, {"attention_bias": True}, {"max_loras": 3}),
            (2, 2, {}, {"speculation": "ngram", "pp": 1}),
        ),
    ],
)
def test_each_request_has_its_adapter_under_random_modes(sp, tp, overrides, options):
    """In chunks, from the prefix cache, preempted; with more adapters than slots."""
    directory, *_ = checkpoint(**overrides)
    built = make(directory, sp, tp, **lora(**overrides), **options)
    counter = CompileCounter()
    counter.start()
    for seed in (0, 1):
        built.engine.policy = RandomPolicy(seed)
        wanted = prompts(seed)
        assert said(built, wanted) == right(wanted, **overrides)
    counter.stop()
    stats = built.engine.stats()
    assert counter.count == 0
    assert stats.num_prefix_hit_tokens > 0 or options.get("kv_split")  # whose blocks are large
    if options.get("num_blocks"):
        assert max(stats.num_preemptions.values()) > 0
    if built.deployment.lora.num_slots < len(SEEDS):
        assert pool_of(built).told().num_writes > len(SEEDS)


@pytest.mark.thorough
def test_what_is_sampled_is_what_a_merged_model_samples(tmp_path):
    """With seeds, penalties and several continuations, from one engine of each adapter."""
    directory, *_ = checkpoint()
    built = make(directory, 2, 2, whole=True, **lora((1, 2)), max_loras=1)
    built.engine.policy = RandomPolicy(0)
    sampling = SamplingParams(
        temperature=1.1, top_p=0.9, repetition_penalty=1.2, seed=3, n=2, max_tokens=8, logprobs=2
    )
    wanted = [(prompt, (1, 2)[i % 2]) for i, prompt in enumerate(crowd(5, 4))]
    asked = requests(built, wanted, sampling)
    together = serve(built, asked)
    for seed in (1, 2):
        alone = make(directory_of(merged(seed)), 2, 2, whole=True)
        for request, (prompt, own) in zip(asked, wanted, strict=True):
            if own != seed:
                continue
            fresh = run(alone.engine, [prompt], [sampling])
            for index in (0, 1):
                got = [e for e in together[request.request_id] if e.index == index]
                assert tokens(got) == tokens(fresh[0, index])
                mine = [entry.logprob for e in got for entry in e.logprobs]
                want = [entry.logprob for e in fresh[0, index] for entry in e.logprobs]
                np.testing.assert_allclose(mine, want, atol=2e-4)


@pytest.mark.costs(20)
@pytest.mark.parametrize(
    ("sp", "tp", "experts"), [(2, 2, {}), *thorough((4, 2, {"num_experts_per_tok": 1}))]
)
def test_adapters_change_experts(sp, tp, experts):
    """Where pairs are gathered, and where they are sent to their experts."""
    overrides = MOE | {"num_hidden_layers": 2} | experts
    directory, *_ = checkpoint(**overrides)
    settings = lora((1, 2, 3), experts=True, **overrides) | {"lora_experts": True, "max_loras": 2}
    built = make(directory, sp, tp, **settings)
    built.engine.policy = RandomPolicy(2)
    wanted = [(prompt, (None, 1, 2, 3)[i % 4]) for i, prompt in enumerate(crowd(9, 8))]
    assert said(built, wanted) == right(wanted, experts=True, **overrides)
    plain = right(wanted, **overrides)
    assert right(wanted, experts=True, **overrides) != plain


@pytest.mark.costs(15)
@pytest.mark.thorough
def test_a_request_that_moves_between_widths_keeps_its_adapter():
    directory, *_ = checkpoint()
    built = build_tiny(directory, tp=1, fleet=True, devices=4, **lora((1, 2, 3)), max_loras=2)
    engine, policy = built.engine, Told()
    engine.topology.find(Fleet).policy = policy
    for lane in engine.lanes:
        lane.policy = RandomPolicy(0)
    wanted = [(prompt[:24], (None, 1, 2, 3)[i % 4]) for i, prompt in enumerate(crowd(8, 8))]
    for request in (asked := requests(built, wanted)):
        engine.add_request(request)
    events: dict[str, list[Event]] = {}
    for turn in range(400):
        if turn % 4 == 2:
            policy.wishes = [Wish(equal_groups(4, (1, 2, 4)[turn // 4 % 3]), "told", "move")]
        for event in engine.step(float(turn)):
            events.setdefault(event.request_id, []).append(event)
        engine.check()
        if not engine.has_work():
            break
    assert [tokens(events[request.request_id]) for request in asked] == right(wanted)
    assert engine.topology.find(Fleet).stats.num_moved_sequences > 0


@pytest.mark.costs(15)
@pytest.mark.thorough
def test_a_drafting_model_drafts_for_requests_with_adapters():
    directory, *_ = checkpoint()
    tensors = numpy_speculator.random_tensors(SPECULATOR, seed=5)
    drafts = numpy_speculator.save(Path(tempfile.mkdtemp()), SPECULATOR, tensors)
    how = {"speculation": "hybrid", "draft_model": str(drafts), "draft_choice": "fill"}
    how["controls"] = {"fixed_drafts": True}
    built = make(directory, 2, 2, **lora((1, 2)), max_loras=1, **how)
    built.engine.policy = RandomPolicy(1)
    for seed in (4, 4):  # the second time there is something to copy
        wanted = [(prompt, (None, 1, 2)[i % 3]) for i, prompt in enumerate(crowd(seed, 6))]
        assert said(built, wanted) == right(wanted)
    drafted = built.engine.stats().find(DraftStats)
    assert drafted.num_drafts > 0 and sum(drafted.accepted_at.values()) > 0


@pytest.mark.costs(12)
@pytest.mark.parametrize("quantization", thorough("fp8"))
def test_adapters_beside_codes(quantization):
    """An adapter that adds nothing changes nothing; one that is large says other tokens."""
    directory, *_ = checkpoint(**CODED)
    options = lora((1,), **CODED) | {"quantization": quantization, "dtype": "bfloat16"}
    built = make(directory, 2, 2, **options)
    plain = make(directory, 2, 2, quantization=quantization, dtype="bfloat16")
    wanted = [(prompt, None) for prompt in crowd(2, 4)]
    greedy = [GREEDY] * len(wanted)
    alone = run(plain.engine, [prompt for prompt, _ in wanted], greedy)
    assert said(built, wanted) == [tokens(alone[i, 0]) for i in range(len(wanted))]
    firsts = [(prompt, 1) for prompt in crowd(6, 24)]
    got = [words[0] for words in said(built, firsts)]
    wide = [words[0] for words in right(firsts, **CODED)]
    bare = [expected(tuple(prompt), None, **CODED)[0] for prompt, _ in firsts]
    # codes of three bits change some tokens; what the adapter does is seen in most
    assert np.mean(np.equal(got, wide)) > 0.6 and np.mean(np.equal(got, bare)) < 0.3


@pytest.mark.costs(10)
def test_steps_with_adapters_have_the_collectives_of_those_without():
    directory, *_ = checkpoint(**FEW)
    built = make(directory, 2, 2, **lora((1,), **FEW))
    (runner,) = built.runners
    found = {program.bucket.has_adapters: program for program in runner.programs}
    for mode in runner.step.layout.modes:
        plain, adapted = (collectives(found[has].steps[mode].as_text()) for has in (False, True))
        assert plain == adapted and plain


@pytest.mark.costs(10)
def test_a_step_without_adapters_costs_nothing():
    """It is the program that an engine without room for adapters has."""
    directory, *_ = checkpoint(**FEW)
    with_room, without = make(directory, 2, 2, **lora((1,), **FEW)), make(directory, 2, 2)
    (roomy,), (plain,) = with_room.runners, without.runners
    (program,) = plain.programs
    (same,) = (each for each in roomy.programs if not each.bucket.has_adapters)
    for mode, step in program.steps.items():
        texts = (each.as_text().partition("\n")[2] for each in (step, same.steps[mode]))
        one, other = (re.sub(r"metadata={[^}]*}", "", text) for text in texts)
        assert one == other


@pytest.mark.costs(10)
def test_factors_of_shift_are_views_of_those_of_base():
    directory, *_ = checkpoint(**FEW)
    built = make(directory, 2, 2, **lora((1, 2), **FEW))
    (runner,) = built.runners
    memory, step = runner.memory, runner.step
    for _ in range(2):
        base, shift = (memory.params(mode) for mode in step.layout.modes)
        names = [members[0].name for members in step.weights.arrays]
        split = [n for n, m in enumerate(step.weights.arrays) if m[0].kind == "factor"]
        for nth in split:
            weight = step.weights.arrays[nth][0]
            for one, other in zip(
                base[nth].addressable_shards, shift[nth].addressable_shards, strict=True
            ):
                assert one.device == other.device, names[nth]
                start = one.data.unsafe_buffer_pointer()
                inside = other.data.unsafe_buffer_pointer() - start
                assert 0 <= inside <= one.data.nbytes - other.data.nbytes, names[nth]
                assert weight.axes[0] is None or other.data.nbytes * 2 == one.data.nbytes
        said(built, [([5, 6, 7], 2), ([5, 6, 7], 1)])  # other adapters come to the slots


@pytest.mark.costs(10)
@pytest.mark.parametrize(("sp", "tp"), [(1, 1), *thorough((2, 2))])
def test_slots_are_written_where_steps_read_them(sp, tp, monkeypatch):
    """As on GPUs: what is stored is donated when no step and no view has it any more."""
    monkeypatch.setattr(slots_device, "writes_in_place", lambda platform: True)
    directory, *_ = checkpoint(**FEW)
    built = make(directory, sp, tp, **lora((1, 2, 3), **FEW), max_loras=2)
    built.engine.policy = RandomPolicy(0)
    (runner,) = built.runners
    step, memory = runner.step, runner.memory
    nth = next(n for n, m in enumerate(step.weights.arrays) if m[0].kind == "factor")
    before = memory.given[nth]
    wanted = [([5, 6, 7], seed) for seed in (1, 3, None, 2)]
    assert said(built, wanted) == right(wanted, **FEW)
    assert before is not None and before.is_deleted()


@pytest.mark.costs(20)
def test_a_hundred_adapters_come_and_go_and_nothing_is_compiled():
    directory, *_ = checkpoint(**FEW)
    settings = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "max_cpu_loras": 3}
    built = make(directory, 2, 2, **settings)
    built.engine.policy = RandomPolicy(0)
    pool, draw, counter = pool_of(built), random.Random(0), CompileCounter()
    counter.start()
    for number in range(100):
        seed = number % 5
        pool.load(f"a{seed}", str(adapter(seed, **FEW)[0]))
        if number >= 3:
            pool.unload(f"a{(number - 3) % 5}")
        here = [name for name in pool.names]
        wanted = [
            (prompt[:20], draw.choice([None, *(int(name[1:]) for name in here)]))
            for prompt in crowd(number, 2)
        ]
        if number % 10 == 0:
            assert said(built, wanted) == right(wanted, **FEW)
        else:
            short = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
            serve(built, requests(built, wanted, short))
    counter.stop()
    state = pool.told()
    assert counter.count == 0 and state.num_writes > 20 and state.num_reads > 0
    assert len(state.loaded) == 3 and not state.running and not state.waiting


def test_nobody_else_waits_for_an_adapter_that_is_on_its_way(monkeypatch):
    directory, *_ = checkpoint(**FEW)
    built = make(directory, 1, 1, **lora((1,), **FEW), max_loras=2)
    pool, may_go = pool_of(built), threading.Event()
    pool.load("a2", str(adapter(2, **FEW)[0]))
    place = pool._slots.place
    monkeypatch.setattr(pool._slots, "place", lambda one: may_go.wait(60) and place(one))
    asked = requests(built, [([5, 6, 7], 2), ([8, 9, 10], 1), ([11, 12], None)])
    for request in asked:
        built.engine.add_request(request)
    ended = set()
    for turn in range(60):
        for event in built.engine.step(float(turn)):
            ended |= {event.request_id} if event.is_last else set()
    assert ended == {asked[1].request_id, asked[2].request_id}
    assert pool.told().waiting == {"a2": 1}
    may_go.set()
    events = serve(built, [])
    assert tokens(events[asked[0].request_id]) == expected((5, 6, 7), 2, **FEW)


def test_no_adapter_starves():
    """Requests of the adapter in the only slot come without end; the others get their turn."""
    directory, *_ = checkpoint(**FEW)
    built = make(directory, 1, 1, **lora((1, 2), **FEW), max_loras=1)
    engine, numbers = built.engine, itertools.count()
    key = {seed: pool_of(built).key_of(f"a{seed}") for seed in (1, 2)}

    def ask(seed: int) -> str:
        name = f"x{next(numbers)}"
        engine.add_request(Request(name, [5, 6, 7], GREEDY, adapter=key[seed]))
        return name

    for _ in range(3):
        ask(1)
    ended: list[str] = []
    other = None
    for turn in range(300):
        ended += [event.request_id for event in engine.step(float(turn)) if event.is_last]
        if turn % 2 == 0 and turn < 100:
            ask(1)
        if turn == 6:
            other = ask(2)
        if other in ended:
            break
    assert other in ended and len(ended) < 40
    serve(built, [])


def test_an_adapter_that_is_unloaded_serves_those_who_have_it():
    directory, *_ = checkpoint(**FEW)
    built = make(directory, 1, 1, **lora((1,), **FEW))
    pool = pool_of(built)
    asked = requests(built, [([5, 6, 7], 1)])
    built.engine.add_request(asked[0])
    built.engine.step(0.0)
    pool.unload("a1")
    with pytest.raises(RequestError, match="not loaded"):
        built.engine.add_request(Request("late", [1], GREEDY, adapter=asked[0].adapter))
    with pytest.raises(AdapterError, match="no adapter 'a1'"):
        pool.unload("a1")
    pool.load("a1", str(adapter(2, **FEW)[0]))  # another one under this name
    again = requests(built, [([5, 6, 7], 1)])
    events = serve(built, again)
    assert tokens(events[again[0].request_id]) == expected((5, 6, 7), 2, **FEW)
    with pytest.raises(AdapterError, match="already"):
        pool.load("a1", str(adapter(1, **FEW)[0]))


@pytest.mark.thorough
def test_adapters_stay_when_weights_sleep_and_are_brought_again_when_they_were_dropped():
    directory, _, tensors = checkpoint(**FEW)
    built = make(directory, 2, 2, **lora((1, 2), **FEW))
    wanted = [([5, 6, 7], 1), ([9, 8], 2), ([9, 8], None)]
    for level in (1, 2):
        built.rollouts.sleep(level, "abort", 0.0)
        built.rollouts.wake_up()
        if level == 2:
            built.rollouts.update(tensors, 0.0)
        assert said(built, wanted) == right(wanted, **FEW)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"numerics": "invariant", "dtype": "bfloat16"}, "numerics = invariant"),
        ({"weights": "gather"}, "weights = gather"),
        ({"phases": "tp2:tp2", "sp": None, "tp": None}, "phases"),
    ],
)
def test_what_adapters_are_not_had_with_is_refused_by_name(options, words):
    directory, *_ = checkpoint(**FEW)
    with pytest.raises(ConfigError, match=f"enable_lora.* cannot be had with {words}"):
        build_tiny(directory, **({"sp": 2, "tp": 2} | lora((1,), **FEW) | options))
