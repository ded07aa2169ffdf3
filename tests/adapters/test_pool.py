"""Which adapter is in which slot, in histories of requests: no engine, no devices."""

import random
import threading

import pytest

from shiftjax.adapters.adapter import Adapter, AdapterError
from shiftjax.adapters.pool import NO_SLOT, AdapterPool, NoDevices


class Written(NoDevices):
    """Slots that remember what was written, and refuse to overwrite what runs."""

    def __init__(self):
        self.held: dict[int, str] = {}
        self.running: list[str] = []

    def place(self, adapter: Adapter):
        return adapter.key

    def write(self, slot: int, placed) -> None:
        assert self.held.get(slot) not in self.running, "a running sequence loses its adapter"
        self.held[slot] = placed


class World:
    """Sequences that wait, run and end, around a pool."""

    def __init__(self, num_slots: int, most_held: int | None = None):
        self.slots, self.reads = Written(), []
        self.pool = AdapterPool(num_slots, self.read, most_held)
        self.pool.fill(self.slots)
        self.waiting: list[str] = []
        self.running = self.slots.running
        self.pool.users = lambda: (
            *((key, True) for key in self.running),
            *((key, False) for key in self.waiting),
        )

    def read(self, name: str, path: str) -> Adapter:
        self.reads.append(name)
        return Adapter(name, path, path, 4, {})

    def ask(self, name: str) -> str:
        key = self.pool.key_of(name)
        assert key is not None
        self.waiting.append(key)
        return key

    def turn(self, room: int = 99) -> list[str]:
        """Admit in order whoever has its adapter; returns who was admitted."""
        admitted = []
        self.pool.begin_turn()
        for key in list(self.waiting):
            if len(self.running) < room and self.pool.acquire(key):
                self.waiting.remove(key)
                self.running.append(key)
                admitted.append(key)
                assert self.slots.held[self.pool.slot_of(key)] == key
        return admitted

    def until_admitted(self, key: str, turns: int = 200) -> int:
        """How many turns it takes."""
        for nth in range(turns):
            if key in self.turn():
                return nth
        raise AssertionError(f"{key} is not admitted in {turns} turns")


@pytest.mark.parametrize("seed", range(6))
def test_a_running_sequence_keeps_its_slot_and_everybody_gets_one(seed):
    draw = random.Random(seed)
    world = World(draw.randrange(1, 4), draw.choice((None, 3)))
    names = [f"n{i}" for i in range(7)]
    for name in names:
        world.pool.load(name, name)
    asked = 0
    for _ in range(400):
        if asked < 150 and draw.random() < 0.5:
            world.ask(draw.choice(names))
            asked += 1
        world.turn(room=5)
        for key in list(world.running):
            if draw.random() < 0.2:
                world.running.remove(key)
            else:
                assert world.slots.held[world.pool.slot_of(key)] == key
    for _ in range(2000):
        world.turn(room=5)
        world.running.clear()
        if not world.waiting:
            break
    assert not world.waiting
    state = world.pool.told()
    assert state.num_writes > 20 and not state.running and len(state.in_slots) <= state.num_slots


def test_the_least_recently_used_slot_gives_way():
    world = World(2)
    for name in "abc":
        world.pool.load(name, name)
    for name in "aba":
        world.until_admitted(world.ask(name))
        world.running.clear()
    world.until_admitted(world.ask("c"))
    assert set(world.slots.held.values()) == {"a@a", "c@c"}


def test_a_slot_that_is_promised_takes_no_further_sequence():
    world = World(1)
    for name in "ab":
        world.pool.load(name, name)
    world.until_admitted(world.ask("a"))
    later = world.ask("b")
    while not world.pool._promised:
        world.turn()
    again = world.ask("a")
    assert world.turn() == []  # neither: one runs, one waits for its slot
    world.running.clear()
    assert world.until_admitted(later) == 0
    world.running.clear()
    world.until_admitted(again)


def test_a_promise_to_somebody_who_has_gone_is_none():
    world = World(1)
    for name in "ab":
        world.pool.load(name, name)
    world.until_admitted(world.ask("a"))
    world.ask("b")
    while not world.pool._promised:
        world.turn()
    world.waiting.clear()  # aborted
    assert world.until_admitted(world.ask("a")) == 0


def test_host_memory_keeps_the_most_recent_and_reads_others_again():
    world = World(1, most_held=2)
    for name in "abcd":
        world.pool.load(name, name)
    assert sum(e.adapter is not None for e in world.pool._entries.values()) == 2
    for name, num_reads in zip("cdcacb", (0, 0, 0, 1, 1, 2), strict=True):
        world.until_admitted(world.ask(name))
        world.running.clear()
        assert world.pool.told().num_reads == num_reads
    assert sum(e.adapter is not None for e in world.pool._entries.values()) == 2


def test_an_adapter_whose_file_has_changed_is_not_taken_for_the_one_that_was_loaded():
    world = World(1, most_held=1)
    world.pool.load("a", "a")
    world.pool.load("b", "b")
    world.pool._read = lambda name, path: Adapter(name, path, "another", 4, {})
    key = world.ask("a")
    for _ in range(20):
        assert world.turn() == []
    assert key not in world.slots.held.values()
    assert world.pool.lost == [key] and world.pool.key_of("a") is None


def test_names_are_unique_until_they_are_unloaded():
    world = World(2)
    world.pool.load("a", "one")
    with pytest.raises(AdapterError, match="already"):
        world.pool.load("a", "two")
    old = world.ask("a")
    world.until_admitted(old)
    world.pool.unload("a")
    assert world.pool.key_of("a") is None and old not in world.pool
    assert world.pool.slot_of(old) != NO_SLOT  # who has it keeps it
    new = world.pool.load("a", "two")
    assert new in world.pool and world.pool.names == {"a": "two"}
    world.running.clear()
    world.pool.told()
    assert old not in world.pool._entries and world.pool.told().in_slots == []
    assert world.pool.load("a", "three", replace=True) != new and new not in world.pool
    assert world.pool.slot_of(None) == NO_SLOT


def test_two_threads_cannot_load_one_name():
    world, begun, go = World(1), threading.Event(), threading.Event()

    def slowly(name: str, path: str) -> Adapter:
        begun.set()
        go.wait(10)
        return Adapter(name, path, path, 4, {})

    world.pool._read = slowly
    errors: list[Exception] = []

    def load(path: str) -> None:
        try:
            world.pool.load("a", path)
        except AdapterError as error:
            errors.append(error)

    threads = [threading.Thread(target=load, args=(path,)) for path in "xy"]
    for thread in threads:
        thread.start()
    begun.wait(10)
    go.set()
    for thread in threads:
        thread.join(10)
    assert len(errors) == 1 and "already" in str(errors[0])


def test_slots_that_devices_have_lost_are_filled_again():
    world = World(1)
    world.pool.load("a", "a")
    world.pool.fill(world.slots)
    assert world.slots.held == {0: "a@a"}
    world.slots.held.clear()
    world.pool.forget_slots()
    world.until_admitted(world.ask("a"))
    assert world.slots.held == {0: "a@a"}
