"""What other arrangements of a fleet would make its requests wait, whichever policy runs. No JAX.

It sees what the policy sees, and is priced when somebody asks, by the formula of the cost policy.
Its prices of steps are its own, so that a look changes no decision.
"""

from copy import copy
from typing import Any, NamedTuple

from shiftjax.fleet.cost_arrangement import CostArrangement, Load, Nodes
from shiftjax.fleet.fleet_policy import FleetView, Wish
from shiftjax.fleet.state import REASONS, shown_arrangement
from shiftjax.parallel.arrangements import Arrangement, equal_groups


class ArrangementPrice(NamedTuple):
    """Predicted seconds of an arrangement, and of the change to it."""

    arrangement: Arrangement
    wait_seconds: float  # of all that is there, until all of it is done
    switch_seconds: float  # in which groups that change do not step


class Alternatives:
    """Remembers what the policy saw last, and at the last change; `prices` tells the costs."""

    def __init__(self, prices: CostArrangement):
        self.prices = prices
        self.load = Load()
        self._now: FleetView | None = None
        self._changed: tuple[FleetView, Load, Wish] | None = None
        self._told: dict[str, tuple[FleetView, list[ArrangementPrice]]] = {}

    def saw(self, view: FleetView, wish: Wish | None) -> None:
        """The policy has seen this, and wishes that; None: nothing changes."""
        self.load.see(view)
        self._now = view
        if wish is not None and wish.arrangement != view.arrangement:
            self._changed = view, copy(self.load), wish

    def told(self, now: float) -> dict[str, Any]:
        """Arrangements with their prices as plain data: of now, and of the last change.

        The quickest come first. `now` is by the clock of the engine, times are seconds before it.
        """
        found: dict[str, Any] = {}
        if self._now is not None:
            found["now"] = self._plain("now", self._now, self.load, self._now.arrangement, now)
        if self._changed is not None:
            view, load, wish = self._changed
            told = self._plain("last_change", view, load, wish.arrangement, now)
            why = REASONS.get(wish.reason, wish.reason)
            found["last_change"] = told | {"reason": wish.reason, "why": why}
        return found

    def _plain(
        self, name: str, view: FleetView, load: Load, chosen: Arrangement, now: float
    ) -> dict[str, Any]:
        kept = self._told.get(name)
        if kept is None or kept[0] is not view:
            kept = self._told[name] = view, self.priced(view, load, chosen)
        rows = [
            {
                "arrangement": shown_arrangement(each.arrangement),
                "wait_seconds": each.wait_seconds,
                "switch_seconds": each.switch_seconds,
                "is_chosen": each.arrangement == chosen,
            }
            for each in kept[1]
        ]
        return {
            "seconds_ago": now - view.now,
            "from": shown_arrangement(view.arrangement),
            "to": shown_arrangement(chosen),
            "num_sequences": view.num_sequences,
            "arrangements": rows,
        }

    def priced(self, view: FleetView, load: Load, chosen: Arrangement) -> list[ArrangementPrice]:
        """What there is, what was chosen, equal groups and the best of all, the quickest first.

        Others than the first two are left out where not everybody fits into them.
        """
        nodes = Nodes(self.prices, view, load)
        equal = [equal_groups(view.units, width) for width in self.prices.widths]
        others = [each for each in equal if all(map(nodes.is_possible, each))]
        best = nodes.best_partition()
        wanted: list[Arrangement] = [view.arrangement, chosen, *others, *([best] if best else [])]
        switch = self.prices.switch_seconds
        rows = [
            ArrangementPrice(each, nodes.seconds_of(each), switch(view, each))
            for each in sorted(set(wanted))
        ]
        return sorted(rows, key=lambda row: row.wait_seconds)
