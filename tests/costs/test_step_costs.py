"""The cost model against sums done by hand, and against what must hold of any machine."""

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machine_kit import FLOAT32, PLAIN, TINY

from pallas_kernels.window import Chunk
from shiftjax.arch.config import Experts, LayerKind
from shiftjax.arch.formats import Formats
from shiftjax.arch.presets import PRESETS
from shiftjax.arch.weights import layer_parameters, num_parameters
from shiftjax.core.policy import work_of
from shiftjax.core.request import Request, ScheduledSequence, SequenceState, StepPlan
from shiftjax.costs.buckets import Bucket
from shiftjax.costs.collectives import (
    Collective,
    context_gathers,
    layer_collectives,
    row_exchanges,
)
from shiftjax.costs.expert_load import Load
from shiftjax.costs.expert_part import expert_part
from shiftjax.costs.kernel_costs import KernelCosts, Split, matmul_seconds
from shiftjax.costs.levels import transfer_seconds
from shiftjax.costs.machine import EngineOverhead, Transfer
from shiftjax.costs.machine_files import load_engine, load_machine
from shiftjax.costs.memory import kv_token_bytes, weight_bytes
from shiftjax.costs.step_costs import CostModel
from shiftjax.costs.work import Work
from shiftjax.parallel.grid import Group, Mode
from shiftjax.parallel.layout import Layout

NO_OVERHEAD = EngineOverhead(
    "none",
    host_seconds=0.0,
    host_seconds_distributed=0.0,
    host_seconds_per_sequence=0.0,
    overlaps=False,
    kernels_per_exchange=0,
    kernels_per_step=0,
    graph_tokens=1 << 20,
    eager_kernel_seconds=0.0,
    reserved_bytes=0.0,
    pads_to_buckets=False,
    copies_shift_weights=False,
    replicas_in_step=False,
)
ONE = Mode(1, 1)


def costs(sp=1, tp=1, machine=PLAIN, engine=NO_OVERHEAD, model=None, buckets=()):
    return CostModel(Layout(model or TINY, sp, tp), machine, engine, FLOAT32, buckets)


def sequence(length: int) -> SequenceState:
    prompt = [0] * length
    return SequenceState(
        Request("r", prompt), 0, 0, (0, 0.0, 0, 0), prompt, length, 99, frozenset(), []
    )


def test_work_is_the_sum_over_tokens():
    spans = [(9, 1), (4, 1), (0, 5), (7, 3)]  # (start, tokens): two decodes, two chunks
    items = [ScheduledSequence(sequence(start + n), start, n, 1, -1) for start, n in spans]
    work = work_of(StepPlan(items, 10, 4, 2, [], [], 0))
    keys = [position + 1 for start, n in spans[2:] for position in range(start, start + n)]
    assert work == Work(10, 4, 4, 10 + 5, 5 + 10, sum(keys), 2)


def test_a_memory_bound_step_is_its_bytes_over_the_rate():
    # One token on one device: every weight of the layers and the head is read once, and with them
    # activations; with infinite FLOP/s nothing else takes time.
    work = Work(1, 0, 1, 0, 0, 0)
    breakdown = costs().breakdown(ONE, work)
    hidden, inner, heads, kv = 64, 128, 64, 32  # widths of d, I, h D, m D
    products = [(hidden, heads + 2 * kv), (heads, hidden), (hidden, 2 * inner), (inner, hidden)]
    numbers = sum(k * n + k + n for k, n in products)
    assert breakdown.matmul == pytest.approx(2 * 4 * numbers / 1000)
    assert breakdown.collectives == breakdown.launch == breakdown.host == 0.0


def test_a_compute_bound_product_is_tiles_in_waves():
    machine = replace(PLAIN, matmul_flops={"float32": 100.0}, compute_units=4, tile_seconds=3.0)
    tile = 2 * 8 * 8 * 10 / (100.0 / 4)
    # 17 rows are 3 tiles high, 20 columns 3 wide: 9 tiles on 4 units.
    assert matmul_seconds(machine, 17, 10, 20, "float32") == pytest.approx(9 / 4 * (tile + 3.0))
    assert matmul_seconds(machine, 1, 10, 8, "float32") == pytest.approx(tile + 3.0)


