"""Choosing the next token of every logit row, inside the compiled step.

Order of operations, as in vLLM's sampler:

    token bitmask -> logit bias -> repetition, frequency, presence penalty -> temperature
    -> min_p -> top_k -> top_p (of what top_k left, renormalised) -> one draw

A row draws the token with the largest p / noise (`token_noise`): every token has a number of its
own, made from (key, seed, position, token). So the last bits of the logits, which depend on the
batch and the mode, change a draw only where the two best are as close as that: logits that move
by 1e-5 change about 1 draw in 100,000.

Nothing is sorted. top_k and top_p are thresholds on the probability as a fixed-point
integer, about 30 bits per row (`_fixed_point_weights`), whose sums do not depend on the order in
which they are added; they are found exactly, some bits at a time, by masked sums. Tokens of equal
weight, which is to say of probabilities closer than about 2**-29, are kept or dropped together: a
tie at the threshold keeps more than k tokens, as in vLLM and transformers. `top_k=1` is the
exception: it is greedy, and greedy takes the lowest index.

All devices of a group split the vocabulary, as they split the LM head, and each sees all rows. What
they tell each other are sums of few numbers a row, for which XLA has kernels on GPUs: one for
greedy rows, a second one for a draw, and one for each digit of a threshold. The integers are exact,
so the tokens are the same however many devices there are; log-probabilities may differ in the last
bits, but where numerics are strict. Every device takes the same branches, so there may be
collectives in them.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, Key, UInt32

from shiftjax.costs.collectives import DIGIT_BITS, DIGIT_BITS_ON_CPU, THRESHOLD_BITS, TOP_IDS
from shiftjax.device.sampling_inputs import SamplingInputs
from shiftjax.models.argmax import argmax
from shiftjax.models.exchange import Parallel
from shiftjax.models.noise import token_noise

__all__ = ["MAX_LOGPROBS", "SampleOutput", "SamplingInputs", "sample"]

MAX_LOGPROBS = TOP_IDS
MOST = 2**31 - 1  # an int32: more than any sum
MAX_VOCAB = 2**19 - 1  # the integer sums of top_p stay below 2**31 up to here

Rows = Int32[Array, " rows"]
Logits = Float32[Array, "rows vocab_split"]  # of one device, as all below
Weights = Int32[Array, "rows vocab_split"]
Odds = Float32[Array, "rows vocab_split"]  # exp((x - max) / temperature)


class SampleOutput(NamedTuple):
    """What a step returns, one entry per logit row."""

    # the chosen token: drawn, or the row's target; 0 where the row is not finite
    token_ids: Int32[Array, " rows"]
    # log_softmax(raw logits)[token], before edits and temperature; 0 when no row asks. With
    # `of_processed`, of what the token was chosen from
    logprobs: Float32[Array, " rows"]
    # the most likely tokens under the same, best first; 0 when no row asks
    top_ids: Int32[Array, "rows top"]
    top_logprobs: Float32[Array, "rows top"]
    # False: NaN or infinity among the raw logits, or no token allowed; all other fields are 0
    is_finite: Bool[Array, " rows"]


class _Split(NamedTuple):
    """What part of the vocabulary this device has."""

    parallel: Parallel
    vocab_size: int  # in all, less padding
    num_ids: int  # of each device, the last ones of all maybe padding

    @property
    def first(self) -> Int32[Array, ""]:
        """Return the token of this device's first logit."""
        return self.parallel.place * self.num_ids

    def token_ids(self) -> Int32[Array, " vocab_split"]:
        """Return the tokens of its logits: counted where they are used, not read from memory."""
        return self.first + jnp.arange(self.num_ids, dtype=jnp.int32)

    def without_padding(self, logits: Logits, instead: float) -> Logits:
        """Return the same with another number in the place of logits that stand for no token."""
        if self.num_ids * self.parallel.layout.num_devices == self.vocab_size:
            return logits
        return jnp.where(self.token_ids()[None] < self.vocab_size, logits, instead)

    def best(self, values: Logits, *more: Rows) -> tuple[Rows, jax.Array, list[jax.Array]]:
        """Return the lowest id of the largest value of all devices, that value, and all `more`.

        These are `[devices, rows]`. One exchange of 8 bytes a row, and 4 for each of `more`.
        """
        index, largest = argmax(values)
        own = [self.first + index, lax.bitcast_convert_type(largest, jnp.int32), *more]
        ids, bits, *rest = self.parallel.of_all_devices(jnp.stack(own)).swapaxes(0, 1)
        largest = lax.bitcast_convert_type(bits, jnp.float32)
        winner = jnp.argmax(largest, axis=0)[None]  # the first device of some has the lowest ids
        token_ids = jnp.take_along_axis(ids, winner, axis=0)[0]
        return token_ids, jnp.max(largest, axis=0), rest

    def sums_and_chosen(
        self, logits: Logits, largest: Float32[Array, " rows"], token_ids: Rows
    ) -> Float32[Array, "2 rows"]:
        """Return sum(exp(x - `largest`)) over all devices, and the logits of `token_ids`."""
        index = token_ids - self.first
        chosen = jnp.take_along_axis(logits, index[:, None], axis=-1, mode="clip")[:, 0]
        chosen = jnp.where((index >= 0) & (index < self.num_ids), chosen, 0.0)
        odds = jnp.exp(logits - largest[:, None])
        if self.parallel.numerics.is_strict:
            return self._exact_sums(odds, chosen)
        own = jnp.stack([jnp.sum(odds, axis=-1), chosen])
        return jnp.sum(self.parallel.of_all_devices(own), axis=0)

    def _exact_sums(self, odds: Odds, chosen: Float32[Array, " rows"]) -> Float32[Array, "2 rows"]:
        """Return sums whose bits depend on no order, and on no number of devices.

        Odds are at most 1: in units of 2**-30, added in three limbs of 10 bits. Of `chosen` all
        devices but one have 0.
        """
        fine = jnp.rint(odds * 2.0**30).astype(jnp.int32)
        limbs = [jnp.sum(fine >> shift & 0x3FF, axis=-1) for shift in (0, 10)]
        limbs = [*limbs, jnp.sum(fine >> 20, axis=-1)]
        bits = lax.bitcast_convert_type(chosen, jnp.int32)
        *limbs, bits = self.parallel.total(jnp.stack([*limbs, bits]))
        low, middle, high = (limb.astype(jnp.float32) for limb in limbs)
        total = (low * 2.0**-30 + middle * 2.0**-20) + high * 2.0**-10
        return jnp.stack([total, lax.bitcast_convert_type(bits, jnp.float32)])


