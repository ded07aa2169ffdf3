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
which a device adds; they are found exactly by bisection (at most 35 masked sums). Tokens of equal
weight, which is to say of probabilities closer than about 2**-29, are kept or dropped together: a
tie at the threshold keeps more than k tokens, as in vLLM and transformers. `top_k=1` is the
exception: it is greedy, and greedy takes the lowest index.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, Key, UInt32

from shiftjax.device.sampling_inputs import SamplingInputs
from shiftjax.models.argmax import argmax
from shiftjax.models.noise import token_noise

__all__ = ["MAX_LOGPROBS", "SampleOutput", "SamplingInputs", "sample"]

MAX_LOGPROBS = 20
MAX_VOCAB = 2**19 - 1  # the integer sums of top_p stay below 2**31 up to here

Rows = Int32[Array, " rows"]
Logits = Float32[Array, "rows vocab"]
Weights = Int32[Array, "rows vocab"]
Odds = Float32[Array, "rows vocab"]  # exp((x - max) / temperature)


class SampleOutput(NamedTuple):
    """What a step returns, one entry per logit row."""

    # the chosen token: drawn, or the row's target; 0 where the row is not finite
    token_ids: Int32[Array, " rows"]
    # log_softmax(raw logits)[token], before edits and temperature; 0 when no row asks
    logprobs: Float32[Array, " rows"]
    # the most likely tokens under the raw logits, best first; 0 when no row asks
    top_ids: Int32[Array, "rows top"]
    top_logprobs: Float32[Array, "rows top"]
    # False: NaN or infinity among the raw logits, or no token allowed; all other fields are 0
    is_finite: Bool[Array, " rows"]


def sample(
    logits: Float32[Array, "rows padded_vocab"],
    inputs: SamplingInputs,
    key: Key[Array, ""],
    *,
    vocab_size: int,
) -> SampleOutput:
    """Choose one token per row; ids from `vocab_size` (static) up are padding and never chosen.

    A batch of greedy rows that asks for nothing else costs an argmax and a sum; the rest is
    behind `lax.cond`. Raises ValueError, while tracing, for a vocabulary over `MAX_VOCAB` or a
    key of another kind than threefry.
    """
    if vocab_size > MAX_VOCAB:
        raise ValueError(f"vocab_size {vocab_size} is over the sampler's limit of {MAX_VOCAB}")
    logits = logits[:, :vocab_size]
    greedy_ids, largest = argmax(logits)
    # NaN and infinity times 0 are NaN; a maximum would not do, XLA's on CPU may skip a NaN
    is_finite = jnp.sum(logits * 0.0, axis=-1) == 0.0
    edited, sampled = _edited_rows(inputs), _sampled_rows(inputs)
    token_ids, is_allowed = lax.cond(
        jnp.any(edited | sampled),
        lambda: _choose(logits, inputs, key, jnp.any(edited), sampled),
        lambda: (greedy_ids, is_finite),
    )
    is_finite &= is_allowed
    token_ids = jnp.where(inputs.target_ids >= 0, inputs.target_ids, token_ids)
    token_ids = jnp.where(is_finite, token_ids, 0)
    logprobs, top_ids, top_logprobs = _logprobs(logits, largest, token_ids, inputs.num_logprobs)
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
    """Rows whose logits change before the temperature."""
    constrained = jnp.any(inputs.token_bitmask != jnp.uint32(0xFFFFFFFF), axis=-1)
    biased = jnp.any(inputs.bias_ids >= 0, axis=-1)
    additive = (inputs.frequency_penalty != 0.0) | (inputs.presence_penalty != 0.0)
    return constrained | biased | additive | (inputs.repetition_penalty != 1.0)


