"""What the sampler has to know about each logit row, and how the host builds it. No JAX.

    sequence -> RowParams (once) -> RowInputs (every step) -> SamplingInputs (inside the step)

A greedy row that asks for nothing costs neither the host nor the step anything: it keeps the
neutral values of `neutral_rows`.
"""

from collections import namedtuple
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, Int32, UInt16, UInt32

from shiftjax.core.request import ScheduledSequence, SequenceState, StepPlan
from shiftjax.core.sampling_params import MAX_LOGIT_BIAS, PARAMS, SamplingParams

ALL_ALLOWED = 0xFFFFFFFF
IN_PROMPT = 0x8000  # bit 15 of a token count
MAX_COUNT = 0x7FFF  # where the count in the other bits saturates

# The parameters that the sampler reads, by their own names, and by those in `SamplingInputs`.
_READ = {name: param.device for name, param in PARAMS.items() if param.device is not None}
SCALARS = {scalar.name or name: scalar for name, scalar in _READ.items()}
_DTYPES = {float: np.float32, int: np.int32}  # of a scalar, by its neutral value


class _OtherInputs(NamedTuple):
    """What the sampler has to know beside the parameters."""

    # the sequence's 64-bit seed, low word first
    seeds: UInt32[Any, "rows 2"]
    # of the token to be sampled; with the seed it names the random number
    positions: Int32[Any, " rows"]
    # -1: choose a token; else the known next token, of which only the log-probability is asked
    target_ids: Int32[Any, " rows"]
    # a generated token that the host could not count yet because it was in flight; -1: none
    pending_ids: Int32[Any, " rows"]
    # bit t % 32 of word t // 32: token t is allowed; the words of each device (`VocabSplit`)
    token_bitmask: UInt32[Any, "rows words"]
    # distinct tokens whose logits get a bias, padded with -1, and the biases
    bias_ids: Int32[Any, "rows entries"]
    bias_values: Float32[Any, "rows entries"]
    # bit 15: the token is in the prompt; the others: how often it was generated, saturating
    token_counts: UInt16[Any, "rows padded_vocab"]


class SamplingInputs(namedtuple("SamplingInputs", (*SCALARS, *_OtherInputs._fields))):
    """What a step samples by, one entry per logit row: NumPy outside the step, `jax.Array` inside.

    First the parameters of `SCALARS`, each `[rows]`; they and `seeds`, `positions`, `target_ids`
    travel to the device every step. The tables of `RowMasks` stay there, neutral until a request
    needs them.
    """

    __slots__ = ()


class VocabSplit(NamedTuple):
    """How the devices of a group split a vocabulary, one part after the other."""

    size: int  # less padding
    of_device: int  # tokens, the last ones of all maybe padding
    num_devices: int = 1

    @property
    def padded(self) -> int:
        """Tokens of all devices."""
        return self.of_device * self.num_devices

    @property
    def words(self) -> Int32[np.ndarray, " words"]:
        """For each device, which words of a bitmask have its tokens: one may be two devices'."""
        aligned = self.of_device % 32 == 0
        count = self.of_device // 32 if aligned else (self.of_device + 30) // 32 + 1
        firsts = np.arange(self.num_devices, dtype=np.int32) * self.of_device // 32
        words = firsts[:, None] + np.arange(count, dtype=np.int32)
        return np.minimum(words, _num_words(self.size) - 1).reshape(-1)


class RowMasks(NamedTuple):
    """The tables of `SamplingInputs`; on the host, None stands for the neutral table."""

    token_bitmask: UInt32[Any, "rows words"] | None = None
    bias_ids: Int32[Any, "rows entries"] | None = None
    bias_values: Float32[Any, "rows entries"] | None = None
    token_counts: UInt16[Any, "rows padded_vocab"] | None = None


class RowInputs(NamedTuple):
    """`SamplingInputs` of a plan, less `positions` and `pending_ids`, which its tokens give."""

    scalars: dict[str, np.ndarray]
    tables: RowMasks | None  # None: all of them neutral
    wants_top: bool  # whether some row asks for the most likely tokens


class RowParams(NamedTuple):
    """What does not change while a sequence runs."""

    is_neutral: bool  # greedy, and nothing else asked
    scalars: tuple[float | int, ...]  # in the order of `SCALARS`
    seed_words: tuple[int, int]
    num_prompt_logprobs: int
    allowed: np.ndarray | None  # [words] uint32; None: all tokens
    allowed_at_first: np.ndarray | None  # the same while `min_tokens` bans the stop ids
    bias: tuple[np.ndarray, np.ndarray] | None  # ids int32 and values float32
    prompt_flags: np.ndarray | None  # [vocab] uint16; None: no penalties, no counts


# --- neutral values -------------------------------------------------------------------------------


def neutral_scalars(num_rows: int) -> dict[str, np.ndarray]:
    """Greedy rows, as the scalars of `RowInputs`; new arrays."""
    neutral = {name: scalar.neutral for name, scalar in SCALARS.items()} | {"target_ids": -1}
    scalars = {name: np.full(num_rows, x, _DTYPES[type(x)]) for name, x in neutral.items()}
    return scalars | {"seeds": np.zeros((num_rows, 2), np.uint32)}


