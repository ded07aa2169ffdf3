"""Which adapters there are, and which of them the slots of the devices hold. No JAX.

    loaded --asked for--> on its way (a thread reads and copies) --a slot is free--> in a slot
       ^                                                                               |
       '------------- least recently used, and no running sequence has it -------------'

Slots are the same on all devices: of every group, of all widths, of every stage. A request waits
for its adapter, and lets others pass. Where running sequences have all slots, the one with the
fewest is promised to the adapter that has waited longest. Requests that come for what it holds then
wait, too. Of all slots a fourth may be promised at a time, the others go on: many adapters that are
asked for seldom take turns beside a few that are asked for always.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

from shiftjax.adapters.adapter import Adapter, AdapterError

NO_SLOT = -1  # of a request without an adapter
MOST_NAME = 256  # characters of a name
MOST_FAILURES = 3  # of reading an adapter again, until it is given up
PROMISED = 4  # of so many slots, one may be promised
LONGEST_PAUSE = 2e-3  # seconds that a turn waits for an adapter when nothing else can be done
logger = logging.getLogger(__name__)


@runtime_checkable
class Slots(Protocol):
    """The slots of all devices."""

    def place(self, adapter: Adapter) -> Any:
        """Copy an adapter to where its slots are; may be called beside steps."""
        ...

    def write(self, slot: int, placed: Any) -> None:
        """Have what `place` returned in a slot, for all steps that come later."""
        ...


class NoDevices:
    """Slots of simulated devices."""

    def place(self, adapter: Adapter) -> None:
        """Return nothing."""

    def write(self, slot: int, placed: Any) -> None:
        """Do nothing."""


@dataclass(slots=True)
class _Entry:
    """An adapter that may be asked for, or that a request still has."""

    name: str
    key: str
    path: str
    adapter: Adapter | None  # None: to be read again
    used: int = 0  # when it was last asked for, in requests
    job: "Future[Any] | None" = None  # that reads and places it
    num_failures: int = 0  # of such jobs, one after the other

    @property
    def is_lost(self) -> bool:
        """Whether nobody tries to read it any more."""
        return self.num_failures >= MOST_FAILURES


@dataclass(frozen=True)
class AdapterState:
    """What the pool holds now, and what it has done."""

    num_slots: int
    loaded: Sequence[str]  # names
    in_slots: Sequence[str]
    num_writes: int  # of slots
    num_reads: int  # of files, again
    running: dict[str, int] = field(default_factory=dict)  # sequences by name
    waiting: dict[str, int] = field(default_factory=dict)
    lost: Sequence[str] = ()  # keys of those that cannot be read again: who waits waits in vain


class _Seen(NamedTuple):
    """Who has adapters as a turn begins, and who was let go on in it."""

    running: Counter[str]  # sequences by key; what has ended since makes a slot wait for a turn
    waiting: Counter[str]


Users = Callable[[], Iterator[tuple[str, bool]]]  # (key, whether it runs) of unfinished sequences


class AdapterPool:
    """The adapters of one engine.

    `read(name, path)` reads an adapter; the slots of the devices come with `fill`. Host memory
    keeps `most_held` adapters (None: all), the most recently used ones. `load` and `unload` may be
    called from any thread, all else from that which steps the engine.
    """

    def __init__(
        self,
        num_slots: int,
        read: Callable[[str, str], Adapter],
        most_held: int | None = None,
        thread: Executor | None = None,  # that reads and places; None: one of its own
    ):
        self._read, self._most_held = read, most_held
        self._slots: Slots = NoDevices()
        self._names: dict[str, str] = {}  # keys
        self._entries: dict[str, _Entry] = {}
        self._held: list[str | None] = [None] * num_slots  # keys
        self._promised: dict[int, str] = {}
        self._time = self._num_writes = self._num_reads = 0
        self._lock = threading.Lock()  # of names and entries
        self._thread = thread or ThreadPoolExecutor(1, "adapters")
        self.users: Users = lambda: iter(())
        self._seen: _Seen | None = None  # in this turn

    # ------------------------------------------------------------------ from any thread

    def load(self, name: str, path: str, *, replace: bool = False) -> str:
        """Read an adapter and let requests ask for it; returns its key.

        Raises AdapterError: it cannot be served, or there is another one of this name.
        """
        if not (0 < len(name) <= MOST_NAME and name.isprintable()):
            words = f"must be 1 to {MOST_NAME} printable characters"
            raise AdapterError(f"The name of an adapter {words}.")
        if not replace and name in self._names:
            raise AdapterError(f"There is an adapter {name!r} already: unload it first.")
        adapter = self._read(name, path)
        with self._lock:
            if not replace and name in self._names:
                raise AdapterError(f"There is an adapter {name!r} already: unload it first.")
            self._names[name] = adapter.key
            entry = self._entries.setdefault(adapter.key, _Entry(name, adapter.key, path, adapter))
            entry.path, entry.adapter = path, adapter  # of an equal one that was unloaded, too
            entry.num_failures = 0
        self._trim()
        return adapter.key

    def unload(self, name: str) -> None:
        """Let no further request ask for an adapter; those that have it keep it to their end.

        Raises AdapterError: there is none of this name.
        """
        with self._lock:
            if self._names.pop(name, None) is None:
                raise AdapterError(f"There is no adapter {name!r}.")

    @property
    def names(self) -> dict[str, str]:
        """Paths of the adapters that requests may ask for, by name."""
        with self._lock:
            return {name: self._entries[key].path for name, key in self._names.items()}

    @property
    def lost(self) -> list[str]:
        """Keys of adapters that cannot be read again: who waits for one waits in vain."""
        with self._lock:
            lost = [each.key for each in self._entries.values() if each.is_lost]
            return [key for key in lost if key not in self._held]

    def key_of(self, name: str) -> str | None:
        """Return what requests call the adapter of a name; None: there is none."""
        return self._names.get(name)

    def __contains__(self, key: object) -> bool:
        """Whether requests may ask for an adapter by this key."""
        entry = self._entries.get(key) if isinstance(key, str) else None
        return entry is not None and self._names.get(entry.name) == key

    # ------------------------------------------------------------------ from the engine's thread

    def slot_of(self, key: str | None) -> int:
        """Return the slot that holds an adapter, which `acquire` has brought there."""
        return NO_SLOT if key is None else self._held.index(key)

    def begin_turn(self) -> None:
        """Look anew at who runs and who waits, when that is next asked for."""
        self._seen = None

    def _look(self) -> _Seen:
        if self._seen is None:
            self._seen = _Seen(Counter(), Counter())
            for key, runs in self.users():
                self._seen[0 if runs else 1][key] += 1
        return self._seen

    def acquire(self, key: str) -> bool:
        """Return whether a slot holds an adapter; brings it nearer if none does."""
        is_there = self._is_in_slot(key)
        if is_there:
            self._look().running[key] += 1
        return is_there

    def _is_in_slot(self, key: str) -> bool:
        """Whether a slot holds an adapter for those who come; it is brought there, if it can be."""
        self._time += 1
        entry = self._entries[key]
        entry.used = self._time
        if key in self._held:
            return not self._is_promised_to_another(self._held.index(key), key)
        if not self._is_placed(entry):
            return False
        slot = self._free_slot(key)
        if slot is None:
            return False
        assert entry.job is not None
        self._slots.write(slot, entry.job.result())
        entry.job, entry.num_failures = None, 0
        self._held[slot] = key
        self._promised.pop(slot, None)
        self._num_writes += 1
        self._forget_unloaded()
        self._trim()
        return True

    def fill(self, slots: Slots) -> None:
        """Have these slots hold the adapters that were loaded first; waits for it.

        Nothing runs yet.
        """
        self._slots = slots
        for key in list(self._entries)[: self._held.count(None)]:
            while not self.acquire(key):
                job = self._entries[key].job
                assert job is not None
                job.result()

    def forget_slots(self) -> None:
        """No slot holds anything any more: the devices have lost them. No step is in flight."""
        self._held = [None] * len(self._held)
        self._promised.clear()

    def told(self) -> AdapterState:
        """Return what is held, and by whom."""
        self._forget_unloaded()
        running: dict[str, int] = {}
        waiting: dict[str, int] = {}
        for key, runs in self.users():
            counts, name = running if runs else waiting, self._entries[key].name
            counts[name] = counts.get(name, 0) + 1
        held = [self._entries[key].name for key in self._held if key is not None]
        counters = self._num_writes, self._num_reads
        counts = *counters, running, waiting, self.lost
        return AdapterState(len(self._held), list(self._names), held, *counts)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _is_placed(self, entry: _Entry) -> bool:
        """Whether an adapter is on the devices, beside the slots; else it is on its way."""
        if entry.job is not None and entry.job.done() and entry.job.exception() is not None:
            self._count_failure(entry, entry.job.exception())
        if entry.is_lost:
            return False
        if entry.job is None:
            entry.job = self._thread.submit(self._bring, entry)
        if not entry.job.done() and not self._look().running:
            wait([entry.job], LONGEST_PAUSE)
        return entry.job.done() and entry.job.exception() is None

    def _count_failure(self, entry: _Entry, error: BaseException | None) -> None:
        """Try again, or after some failures let nobody ask for the adapter any more."""
        entry.job, entry.num_failures = None, entry.num_failures + 1
        what = "is given up" if entry.is_lost else "is tried again"
        logger.warning("The adapter %s %s: %s", entry.name, what, error)
        if entry.is_lost:
            with self._lock:
                if self._names.get(entry.name) == entry.key:
                    del self._names[entry.name]

    def _bring(self, entry: _Entry) -> Any:
        adapter = entry.adapter
        if adapter is None:
            adapter = self._read(entry.name, entry.path)
            if adapter.key != entry.key:
                raise AdapterError(f"{entry.path} has changed since it was loaded.")
            self._num_reads += 1
            entry.adapter = adapter
        return self._slots.place(adapter)

    def _free_slot(self, key: str) -> int | None:
        """Return a slot that no running sequence needs; None: one is promised."""
        if None in self._held:
            return self._held.index(None)
        in_use = self._look().running
        mine = next((slot for slot, for_key in self._promised.items() if for_key == key), None)
        if mine is not None:
            return None if self._held[mine] in in_use else mine
        slots = [s for s in range(len(self._held)) if not self._is_promised_to_another(s, key)]
        unused = [slot for slot in slots if self._held[slot] not in in_use]
        if unused:
            return min(unused, key=self._last_used)
        if slots and len(self._promised) < max(1, len(self._held) // PROMISED):
            fewest = min(
                slots, key=lambda slot: (in_use[self._held[slot] or ""], self._last_used(slot))
            )
            self._promised[fewest] = key
        return None

    def _last_used(self, slot: int) -> int:
        held = self._held[slot]
        return 0 if held is None else self._entries[held].used

    def _is_promised_to_another(self, slot: int, key: str) -> bool:
        """Whether a slot is promised to an adapter that a sequence still waits for."""
        other = self._promised.get(slot)
        if other is None or other == key:
            return False
        if other in self._look().waiting:
            return True
        del self._promised[slot]
        return False

    def _trim(self) -> None:
        """Keep no more than the most recently used adapters in host memory."""
        if self._most_held is None:
            return
        with self._lock:
            held = [each for each in self._entries.values() if each.adapter is not None]
            held.sort(key=lambda entry: entry.used)
            for entry in held[: max(0, len(held) - self._most_held)]:
                if entry.job is None:
                    entry.adapter = None

    def _forget_unloaded(self) -> None:
        """Forget adapters that were unloaded and that no request has; their slots are free."""
        with self._lock:
            gone = {e.key for e in self._entries.values() if self._names.get(e.name) != e.key}
            if not gone:
                return
            for key, _ in self.users():
                gone.discard(key)
            for key in gone:
                del self._entries[key]
                if key in self._held:
                    self._held[self._held.index(key)] = None
