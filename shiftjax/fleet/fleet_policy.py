"""Which groups a fleet shall have. A policy sees demands and what groups hold, never JAX.

All of them let a request have the width that it needs: because its context fits no narrower group
(F20 of Flying Serving's mechanisms), because it asks (`min_width`), or because of its class (F19).
They differ in what they do with the rest of the load.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

from shiftjax.core.request import Request
from shiftjax.parallel.arrangements import Arrangement, bound, equal_groups, released
from shiftjax.parallel.grid import Group

KV_SHARE = 0.9  # of the blocks of a group that a bind may fill


class Demand(NamedTuple):
    """A request that no group has yet."""

    needed_width: int
    num_prompt_tokens: int
    num_sequences: int


class GroupView(NamedTuple):
    """What a group has to do."""

    num_running: int
    num_waiting: int
    num_prompt_tokens: int  # that are not computed yet
    num_context_tokens: int
    num_output_tokens: int  # of what runs
    num_used_blocks: int
    num_blocks: int
    max_num_seqs: int
    needed_width: int  # the least width that all its requests can be served with


class FleetView(NamedTuple):
    """What a policy sees."""

    units: int
    arrangement: Arrangement
    groups: Mapping[Group, GroupView]  # of the arrangement
    queue: Sequence[Demand]  # its beginning
    num_unseen: int  # requests that come after
    now: float
    num_seen: int = 0  # requests that have come since the start

    @property
    def num_sequences(self) -> int:
        """All that run or wait."""
        held = sum(group.num_running + group.num_waiting for group in self.groups.values())
        return held + self.num_queued

    @property
    def num_queued(self) -> int:
        """Sequences that no group has; those of requests that are not seen count once."""
        return self.num_unseen + sum(demand.num_sequences for demand in self.queue)

    @property
    def num_queued_tokens(self) -> float:
        """Tokens of their prompts; those that are not seen are as long as the others."""
        seen = sum(demand.num_prompt_tokens for demand in self.queue)
        return seen * (1 + self.num_unseen / max(1, len(self.queue)))


class Wish(NamedTuple):
    """An arrangement, and why; `kind` of switching, if not the fleet's own."""

    arrangement: Arrangement
    reason: str
    kind: str | None = None


class FleetPolicy(Protocol):
    """Says which groups there shall be; `widens`: as wide as a request comes to need."""

    widens: ClassVar[bool]

    def rule(self) -> str:
        """When groups change, for people."""
        ...

    def width_for(self, request: Request) -> int:
        """The least width that a request shall have, as far as its class says."""
        ...

    def arrange(self, view: FleetView) -> Wish | None:
        """The groups that there shall be; None: as it is."""
        ...


@dataclass(frozen=True)
class FixedArrangement:
    """The same groups whatever comes: the control."""

    arrangement: Arrangement
    widens: ClassVar[bool] = False

    def rule(self) -> str:
        """Never."""
        return "the arrangement is fixed, so groups never change"

    def width_for(self, request: Request) -> int:
        """Any."""
        return 1

    def arrange(self, view: FleetView) -> Wish | None:
        """As it was at the start."""
        return None


@dataclass(frozen=True)
class NeedPolicy:
    """Groups are as wide as their requests need: by context, by wish, by class.

    Requests of a class in `priorities` have a group of `bind_width` units.
    """

    widths: tuple[int, ...]
    priorities: Container[int] = ()
    bind_width: int = 1
    widens: ClassVar[bool] = True

    def rule(self) -> str:
        """By need."""
        return "a wider group is formed when a request needs it, and parts when none does"

    def width_for(self, request: Request) -> int:
        """Of a class that binds: `bind_width`."""
        return self.bind_width if request.priority in self.priorities else 1

    def arrange(self, view: FleetView) -> Wish | None:
        """Bind for the first request that needs it; release what nobody needs."""
        return bind_for_need(view) or release_unneeded(view, self.widths)


@dataclass(frozen=True)
class LoadPolicy:
    """Few requests: one group; many: every unit on its own (F18). In between: as it is.

    Counts are of sequences, running or waiting, per unit.
    """

    widths: tuple[int, ...]
    bind_at: float
    release_at: float
    needs: NeedPolicy
    widens: ClassVar[bool] = True

    def rule(self) -> str:
        """The two bounds."""
        few, many = f"{self.bind_at:g} requests per unit or fewer", f"{self.release_at:g} or more"
        return f"units form one group at {few}, part at {many}, and stay as they are in between"

    def width_for(self, request: Request) -> int:
        """What its class says."""
        return self.needs.width_for(request)

    def arrange(self, view: FleetView) -> Wish | None:
        """By the load per unit."""
        if wish := bind_for_need(view):
            return wish
        load = view.num_sequences / view.units
        if load >= self.release_at:
            return release_unneeded(view, self.widths, "load")
        widest = max(self.widths)
        wanted = equal_groups(view.units, widest)
        if load > self.bind_at or view.arrangement == wanted:
            return None
        return Wish(wanted, "quiet") if all(fits(view, group) for group in wanted) else None


def bind_for_need(view: FleetView) -> Wish | None:
    """A wide enough group for whom there is none: for what has outgrown its group, and the queue.

    For one of the queue it is where least is to do.
    """
    for group, held in view.groups.items():
        if held.needed_width > group.width:
            width = held.needed_width
            place = Group(group.first // width * width, width)
            # No other kind takes it along, and it would wait for others to give way.
            return Wish(bound(view.arrangement, place), "need", "move")
    for demand in view.queue:
        width = demand.needed_width
        if all(group.width < width for group in view.arrangement):
            places = [g for g in equal_groups(view.units, width) if _is_free(view, g)]
            if not places:
                return None
            place = min(places, key=lambda group: _work_around(view, group))
            return Wish(bound(view.arrangement, place), "need")
    return None


def release_unneeded(
    view: FleetView, widths: Iterable[int], reason: str = "unneeded"
) -> Wish | None:
    """The narrowest groups that all requests can be served with; None: there are no others."""
    arrangement = view.arrangement
    wanted = {demand.needed_width for demand in view.queue}
    for group in view.arrangement:
        needed = max(view.groups[group].needed_width, *(w for w in wanted if w <= group.width), 1)
        width = min(width for width in widths if width >= needed)
        if width < group.width:
            arrangement = released(arrangement, group, width)
    return None if arrangement == view.arrangement else Wish(arrangement, reason)


def fits(view: FleetView, node: Group) -> bool:
    """Whether all that runs on the units of a group could run in it, with room to grow."""
    inside = [(g, held) for g, held in view.groups.items() if g.overlaps(node)]
    num_running = sum(held.num_running for _, held in inside)
    blocks = sum(held.num_used_blocks * group.width for group, held in inside)
    least = min(held.num_blocks for _, held in inside)
    most = min(held.max_num_seqs for _, held in inside)
    return num_running <= most and blocks / node.width <= KV_SHARE * least


def _is_free(view: FleetView, place: Group) -> bool:
    """Whether no group that is as wide would be torn up."""
    return all(g.width < place.width for g in view.arrangement if g.overlaps(place))


def _work_around(view: FleetView, place: Group) -> tuple[int, int]:
    inside = [held for group, held in view.groups.items() if group.overlaps(place)]
    return (
        sum(held.num_running + held.num_waiting for held in inside),
        sum(held.num_context_tokens for held in inside),
    )