def neutral_tables(num_rows: int, vocab: VocabSplit) -> RowMasks:
    """Everything allowed, no bias, nothing counted; new arrays."""
    return RowMasks(
        token_bitmask=np.full((num_rows, vocab.words.size), ALL_ALLOWED, np.uint32),
        bias_ids=np.full((num_rows, MAX_LOGIT_BIAS), -1, np.int32),
        bias_values=np.zeros((num_rows, MAX_LOGIT_BIAS), np.float32),
        token_counts=np.zeros((num_rows, vocab.padded), np.uint16),
    )


def neutral_rows(num_rows: int, vocab: VocabSplit) -> tuple[dict[str, np.ndarray], RowMasks]:
    """Scalars and tables of greedy rows that ask for nothing."""
    return neutral_scalars(num_rows), neutral_tables(num_rows, vocab)


# --- once per sequence ----------------------------------------------------------------------------


def refresh_params(
    plan: StepPlan, known: Mapping[SequenceState, RowParams], vocab_size: int
) -> dict[SequenceState, RowParams]:
    """Return the `RowParams` of the plan's sequences, computing those that are not `known` yet.

    Give it the result of the previous step: what is no longer scheduled falls out by itself.
    """
    sequences = [item.sequence for item in plan.scheduled]
    return {each: known.get(each) or row_params(each, vocab_size) for each in sequences}


def row_params(sequence: SequenceState, vocab_size: int) -> RowParams:
    """Translate what a request asks into arrays. Token ids must lie in the vocabulary."""
    asked = sequence.request.sampling
    scalars = _scalars(asked)
    num_prompt_logprobs = -1 if asked.prompt_logprobs is None else asked.prompt_logprobs
    pairs = zip(SCALARS.values(), scalars, strict=True)
    wanted = [scalar for scalar, value in pairs if value != scalar.neutral]
    needs_counts = any(scalar.counts for scalar in wanted)
    allowed = _bitmask(asked.allowed_token_ids, vocab_size)
    params = RowParams(
        is_neutral=False,
        scalars=scalars,
        seed_words=(sequence.seed & 0xFFFFFFFF, sequence.seed >> 32 & 0xFFFFFFFF),
        num_prompt_logprobs=num_prompt_logprobs,
        allowed=allowed,
        allowed_at_first=_without_stops(allowed, sequence, vocab_size),
        bias=_bias_arrays(asked.logit_bias),
        prompt_flags=_prompt_flags(sequence, vocab_size) if needs_counts else None,
    )
    tables = params.allowed, params.allowed_at_first, params.bias
    asks = bool(wanted) or num_prompt_logprobs >= 0
    is_free = sequence.constraint is None and all(table is None for table in tables)
    return params._replace(is_neutral=not asks and is_free)


def _scalars(asked: SamplingParams) -> tuple[float | int, ...]:
    """The values of `SCALARS`; where the best token is taken, those that only draw are neutral."""
    is_greedy = asked.temperature == 0.0 or asked.top_k == 1
    return tuple(
        scalar.neutral if is_greedy and scalar.draws else scalar.value(getattr(asked, name))
        for name, scalar in _READ.items()
    )


def _num_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)