def sample(
    logits: Float32[Array, "rows vocab_split"],
    inputs: SamplingInputs,
    key: Key[Array, ""],
    parallel: Parallel,
    *,
    vocab_size: int,
    of_processed: bool = False,
) -> SampleOutput:
    """Choose one token per row; the same result on every device.

    `logits` are this device's columns, of `parallel.place`, and so are `inputs.token_bitmask` (as
    `VocabSplit` has its words) and `inputs.token_counts`; all else of `inputs` is whole. Ids from
    `vocab_size` (static) up are padding and never chosen. With `of_processed` (static)
    log-probabilities are those after edits, temperature, min_p, top_k and top_p, -inf of what
    they ban; a target has those of the raw logits all the same.

    A batch of greedy rows that asks for nothing else costs an argmax and a sum; the rest is
    behind `lax.cond`. Raises ValueError, while tracing, for a vocabulary over `MAX_VOCAB` or a
    key of another kind than threefry.
    """
    if vocab_size > MAX_VOCAB:
        raise ValueError(f"vocab_size {vocab_size} is over the sampler's limit of {MAX_VOCAB}")
    split = _Split(parallel, vocab_size, logits.shape[1])
    # NaN and infinity times 0 are NaN; a maximum would not do, XLA's on CPU may skip a NaN
    is_bad = jnp.sum(split.without_padding(logits, 0.0) * 0.0, axis=-1) != 0.0
    logits = split.without_padding(logits, -jnp.inf)
    is_masked = jnp.any(inputs.token_bitmask != jnp.uint32(0xFFFFFFFF), axis=-1)
    flags = is_bad.astype(jnp.int32) + 2 * is_masked.astype(jnp.int32)
    *greedy, (flags,) = split.best(logits, flags)
    is_finite = ~jnp.any(flags & 1, axis=0)
    edited = jnp.any(flags & 2, axis=0) | _edited_rows(inputs)
    sampled = _sampled_rows(inputs)
    token_ids, is_allowed = lax.cond(
        jnp.any(edited | sampled),
        lambda: _choose(split, logits, greedy, inputs, key, jnp.any(edited), sampled),
        lambda: (greedy[0], is_finite),
    )
    is_finite &= is_allowed
    token_ids = jnp.where(inputs.target_ids >= 0, inputs.target_ids, token_ids)
    token_ids = jnp.where(is_finite, token_ids, 0)
    told, most = logits, greedy[1]
    if of_processed:
        is_asked, process = jnp.any(inputs.num_logprobs >= 0), partial(_processed, split, inputs)
        told, most = lax.cond(is_asked, process, lambda *raw: raw, told, most)
    logprobs, top_ids, top_logprobs = _logprobs(split, told, most, token_ids, inputs.num_logprobs)
    return SampleOutput(
        token_ids=token_ids,
        logprobs=jnp.where(is_finite, logprobs, 0.0),
        top_ids=jnp.where(is_finite[:, None], top_ids, 0),
        top_logprobs=jnp.where(is_finite[:, None], top_logprobs, 0.0),
        is_finite=is_finite,
    )