def test_a_collective_takes_the_quickest_way():
    ways = (Transfer(1.0, 10.0, "one_shot"), Transfer(5.0, 10.0))
    small = Collective("all-reduce", 8, 1, 1)
    large = Collective("all-reduce", 8, 80, 1)
    assert transfer_seconds(ways, small) == pytest.approx(1.0 + 7 * 1 / 10)
    assert transfer_seconds(ways, large) == pytest.approx(5.0 + 2 * 7 / 8 * 80 / 10)
    gather = Collective("all-gather", 8, 80, 1)
    assert transfer_seconds(ways[1:], gather) == pytest.approx(5.0 + 7 / 8 * 80 / 10)


def test_tp_moves_the_same_whatever_its_size_and_ulysses_less_the_larger_it_is():
    model = PRESETS["llama-70b"]
    reduced = {tp: layer_collectives(Layout(model, 1, tp), ONE, 4096, 2) for tp in (2, 4, 8)}
    assert {sum(m.num_bytes * m.num_times for m in moves) for moves in reduced.values()} == {
        2 * 4096 * 8192 * 2
    }
    exchanged = [
        sum(m.num_bytes for m in layer_collectives(Layout(model, sp, 1), Mode(sp, sp), 4096, 2))
        for sp in (2, 4, 8)
    ]
    assert exchanged[0] == 2 * exchanged[1] == 4 * exchanged[2]