def _bitmask(token_ids: Iterable[int] | None, vocab_size: int) -> np.ndarray | None:
    """Bits of the given tokens; None for None."""
    if token_ids is None:
        return None
    words = np.zeros(_num_words(vocab_size), np.uint32)
    ids = np.fromiter(token_ids, np.uint32)
    np.bitwise_or.at(words, ids // 32, np.uint32(1) << ids % 32)
    return words


def _without_stops(
    allowed: np.ndarray | None, sequence: SequenceState, vocab_size: int
) -> np.ndarray | None:
    banned = _bitmask(sequence.stop_ids, vocab_size)
    if banned is None or not sequence.request.sampling.min_tokens:
        return None
    return ~banned if allowed is None else allowed & ~banned


def _bias_arrays(bias: Mapping[int, float] | None) -> tuple[np.ndarray, np.ndarray] | None:
    if not bias:
        return None
    return np.array(list(bias), np.int32), np.array(list(bias.values()), np.float32)


def _prompt_flags(sequence: SequenceState, vocab_size: int) -> np.ndarray:
    flags = np.zeros(vocab_size, np.uint16)
    flags[sequence.token_ids[: sequence.num_prompt_tokens]] = IN_PROMPT
    return flags


# --- every step -----------------------------------------------------------------------------------


class _Block(NamedTuple):
    """The logit rows `[first, last]` of one scheduled sequence that is not neutral."""

    first: int
    last: int
    item: ScheduledSequence
    params: RowParams

    @property
    def sampling(self) -> range:
        """The rows that sample: the last, and before it one for each token of a draft."""
        return range(self.last - len(self.item.proposed_ids), self.last + 1)


def build_rows(
    plan: StepPlan, params: Mapping[SequenceState, RowParams], num_rows: int, vocab: VocabSplit
) -> RowInputs:
    """Build the inputs of `num_rows` rows (the bucket's) for a plan.

    `params` holds every scheduled sequence (`refresh_params`). Rows past the plan's are neutral.
    """
    scalars = neutral_scalars(num_rows)
    blocks = _blocks(plan, params)
    if not blocks:
        return RowInputs(scalars, None, False)
    _fill_scalars(scalars, blocks)
    _fill_targets(scalars, blocks)
    wants_top = bool((scalars["num_logprobs"] > 0).any())
    tables = RowMasks(
        _bitmask_table(blocks, num_rows, vocab),
        *_bias_tables(blocks, num_rows),
        _count_table(blocks, num_rows, vocab),
    )
    return RowInputs(scalars, tables if any(t is not None for t in tables) else None, wants_top)


def _blocks(plan: StepPlan, params: Mapping[SequenceState, RowParams]) -> list[_Block]:
    blocks, row = [], 0
    for item in plan.scheduled:
        num_rows = item.num_rows
        if num_rows:
            asked = params[item.sequence]
            if not asked.is_neutral:
                blocks.append(_Block(row, row + num_rows - 1, item, asked))
            row += num_rows
    return blocks


def _fill_scalars(scalars: dict[str, np.ndarray], blocks: list[_Block]) -> None:
    """Write the parameters of the rows that sample."""
    rows = np.array([row for block in blocks for row in block.sampling])
    counts = [len(block.sampling) for block in blocks]
    columns = np.repeat(np.array([b.params.scalars for b in blocks]), counts, axis=0).T
    seeds = np.repeat(np.array([b.params.seed_words for b in blocks], np.uint32), counts, axis=0)
    for name, column in zip(SCALARS, columns, strict=True):
        scalars[name][rows] = column
    scalars["seeds"][rows] = seeds


def _fill_targets(scalars: dict[str, np.ndarray], blocks: list[_Block]) -> None:
    """Give rows whose next token is known (prompt log-probabilities) that token as target."""
    for block in blocks:
        end = block.item.start + block.item.num_tokens
        known = block.item.sequence.token_ids[end - block.item.num_rows + 1 : end + 1]
        if known:
            rows = slice(block.first, block.first + len(known))
            scalars["target_ids"][rows] = known
            scalars["num_logprobs"][rows] = block.params.num_prompt_logprobs


def _bitmask_table(
    blocks: list[_Block], num_rows: int, vocab: VocabSplit
) -> UInt32[np.ndarray, "rows words"] | None:
    masks = [
        (row, _allowed(block, row - block.first)) for block in blocks for row in block.sampling
    ]
    if all(mask is None for _, mask in masks):
        return None
    words = vocab.words
    table = np.full((num_rows, words.size), ALL_ALLOWED, np.uint32)
    for row, mask in masks:
        if mask is not None:
            table[row] = mask[words]
    return table


def _allowed(block: _Block, row: int) -> UInt32[np.ndarray, " words"] | None:
    """What a row of the item, counted from its first, may sample; None: anything."""
    params, item, constraint = block.params, block.item, block.item.sequence.constraint
    allowed = params.allowed
    if params.allowed_at_first is not None and item.bans_stop_ids(row):
        allowed = params.allowed_at_first
    if constraint is None:
        return allowed
    mask = constraint.mask if item.masks is None else item.masks[row]
    return mask if allowed is None else mask & allowed


def _bias_tables(
    blocks: list[_Block], num_rows: int
) -> tuple[Int32[np.ndarray, "rows entries"] | None, Float32[np.ndarray, "rows entries"] | None]:
    biased = [
        (row, *bias) for block in blocks if (bias := block.params.bias) for row in block.sampling
    ]
    if not biased:
        return None, None
    all_ids = np.full((num_rows, MAX_LOGIT_BIAS), -1, np.int32)
    all_values = np.zeros((num_rows, MAX_LOGIT_BIAS), np.float32)
    for row, ids, values in biased:
        all_ids[row, : len(ids)] = ids
        all_values[row, : len(ids)] = values
    return all_ids, all_values


def _count_table(
    blocks: list[_Block], num_rows: int, vocab: VocabSplit
) -> UInt16[np.ndarray, "rows padded_vocab"] | None:
    """Count the committed output, and of a draft what stands before a row.

    A token in flight is added on the device (`pending_ids`).
    """
    if all(block.params.prompt_flags is None for block in blocks):
        return None
    table = np.zeros((num_rows, vocab.padded), np.uint16)
    for block in blocks:
        flags, sequence = block.params.prompt_flags, block.item.sequence
        if flags is None:
            continue
        output = np.array(sequence.token_ids[sequence.num_prompt_tokens :], np.int32)
        ids, counts = np.unique(output, return_counts=True)
        first, *others = block.sampling
        table[first, : len(flags)] = flags
        table[first, ids] |= np.minimum(counts, MAX_COUNT).astype(np.uint16)
        for row, token in zip(others, block.item.proposed_ids, strict=True):
            table[row] = table[row - 1]
            table[row, token] += (table[row, token] & MAX_COUNT) < MAX_COUNT
    return table
