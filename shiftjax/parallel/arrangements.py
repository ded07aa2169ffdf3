"""Arrangements of a fleet: which groups the units form. No JAX.

A fleet stores its weights as any grid does; which groups of units step together is decided while
serving (Flying Serving, F1, F2 and F10 of its mechanisms: a unit is what it calls an engine). A
group is aligned: its width is a power of two and its first unit a multiple of it. An arrangement
is a set of groups in which every unit is once.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from shiftjax.options import control, controls_of, option, settings_of, shown
from shiftjax.parallel.grid import Group

Arrangement = tuple[Group, ...]  # by first unit


class PolicyTraits(NamedTuple):
    """What a fleet policy needs to know, and how its fleet begins."""

    needs_costs: bool = False  # it predicts the seconds of steps and moves
    begins_wide: bool = False  # with one group, as in a quiet time; else with single units
    has_bounds: bool = False  # reads `bind_at` and `release_at`
    binds_urgent: bool = False  # requests of negative priority get the widest group


FLEET_POLICIES = MappingProxyType(
    {
        "cost": PolicyTraits(needs_costs=True, begins_wide=True),
        "load": PolicyTraits(begins_wide=True, has_bounds=True),
        "priority": PolicyTraits(binds_urgent=True),
        "context": PolicyTraits(),
    }
)
FIXED = "fixed:"  # how the name of a policy begins that keeps an arrangement


def traits_of(fleet_policy: str) -> PolicyTraits:
    """Return the traits of a policy by its name; one that keeps an arrangement has none."""
    return FLEET_POLICIES.get(fleet_policy, PolicyTraits())


def _widths(values: tuple[int, ...] | None) -> str | None:
    powers = all(value > 0 and value & (value - 1) == 0 for value in values or ())
    if values is None or (values and powers and list(values) == sorted(set(values))):
        return None
    return f"must be powers of two and increasing, got {shown(values)}"


def _policy(value: str) -> str | None:
    if value in FLEET_POLICIES or value.startswith(FIXED):
        return None
    return f"must be one of {', '.join(FLEET_POLICIES)} or {FIXED}WIDTHS, got {shown(value)}"


@dataclass(frozen=True)
class FleetOptions:
    """Groups of units that are formed while serving."""

    fleet: bool = option(
        False, "let the devices form groups of any width while they serve; tp is then a unit's"
    )
    fleet_widths: tuple[int, ...] | None = option(
        None, "units of the groups that may be formed; default: all powers of two", check=_widths
    )
    fleet_policy: str = option(
        "cost",
        "which groups there shall be: cost, load, priority, context, or fixed:4+2+1+1",
        check=_policy,
    )
    bind_at: float = option(
        1.0, "policy load: with so few requests per unit all form one group", low=0.0, high=1e6
    )
    release_at: float = option(
        4.0, "policy load: with so many requests per unit each is a group", low=0.0, high=1e6
    )
    switch: Literal["auto", "move", "soft", "hard", "sequential"] = control(
        "move", "what becomes of running requests when groups are bound into a wider one"
    )

    @property
    def traits(self) -> PolicyTraits:
        """Those of the policy."""
        return traits_of(self.fleet_policy)

    @property
    def fixed(self) -> str | None:
        """The widths of an arrangement that is kept, such as 4+2+1+1; None: groups change."""
        is_fixed = self.fleet_policy.startswith(FIXED)
        return self.fleet_policy.removeprefix(FIXED) if is_fixed else None


NO_FLEET = FleetOptions()
_BOUNDED = tuple(name for name, traits in FLEET_POLICIES.items() if traits.has_bounds)
_READ_WITH = {  # settings of a fleet: the setting and the values that read them
    "bind_at": ("fleet_policy", _BOUNDED),
    "release_at": ("fleet_policy", _BOUNDED),
    "switch": ("fleet_policy", tuple(FLEET_POLICIES)),
}


def fleet_problems(options: Mapping[str, Any]) -> list[str]:
    """What is wrong between the settings of a fleet: what is set, but read with others only."""
    given = [
        name
        for name, setting in {**settings_of(FleetOptions), **controls_of(FleetOptions)}.items()
        if name != "fleet" and options[name] != setting.default
    ]
    if not options["fleet"]:
        return [f"{name} has no meaning without fleet: drop one" for name in given]
    problems = []
    for name in given:
        reader, values = _READ_WITH.get(name, ("fleet", (True,)))
        if options[reader] not in values:
            problems.append(f"{name} has no meaning with {reader} = {options[reader]}: drop one")
    policy = options["fleet_policy"]
    traits = traits_of(policy)
    if options["switch"] == "auto" and policy in FLEET_POLICIES and not traits.needs_costs:
        words = "which predicts what each kind of switching costs"
        problems.append(f"switch = auto needs fleet_policy = cost, {words}")
    if traits.has_bounds and options["bind_at"] >= options["release_at"]:
        words = f"bind_at = {options['bind_at']} is not below release_at = {options['release_at']}"
        problems.append(f"{words}: groups would come and go at every request")
    return problems


def without_unread(options: FleetOptions) -> FleetOptions:
    """The same, where what nothing reads is as by default: settings of several fleets at once."""
    for name, (reader, values) in _READ_WITH.items():
        if getattr(options, reader) not in values:
            options = replace(options, **{name: getattr(NO_FLEET, name)})
    return options


class Change(NamedTuple):
    """Groups that give way to others on the same units: one side is a single group."""

    sources: Arrangement
    targets: Arrangement

    @property
    def is_bind(self) -> bool:
        """Whether several groups become one."""
        return len(self.targets) == 1

    @property
    def wide(self) -> Group:
        """The group on the single side."""
        return self.targets[0] if self.is_bind else self.sources[0]

    @property
    def narrow(self) -> Arrangement:
        """The groups on the other side."""
        return self.sources if self.is_bind else self.targets


def possible_widths(units: int) -> tuple[int, ...]:
    """The powers of two that divide a number of units."""
    return tuple(1 << i for i in range(units.bit_length()) if units % (1 << i) == 0)


def widths_of(options: FleetOptions, units: int) -> tuple[int, ...]:
    """Widths of the groups that a fleet of so many units forms.

    Where the settings leave it open, they are all that are possible; of an arrangement that is
    fixed, its own.
    """
    if options.fleet_widths is not None:
        return options.fleet_widths
    possible = possible_widths(units)
    if options.fixed is None:
        return possible
    sizes = options.fixed.split("+")
    return tuple(width for width in possible if str(width) in sizes) or possible


def all_groups(units: int, widths: Sequence[int]) -> list[Group]:
    """Every group of these widths, the widest first."""
    return [
        Group(first, width)
        for width in sorted(widths, reverse=True)
        for first in range(0, units, width)
    ]


def equal_groups(units: int, width: int) -> Arrangement:
    """As many groups of one width as there are."""
    return tuple(Group(first, width) for first in range(0, units, width))


def spelled(arrangement: Arrangement) -> str:
    """The widths of its groups, as `parse_arrangement` reads them: 4+2+1+1."""
    return "+".join(str(group.width) for group in arrangement)


def parse_arrangement(text: str, units: int, widths: Sequence[int]) -> Arrangement:
    """Return `4+2+1+1` as groups, from the first unit on. Raises ValueError with what is wrong."""
    try:
        sizes = [int(part) for part in text.split("+")]
    except ValueError:
        raise ValueError(f"{text!r} is no arrangement: write widths, such as 4+2+1+1") from None
    if sum(sizes) != units:
        raise ValueError(f"{text} has {sum(sizes)} units, there are {units}")
    if other := [size for size in sizes if size not in widths]:
        raise ValueError(f"{text}: no groups of {other[0]} units among the widths {list(widths)}")
    firsts = itertools.accumulate(sizes, initial=0)
    groups = tuple(Group(first, size) for first, size in zip(firsts, sizes, strict=False))
    for group in groups:
        if group.first % group.width:
            raise ValueError(
                f"{text}: a group of {group.width} cannot begin at unit {group.first}; put wide "
                "groups first"
            )
    return groups


def changes(old: Arrangement, new: Arrangement) -> list[Change]:
    """What turns one arrangement into another: independent changes of disjoint units."""
    found = []
    gone, come = ([*set(a) - set(b)] for a, b in ((old, new), (new, old)))
    every = [*gone, *come]
    for group in sorted(g for g in every if not any(_is_inside(g, other) for other in every)):
        inside = _inside(come if group in gone else gone, group)
        sides = ((group,), inside) if group in gone else (inside, (group,))
        found.append(Change(*sides))
    return found


def bound(arrangement: Arrangement, group: Group) -> Arrangement:
    """The arrangement with one group in the place of those that it overlaps."""
    rest = [other for other in arrangement if not other.overlaps(group)]
    return tuple(sorted([*rest, group]))


def released(arrangement: Arrangement, group: Group, width: int) -> Arrangement:
    """The arrangement with groups of `width` in the place of one."""
    parts = [Group(group.first + i, width) for i in range(0, group.width, width)]
    return tuple(sorted([*(other for other in arrangement if other != group), *parts]))


def check_arrangement(arrangement: Iterable[Group], units: int) -> None:
    """Raise RuntimeError unless every unit is in one group."""
    covered = sorted(
        unit for group in arrangement for unit in range(group.first, group.first + group.width)
    )
    if covered != list(range(units)):
        raise RuntimeError(f"{arrangement} is no partition of {units} units.")


def _inside(groups: Iterable[Group], wide: Group) -> Arrangement:
    return tuple(sorted(group for group in groups if group.overlaps(wide)))


def _is_inside(group: Group, other: Group) -> bool:
    return group != other and group.overlaps(other) and group.width < other.width
