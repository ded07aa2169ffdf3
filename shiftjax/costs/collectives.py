"""Which collectives a step runs, to the byte. No JAX.

A test counts the same in the compiled programs of the engine (tests/costs/test_costs_hlo.py).
"""

from collections import Counter
from typing import Literal, NamedTuple

from shiftjax.arch.config import LayerParts
from shiftjax.arch.formats import FORMATS, Formats
from shiftjax.arch.numerics import NUMERICS, WIDE_BYTES, NumericsName
from shiftjax.costs.expert_load import room_to_exchange
from shiftjax.costs.memory import shard_bytes
from shiftjax.parallel.grid import PLAIN_USE, Mode, Use, share_stride, strides
from shiftjax.parallel.layout import Layout
from shiftjax.parallel.stored import stored_weights

Kind = Literal["all-reduce", "all-to-all", "all-gather", "reduce-scatter"]
SQUARES = 8  # bytes of a token's sums of squares of queries and of keys, for norms of all heads
GUESS_BYTES = 20  # of a device: its best id, how good that is, and what sums to a probability
FLAG_BYTES = EXPERT_BYTES = 4  # whether the exchange of a layer has room; an expert's number
SAMPLE_BYTES = 12  # of a device for a row: its best id, how good that is, and what is wrong
SCALE_BYTES = 4  # of a block of codes of a token
STATE_BYTES = 4  # of each number of a softmax under way
PAIR_BYTES = 8  # an id and a number; or a sum of exponentials and the chosen logit
EXACT_BYTES = 16  # three limbs of such a sum, and the logit: of all devices together
TOP_IDS = 20  # most likely tokens that a row may ask for
THRESHOLD_BITS = 30  # of top_k's and of top_p's, which the sampler finds a digit at a time
DIGIT_BITS, DIGIT_BITS_ON_CPU = 5, 2  # where a masked sum costs more than one over devices


class Collective(NamedTuple):
    """`num_times` equal collectives; `num_bytes` is the size of the result on one device."""

    kind: Kind
    num_devices: int  # that take part together
    num_bytes: int
    num_times: int
    stride: int = 1  # from one of them to the next, in devices: `parallel.grid.strides`


class Carried(NamedTuple):
    """What activations take where devices exchange them."""

    number_bytes: int
    codes: bool = False  # heads come back as the codes that o multiplies
    sums: NumericsName = "fast"  # how partial products are summed


def carried_by(formats: Formats) -> Carried:
    """Return what our programs carry."""
    has_codes = formats.has_codes_of_inputs and not FORMATS[formats.weights].of_experts
    return Carried(formats.activation_bytes, has_codes, formats.sums)


