"""Frequencies of rotary embeddings (arXiv 2104.09864), and how they are stretched. No JAX."""

import math
from dataclasses import replace

from shiftjax.arch.config import ModelConfig, RopeScaling


def rope_frequencies(
    theta: float, scaling: RopeScaling | None, rotary_dim: int, max_positions: int = 0
) -> list[float]:
    """Return the rotary_dim / 2 frequencies in radians per position, scaling applied.

    `max_positions` are those that the model is used with: longrope has numbers for two ranges.
    """
    frequencies = [theta ** (-2 * i / rotary_dim) for i in range(rotary_dim // 2)]
    if scaling is None:
        return frequencies
    if scaling.kind == "longrope":
        is_long = max_positions > scaling.original_max_position_embeddings
        divisors = scaling.long_factors if is_long else scaling.short_factors
        return [f / divisor for f, divisor in zip(frequencies, divisors, strict=True)]
    if scaling.kind == "proportional":  # halves of the whole head, of which the last stand still
        turning = int(scaling.part * rotary_dim // 2)
        return [f / scaling.factor * (i < turning) for i, f in enumerate(frequencies)]
    if scaling.kind == "yarn":
        kept = _yarn_kept(theta, scaling, rotary_dim)
    else:
        kept = [llama3_kept(f, scaling) for f in frequencies]
    return [k * f + (1 - k) * f / scaling.factor for k, f in zip(kept, frequencies, strict=True)]


def served_within(model: ModelConfig, longest: int) -> ModelConfig:
    """Return a model whose sequences have `longest` tokens at most.

    Rotary embeddings with numbers for two ranges then take those of this one, in all sequences.
    """
    scalings = (rope.scaling for rope in model.ropes)
    if any(scaling is not None and scaling.kind == "longrope" for scaling in scalings):
        return replace(model, max_position_embeddings=longest)
    return model


def llama3_kept(frequency: float, scaling: RopeScaling) -> float:
    """Return how much of a frequency stays: all where the wavelength is short; of linear none."""
    if scaling.kind == "linear":
        return 0.0
    turns = scaling.original_max_position_embeddings * frequency / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    if low == high:
        return float(turns > high)
    return min(1.0, max(0.0, (turns - low) / (high - low)))


def _yarn_kept(theta: float, scaling: RopeScaling, rotary_dim: int) -> list[float]:
    """Return the same of every frequency, by its place (arXiv 2309.00071, section 3.2)."""

    def place_of(turns: float) -> float:
        wavelength = scaling.original_max_position_embeddings / (2 * math.pi * turns)
        return rotary_dim * math.log(wavelength) / (2 * math.log(theta))

    first, last = place_of(scaling.high_freq_factor), place_of(scaling.low_freq_factor)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    width = last - first or 0.001  # as published: no division by nothing
    return [1 - min(1.0, max(0.0, (i - first) / width)) for i in range(rotary_dim // 2)]
