"""Devices as a grid, a group of them, and the mode in which a step uses a group. No JAX.

Weights are stored once, `tp` ways, on a grid of `tp` rows and `units` columns; a unit holds the
whole model (its stage of it, with pipeline stages), and units hold the same. Nothing is moved:

    grid (tp=2, units=4)     u0   u1   u2   u3
                      t=0    d0   d2   d4   d6      device = unit * tp + t
                      t=1    d1   d3   d5   d7

    a group      `width` neighbouring units: 1 group of 4, 2 of 2 (data parallel), 4 of 1
    a mode       how many ways, sp, a step splits its tokens over the units of its group:
                 (width 4): sp=4 is base, sp=1 is shift, sp=2 lies between

In a group, place `j = t * width + p` holds head block j of queries, keys and values in every mode,
where p counts the units of the group in the order of `unit_order`: sp divides width, so a mode only
says how many neighbours in that order share a step's tokens, and `tp * width / sp` is how many ways
a step splits the weights. Modes of one width share the KV layout and may alternate at every step
(Shift Parallelism, arXiv 2509.16495, section 3.3).

The order is bit-reversed where the width is a power of two. Then the heads of a device in a group
lie inside its heads in every narrower group that it can belong to, so that a sequence changes
between any two widths by an exchange among the devices that hold the same narrow heads: those of
place j of the narrow groups of `n` units are the places `[j * width / n, (j + 1) * width / n)` of
the wide one.

On several hosts, devices are counted host by host, so a unit lies inside a host if `tp` divides its
devices. In the bit-reversed order the units that split a step's weights are neighbours in that
count, too: on 2 hosts of 8, (SP=2, TP=8), be it as stored or as a mode of (SP=8, TP=2), sums inside
each host and exchanges between them. Only modes that split weights further cross hosts with sums.
"""

from typing import Any, NamedTuple

Device = Any  # a jax.Device: jaxlib ships no stubs, so a type checker cannot know it

# Axes of a group's mesh in a mode, major first; `axis_sizes` has their sizes.
STORED_AXES = ("tp",)  # split the weights as they are stored
DEAL_AXIS = "deal"  # devices with the same experts and the same tokens
SHARE_AXIS = "share"  # devices that bring their tokens together, and split experts further
WEIGHT_AXES = ("tp", "shift", DEAL_AXIS)  # split the weights as a step uses them
EXPERT_AXES = ("tp", "shift", SHARE_AXIS)  # split the experts as a step uses them
TOKEN_AXES = (SHARE_AXIS, "sp")
ALIKE_AXES = (DEAL_AXIS, "sp")  # devices with the same experts, each for pairs of its own
ALL_AXES = ("tp", "shift", DEAL_AXIS, SHARE_AXIS, "sp")  # heads, KV cache, LM head and sampling


def unit_order(width: int) -> list[int]:
    """The units of a group by place: in bit-reversed order if they are a power of two."""
    bits = width.bit_length() - 1
    if width != 1 << bits:
        return list(range(width))
    return [int(f"{place:0{bits}b}"[::-1], 2) if bits else 0 for place in range(width)]


class Mode(NamedTuple):
    """How a step uses a group of `width` units: its tokens are split `sp` ways."""

    width: int
    sp: int

    @property
    def label(self) -> str:
        """The name in metrics: `shift` splits no tokens, `base` most, `sp2` lies between."""
        if self.sp == 1:
            return "shift"
        return "base" if self.sp == self.width else f"sp{self.sp}"


class Use(NamedTuple):
    """As in which modes a program uses weights that do not follow its own mode."""

    experts: Mode | None = None  # None: as in SHIFT
    queries: Mode | None = None  # q, o and what is theirs: `Layout.query_modes`; None: as its own


PLAIN_USE = Use()


def axis_sizes(mode: Mode, experts: Mode, tp: int) -> tuple[int, int, int, int, int]:
    """The sizes of `ALL_AXES` in steps of a mode whose experts are split as in another.

    Of the two numbers of ways to split tokens, one divides the other.
    """
    (width, sp), e = mode, experts.sp
    return tp, width // max(sp, e), max(1, e // sp), max(1, sp // e), min(sp, e)


def strides(mode: Mode, tp: int) -> tuple[int, int]:
    """Devices between neighbours among those that split weights, and among those that split tokens.

    Between base and shift in the natural order, the units that split weights are `sp` apart; their
    `tp` devices are neighbours all the same, which this leaves out.
    """
    width, sp = mode
    if sp in (1, width) or width & (width - 1) == 0:
        return 1, width // sp * tp
    return sp, tp


def share_stride(mode: Mode, experts: Mode, tp: int) -> int:
    """Devices between neighbours among those that bring their tokens together for experts."""
    _, tokens = strides(mode, tp)
    return tokens if mode.width & (mode.width - 1) == 0 else tokens * experts.sp


class Group(NamedTuple):
    """The units `[first, first + width)` of a grid, whose devices step together."""

    first: int
    width: int

    @property
    def modes(self) -> tuple[Mode, ...]:
        """The modes of its KV layout, base first and shift last; of one unit they are the same."""
        splits = (sp for sp in range(self.width, 0, -1) if self.width % sp == 0)
        return tuple(Mode(self.width, sp) for sp in splits)

    def overlaps(self, other: "Group") -> bool:
        """Whether the two have a unit in common; aligned ones then lie inside each other."""
        return self.first < other.first + other.width and other.first < self.first + self.width

    def halves(self) -> "tuple[Group, Group]":
        """The two groups that it can be released into next."""
        half = self.width // 2
        return Group(self.first, half), Group(self.first + half, half)


class Grid(NamedTuple):
    """Where weights are stored: `tp` ways in each of `units` units, of each of `pp` stages."""

    tp: int
    units: int
    pp: int = 1

    @property
    def num_devices(self) -> int:
        """All of them."""
        return self.pp * self.units * self.tp

    def groups(self, width: int) -> list[Group]:
        """Cut the units into groups of `width`: data parallel replicas. Raises ValueError."""
        if self.units % width:
            raise ValueError(f"{self.units} units cannot be cut into groups of {width}.")
        return [Group(first, width) for first in range(0, self.units, width)]

    def devices_of(self, group: Group, stage: int = 0) -> list[int]:
        """The devices of a stage of a group by place."""
        first = (stage * self.units + group.first) * self.tp
        order = unit_order(group.width)
        return [first + u * self.tp + t for t in range(self.tp) for u in order]