def layer_collectives(
    layout: Layout,
    mode: Mode,
    num_tokens: int,
    activation_bytes: int,
    *,
    experts: Mode | None = None,
    has_kv: bool = True,
    codes: bool = False,
    sums: NumericsName = "fast",
) -> list[Collective]:
    """What one decoder layer moves for a step of `num_tokens`, a multiple of the mode's sp.

    Both all-reduces (after o and after down) carry n / sp tokens over the devices that split a
    weight: n / SP over TP in BASE, all n over all devices in SHIFT. Where tokens are split, one
    all-to-all brings each device n tokens of its query heads and of what it caches, or of query
    heads alone in layers without KV of their own. Another carries the output, n of its heads: with
    `codes` a byte of each number, and the scales of blocks. Norms of all heads sum two numbers a
    token over the devices that split a weight. Latents go to all devices in an all-gather, beside
    the query heads.

    A layer of experts, which are used as in the mode `experts`, has an MLP's sums. What shares
    them brings its tokens together before that, and scatters their sums.
    """
    each = num_tokens * activation_bytes  # bytes of a number of all tokens
    queries, answers = (
        each * layout.heads_per_device * width
        for width in (layout.model.query_dim, layout.model.value_dim)
    )
    if codes and layout.model.latent is None:
        columns, (block, _) = (
            layout.heads_per_device * layout.model.value_dim,
            layout.heads_of_block,
        )
        answers = num_tokens * (columns + SCALE_BYTES * columns // block)
    moves = _sums(layout, mode, num_tokens, activation_bytes, 1 if experts else 2, sums)
    weights, tokens = strides(mode, layout.tp)
    cached = each * layout.cache.numbers if has_kv else 0
    if layout.model.latent is not None:
        moves.append(Collective("all-gather", mode.sp, cached, 1, tokens))
        cached = 0
    moves.append(Collective("all-to-all", mode.sp, queries + cached, 1, tokens))
    moves.append(Collective("all-to-all", mode.sp, answers, 1, tokens))
    if layout.model.wide_qk_norm:
        squares = num_tokens // mode.sp * SQUARES
        moves.append(Collective("all-reduce", layout.ways(mode), squares, 1, weights))
    if experts:
        exchanges = room_to_exchange(layout, mode, experts, num_tokens) > 0
        if exchanges:
            own = exchange_of_experts(layout, mode, num_tokens, activation_bytes)
        else:
            own = gather_of_experts(layout, mode, experts, num_tokens, activation_bytes)
        if layout.model.experts and layout.model.experts.beside_mlp:
            own = _with_mlp(own, moves[0], exchanges)
        moves += own
    return [move for move in moves if move.num_devices > 1]


def _with_mlp(moves: list[Collective], of_mlp: Collective, exchanges: bool) -> list[Collective]:
    """Add the all-reduce of an MLP beside experts: the compiler makes one of both, if it can."""
    if exchanges:  # in a branch
        return [*moves, of_mlp]
    return [m._replace(num_bytes=2 * m.num_bytes) if m.kind == "all-reduce" else m for m in moves]


def parts_collectives(
    layout: Layout,
    mode: Mode,
    num_tokens: int,
    parts: LayerParts,
    carried: Carried,
    experts: Mode | None = None,
) -> list[Collective]:
    """What a layer of these parts moves; see `layer_collectives`. Experts None: as in SHIFT."""
    own = layout.shapes[parts.heads], mode, num_tokens, carried.number_bytes
    used = (experts or layout.shift) if parts.has_experts else None
    has_kv = parts.num_kv > 0
    return layer_collectives(
        *own, experts=used, has_kv=has_kv, codes=carried.codes, sums=carried.sums
    )


def gather_of_experts(
    layout: Layout, mode: Mode, experts: Mode, num_tokens: int, activation_bytes: int
) -> list[Collective]:
    """What a layer of experts moves that tokens are brought to, and their sums back.

    Those of the devices that share the experts: none where the mode splits them as weights, or
    less.
    """
    shares, row = max(1, mode.sp // experts.sp), layout.model.hidden_size * activation_bytes
    stride, size = share_stride(mode, experts, layout.tp), num_tokens // mode.sp * row
    moves = [
        _reduce(layout, mode, num_tokens, activation_bytes, 1),
        Collective("all-gather", shares, shares * size, 1, stride),
        Collective("reduce-scatter", shares, size, 1, stride),
    ]
    return [move for move in moves if move.num_devices > 1]


def exchange_of_experts(
    layout: Layout, mode: Mode, num_tokens: int, activation_bytes: int
) -> list[Collective]:
    """What it moves where pairs go to their experts and back: room for so many to each device.

    With them goes which expert it is. Whether anybody lacks room is known to all before that; a
    step in which somebody does moves what `gather_of_experts` says instead. Last come the tokens
    that neighbours have computed, and what the expert that all tokens use adds to each.
    """
    devices, row = layout.num_devices, layout.model.hidden_size * activation_bytes
    rows = devices * room_to_exchange(layout, mode, layout.shift, num_tokens)
    weights, _ = strides(mode, layout.tp)
    moves = [
        Collective("all-reduce", devices, FLAG_BYTES, 1),
        Collective("all-to-all", devices, rows * row, 2),
        Collective("all-to-all", devices, rows * EXPERT_BYTES, 1),
        Collective("all-gather", layout.ways(mode), num_tokens // mode.sp * row, 1, weights),
    ]
    if layout.shared_intermediate_size:
        moves.append(_reduce(layout, mode, num_tokens, activation_bytes, 1))
    return [move for move in moves if move.num_devices > 1]


def entry_collectives(
    layout: Layout, mode: Mode, num_tokens: int, activation_bytes: int
) -> list[Collective]:
    """What comes before the first layer: the embedding's rows, summed over the devices that split
    the vocabulary; in later stages of a pipeline the columns of hidden states, gathered.

    Where weights are gathered, all devices have rows of all tokens, and keep the sums of their own.
    """
    move = _reduce(layout, mode, num_tokens, activation_bytes, 1)
    parts = [move]
    if inputs := layout.model.num_layers * layout.model.layer_input_width:
        parts.append(move._replace(num_bytes=move.num_bytes // layout.model.hidden_size * inputs))
        # The compiler makes one of both sums, but not of both scatters.
        move = move._replace(num_bytes=sum(part.num_bytes for part in parts))
    moves = [move]
    if not layout.model.is_first_stage:
        moves = [move._replace(kind="all-gather")]
    elif layout.gathers:
        _, tokens = strides(mode, layout.tp)
        scatter = {"kind": "reduce-scatter", "num_devices": mode.sp, "stride": tokens}
        moves += [part._replace(**scatter) for part in parts]
    return [move for move in moves if move.num_devices > 1]


def weight_collectives(layout: Layout, mode: Mode, formats: Formats) -> list[Collective]:
    """What gathering the layers' weights moves, one all-gather of each, where tokens are split.

    w_layer / ways on each device, and the replicas of rows of k and v that its neighbours store. Of
    that a device has 1 / sp already.
    """
    if not layout.gathers or mode.sp == 1:
        return []
    gathered = filter(layout.is_gathered, stored_weights(layout, formats))
    shards = (shard_bytes(weight, layout, formats, layout.shift) for weight in gathered)
    _, tokens = strides(mode, layout.tp)
    return [Collective("all-gather", mode.sp, mode.sp * shard, 1, tokens) for shard in shards]


def gather_collectives(
    layout: Layout, mode: Mode, num_tokens: int, activation_bytes: int
) -> list[Collective]:
    """What SwiftKV moves before its late layers: all tokens go everywhere, for their KV."""
    if not layout.model.num_late_layers or mode.sp == 1:
        return []
    size = num_tokens * layout.model.hidden_size * activation_bytes
    _, tokens = strides(mode, layout.tp)
    return [Collective("all-gather", mode.sp, size, 1, tokens)]


def row_collectives(
    layout: Layout,
    mode: Mode,
    num_rows: int,
    activation_bytes: int,
    sums: NumericsName = "fast",
) -> list[Collective]:
    """What the logit rows of a step move: in late layers, which run as in SHIFT, and after them.

    Where tokens are split the sampled rows cross SP, unless late layers have them everywhere. All
    devices tell each other their best token of every row; what draws and log-probabilities need
    besides is not counted. Stages before the last of a pipeline have none.
    """
    if not layout.model.is_last_stage:
        return []
    size, row = layout.num_devices, layout.model.hidden_size * activation_bytes
    late = layer_collectives(layout, layout.shift, num_rows, activation_bytes, sums=sums)
    moves = [
        *_times(late, layout.model.num_late_layers),
        Collective("all-reduce", size, num_rows * size * SAMPLE_BYTES, 1),
    ]
    if not layout.model.num_late_layers:
        _, tokens = strides(mode, layout.tp)
        moves.append(Collective("all-reduce", mode.sp, num_rows * row, 1, tokens))
    return [move for move in moves if move.num_devices > 1]


def logprob_collective(layout: Layout, num_rows: int, sums: NumericsName = "fast") -> Collective:
    """What log-probabilities take: a pair of every device, or, if `sums` are strict, four sums."""
    size = layout.num_devices
    num_bytes = EXACT_BYTES if NUMERICS[sums].is_strict else size * PAIR_BYTES
    return Collective("all-reduce", size, num_rows * num_bytes, 1)


def sampling_collectives(
    layout: Layout,
    num_rows: int,
    digit_bits: int = DIGIT_BITS,
    num_digits: int | None = None,
    sums: NumericsName = "fast",
) -> list[Collective]:
    """What the branches of a sampler move where some row asks for more than its best token.

    Each draw takes one pair of every device, and after edits another; top_k and top_p together
    the sum of all weights, a sum for each digit of each threshold (in a program with loops,
    `num_digits`), and for top_p what top_k has left. The most likely tokens take a pair for each,
    log-probabilities what `logprob_collective` says.
    """
    size = layout.num_devices
    if size == 1 or not layout.model.is_last_stage:
        return []
    digits = THRESHOLD_BITS // digit_bits if num_digits is None else num_digits
    num_top = min(TOP_IDS, layout.model.vocab_size, layout.vocab_size // size)
    pairs = num_rows * size * PAIR_BYTES
    return [
        Collective("all-reduce", size, pairs, 3),  # edits, draws with thresholds and without
        logprob_collective(layout, num_rows, sums),
        Collective("all-reduce", size, pairs * num_top, 1),
        Collective("all-reduce", size, num_rows * 2 * 4, 1),
        Collective("all-reduce", size, num_rows * ((1 << digit_bits) - 1) * 4, 2 * digits),
        Collective("all-reduce", size, num_rows * 4, 1),
    ]


def guess_collectives(layout: Layout, num_seqs: int, activation_bytes: int) -> list[Collective]:
    """What all guesses of a speculator move: embeddings summed, and who has the best token.

    Of the latter five numbers of 4 bytes from each device for each sequence.
    """
    speculator, size = layout.model.speculator, layout.num_devices
    if speculator is None or size == 1:
        return []
    has_embeddings_by_gate = speculator.method == "lstm" and not speculator.tie_lstm_embs
    width = speculator.inner_dim * (4 if has_embeddings_by_gate else 1)
    num = speculator.num_predict
    return [
        Collective("all-reduce", size, num_seqs * width * activation_bytes, num),
        Collective("all-reduce", size, num_seqs * size * GUESS_BYTES, num),
    ]


def row_exchanges(
    layout: Layout, num_rows: int, activation_bytes: int, *, of_all: bool = False
) -> list[Collective]:
    """What decode rows move in a layer where devices split positions, in every mode the same.

    Their queries go to all neighbours, and parts of softmaxes come back: of each head the weighted
    sum of values, the sum of weights and the largest score. Where a device has the queries `of_all`
    already, the last two of each neighbour come, and nothing else.
    """
    ways, width = layout.position_ways, layout.model.head_dim
    if ways == 1:
        return []
    summed = layout.model.values_in_keys or width
    asked, stride = num_rows * layout.heads_per_device * ways, _neighbour_stride(layout)
    if of_all:
        return [Collective("all-gather", ways, ways * asked * 2 * STATE_BYTES, 1, stride)]
    return [
        Collective("all-gather", ways, asked * width * activation_bytes, 1, stride),
        Collective("all-to-all", ways, asked * (summed + 2) * STATE_BYTES, 1, stride),
    ]


def context_gathers(layout: Layout, formats: Formats, num_tokens: int) -> list[Collective]:
    """What a layer with tiles moves there for so many tokens of context: what it caches of them.

    It is in a loop, as often as the contexts of the step need: once in a program's text.
    """
    num_bytes = num_tokens * layout.cache.num_bytes(formats)
    move = Collective("all-gather", layout.position_ways, num_bytes, 1, _neighbour_stride(layout))
    return [move] if layout.position_ways > 1 else []


def _neighbour_stride(layout: Layout) -> int:
    """Devices between neighbours, who may be on several hosts.

    They are those that a mode would split tokens among; or they are of all units, of which each
    has as many next to each other. A unit is taken to be inside a host, if there are several.
    """
    ways = layout.position_ways
    if layout.sp % ways == 0:
        return strides(Mode(layout.sp, ways), layout.tp)[1]
    return layout.num_devices // ways if layout.sp > 1 else 1


def step_collectives(
    layout: Layout,
    mode: Mode,
    num_tokens: int,
    num_rows: int,
    formats: Formats,
    use: Use = PLAIN_USE,
) -> list[Collective]:
    """All collectives of a step, with those of every layer, which uses weights as `use` says.

    But for `context_gathers`, of which contexts say how many there are.
    """
    activation_bytes, of_layers = formats.activation_bytes, []
    for parts, count in Counter(layout.model.parts[: layout.model.num_early_layers]).items():
        own = parts, carried_by(formats), use.experts
        of_layers += _times(parts_collectives(layout, mode, num_tokens, *own), count)
    return [
        *of_layers,
        *weight_collectives(layout, mode, formats),
        *gather_collectives(layout, mode, num_tokens, activation_bytes),
        *entry_collectives(layout, mode, num_tokens, activation_bytes),
        *row_collectives(layout, mode, num_rows, activation_bytes, formats.sums),
        *exchanges_of_rows(layout, num_rows, activation_bytes, of_all=use.queries is not None),
    ]


def exchanges_of_rows(
    layout: Layout, num_rows: int, activation_bytes: int, *, of_all: bool
) -> list[Collective]:
    """`row_exchanges` of all layers; late ones, of rows alone, have queries of their own heads."""
    model, own = layout.model, (layout, num_rows, activation_bytes)
    return [
        *_times(row_exchanges(*own, of_all=of_all), model.num_early_layers),
        *_times(row_exchanges(*own), model.num_late_layers),
    ]


def _times(moves: list[Collective], count: int) -> list[Collective]:
    return [move._replace(num_times=move.num_times * count) for move in moves if count]


def _sums(
    layout: Layout,
    mode: Mode,
    num_tokens: int,
    activation_bytes: int,
    num_times: int,
    sums: NumericsName,
) -> list[Collective]:
    """What sums of partial products move, by the setting `numerics`; see `models/sums.py`."""
    move = _reduce(layout, mode, num_tokens, activation_bytes, num_times)
    wide = _reduce(layout, mode, num_tokens, WIDE_BYTES, num_times)
    if sums == "fast":
        return [move]
    if sums == "float32":
        return [wide]
    if sums == "integer":  # and the largest leaf of each token
        return [wide, wide._replace(num_bytes=num_tokens // mode.sp * WIDE_BYTES)]
    return [wide._replace(kind="all-to-all"), move._replace(kind="all-gather")]


def _reduce(
    layout: Layout, mode: Mode, num_tokens: int, activation_bytes: int, num_times: int
) -> Collective:
    num_bytes = num_tokens // mode.sp * layout.model.hidden_size * activation_bytes
    weights, _ = strides(mode, layout.tp)
    return Collective("all-reduce", layout.ways(mode), num_bytes, num_times, weights)