def _choose(
    logits: Logits,
    inputs: SamplingInputs,
    key: Key[Array, ""],
    any_edited: Bool[Array, ""],
    sampled: Bool[Array, " rows"],
) -> tuple[Rows, Bool[Array, " rows"]]:
    """Edit, then draw where `sampled`, else argmax. The second result: is any token allowed."""
    logits = lax.cond(any_edited, _edit, lambda logits, _: logits, logits, inputs)
    greedy_ids, largest = argmax(logits)
    token_ids = lax.cond(
        jnp.any(sampled),
        lambda: jnp.where(sampled, _draw(logits, largest, inputs, key, sampled), greedy_ids),
        lambda: greedy_ids,
    )
    return token_ids, jnp.isfinite(largest)


# --- editing the logits ---------------------------------------------------------------------------


def _edit(logits: Logits, inputs: SamplingInputs) -> Logits:
    """Bitmask, bias and penalties, in this order; rows with neutral values stay as they are."""
    rows, vocab = logits.shape
    logits = jnp.where(_unpack_bits(inputs.token_bitmask, vocab), logits, -jnp.inf)
    # a scatter wraps negative indices, but drops those past the end
    bias_ids = jnp.where(inputs.bias_ids < 0, vocab, inputs.bias_ids)
    row_ids = lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
    logits = logits.at[row_ids, bias_ids].add(inputs.bias_values, mode="drop")
    return _penalize(logits, inputs)


def _unpack_bits(words: UInt32[Array, "rows words"], vocab: int) -> Bool[Array, "rows vocab"]:
    bits = words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None]
    return (bits & 1).astype(jnp.bool_).reshape(words.shape[0], -1)[:, :vocab]


def _penalize(logits: Logits, inputs: SamplingInputs) -> Logits:
    """Repetition (CTRL, Keskar et al. 2019, section 4.1), then OpenAI's frequency and presence."""
    tokens = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    counts = inputs.token_counts.astype(jnp.int32)
    is_pending = tokens == inputs.pending_ids[:, None]
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
    logits: Logits,
    largest: Float32[Array, " rows"],
    inputs: SamplingInputs,
    key: Key[Array, ""],
    sampled: Bool[Array, " rows"],
) -> Rows:
    """One token per row out of the distribution that min_p, top_k and top_p leave."""
    temperature = jnp.where(sampled, inputs.temperature, 1.0)
    tokens = jnp.arange(logits.shape[-1], dtype=jnp.int32)

    def race(odds: Odds) -> Rows:
        noise = token_noise(key, inputs.seeds, inputs.positions, tokens)
        return argmax(jnp.where(odds >= inputs.min_p[:, None], odds / noise, 0.0))[0]

    def race_of_kept() -> Rows:
        odds = _odds(logits, largest, temperature)
        weights, one = _fixed_point_weights(odds)
        threshold = _threshold(weights, one, inputs, sampled)
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


def _fixed_point_weights(odds: Odds) -> tuple[Weights, Rows]:
    """`floor(odds * one)`; and `one`, a power of two per row.

    `one` is the weight of the best token, as large as keeps the sum of the row below 2**31. It
    comes from an upper bound of sum(odds) that is itself an exact integer sum: odds in units of
    2**-24, added in two limbs of 12 bits. The sum of a row lies between 2**29 and 2**31.
    """
    fine = (odds * 2.0**24).astype(jnp.int32)
    high, low = jnp.sum(fine >> 12, axis=-1), jnp.sum(fine & 0xFFF, axis=-1)
    # in units of 2**-12: the last terms are what the floors may have lost
    bound = high + (low >> 12) + (odds.shape[-1] >> 12) + 2
    one = 1 << (lax.clz(bound) + 11)
    return (odds * one.astype(jnp.float32)[:, None]).astype(jnp.int32), one