def test_one_exchange_carries_queries_keys_and_values_the_other_outputs():
    # Of 4 devices each has 2 query heads and 1 KV head of 8, of all 64 tokens, 2 bytes a number.
    moves = layer_collectives(Layout(TINY, 2, 2), Mode(2, 2), 64, 2)
    sizes = [move.num_bytes for move in moves if move.kind == "all-to-all"]
    assert sizes == [64 * (2 + 1 + 1) * 8 * 2, 64 * 2 * 8 * 2]
    # Half of the tokens, of 64 numbers each, are summed twice by the 2 that split a weight.
    assert Collective("all-reduce", 2, 64 // 2 * 64 * 2, 2) in moves


def test_norms_of_all_heads_sum_two_numbers_a_token():
    olmo = replace(TINY, qk_norm=True, wide_qk_norm=True)
    for mode, ways in ((Mode(2, 2), 4), (Mode(2, 1), 8)):
        plain, wide = (layer_collectives(Layout(m, 2, 4), mode, 64, 2) for m in (TINY, olmo))
        assert [move for move in wide if move not in plain] == [
            Collective("all-reduce", ways, 64 // mode.sp * 2 * 4, 1)
        ]


@pytest.mark.parametrize("mode", Group(0, 4).modes)
@pytest.mark.parametrize("work", [Work.decode(7, 100), Work.prefill(40, 3)])
def test_the_breakdown_adds_up(mode, work):
    machine, engine = load_machine("h200x8"), load_engine("vllm")
    model = CostModel(Layout(PRESETS["llama-70b"], 4, 2), machine, engine, Formats("fp8"))
    breakdown = model.breakdown(mode, work)
    assert breakdown.device == pytest.approx(model.device_seconds(mode, work))
    assert breakdown.device + breakdown.host == pytest.approx(model.seconds(mode, work))
    assert all(part >= 0 for part in breakdown)


@pytest.mark.parametrize("mode", Group(0, 4).modes)
def test_modes_are_compared_by_all_but_attention(mode):
    model, work = costs(4, 2), Work.decode(7, 100)
    cost = model.breakdown(mode, work)
    seconds = model.mode_seconds(mode, model.size_of(work))
    assert seconds == pytest.approx(cost.device - cost.attention)


def test_attention_reads_the_context_of_decodes_and_computes_the_pairs_of_chunks():
    model = costs(machine=replace(PLAIN, matmul_flops={"float32": 1000.0}))
    token = 2 * 2 * 4 * 8 * 4  # k and v, layers, KV heads, head_dim, bytes
    assert kv_token_bytes(model.layout, model.formats) == token
    pair = 4 * 2 * 8 * 8 / 1000.0  # FLOP per pair of all layers and heads, over FLOP/s
    base = model.breakdown(model.layout.base, Work(1, 0, 1, 0, 0, 0)).attention
    decode = model.breakdown(model.layout.base, Work(1, 0, 1, 10, 0, 0)).attention
    chunk = model.breakdown(model.layout.base, Work(1, 0, 1, 0, 10, 100)).attention
    assert base == 0.0
    assert decode == pytest.approx(10 * max(token / 1000.0, pair))
    queries = 2 * 2 * 8 * 8 * 4 / 1000.0  # read, and their sums written: layers, heads, head_dim
    assert chunk == pytest.approx(max(10 * token / 1000.0, 100 * pair) + queries)


@given(st.integers(1, 80), st.integers(1, 5), st.integers(0, 60), st.integers(1, 40), st.data())
def test_a_window_cuts_what_each_token_sees(window, num_decodes, start, size, data):
    """Exactly, where decodes are alike and chunks are."""
    context, chunks = data.draw(st.integers(1, 90)), data.draw(st.integers(0, 3))
    seen = [min(start + i, window) for i in range(1, size + 1)]
    all_pairs = sum(start + i for i in range(1, size + 1))
    work = Work(
        num_decodes + chunks * size,
        num_decodes + chunks,
        num_decodes + chunks,
        num_decodes * context,
        chunks * (start + size),
        chunks * all_pairs,
        num_decodes,
    )
    cut = work.within(window)
    assert cut.context_tokens == num_decodes * min(context, window)
    assert cut.attention_pairs == chunks * sum(seen)
    assert cut.chunk_context_tokens == chunks * min(start + size, size + window - 1)
    assert cut._replace(context_tokens=0, attention_pairs=0, chunk_context_tokens=0) == (
        work._replace(context_tokens=0, attention_pairs=0, chunk_context_tokens=0)
    )
    assert work.within(None) == work


@given(st.integers(1, 80), st.integers(1, 5), st.integers(0, 300), st.integers(1, 99), st.data())
def test_a_chunk_cuts_what_each_token_sees(chunk, num_decodes, start, size, data):
    """Exactly, but for decodes beyond the first one, which see half of one."""
    context, prompts = data.draw(st.integers(1, 200)), data.draw(st.integers(0, 3))
    positions = range(start, start + size)
    pairs, read = prompts * sum(p + 1 for p in positions), prompts * (start + size)
    numbers = num_decodes + prompts * size, num_decodes + prompts, num_decodes + prompts
    work = Work(*numbers, num_decodes * context, read, pairs, num_decodes)
    cut = work.within(Chunk(chunk))
    assert cut.attention_pairs == prompts * sum(p % chunk + 1 for p in positions)
    assert cut.chunk_context_tokens == prompts * (start + size - start // chunk * chunk)
    seen = context if context <= chunk else (chunk + 1) / 2
    assert abs(cut.context_tokens - num_decodes * seen) < 1


def test_layers_attend_as_far_back_as_their_kind():
    """Half of the layers see 4 tokens, and a layer that sees all costs what it did."""
    machine = replace(PLAIN, attention_seconds=0.5)
    kinds = (LayerKind(4), LayerKind(None))
    model = costs(machine=machine, model=replace(TINY, layer_kinds=kinds))
    all_see = costs(machine=machine)
    for work in (Work.decode(3, 10), Work.prefill(6, 5)):
        apart = [all_see.breakdown(ONE, seen).attention / 2 for seen in (work.within(4), work)]
        assert model.breakdown(ONE, work).attention == pytest.approx(sum(apart))
        assert apart[0] < apart[1] and min(apart) > 0.5
    assert model.breakdown(ONE, Work(1, 0, 1, 0, 0, 0)).attention == 0.0


def test_launches_are_those_that_the_engine_lists_for_the_format():
    """Their number, and what each reads and writes of a token; bytes by hand."""
    machine = replace(PLAIN, matmul_flops={"bfloat16": 1e30, "fp8": 1e30}, kernel_seconds=1.0)
    lists = {"bfloat16": ("add, norm",), "fp8": ("norm, codes", "codes of heads", "activation")}
    engine, one = replace(NO_OVERHEAD, layer_launches=lists), NO_OVERHEAD
    work, layers, hidden, inner = Work(8, 0, 8, 0, 0, 0), 2, 64, 128  # heads are as wide as hidden

    def parts(mode, name, engine):
        model = CostModel(Layout(TINY, 4, 1), machine, engine, Formats(name)).breakdown(mode, work)
        return model.launch, model.elementwise

    for mode, local, ways in ((Mode(4, 1), 8, 4), (Mode(4, 4), 2, 1)):
        for name, count, num_bytes in (
            ("bfloat16", 1, 4 * 2 * hidden),
            ("fp8", 3, 3 * hidden + 3 * hidden // ways + 3 * 2 * inner // ways),
            ("int4", 1, 4 * 2 * hidden),  # whose activations are as in bfloat16
        ):
            plain = local * 2 * (8 * hidden + 3 * inner // ways)  # without a list
            pairs = zip(parts(mode, name, engine), parts(mode, name, one), strict=True)
            launch, beside = (a - b for a, b in pairs)
            assert launch == pytest.approx(layers * count), (mode, name)
            assert beside == pytest.approx(layers * (local * num_bytes - plain) / 1000), name
    # Codes are made after an exchange, where there is one: three launches more.
    of_heads = ("largest of heads", "codes of heads", "scales of heads")
    coded = replace(
        engine,
        layer_launches={"fp8": ("combine, codes", "norm, codes")},
        exchanged_launches={"fp8": ("combine", *of_heads, "norm, codes")},
    )
    assert coded.launches_of("fp8") == coded.layer_launches["fp8"]
    launches, read = parts(Mode(4, 4), "fp8", coded)
    few = {"fp8": ("norm, codes", "combine")}
    fewer = replace(engine, layer_launches=few, exchanged_launches=few)
    fewer_launches, fewer_read = parts(Mode(4, 4), "fp8", fewer)
    assert launches - fewer_launches == pytest.approx(3 * layers)
    assert read - fewer_read == pytest.approx(layers * 2 * (2 * 2 + 1) * hidden / 1000)
    assert parts(Mode(4, 1), "fp8", coded) == pytest.approx(parts(Mode(4, 1), "fp8", fewer))
    some = replace(engine, kernels_per_layer=5)  # which says the number alone
    assert some.num_layer_launches("fp8") == 5 and engine.num_layer_launches("fp8") == 3


def test_many_rows_and_exchanges_have_launches_of_their_own():
    """Rows are those of a device; an activation of experts is among their own kernels."""
    machine = replace(PLAIN, matmul_flops={"bfloat16": 1e30}, kernel_seconds=1.0)
    fmt = Formats("bfloat16")
    lists = {"layer_launches": ("norm",), "exchanged_launches": ("norm", "unpack", "unpack")}
    lists |= {"many_rows_launches": ("activation",)}
    own = {name: {"bfloat16": names} for name, names in lists.items()}
    engine = replace(NO_OVERHEAD, few_rows=8, **own)

    def launches(mode, tokens, engine):
        work = Work(tokens, 0, tokens, 0, 0, 0)
        return CostModel(Layout(TINY, 4, 1), machine, engine, fmt).breakdown(mode, work).launch

    for mode, tokens, count in (
        (Mode(4, 1), 8, 1),
        (Mode(4, 1), 12, 2),
        (Mode(4, 4), 32, 3),
        (Mode(4, 4), 36, 4),
    ):
        more = launches(mode, tokens, engine) - launches(mode, tokens, NO_OVERHEAD)
        assert more == pytest.approx(TINY.num_layers * count), (mode, tokens)


def test_the_host_launches_layers_of_steps_that_no_graph_replays():
    engine = replace(NO_OVERHEAD, graph_tokens=512, eager_layer_seconds=0.1)
    one = costs(engine=engine)
    host = {n: one.host_seconds(Work(n, 0, n, 0, n, 0)) for n in (512, 513)}
    assert host == {512: 0.0, 513: pytest.approx(0.1 * TINY.num_layers)}


def test_widths_of_codes_are_those_of_whole_blocks_on_each_device():
    """Of 17,920, as in phi-4, 140 blocks of 128 become 144 on 8 devices; others' stay as they are.

    In numbers that are read: three matrices of 64 inputs.
    """
    machine = replace(PLAIN, matmul_flops={"bfloat16": 1e30, "fp8": 1e30})
    model, work = replace(TINY, intermediate_size=17_920), Work(1, 0, 1, 0, 0, 0)
    ours = replace(NO_OVERHEAD, layer_launches={"bfloat16": ("norm",)})

    def reading(engine, name):
        layout, formats = Layout(model, 1, 8), Formats(name)
        return CostModel(layout, machine, engine, formats).breakdown(ONE, work).matmul

    more = reading(ours, "fp8") - reading(NO_OVERHEAD, "fp8")
    assert more == pytest.approx(2 * 4 * 128 / 8 * (3 * 64 + 2 * 2 + 1) / 1000)  # and activations
    assert reading(ours, "bfloat16") == reading(NO_OVERHEAD, "bfloat16")


def test_devices_that_share_a_processor_take_turns():
    shared = replace(PLAIN, shared_cores=2)
    alone, together = costs(2, 4), costs(2, 4, machine=shared)
    work = Work.decode(16, 50)
    one, many = (c.breakdown(Mode(2, 1), work) for c in (alone, together))
    assert many.matmul == pytest.approx(8 / 2 * one.matmul)  # bound by reading: a core each
    assert many.attention == pytest.approx(8 / 2 * one.attention)
    assert many.collectives == pytest.approx(8 * one.collectives)  # of 8 devices, in turn


def test_computing_and_reading_overlap_as_far_as_the_machine_lets_them():
    slow = replace(PLAIN, matmul_flops={"float32": 1e4})
    work = Work(64, 0, 1, 0, 0, 0)
    reading = costs().products_seconds(ONE, 64)
    both = costs(machine=slow).products_seconds(ONE, 64)
    apart = costs(machine=replace(slow, memory_overlap=0.0)).breakdown(ONE, work).matmul
    assert both > reading
    assert apart == pytest.approx(both + reading)


def test_attention_in_rounds_costs_a_fixed_time_for_each():
    rounds = replace(
        PLAIN, attention_round_seconds=2.0, attention_round_tokens=64, attention_lanes=4
    )
    work = Work(16, 16, 16, 16 * 100, 0, 0)
    extra = costs(machine=rounds).breakdown(ONE, work).attention
    extra -= costs().breakdown(ONE, work).attention
    assert extra == pytest.approx(2.0 * 2 * -(-1600 // (4 * 64)))  # layers, rounds


def test_a_step_costs_what_its_bucket_costs():
    buckets = [Bucket(8, 8), Bucket(64, 16)]
    padded, exact = costs(buckets=buckets), costs()
    small, large = Work(5, 1, 1, 0, 0, 0), Work(9, 1, 1, 0, 0, 0)
    assert padded.device_seconds(ONE, small) == exact.device_seconds(ONE, Work(8, 8, 1, 0, 0, 0))
    assert padded.device_seconds(ONE, large) == exact.device_seconds(ONE, Work(64, 16, 1, 0, 0, 0))


def test_few_tokens_touch_few_experts_and_many_all():
    model = replace(TINY, experts=Experts(num=64, per_token=1, intermediate_size=128))
    dense = costs().breakdown(ONE, Work(1, 0, 1, 0, 0, 0)).matmul
    one = costs(model=model).breakdown(ONE, Work(1, 0, 1, 0, 0, 0)).matmul
    many = costs(model=model).breakdown(ONE, Work(4096, 0, 1, 0, 0, 0)).matmul
    router = 2 * 4 * (64 * 64 + 64 + 64) / 1000
    assert one == pytest.approx(dense + router)  # one expert is read: the size of the MLP
    assert many > 60 * (dense / 2)


def test_products_of_few_experts_are_cut_to_read_faster():
    """By hand, of one expert: 6 and 8 items, or 24 and 32, of 132 that read at half their rate."""
    kernels, sizes = KernelCosts(load_machine("h200x8"), Formats()), (2048, 768)
    cut = kernels.cut_experts(*sizes, 8 * 8 / 128, 16)
    assert (cut.parts, cut.num_kernels) == ((4, 4), 1)
    whole, one = cut._replace(parts=(1, 1)), Load(1.0, 1.0)
    assert (whole.num_kernels, whole.readings(one)) == (0, (12 / 132, 16 / 132))
    assert cut.readings(one) == (48 / 132, 64 / 132)
    seconds = [kernels.experts(one, *sizes, each) for each in (None, cut, whole)]
    assert seconds == sorted(set(seconds))
    many = kernels.cut_experts(*sizes, 64 * 8 / 128, 16)
    assert (many.parts, many.num_kernels) == ((1, 1), 0)
    all_read = Load(64.0, 16.0)
    assert kernels.experts(all_read, *sizes, many) == kernels.experts(all_read, *sizes)


def test_only_an_engine_that_cuts_experts_launches_more_for_it():
    model, work = PRESETS["qwen3-30b-a3b"], Work.decode(1, 100)
    machine, cuts = load_machine("h200x8"), replace(NO_OVERHEAD, cuts_experts=True)
    whole, cut = (
        CostModel(Layout(model, 1, 8), machine, engine, Formats()).breakdown(ONE, work).launch
        for engine in (NO_OVERHEAD, cuts)
    )
    assert cut - whole == pytest.approx(model.num_expert_layers * machine.kernel_seconds)


def test_every_mode_does_the_same_work_of_experts_and_base_moves_what_it_gathers():
    model = replace(TINY, experts=Experts(num=64, per_token=4, intermediate_size=128))
    group, shift = costs(model=model, sp=8), Mode(8, 1)
    sizes = group.kernels, NO_OVERHEAD, group.layout
    parts = [expert_part(*sizes, (mode, shift), 64) for mode in (Mode(8, 8), shift)]
    assert parts[0] == parts[1] and parts[0].products > 0
    moves = layer_collectives(group.layout, Mode(8, 8), 64, 2)
    more = layer_collectives(group.layout, Mode(8, 8), 64, 2, experts=Mode(8, 1))
    assert more == [
        *moves,
        Collective("all-gather", 8, 64 * 64 * 2, 1),
        Collective("reduce-scatter", 8, 8 * 64 * 2, 1),
    ]


def test_a_reduce_scatter_takes_as_long_as_the_gather_back():
    ways = (Transfer(5.0, 10.0),)
    gather = transfer_seconds(ways, Collective("all-gather", 8, 80, 1))
    assert transfer_seconds(ways, Collective("reduce-scatter", 8, 10, 1)) == gather


def test_weights_on_a_device():
    model, formats = PRESETS["llama-70b"], Formats("fp8")
    alone, split, wide = (
        weight_bytes(Layout(model, *mesh), formats) for mesh in ((1, 1), (1, 8), (8, 1))
    )
    norms = 2 * (2 * 80 + 1) * model.hidden_size
    head = 2 * model.vocab_size * model.hidden_size  # and so many for the embedding
    hidden, heads, kv_heads = model.hidden_size, 64 * 128, 8 * 128
    whole = 4 * 80 * 2 * hidden  # scales of o and down, on every device
    scales = whole + 4 * 80 * (heads + 2 * kv_heads + 2 * model.intermediate_size)
    assert alone == layer_parameters(model) + 2 * head + norms + scales
    assert split - norms - whole == (alone - norms - whole) // 8
    assert wide == alone - head + head // 8
    assert num_parameters(model) == pytest.approx(70.55e9, rel=1e-3)


def test_the_host_is_added_or_hidden():
    slow = replace(NO_OVERHEAD, host_seconds=1e6, host_seconds_distributed=1e5)
    work = Work.decode(1, 1)
    device = costs(1, 2).device_seconds(ONE, work)
    assert costs(1, 2, engine=slow).seconds(ONE, work) == device + 1.1e6
    hidden = replace(slow, overlaps=True)
    assert costs(1, 2, engine=hidden).seconds(ONE, work) == 1.1e6


def test_split_positions_are_read_once_and_exchanged():
    """Of 2 KV heads on 8 devices, 4 of which split positions: a quarter is read, latencies stay."""
    layout = Layout(replace(PRESETS["llama-8b"], num_kv_heads=2), 4, 2)
    machine, engine = load_machine("h200x8"), load_engine("shiftjax")
    formats = Formats("bfloat16", "bfloat16", "bfloat16")
    layouts = layout, replace(layout, by_position=True, normalisers=False)
    whole, split = (CostModel(each, machine, engine, formats) for each in layouts)
    short, long = Work.decode(1, 2048), Work.decode(64, 131_072)
    for mode in layout.modes:
        assert split.device_seconds(mode, short) > whole.device_seconds(mode, short)
        assert split.device_seconds(mode, long) < whole.device_seconds(mode, long) / 2
        chunk = Work.prefill(4096, 28_672)
        assert split.device_seconds(mode, chunk) > whole.device_seconds(mode, chunk)
        size = split.size_of(long)
        added = split.mode_seconds(mode, size) - whole.mode_seconds(mode, size)
        exchanges = row_exchanges(layouts[1], 64, 2)
        assert added == pytest.approx(32 * split.layers.move(exchanges))
    # What tiles see is gathered once a layer, however many they are; K and V of one head. Softmaxes
    # of 4 heads are put together after 32,768 tokens, and again.
    (gather,) = context_gathers(layouts[1], formats, 4096)
    assert gather[:3] == ("all-gather", 4, 4096 * 2 * 128 * 2)
    steps = (4096, 0, 1, 1), (4096, 28_672, 8, 1), (256, 28_672, 8, 1), (256, 40_000, 10, 2)
    for tokens, before, count, rounds in steps:
        work = Work.prefill(tokens, before)
        own, others = (each.breakdown(layout.base, work).attention for each in (split, whole))
        states = split.kernels.moved((rounds + 1) * tokens * 4 * 128 * 10)
        expected = 32 * (count * split.layers.move([gather]) + states)
        assert own - others == pytest.approx(expected)
    # The queries of 4 x 4 heads of 128 come, and 130 numbers of each go back.
    assert [move[:3] for move in row_exchanges(layouts[1], 10, 2)] == [
        ("all-gather", 4, 10 * 16 * 128 * 2),
        ("all-to-all", 4, 10 * 16 * 130 * 4),
    ]


def test_normalisers_travel_alone_where_q_and_o_are_small():
    """Of 4 KV heads on 8 devices: with few tokens, in SHIFT; what is wider is read and computed."""
    layout = Layout(PRESETS["qwen3-30b-a3b"], 8, 1, by_position=True)
    wide, costs_of = Mode(8, 2), partial(CostModel, machine=load_machine("h200x8"))
    costs_of = partial(costs_of, engine=load_engine("shiftjax"), formats=Formats("bfloat16"))
    auto, never, always = (
        costs_of(replace(layout, normalisers=given)) for given in (None, False, True)
    )
    sizes = [(n, min(n, 256)) for n in (1, 64, 256, 8192)]
    for size in sizes:
        both = [each.mode_seconds(layout.shift, size) for each in (never, always)]
        assert auto.mode_seconds(layout.shift, size) == min(both)
        assert auto.query_modes(layout.shift, size) == (wide if both[1] < both[0] else Mode(8, 1))
    chosen = [auto.query_modes(layout.shift, size) == wide for size in sizes]
    assert chosen == [True, True, True, False]
    assert {auto.query_modes(mode, (8, 8)) == mode for mode in layout.modes[:-1]} == {True}
    own = {"of_all": True}
    (told,) = row_exchanges(layout, 10, 2, **own)
    assert told[:3] == ("all-gather", 2, 2 * 10 * 8 * 8)  # two numbers of 2 x 4 heads of each
    moved = [each.breakdown(layout.shift, Work.decode(64, 1)).collectives for each in (never, auto)]
    exchanges = (row_exchanges(layout, 64, 2), row_exchanges(layout, 64, 2, **own))
    apart = [48 * auto.layers.move(each) for each in exchanges]
    assert moved[0] - moved[1] == pytest.approx(apart[0] - apart[1])
    products = [each.products_seconds(layout.shift, 64) for each in (never, always)]
    assert products[1] > products[0]


@pytest.mark.parametrize(
    ("heads", "ways", "groups"), [(16, 1, 1), (64, 1, 1), (128, 1, 2), (24, 8, 3)]
)
def test_groups_of_heads_read_the_same_latents(heads, ways, groups):
    """From the memory once, and from the cache each: the slower of the two bounds them."""
    for l2 in (1e20, PLAIN.memory_bytes_per_second * 1.5):
        machine = replace(PLAIN, l2_bytes_per_second=l2, kv_efficiency={"bfloat16": 1.0})
        kernels, cache = KernelCosts(machine, FLOAT32), Layout(TINY, 1, 1).cache
        own = kernels.attention(heads, 576, cache, 512, Split(ways))
        bound = max(1 / machine.memory_bytes_per_second, groups / l2)
        assert own.read == pytest.approx(cache.num_bytes(FLOAT32) * bound / ways)
        assert kernels.attention(heads, 576, cache).read < own.read * ways * 1.01
