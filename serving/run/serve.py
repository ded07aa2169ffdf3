"""`shiftjax serve`: load a model behind listeners that are up, and run until told to stop."""

import argparse
import asyncio
import contextlib
import ctypes
import faulthandler
import gc
import logging
import resource
import signal
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from uvicorn.loops.auto import auto_loop_factory

from serving.hosts.leader import LeaderHosts
from serving.run.access import VLLM_KEY, read_keys
from serving.run.faults import LOADING, POINTS, Fault, faulty, install, parse_fault
from serving.run.hosts import leave, open_leader, run_follower
from serving.run.last_start import keep_last_start, plan_of, read_last_start
from serving.run.listeners import Server
from serving.run.progress import shown_phases
from serving.run.simulated import Simulated, open_simulated
from serving.run.start import StartError, chat_template, open_model
from serving.server.async_embedder import AsyncEmbedder
from serving.server.async_engine import AsyncEngine
from serving.server.kv_events import KvEvents, check_kv_events, open_kv_events
from serving.server.options import ServerOptions, names_of
from serving.server.served import ServedModel
from serving.server.service import Service
from serving.server.start_phases import Phases
from serving.traces.plug import check_traces, plug_traces
from shiftjax.config import EngineConfig
from shiftjax.core.errors import RequestError
from shiftjax.core.request import SamplingParams
from shiftjax.drafts.speculation import DraftStats
from shiftjax.hosts.calls import LostHostError
from shiftjax.options import ConfigError
from shiftjax.plugins import loaded_plugins
from shiftjax.settings import environ_beside, fault_of, make_virtual_devices
from shiftjax.weights.locate import find_model

if TYPE_CHECKING:
    from shiftjax.embedder import Embedder
    from shiftjax.llm import LLM

logger = logging.getLogger(__name__)

OK, ENGINE_FAILED = 0, 75
WATCH_SECONDS = 0.5  # between looks of the watchdog
DRAFT_LOG_SECONDS = 10.0  # between lines about drafts, while there are any
# How long a busy event loop may keep the engine waiting for the GIL, or the reverse. With Python's
# 5 ms a step that has ended waits that long, and all streams get fewer tokens.
GIL_SECONDS = 0.0002
WARM_UP = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)


def run_server(
    arguments: argparse.Namespace, config: EngineConfig, sampling: SamplingParams
) -> int:
    """Serve until a signal; returns the exit code. Raises what starting raises."""
    options: ServerOptions = arguments.server
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    for name in sorted(n for n in environ_beside() if n.startswith("VLLM_") and n != VLLM_KEY):
        logger.warning("the variable %s has no effect: settings are flags or SHIFTJAX_NAME", name)
    for plugin in loaded_plugins():
        logger.info("loaded %s", plugin)
    keys = read_keys(options)
    check_kv_events(options, config)
    check_traces(options, environ_beside())
    if config.parallel.phases is not None and options.simulate is None:
        given = f"phases = {config.parallel.phases}"
        raise ConfigError([f"{given} is of batch and LLM: requests that wait for a phase are late"])
    if config.host.is_one_of_several and options.simulate is not None:
        raise ConfigError([f"hosts = {config.host.hosts} has no meaning with simulate: drop it"])
    text = fault_of()
    fault = parse_fault(text) if text else None
    if options.simulate is None:
        find_model(config.model.model)
        make_virtual_devices(config)
    _use_all_descriptors()
    sys.setswitchinterval(GIL_SECONDS)
    if config.host.host_rank:
        run_follower(config, options, fault)
    faulthandler.enable()  # a library that aborts leaves at least its stack
    with asyncio.Runner(loop_factory=auto_loop_factory()) as runner:
        return runner.run(Process(config, options, keys, fault).run())


