"""`shiftjax serve --hosts N`: the first machine opens the model with the others, which follow."""

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

import grpc
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from serving.hosts.follower import FollowerHosts
from serving.hosts.leader import LeaderHosts
from serving.hosts.replicas import ReplicaHosts
from serving.hosts.terms import SILENT_SECONDS, Terms, facts_of
from serving.run.access import bind
from serving.run.faults import FOLLOWING, Fault, faulty
from serving.run.flags import read_secret_lines
from serving.run.jax_log import shorten_jax_log
from serving.run.listeners import HttpServer
from serving.run.start import loaded, look_for_server
from serving.server.options import ServerOptions
from serving.server.start_phases import Phases
from serving.server.tls import Certificates
from shiftjax.config import EngineConfig
from shiftjax.hosts.calls import LostHostError
from shiftjax.options import ConfigError
from shiftjax.settings import make_virtual_devices

if TYPE_CHECKING:
    from shiftjax.llm import LLM
    from shiftjax.model_files import ModelFiles

logger = logging.getLogger(__name__)

LOST = 75  # as a failed engine: whoever started the process starts all of them again


def open_leader(
    config: EngineConfig,
    options: ServerOptions,
    phases: Phases,
    on_lost: Callable[[LostHostError], None],
) -> tuple["LLM", LeaderHosts]:
    """Wait for the other hosts, then load and compile with them.

    Raises LostHostError for those that do not come, or go.
    """
    files = _files(config, options, phases)
    kind = ReplicaHosts if config.has_groups_on_each_host else LeaderHosts
    hosts = kind(_terms(config, options, files), on_lost)
    hosts.start(Certificates(options).credentials if options.ssl_certfile else None)
    phases("wait for hosts", 0, 1)
    hosts.gather()
    _join(config)
    llm = loaded(config, files, phases, hosts)
    hosts.begin()
    return llm, hosts


def run_follower(
    config: EngineConfig, options: ServerOptions, fault: Fault | None = None
) -> NoReturn:
    """Follow the leader to its end, and leave; `/health/live` is all that listens.

    Raises ConfigError for what makes this host none of the leader's.
    """
    _Signals(options)
    files = _files(config, options, Phases())
    hosts = FollowerHosts(_terms(config, options, files), lambda error: leave(LOST))
    _listen(options)
    try:
        hosts.connect(channel_credentials(options))
        _join(config)
        from shiftjax.build import build_follower
        from shiftjax.hosts.replicas_device import serve_groups
        from shiftjax.hosts.steps_device import follow

        runners, slots = build_follower(config, files.source, _log, hosts, files.cache_dir)
        if fault and fault.point == FOLLOWING:
            runners[0].launch = faulty(fault, runners[0].launch)
        logger.info("following %s", config.host.coordinator)
        if config.has_groups_on_each_host:
            serve_groups(runners, hosts, hosts.answer)
        else:
            follow(runners[0], hosts, slots)
    except LostHostError:
        leave(LOST)
    except ConfigError:
        raise
    except Exception as error:
        logger.exception("This host cannot go on.")
        hosts.fail(error)
        leave(LOST)
    leave(0)


def jax_address(coordinator: str) -> str:
    """Where JAX's own service listens: at the next port."""
    host, _, port = coordinator.rpartition(":")
    return f"{host}:{int(port) + 1}"


def check_free(address: str) -> None:
    """Raise ConfigError where JAX's service could not listen: it would abort the process."""
    port = int(address.rpartition(":")[2])
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError as error:
            words = f"coordinator: JAX listens at the next port, {port}: {error.strerror}"
            raise ConfigError([f"{words}; name another port"]) from None


def leave(code: int) -> NoReturn:
    """End the process without waiting for threads, nor for other hosts as JAX does."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _files(config: EngineConfig, options: ServerOptions, phases: Phases) -> "ModelFiles":
    files = look_for_server(config, options, phases)
    if files.task != "generate":
        raise ConfigError([f"hosts = {config.host.hosts} is of models that generate"])
    return files


def _terms(config: EngineConfig, options: ServerOptions, files: "ModelFiles") -> Terms:
    host = config.host
    assert host.hosts and host.coordinator and host.host_secret_file
    limit = min(SILENT_SECONDS, options.watchdog_timeout)
    return Terms(
        host.host_rank,
        host.hosts,
        host.coordinator,
        read_secret_lines("host_secret_file", host.host_secret_file)[0],
        facts_of(config, files.source),
        limit,
        options.watchdog_timeout,
    )


def _join(config: EngineConfig) -> None:
    """Make one JAX of all hosts, if groups are over them."""
    make_virtual_devices(config)
    shorten_jax_log()
    if config.has_groups_on_each_host:
        return
    from shiftjax.hosts.steps_device import join

    assert config.host.coordinator and config.host.hosts
    address = jax_address(config.host.coordinator)
    if config.host.host_rank == 0:
        check_free(address)
    join(address, config.host.hosts, config.host.host_rank)


def channel_credentials(options: ServerOptions) -> grpc.ChannelCredentials | None:
    """As a client of the leader: its certificate, or the authorities', is what is trusted."""
    if options.ssl_certfile is None or options.ssl_keyfile is None:
        return None
    try:
        names = options.ssl_ca_certs or options.ssl_certfile, options.ssl_keyfile
        trusted, key, own = (_read(name) for name in (*names, options.ssl_certfile))
    except OSError as error:
        raise ConfigError([f"{error.filename} cannot be read: {error.strerror}"]) from None
    return grpc.ssl_channel_credentials(trusted, key, own)


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _log(task: str, done: int, total: int) -> None:
    if done == total:
        logger.info("%s: %d of %d", task, done, total)


async def _live(request: Request) -> JSONResponse:
    return JSONResponse({"status": "live"})


def _listen(options: ServerOptions) -> None:
    """Answer `/health/live` from a thread. Raises ConfigError for a port that is taken."""
    listener = bind(options.host, options.port)
    app = Starlette(routes=[Route("/health/live", _live)])
    config = uvicorn.Config(app, lifespan="off", log_config=None, access_log=False)
    server = HttpServer(config)
    threading.Thread(target=server.run, args=([listener],), name="http", daemon=True).start()


class _Signals:
    """A first signal is the leader's business, which ends this host when it has drained."""

    def __init__(self, options: ServerOptions):
        self._seconds = options.drain_delay + options.shutdown_timeout + 10
        self._has_come = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _: object) -> None:
        if self._has_come:
            leave(128 + number)
        self._has_come = True
        logger.info("signal %d: waiting for the leader to end", number)
        timer = threading.Timer(self._seconds, leave, (128 + number,))
        timer.daemon = True
        timer.start()
