"""A bounded past in columns: what the engine did in each of the last stretches of time. No JAX."""

from typing import Any

KINDS = ("base", "between", "shift")  # of modes; all that are neither one nor the other lie between
COUNTS = (
    *("tokens", "accepted", "texts", "computed", "switches", "preempted", "failed"),
    *("prompt", "firsts", "queued", "prefilled", "ended", "good"),
)
GAUGES = ("running", "waiting", "kv")
OF_KIND = ("steps", "seconds", "busy", "load")
DIGITS = 6  # behind the point, of what is shown


def kind_of(mode: str) -> str:
    """Return the kind of a mode: "base", "shift" or "between"."""
    return mode if mode in ("base", "shift") else "between"


class Slot:
    """One stretch. `most` are gauges at their highest, `last` at its end; None: nobody looked."""

    __slots__ = ("counts", "index", "last", "most")

    def __init__(self, index: int):
        self.index = index
        self.counts: dict[str, float] = {}
        self.most: dict[str, float] = {}
        self.last: dict[str, float] | None = None

    def add(self, name: str, value: float) -> None:
        """Add `value` to the counter `name` of this stretch."""
        self.counts[name] = self.counts.get(name, 0) + value


class History:
    """The last `num` stretches of `seconds` each: a ring, slot i holds stretch j with j % num = i.

    Columns, one entry a stretch:

        tokens, accepted ...   how many in it
        firsts                 first tokens that came in it
        queued, prefilled      seconds that those requests waited, and that their prompts took
        ended, good            requests that ended well in it; those of them within the targets
        running, waiting, kv   the most in it; where nobody looked, what the one before ended with
        KIND_steps             steps of a kind of mode that ended in it
        KIND_seconds           what they took together
        KIND_busy              seconds of it in which steps of the kind ran
        KIND_load              tokens of those steps times these seconds: load / busy is their mean

    A step longer than a stretch is entered wherever it ran, so that it leaves no hole.
    """

    def __init__(self, seconds: float, num: int):
        self.seconds, self.num = seconds, num
        self._slots: list[Slot | None] = [None] * num
        self._replaced: tuple[int, dict[str, float]] = (-1, {})  # the latest slot that is gone

    @property
    def span(self) -> float:
        """Seconds of the past that the history covers."""
        return self.seconds * self.num

    def count(self, at: float, **counts: float) -> None:
        """Add counts to the stretch of time `at`; zeros are left out."""
        for name, value in counts.items():
            if value:
                self._slot(int(at // self.seconds)).add(name, value)

    def look(self, at: float, **gauges: float) -> None:
        """Record values of gauges at time `at`."""
        slot = self._slot(int(at // self.seconds))
        slot.last = gauges
        for name, value in gauges.items():
            slot.most[name] = max(value, slot.most.get(name, 0))

    def step(self, kind: str, at: float, seconds: float, num_tokens: int) -> None:
        """Enter a step that ended at `at` after so many seconds."""
        self.count(at, **{f"{kind}_steps": 1, f"{kind}_seconds": seconds})
        newest = int(at // self.seconds)
        first = max(int((at - seconds) // self.seconds), newest - self.num + 1)
        for index in range(first, newest + 1):
            left, right = index * self.seconds, (index + 1) * self.seconds
            busy = min(right, at) - max(left, at - seconds)
            if busy > 0:
                slot = self._slot(index)
                slot.add(f"{kind}_busy", busy)
                slot.add(f"{kind}_load", busy * num_tokens)

    def sums(self, now: float, seconds: float) -> dict[str, float]:
        """Return the counters of the stretches that end within the last `seconds`, summed."""
        first, totals = int((now - seconds) // self.seconds), dict[str, float]()
        for slot in self._slots:
            if slot is not None and slot.index >= first:
                for name, value in slot.counts.items():
                    totals[name] = totals.get(name, 0) + value
        return totals

    def peak(self, name: str, now: float, seconds: float) -> float:
        """Return the most of a gauge in the stretches that end within the last `seconds`."""
        first = int((now - seconds) // self.seconds)
        slots = [slot for slot in self._slots if slot is not None and slot.index >= first]
        return max((slot.most.get(name, 0) for slot in slots), default=0)

    def _slot(self, index: int) -> Slot:
        """The slot of a stretch that is not older than the ring."""
        slot = self._slots[index % self.num]
        if slot is None or slot.index < index:
            if slot is not None and slot.last is not None and slot.index > self._replaced[0]:
                self._replaced = slot.index, slot.last
            slot = self._slots[index % self.num] = Slot(index)
        return slot

    def columns(self, now: float) -> dict[str, Any]:
        """All of it: the `start` of the first stretch, their `seconds`, and the `columns`."""
        first = int(now // self.seconds) - self.num + 1
        found = {slot.index: slot for slot in self._slots if slot is not None}
        empty = Slot(first)
        slots = [found.get(index, empty) for index in range(first, first + self.num)]
        names = (*COUNTS, *(f"{kind}_{name}" for kind in KINDS for name in OF_KIND))
        columns = {
            name: [round(slot.counts.get(name, 0), DIGITS) for slot in slots] for name in names
        }
        older = [(i, slot.last) for i, slot in found.items() if i < first and slot.last is not None]
        _, last = max([self._replaced, *older], key=lambda each: each[0])
        gauges: dict[str, list[float]] = {name: [] for name in GAUGES}
        for slot in slots:
            shown = last if slot.last is None else slot.most
            for name, column in gauges.items():
                column.append(round(shown.get(name, 0), DIGITS))
            last = slot.last or last
        return {"start": first * self.seconds, "seconds": self.seconds, "columns": columns | gauges}