def _threshold(
    weights: Weights, one: Rows, inputs: SamplingInputs, sampled: Bool[Array, " rows"]
) -> Rows:
    """Least weight that top_k and then top_p keep of what min_p left: 0 in rows without either."""
    by_k = sampled & (inputs.top_k > 0)
    by_p = sampled & (inputs.top_p < 1.0)

    def top_k(floor: Rows) -> Rows:
        ones = jnp.ones_like(weights)
        held = _sum_from(weights, ones, floor)
        return _bisect(weights, ones, (floor, jnp.where(by_k, one, floor)), held, inputs.top_k)

    def top_p(floor: Rows) -> Rows:
        held = _sum_from(weights, weights, floor)
        target = jnp.ceil(inputs.top_p * held.astype(jnp.float32)).astype(jnp.int32)
        target = jnp.maximum(target, 1)
        return _bisect(weights, weights, (floor, jnp.where(by_p, one, floor)), held, target)

    min_p = jnp.ceil(inputs.min_p * one.astype(jnp.float32)).astype(jnp.int32)
    threshold = jnp.where(by_k | by_p, jnp.maximum(min_p, 1), 0)
    threshold = lax.cond(jnp.any(by_k), top_k, lambda floor: floor, threshold)
    return lax.cond(jnp.any(by_p), top_p, lambda floor: floor, threshold)


def _sum_from(weights: Weights, values: Weights, threshold: Rows) -> Rows:
    return jnp.sum(jnp.where(weights >= threshold[:, None], values, 0), axis=-1)


def _bisect(
    weights: Weights, values: Weights, bounds: tuple[Rows, Rows], held: Rows, target: Rows
) -> Rows:
    """Raise the lower bound of the threshold until what it keeps is as little as `target` needs.

    `values` are ones (top_k) or the weights (top_p); `held = _sum_from(weights, values, low)`.
    Every turn halves the gap of a row and keeps held >= target > _sum_from(high + 1). A row is
    done when not even the lightest token that it may hold can be spared, or the gap is closed.
    """
    by_mass = values is weights

    def searching(low: Rows, high: Rows, held: Rows) -> Bool[Array, " rows"]:
        return (low < high) & (held - (low if by_mass else 1) >= target)

    def halve(state: tuple[Rows, Rows, Rows]) -> tuple[Rows, Rows, Rows]:
        low, high, held = state
        active = searching(*state)
        # in halves of their ratio first, as thresholds lie anywhere between one and one / 2**20
        ratio_half = jnp.sqrt(low.astype(jnp.float32) * high.astype(jnp.float32)).astype(jnp.int32)
        middle = jnp.where(high // 2 > low, ratio_half, low + (high - low + 1) // 2)
        total = _sum_from(weights, values, middle)
        up, down = active & (total >= target), active & (total < target)
        return (
            jnp.where(up, middle, low),
            jnp.where(down, middle - 1, high),
            jnp.where(up, total, held),
        )

    return lax.while_loop(lambda state: jnp.any(searching(*state)), halve, (*bounds, held))[0]


# --- log-probabilities ----------------------------------------------------------------------------


def _logprobs(
    logits: Logits, largest: Float32[Array, " rows"], token_ids: Rows, num_logprobs: Rows
) -> tuple[Float32[Array, " rows"], Int32[Array, "rows top"], Float32[Array, "rows top"]]:
    """Log-probabilities of the chosen and of the most likely tokens; zeros where nobody asks."""
    num_top = min(MAX_LOGPROBS, logits.shape[-1])
    zeros = jnp.zeros_like(logits[:, :num_top])
    nothing = zeros.astype(jnp.int32), zeros

    def compute() -> tuple[jax.Array, jax.Array, jax.Array]:
        total = jnp.sum(jnp.exp(logits - largest[:, None]), axis=-1)
        normalizer = (largest + jnp.log(total))[:, None]
        chosen = jnp.take_along_axis(logits, token_ids[:, None], axis=-1, mode="clip")
        top_ids, top_logprobs = lax.cond(
            jnp.any(num_logprobs > 0), lambda: most_likely(normalizer), lambda: nothing
        )
        return (chosen - normalizer)[:, 0], top_ids, top_logprobs

    def most_likely(normalizer: Float32[Array, "rows 1"]) -> tuple[jax.Array, jax.Array]:
        values, ids = lax.top_k(logits, num_top)
        return ids, values - normalizer

    return lax.cond(
        jnp.any(num_logprobs >= 0), compute, lambda: (jnp.zeros_like(largest), *nothing)
    )
