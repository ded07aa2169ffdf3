"""Rotary frequencies that are stretched, by their definition."""

import math

import pytest

from shiftjax.arch.presets import PRESETS
from shiftjax.arch.rotary import rope_frequencies


def test_what_turns_less_than_once_in_the_original_context_is_stretched_and_nothing_blended():
    """Llama 4 Scout's factors are equal; transformers 5.24 divides the last 29 of 64 by 16."""
    (rope, _) = PRESETS["llama-4-scout"].ropes
    plain = [rope.theta ** (-i / 64) for i in range(64)]
    divided = [8192 * frequency / (2 * math.pi) < 1 for frequency in plain]
    found = rope_frequencies(rope.theta, rope.scaling, rope.width, 10_485_760)
    assert sum(divided) == 29
    assert list(found) == pytest.approx(
        [frequency / (16 if each else 1) for frequency, each in zip(plain, divided, strict=True)]
    )