def _sampled_rows(inputs: SamplingInputs) -> Bool[Array, " rows"]:
    return (inputs.temperature > 0.0) & (inputs.top_k != 1) & (inputs.target_ids < 0)


def _edited_rows(inputs: SamplingInputs) -> Bool[Array, " rows"]:
    """Rows whose logits change before the temperature, but for a bitmask."""
    biased = jnp.any(inputs.bias_ids >= 0, axis=-1)
    additive = (inputs.frequency_penalty != 0.0) | (inputs.presence_penalty != 0.0)
    return biased | additive | (inputs.repetition_penalty != 1.0)


def _choose(
    split: _Split,
    logits: Logits,
    greedy: Sequence[jax.Array],
    inputs: SamplingInputs,
    key: Key[Array, ""],
    any_edited: Bool[Array, ""],
    sampled: Bool[Array, " rows"],
) -> tuple[Rows, Bool[Array, " rows"]]:
    """Edit, then draw where `sampled`, else argmax: `greedy` has that, and the largest, before.

    The second result: is any token allowed.
    """
    edit = partial(_edit, split)
    logits = lax.cond(any_edited, edit, lambda logits, _: logits, logits, inputs)
    greedy_ids, largest = lax.cond(
        any_edited, lambda: split.best(logits)[:2], lambda: tuple(greedy)
    )
    token_ids = lax.cond(
        jnp.any(sampled),
        lambda: jnp.where(sampled, _draw(split, logits, largest, inputs, key, sampled), greedy_ids),
        lambda: greedy_ids,
    )
    return token_ids, jnp.isfinite(largest)


# --- editing the logits ---------------------------------------------------------------------------