def _use_all_descriptors() -> None:
    """Open files up to the hard limit: every connection needs a descriptor."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Process:
    """The life of a server process: start, serve, drain, end."""

    def __init__(
        self,
        config: EngineConfig,
        options: ServerOptions,
        keys: tuple[str, ...],
        fault: Fault | None,
    ):
        self._config, self._options, self._fault = config, options, fault
        self._service = Service(options)
        plug_traces(self._service, environ_beside())
        self._server = Server(self._service, keys, self._begin_end)
        self._stop = asyncio.Event()
        self._signal: int | None = None
        self._delayed: asyncio.TimerHandle | None = None  # the drain, after `drain_delay`
        self._code = OK
        self._model: LLM | Embedder | None = None  # keeps what was loaded
        self._kv_events: KvEvents | None = None
        self._hosts: LeaderHosts | None = None

    async def run(self) -> int:
        """From the first listener to the last; the exit code."""
        loop = self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        self._kv_events = open_kv_events(self._options, self._config)
        await self._server.start()
        if self._server.certificates is not None:
            loop.add_signal_handler(signal.SIGHUP, self._server.certificates.reload)
        try:
            await self._open()
            tasks = [asyncio.create_task(work()) for work in (self._watch, self._log_drafts)]
            await self._stop.wait()
            for task in tasks:
                task.cancel()
        finally:
            await self._server.stop(self._options.shutdown_timeout if self._code == OK else 0)
            has_ended = await self._service.close()
        if not has_ended or self._code != OK:
            leave(self._code or ENGINE_FAILED)  # a thread hangs in a step: nothing waits for it
        if self._hosts is not None:
            self._hosts.close()
            leave(OK)
        return self._code

    def _on_signal(self, number: int) -> None:
        """Begin the end at the first signal, skip `drain_delay` at the next.

        Leave at once at one that comes while requests finish, or while the model loads.
        """
        is_next = self._signal is not None and self._stop.is_set()
        if is_next or self._service.engine is None:
            logger.warning("leaving at once: signal %d", number)
            leave(128 + number)
        self._signal = number
        logger.info("ending: signal %d", number)
        self._begin_end()

    def _begin_end(self) -> None:
        """Drain after `drain_delay`, or when asked again; be unready from now on."""
        delay = self._options.drain_delay
        if delay == 0 or self._delayed is not None:
            self._drain()
            return
        self._service.announce_end()
        self._delayed = self._loop.call_later(delay, self._drain)

    def _drain(self) -> None:
        """Refuse new requests, and let the others finish."""
        self._service.begin_drain()
        self._stop.set()

    async def _open(self) -> None:
        """Load, compile, run a first step, then take requests."""
        fault = self._fault
        load: Any = open_model if self._options.simulate is None else open_simulated
        load = self._open_leader if self._config.host.is_one_of_several else load
        load = faulty(fault, load) if fault and fault.point == LOADING else load
        phases = self._service.phases
        before = {} if self._options.simulate else read_last_start(self._config)
        phases.plan(plan_of(self._config, self._options), before)
        with shown_phases(phases):
            model: Any = await asyncio.to_thread(load, self._config, self._options, phases)
            self._model = model
            phases("first step", 0, 1)
            engine, served = await FRONTS[model.task](model, self._service, self._kv_events)
            engine.on_failure = self._on_failure
            self._service.open(served, engine)
            if fault and fault.point in POINTS and model.task != "embed":
                install(fault, model.engine, self._service)
        if self._options.simulate is None:
            await asyncio.to_thread(keep_last_start, self._config, phases.seconds)
        _settle_memory()
        addresses = [] if self._kv_events is None else self._kv_events.addresses()
        with contextlib.suppress(OSError):  # a full disk, a closed pipe: the server serves
            print(*self._server.addresses(), *addresses, sep="\n", flush=True)

    def _open_leader(self, config: EngineConfig, options: ServerOptions, phases: Phases) -> "LLM":
        """The same together with the other hosts, on a thread."""
        llm, self._hosts = open_leader(config, options, phases, self._lost_host)
        self._service.metrics.collectors.append(self._hosts.metrics)
        return llm

    def _lost_host(self, error: LostHostError) -> None:
        """Another host is gone: end everything, also what waits for a step that hangs."""
        engine = self._service.engine
        if engine is None:
            leave(ENGINE_FAILED)
        self._loop.call_soon_threadsafe(engine.lost, error)

    def _on_failure(self) -> None:
        self._code = ENGINE_FAILED
        self._drain()

    async def _log_drafts(self) -> None:
        """A line every `DRAFT_LOG_SECONDS` while something drafts."""
        engine = self._service.engine
        assert engine is not None
        before = engine.stats.find(DraftStats)
        while before is not None:
            await asyncio.sleep(DRAFT_LOG_SECONDS)
            now = engine.stats.find(DraftStats) or before
            line = drafts_line(before, now, DRAFT_LOG_SECONDS)
            if line is not None:
                logger.info(line)
            before = now

    async def _watch(self) -> None:
        """End the process when steps hang for too long.

        Two looks must agree, because the first request after a pause may just be on its way to the
        engine; and the time for which the process itself was stopped does not count.
        """
        engine, limit = self._service.engine, self._options.watchdog_timeout
        assert engine is not None
        was_late, woken = False, time.monotonic()
        looked = woken
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            now, stalled = time.monotonic(), engine.stalled_seconds()
            woken, looked = now if now - looked > 2 * WATCH_SECONDS else woken, now
            is_late = stalled > limit and now - woken > limit
            if is_late and was_late:
                logger.critical("no step for %.0f s: giving up; where all threads are:", stalled)
                faulthandler.dump_traceback()
                self._on_failure()
                return
            was_late = is_late


def drafts_line(before: DraftStats, now: DraftStats, seconds: float) -> str | None:
    """What drafts did between two looks `seconds` apart; None: there were none."""
    num_drafts = now.num_drafts - before.num_drafts
    if not num_drafts:
        return None
    accepted = now.num_accepted - before.num_accepted
    share = accepted / (now.tokens.total() - before.tokens.total())
    host = (now.seconds.total - before.seconds.total) / seconds
    return (
        f"drafts: {1 + accepted / num_drafts:.2f} tokens per drafted step of a sequence, "
        f"{share:.0%} of guesses accepted, {host:.1%} of the time spent guessing"
    )


def prove(llm: "LLM") -> None:
    """Run a step. Raises StartError if it fails."""
    (first,) = llm.generate([[0]], WARM_UP)[0].outputs
    if first.finish_reason == "error":
        raise StartError(f"the first step failed, see above: {first.error}")


async def front_of_llm(
    llm: "LLM", service: Service, kv_events: KvEvents | None
) -> tuple[AsyncEngine, ServedModel]:
    """Run a first step; return the engine behind a queue, and what is known of the model."""
    options = service.options
    observers, rollouts = service.observers, llm.rollouts
    engine = AsyncEngine(llm.engine, llm.tokenizer, observers, options, kv_events, rollouts)
    # On the thread of all later steps: its first one opens files, for which there may be no
    # room when clients have come.
    await engine.call(lambda _: prove(llm))
    return engine, served_model(llm, options)


async def front_of_embedder(
    embedder: "Embedder", service: Service, kv_events: KvEvents | None
) -> tuple[AsyncEmbedder, ServedModel]:
    """Embed a first text; return the embedder behind a queue. There are no KV events."""
    del kv_events
    options, observers = service.options, service.embed_observers
    try:
        await asyncio.to_thread(embedder.prove)
    except RequestError as error:
        raise StartError(f"the first step failed, see above: {error}") from None
    vocab_size = embedder.model.vocab_size
    engine = AsyncEmbedder(embedder.runner, vocab_size, observers, options)
    return engine, served_encoder(embedder, options)


async def front_of_simulated(
    model: Simulated, service: Service, kv_events: KvEvents | None
) -> tuple[AsyncEngine, ServedModel]:
    """Return the engine behind a queue; virtual devices need no first step."""
    served, options = model.served, service.options
    engine = AsyncEngine(model.engine, served.tokenizer, service.observers, options, kv_events)
    return engine, served


FRONTS: dict[str, Callable[..., Any]] = {
    "generate": front_of_llm,
    "embed": front_of_embedder,
    "simulate": front_of_simulated,
}
"""How a loaded model takes requests, by its task."""


def _settle_memory() -> None:
    """Free what only loading needed, and leave the rest out of later collections."""
    gc.collect()
    gc.freeze()
    with contextlib.suppress(OSError, AttributeError):  # of glibc; others keep what is freed
        ctypes.CDLL(None).malloc_trim(0)


def served_model(llm: "LLM", options: ServerOptions) -> ServedModel:
    """What the front ends know of a loaded model."""
    names = names_of(options.served_model_name or llm.name)
    cache, stats = llm.engine.lanes[0].scheduler.config, llm.stats()
    info = {
        "mesh": stats["mesh"],
        "policy": llm.deployment.policy,
        "block_size": str(cache.block_size),
        "num_gpu_blocks": str(cache.num_whole_blocks),
        "enable_prefix_caching": str(cache.prefix_caching),
    }
    if llm.num_hosts > 1:
        info["hosts"] = str(llm.num_hosts)
    # With SP = 1 the two modes of a program are one step.
    programs = sum(len(set(p.steps.values())) for runner in llm.runners for p in runner.programs)
    return ServedModel(
        names,
        llm.tokenizer,
        chat_template(llm.tokenizer, options),
        info,
        programs,
        num_compiles=lambda: llm.num_compiles,
        attention=stats["attention"],
        defaults=llm.sampling_defaults,
        targets=llm.deployment.targets,
        adapters=llm.adapters,
        adapter_folder=llm.deployment.lora.folder,
    )


def served_encoder(embedder: "Embedder", options: ServerOptions) -> ServedModel:
    """What the front ends know of a loaded encoder."""
    info = {
        "mesh": f"devices={embedder.num_devices}",
        "dtype": str(embedder.dtype),
    }
    names = names_of(options.served_model_name or embedder.name)
    runner, reader = embedder.runner, embedder.reader
    compiles = lambda: embedder.num_compiles  # noqa: E731
    return ServedModel(names, reader.tokenizer, None, info, runner.num_programs, compiles, reader)
