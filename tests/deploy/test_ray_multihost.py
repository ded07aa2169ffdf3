"""The driver of deploy/ray_multihost.py with threads in the place of Ray: how a group ends."""

import importlib.util
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest

from serving.cli.main import make_parser

FILE = Path(__file__).parents[2] / "deploy/ray_multihost.py"


class RayError(Exception):
    """As Ray's: an actor that died."""


class FakeRay(ModuleType):
    """Actors are objects whose methods run in threads."""

    def __init__(self):
        super().__init__("ray")
        self.threads = ThreadPoolExecutor()
        self.killed: list[Any] = []
        self.groups: list[Any] = []
        self.rounds = 0

    def remote(self, kind: type) -> Any:
        return Options(self, kind)

    def wait(self, futures: list[Future], timeout: float, num_returns: int = 1) -> Any:
        self.rounds += 1
        assert self.rounds < 500, "nobody ends"
        done = wait_for(futures, timeout / 100, "FIRST_COMPLETED").done
        return [future for future in futures if future in done], []

    def get(self, future: Future) -> Any:
        return future.result()

    def kill(self, actor: Any) -> None:
        self.killed.append(actor.one)
        actor.one.killed.set()

    def placement_group(self, bundles: list[dict[str, float]], strategy: str) -> Any:
        self.groups.append((bundles, strategy))
        return self

    def ready(self) -> Future:
        return self.threads.submit(lambda: None)


class Options:
    """What `ray.remote` gives: a kind of actor, and one of them."""

    def __init__(self, ray: FakeRay, kind: type):
        self.ray, self.kind = ray, kind

    def options(self, **_: Any) -> "Options":
        return self

    def remote(self) -> "Actor":
        return Actor(self.ray, self.kind())


class Actor:
    """A handle: `.method.remote(...)`."""

    def __init__(self, ray: FakeRay, one: Any):
        self.ray, self.one = ray, one

    def __getattr__(self, name: str) -> Any:
        called = ModuleType(name)
        called.remote = lambda *given: self.ray.threads.submit(getattr(self.one, name), *given)
        return called


class Host:
    """Runs until it is killed or drained, or as long as `ends` of its rank says."""

    ends: ClassVar[dict[int, Any]] = {}
    seen: ClassVar[list["Host"]] = []

    def __init__(self):
        self.killed, self.drained = threading.Event(), threading.Event()
        self.rank = len(self.seen)
        self.seen.append(self)

    def address(self) -> str:
        return "10.0.0.1:1234"

    def run(self, flags: list[str], secret: str) -> int:
        self.flags, self.secret = flags, secret
        end = self.ends.get(self.rank)
        while end is None and not self.killed.is_set():
            if self.drained.is_set():
                return 0
            time.sleep(0.01)
        if isinstance(end, Exception):
            raise end
        return -9 if end is None else end

    def drain(self) -> None:
        self.drained.set()


@pytest.fixture
def driver(monkeypatch):
    fake = FakeRay()
    parts: dict[str, dict[str, Any]] = {
        "ray": {},
        "ray.exceptions": {"RayError": RayError},
        "ray.util": {},
        "ray.util.placement_group": {
            "placement_group": fake.placement_group,
            "remove_placement_group": fake.groups.remove,
        },
        "ray.util.scheduling_strategies": {"PlacementGroupSchedulingStrategy": lambda *_, **__: 0},
    }
    for name, values in parts.items():
        module = fake if name == "ray" else ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    spec = importlib.util.spec_from_file_location("ray_multihost", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "Host", Host)
    removed = []
    monkeypatch.setattr(module, "remove_placement_group", removed.append)
    monkeypatch.setattr(Host, "seen", [])
    monkeypatch.setattr(Host, "ends", {})
    module.fake, module.removed = fake, removed
    yield module
    for host in Host.seen:
        host.killed.set()
    fake.threads.shutdown()


def run(driver: Any, hosts: int = 2, asked: list[int] | None = None) -> int:
    signals = [] if asked is None else asked
    return driver.serve_once(hosts, 8.0, "STRICT_SPREAD", ["--model", "m"], signals)


@pytest.mark.parametrize(("end", "code"), [(75, 75), (RayError(), 1)])
def test_a_host_that_ends_ends_all(driver, end, code):
    """A server that exits, or an actor that dies: all are killed, the group is given back."""
    Host.ends[1] = end
    assert run(driver) == code
    assert set(driver.fake.killed) == set(Host.seen) and len(Host.seen) == 2
    assert driver.removed == [driver.fake]
    assert driver.fake.groups == [([{"CPU": 1.0, "GPU": 8.0}] * 2, "STRICT_SPREAD")]


def test_a_drain_is_the_leaders(driver):
    assert run(driver, asked=[15]) == 0
    leader, follower = Host.seen
    assert leader.drained.is_set() and not follower.drained.is_set()
    assert follower in driver.fake.killed


def test_a_second_signal_does_not_wait(driver, monkeypatch):
    monkeypatch.setattr(Host, "drain", lambda self: None)
    assert run(driver, asked=[15, 15]) == 1
    assert len(driver.fake.killed) == 2


def test_flags_are_those_of_serve(driver):
    Host.ends[0] = 75
    run(driver)
    parser = make_parser()
    for rank, host in enumerate(Host.seen):
        if not hasattr(host, "flags"):  # it was not asked before the other had ended
            continue
        given = parser.parse_args(["serve", *host.flags, "--host-secret-file=s"])
        assert (given.hosts, given.host_rank) == ("2", str(rank))
        assert given.coordinator == "10.0.0.1:1234" and len(host.secret) == 64