def _edit(split: _Split, logits: Logits, inputs: SamplingInputs) -> Logits:
    """Bitmask, bias and penalties, in this order; rows with neutral values stay as they are."""
    rows, count = logits.shape
    is_allowed = _unpack_bits(inputs.token_bitmask, split.first % 32, count)
    logits = jnp.where(is_allowed, logits, -jnp.inf)
    # a scatter wraps negative indices, but drops those past the end
    bias_ids = inputs.bias_ids - split.first
    bias_ids = jnp.where((inputs.bias_ids < 0) | (bias_ids < 0), count, bias_ids)
    row_ids = lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
    logits = logits.at[row_ids, bias_ids].add(inputs.bias_values, mode="drop")
    return _penalize(split, logits, inputs)


def _unpack_bits(
    words: UInt32[Array, "rows words"], first: Int32[Array, ""], count: int
) -> Bool[Array, "rows count"]:
    """`count` bits from number `first` of each row on, which lies in the first word."""
    bits = words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None]
    bits = (bits & 1).astype(jnp.bool_).reshape(words.shape[0], -1)
    if count % 32 == 0:
        return bits  # so `first` is 0 on every device
    return lax.dynamic_slice_in_dim(bits, first, count, axis=1)


def _penalize(split: _Split, logits: Logits, inputs: SamplingInputs) -> Logits:
    """Repetition (CTRL, Keskar et al. 2019, section 4.1), then OpenAI's frequency and presence."""
    counts = inputs.token_counts.astype(jnp.int32)
    is_pending = split.token_ids()[None] == inputs.pending_ids[:, None]
    generated = (counts & 0x7FFF) + is_pending.astype(jnp.int32)
    is_generated = generated > 0
    penalty = inputs.repetition_penalty[:, None]
    repeated = jnp.where(logits > 0.0, logits / penalty, logits * penalty)
    logits = jnp.where(is_generated | (counts >= 0x8000), repeated, logits)
    frequency = inputs.frequency_penalty[:, None] * generated.astype(jnp.float32)
    presence = inputs.presence_penalty[:, None] * is_generated.astype(jnp.float32)
    return logits - frequency - presence


# --- drawing --------------------------------------------------------------------------------------


def _draw(
    split: _Split,
    logits: Logits,
    largest: Float32[Array, " rows"],
    inputs: SamplingInputs,
    key: Key[Array, ""],
    sampled: Bool[Array, " rows"],
) -> Rows:
    """One token per row out of the distribution that min_p, top_k and top_p leave."""
    temperature = jnp.where(sampled, inputs.temperature, 1.0)

    def race(odds: Odds) -> Rows:
        noise = token_noise(key, inputs.seeds, inputs.positions, split.token_ids())
        return split.best(jnp.where(_allowed(odds, inputs), odds / noise, 0.0))[0]

    def race_of_kept() -> Rows:
        odds = _odds(logits, largest, temperature)
        weights, one = _fixed_point_weights(split, odds)
        threshold = _threshold(split, weights, one, inputs, sampled)
        return race(jnp.where(weights >= threshold[:, None], odds, 0.0))

    # in each branch by itself: fused with the race, the odds are never written to memory
    return lax.cond(
        jnp.any(sampled & ((inputs.top_k > 0) | (inputs.top_p < 1.0))),
        race_of_kept,
        lambda: race(_odds(logits, largest, temperature)),
    )


def _odds(
    logits: Logits, largest: Float32[Array, " rows"], temperature: Float32[Array, " rows"]
) -> Odds:
    """Of every token against the best one: 1 for that, 0 where the logit is -inf."""
    return jnp.exp((logits - largest[:, None]) / temperature[:, None])


def _allowed(odds: Odds, inputs: SamplingInputs) -> Bool[Array, "rows vocab"]:
    """Whether a token's odds against the best one reach min_p."""
    return odds >= inputs.min_p[:, None]


