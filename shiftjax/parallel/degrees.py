"""The degrees of a deployment, and how they are spelled: dp2pp4tp2. No JAX.

A pair, `pp8:tp8`, is those of prefill and those of decode (`phases/resharding.py`).
"""

import re
from typing import NamedTuple

MOST_DEGREE = 1024
_SPELLED = re.compile(r"(?:(?:dp|pp|sp|tp)[1-9]\d*)+")


AUTO_PHASES = "auto"  # in the place of a pair: what is predicted to be quickest


class Degrees(NamedTuple):
    """`dp` groups of `pp` stages of `sp * tp` devices."""

    dp: int = 1
    pp: int = 1
    sp: int = 1
    tp: int = 1

    @property
    def name(self) -> str:
        """As `parse_degrees` reads it; degrees of 1 are left out, tp1 where all are."""
        spelled = (f"{name}{n}" for name, n in zip(self._fields, self, strict=True) if n > 1)
        return "".join(spelled) or "tp1"

    @property
    def num_devices(self) -> int:
        """All of them."""
        return self.dp * self.pp * self.sp * self.tp


def parse_degrees(text: str) -> Degrees:
    """The degrees that `dp2pp4sp2tp4` spells, in any order; those left out are 1.

    Raises ValueError with what is wrong.
    """
    if not _SPELLED.fullmatch(text):
        raise ValueError(f"{text!r} spells no degrees: write dp, pp, sp or tp and a number: pp4tp2")
    pairs = re.findall(r"([a-z]+)(\d+)", text)
    found = {name: int(number) for name, number in pairs}
    if len(found) < len(pairs):
        raise ValueError(f"{text!r} spells a degree twice")
    if max(found.values()) > MOST_DEGREE:
        raise ValueError(f"{text!r} spells a degree of more than {MOST_DEGREE}")
    return Degrees(**found)


def parse_phases(text: str) -> tuple[Degrees, Degrees]:
    """The degrees of prefill and of decode that `pp8:tp8` spells. Raises ValueError."""
    prefill, colon, decode = text.partition(":")
    if not colon:
        raise ValueError(f"{text!r} is no pair: write PREFILL:DECODE, such as pp8:tp8")
    pair = parse_degrees(prefill), parse_degrees(decode)
    counts = [degrees.num_devices for degrees in pair]
    if counts[0] != counts[1]:
        raise ValueError(
            f"{prefill} takes {counts[0]} devices and {decode} takes {counts[1]}: they take turns "
            "on the same ones, make the products equal"
        )
    return pair
