"""A follower that is told to end stays as long as the leader may need it."""

import signal
from unittest.mock import Mock

from serving.run import hosts
from serving.server.options import ServerOptions


def test_a_follower_outlasts_the_drain_of_the_leader(monkeypatch):
    handlers, timer = {}, Mock()
    monkeypatch.setattr(hosts.signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(hosts.threading, "Timer", timer)
    hosts._Signals(ServerOptions(drain_delay=15.0, shutdown_timeout=60.0))
    handlers[signal.SIGTERM](signal.SIGTERM, None)
    (seconds, *_), _ = timer.call_args
    assert seconds > 15 + 60