def _fixed_point_weights(split: _Split, odds: Odds) -> tuple[Weights, Rows]:
    """`floor(odds * one)`; and `one`, a power of two per row, at most 2**30.

    `one` is the weight of the best token, as large as keeps the sum of the row below 2**31. It
    comes from an upper bound of sum(odds) that is itself an exact integer sum: odds in units of
    2**-24, added in two limbs of 12 bits. The sum of a row lies between 2**29 and 2**31.
    """
    fine = (odds * 2.0**24).astype(jnp.int32)
    limbs = jnp.stack([jnp.sum(fine >> 12, axis=-1), jnp.sum(fine & 0xFFF, axis=-1)])
    high, low = split.parallel.total(limbs)
    # in units of 2**-12: the last terms are what the floors may have lost
    bound = high + (low >> 12) + (split.vocab_size >> 12) + 2
    one = 1 << (lax.clz(bound) + 11)
    return (odds * one.astype(jnp.float32)[:, None]).astype(jnp.int32), one


def _threshold(
    split: _Split,
    weights: Weights,
    one: Rows,
    inputs: SamplingInputs,
    sampled: Bool[Array, " rows"],
) -> Rows:
    """Least weight that top_k and then top_p keep of what min_p left: 0 in rows without either."""
    by_k = sampled & (inputs.top_k > 0)
    by_p = sampled & (inputs.top_p < 1.0)
    weights = lax.optimization_barrier(weights)  # not computed again for each sum

    def top_k(floor: Rows) -> Rows:
        target = jnp.where(by_k, inputs.top_k, MOST)
        least = _least_kept(split, weights, jnp.ones_like(weights), target)
        return jnp.where(by_k, jnp.maximum(least, floor), floor)

    def top_p(floor: Rows) -> Rows:
        kept = jnp.where(weights >= floor[:, None], weights, 0)
        held = split.parallel.total(jnp.sum(kept, axis=-1))
        # not together with the first digit's: XLA has no kernel for a sum of two arrays
        held, values = lax.optimization_barrier((held, weights))
        target = jnp.ceil(inputs.top_p * held.astype(jnp.float32)).astype(jnp.int32)
        least = _least_kept(split, values, values, jnp.where(by_p, jnp.maximum(target, 1), MOST))
        return jnp.where(by_p, jnp.maximum(least, floor), floor)

    min_p = jnp.ceil(inputs.min_p * one.astype(jnp.float32)).astype(jnp.int32)
    threshold = jnp.where(by_k | by_p, jnp.maximum(min_p, 1), 0)
    threshold = lax.cond(jnp.any(by_k), top_k, lambda floor: floor, threshold)
    return lax.cond(jnp.any(by_p), top_p, lambda floor: floor, threshold)


def _least_kept(split: _Split, weights: Weights, values: Weights, target: Rows) -> Rows:
    """The largest threshold from 1 to 2**30 that keeps `target`, or 1: of those that keep as much.

    What a threshold keeps is the sum of `values`, ones (top_k) or the weights (top_p), over all
    tokens of at least this weight.
    """
    search = partial(_digits_of_threshold, split, weights, values, target)
    return lax.platform_dependent(
        cpu=lambda: search(DIGIT_BITS_ON_CPU, loop=True),
        # kernels of sums count their calls: in a graph each has a place of its own
        default=lambda: search(DIGIT_BITS, loop=False),
    )


def _digits_of_threshold(
    split: _Split, weights: Weights, values: Weights, target: Rows, digit_bits: int, *, loop: bool
) -> Rows:
    """See `_least_kept`: the bits of the threshold less 1, from the highest on, a digit at a time.

    What a threshold keeps falls as it rises. So of the thresholds with each next digit those keep
    enough that are small enough, and their number is the digit: one sum over all devices for it.
    A loop ends when no row can spare even the lightest token that it keeps.
    """
    digits, turns = jnp.arange(1, 1 << digit_bits, dtype=jnp.int32), THRESHOLD_BITS // digit_bits

    def find(state: tuple[jax.Array, Rows, Rows]) -> tuple[jax.Array, Rows, Rows]:
        turn, least, held = state
        unit = jnp.int32(1) << (THRESHOLD_BITS - digit_bits * (turn + 1))
        tried = (least[:, None] + digits[None] * unit)[:, :, None]
        kept = jnp.where(weights[:, None] >= tried, values[:, None], 0)
        sums = split.parallel.total(jnp.sum(kept, axis=-1))
        enough = sums >= target[:, None]
        digit = jnp.sum(enough, axis=-1, dtype=jnp.int32)
        return turn + 1, least + digit * unit, jnp.min(jnp.where(enough, sums, held[:, None]), -1)

    def searching(state: tuple[jax.Array, Rows, Rows]) -> Bool[Array, ""]:
        turn, least, held = state
        lightest = least if values is weights else 1
        return (turn < turns) & jnp.any(held - lightest >= target)

    state = jnp.int32(0), jnp.ones_like(target), jnp.full_like(target, MOST)
    if loop:
        return lax.while_loop(searching, find, state)[1]
    for _ in range(turns):
        state = find(state)
    return state[1]


# --- log-probabilities ----------------------------------------------------------------------------


def _processed(
    split: _Split, inputs: SamplingInputs, logits: Logits, largest: Float32[Array, " rows"]
) -> tuple[Logits, Float32[Array, " rows"]]:
    """What a token is chosen from, as logits, and the largest of a row.

    Greedy rows have temperature 1, and all tokens that edits leave. Rows with a target are raw.
    """
    is_raw, drawn = inputs.target_ids >= 0, _sampled_rows(inputs)
    edited = _edit(split, logits, inputs)
    best = split.best(edited)[1]
    temperature = jnp.where(drawn, inputs.temperature, 1.0)
    odds = _odds(edited, best, temperature)
    weights, one = _fixed_point_weights(split, odds)
    threshold = _threshold(split, weights, one, inputs, drawn)
    kept = _allowed(odds, inputs) & (weights >= threshold[:, None])
    scaled = (edited - best[:, None]) / temperature[:, None]
    processed = jnp.where(kept | ~drawn[:, None], scaled, -jnp.inf)
    return jnp.where(is_raw[:, None], logits, processed), jnp.where(is_raw, largest, 0.0)


def _logprobs(
    split: _Split,
    logits: Logits,
    largest: Float32[Array, " rows"],
    token_ids: Rows,
    num_logprobs: Rows,
) -> tuple[Float32[Array, " rows"], Int32[Array, "rows top"], Float32[Array, "rows top"]]:
    """Log-probabilities of the chosen and of the most likely tokens; zeros where nobody asks."""
    rows, count = logits.shape
    num_top, parallel = min(MAX_LOGPROBS, split.vocab_size), split.parallel
    nothing = jnp.zeros((rows, num_top), jnp.int32), jnp.zeros((rows, num_top), jnp.float32)

    def compute() -> tuple[jax.Array, jax.Array, jax.Array]:
        total, chosen = split.sums_and_chosen(logits, largest, token_ids)
        normalizer = (largest + jnp.log(total))[:, None]
        top_ids, top_logprobs = lax.cond(
            jnp.any(num_logprobs > 0), lambda: most_likely(normalizer), lambda: nothing
        )
        return chosen - normalizer[:, 0], top_ids, top_logprobs

    def most_likely(normalizer: Float32[Array, "rows 1"]) -> tuple[jax.Array, jax.Array]:
        values, index = lax.top_k(logits, min(num_top, count))
        bits = lax.bitcast_convert_type(values, jnp.int32)
        every = parallel.of_all_devices(jnp.stack([split.first + index, bits]))
        # of each row, the devices' one after the other: of equal ones the lowest id is first
        ids, bits = every.transpose(1, 2, 0, 3).reshape(2, rows, -1)
        values, order = lax.top_k(lax.bitcast_convert_type(bits, jnp.float32), num_top)
        return jnp.take_along_axis(ids, order, axis=1), values - normalizer

    return lax.cond(
        jnp.any(num_logprobs >= 0), compute, lambda: (jnp.zeros_like(largest), *nothing)
    )
