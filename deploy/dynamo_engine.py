"""A worker of NVIDIA Dynamo: its frontend makes token ids, ShiftJAX answers with token ids.

    pip install --no-deps ai-dynamo ai-dynamo-runtime
    python deploy/dynamo_engine.py smollm2-135m --devices 8 --sp 4 --tp 2 --kv-events zmq

Flags are those of `shiftjax serve` (`--help`), but for listeners, keys, chats and texts, which are
the frontend's, and `--namespace`, `--component`, `--endpoint`, `--discovery-backend`,
`--request-plane`, `--event-plane` for where in Dynamo it is. With `--kv-events zmq` Dynamo's router
knows which prefixes are cached here. Written against `dynamo.common.backend` of ai-dynamo 1.6,
whose other dependencies pin another jax (hence `--no-deps`).
"""

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import asdict
from typing import Any

from dynamo.common.backend import EngineConfig as Registration
from dynamo.common.backend import LLMEngine, LlmRegistration, WorkerConfig
from dynamo.common.backend.publisher import KvEventSource, ZmqSource
from dynamo.common.backend.run import run
from dynamo.common.utils.token_ids import token_ids_to_list
from dynamo.llm.exceptions import InvalidArgument, WorkerUnavailable

from serving.cli.main import make_parser
from serving.run.flags import parse_args, settle
from serving.run.serve import GIL_SECONDS, prove
from serving.run.simulated import open_simulated
from serving.run.start import open_model
from serving.server.async_engine import AsyncEngine
from serving.server.errors import ServeError
from serving.server.handle import Delta, RequestHandle
from serving.server.kv_events import KvEvents, check_kv_events, open_kv_events
from serving.server.options import ServerOptions, names_of
from serving.server.start_phases import Phases
from shiftjax.config import EngineConfig
from shiftjax.core.request import Request, SamplingParams, TokenLogprobs
from shiftjax.core.sampling_params import DYNAMO, PARAMS, SamplingError
from shiftjax.options import ConfigError
from shiftjax.weights.locate import find_model

PLACE = {
    "namespace": "dynamo",
    "component": "backend",
    "endpoint": "generate",
    "discovery_backend": "etcd",
    "request_plane": "tcp",
    "event_plane": None,
}
# Settings of a server that a worker has, too.
OWN = ("kv_events", "kv_events_endpoint", "kv_events_topic", "served_model_name", "simulate")
OWN += ("max_num_queued_reqs", "max_num_queued_tokens", "stream_interval", "shutdown_timeout")
SAMPLING = [name for name, param in PARAMS.items() if DYNAMO in param.apis]
NOT_HERE = ("prefill_result", "bootstrap_info", "multi_modal_data", "encoder_result")


class ShiftEngine(LLMEngine):
    """One engine, whose groups share their requests: a single rank to Dynamo."""

    def __init__(self, config: EngineConfig, options: ServerOptions):
        self._config, self._options = config, options
        self._model: Any = None
        self._engine: AsyncEngine | None = None
        self._kv_events: KvEvents | None = None

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple["ShiftEngine", WorkerConfig]:
        """Settings from flags, environment and file. Raises ConfigError."""
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        for name, default in PLACE.items():
            parser.add_argument(f"--{name.replace('_', '-')}", default=default)
        place, rest = parser.parse_known_args(argv)
        arguments = parse_args(make_parser(), ["serve", *rest])
        config, _ = settle(arguments)
        options: ServerOptions = arguments.server
        _check(config, options)
        model = config.model.model
        location = None if options.simulate else find_model(model)
        name = names_of(options.served_model_name or model)[0]
        path = model if location is None else str(location.path)
        return cls(config, options), WorkerConfig(
            **vars(place),
            model_name=path,
            served_model_name=name,
            enable_kv_routing=options.kv_events != "none",
        )

    async def start(self, worker_id: int) -> Registration:
        """Load, compile and run a first step."""
        config, options = self._config, self._options
        sys.setswitchinterval(GIL_SECONDS)
        self._kv_events = open_kv_events(options, config)
        load: Any = open_simulated if options.simulate else open_model
        self._model = await asyncio.to_thread(load, config, options, Phases())
        core = self._model.engine
        self._engine = AsyncEngine(core, None, (), options, self._kv_events)
        if not options.simulate:
            await self._engine.call(lambda _: prove(self._model))
        of_lanes = [lane.scheduler.config for lane in core.lanes]
        budgets = of_lanes[0]
        return Registration(
            model=config.model.model,
            served_model_name=names_of(options.served_model_name or config.model.model)[0],
            llm=LlmRegistration(
                context_length=core.limits.max_model_len,
                kv_cache_block_size=budgets.block_size,
                total_kv_blocks=sum(
                    lane.scheduler.config.num_whole_blocks - 1 for lane in core.lanes
                ),
                max_num_seqs=len(core.lanes) * budgets.max_num_seqs,
                max_num_batched_tokens=budgets.max_num_batched_tokens,
            ),
        )

    async def kv_event_sources(self) -> list[KvEventSource]:
        """Where events of the one group come from."""
        events = self._kv_events
        return [] if events is None else [ZmqSource(events.address, events.topic, dp_rank=0)]

    async def health_check_payload(self) -> dict[str, Any]:
        """A request that costs a step."""
        conditions = {"max_tokens": 1, "ignore_eos": True}
        return {"token_ids": [0], "stop_conditions": conditions, "sampling_options": {}}

    async def generate(self, request: Any, context: Any) -> AsyncGenerator[Any, None]:
        """Tokens as they come. Who stops reading, or `abort`, ends the request."""
        assert self._engine is not None, "started"
        try:
            wanted = request_of(request, context.id())
            (handle,) = self._engine.submit([wanted], [None], streams=True)
        except SamplingError as error:
            raise InvalidArgument(str(error)) from None
        except ServeError as error:
            is_wrong = error.kind_name in ("invalid", "duplicate")
            raise (InvalidArgument if is_wrong else WorkerUnavailable)(error.message) from None
        with handle:
            try:
                async for deltas in handle:
                    for delta in deltas:
                        yield chunk_of(delta, handle)
            except ServeError as error:
                is_cancel = error.kind_name in ("aborted", "cancelled", "draining")
                reason = "cancelled" if is_cancel else f"error: {error.message}"
                yield chunk_of(Delta(0, finish_reason=reason), handle)

    async def abort(self, context: Any) -> None:
        """The client has gone."""
        if self._engine is not None:
            self._engine.abort(context.id())

    async def cleanup(self) -> None:
        """Let requests finish for `shutdown_timeout`, then end everything; again does nothing."""
        engine, self._engine = self._engine, None
        events, self._kv_events = self._kv_events, None
        if engine is not None:
            await engine.drain(self._options.shutdown_timeout)
            await engine.close()
        elif events is not None:  # loading has failed
            events.close()


def _check(config: EngineConfig, options: ServerOptions) -> None:
    """Raise ConfigError for settings that a worker has no use for."""
    plain = asdict(ServerOptions())
    idle = [name for name, value in asdict(options).items() if value != plain[name]]
    problems = [
        f"{name} has no meaning for a worker of Dynamo: drop it" for name in idle if name not in OWN
    ]
    several = config.parallel.dp > 1 or config.fleet.fleet
    if options.kv_events != "none" and several:
        problems.append("kv_events: Dynamo's router knows no groups; use a worker for each replica")
    if config.parallel.phases is not None:
        problems.append("phases: requests that wait for a phase are late; drop it")
    if problems:
        raise ConfigError(problems)
    check_kv_events(options, config)


def request_of(request: Mapping[str, Any], name: str) -> Request:
    """What the frontend asks for. Stop strings are its own: it sees the text.

    Raises SamplingError and InvalidArgument.
    """
    sampling: Mapping[str, Any] = request.get("sampling_options") or {}
    stops: Mapping[str, Any] = request.get("stop_conditions") or {}
    output: Mapping[str, Any] = request.get("output_options") or {}
    refused = [name for name in NOT_HERE if request.get(name) is not None]
    refused += [name for name in ("guided_decoding",) if sampling.get(name) is not None]
    refused += [name for name in ("prompt_logprobs",) if output.get(name) is not None]
    if refused:
        raise InvalidArgument(f"{', '.join(refused)}: this worker cannot do that")
    wanted = {name: sampling[name] for name in SAMPLING if sampling.get(name) is not None}
    hidden = stops.get("stop_token_ids_hidden") or []
    return Request(
        name,
        token_ids_to_list(request["token_ids"]),
        SamplingParams(
            **wanted,
            max_tokens=stops.get("max_tokens"),
            min_tokens=stops.get("min_tokens") or 0,
            stop_token_ids=tuple({*hidden, *(stops.get("stop_token_ids") or [])}),
            ignore_eos=bool(stops.get("ignore_eos")),
            logprobs=output.get("logprobs"),
        ),
        time.monotonic(),
    )


def chunk_of(delta: Delta, handle: RequestHandle) -> dict[str, Any]:
    """What one continuation has gained, as Dynamo has it."""
    chunk: dict[str, Any] = {"token_ids": delta.token_ids, "index": delta.index}
    if delta.logprobs:
        chunk["log_probs"] = [each.logprob for each in delta.logprobs]
        chunk["top_logprobs"] = [_top(each) for each in delta.logprobs]
    if delta.finish_reason is not None:
        is_abort = delta.finish_reason == "abort"
        chunk["finish_reason"] = "cancelled" if is_abort else delta.finish_reason
        num_prompt = len(handle.request.prompt_token_ids)
        num_output = handle.num_output_tokens
        chunk["completion_usage"] = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
        }
        metrics = handle.output.metrics
        if metrics is not None:
            details = {"cached_tokens": metrics.num_cached_tokens}
            chunk["completion_usage"]["prompt_tokens_details"] = details
    return chunk


def _top(logprobs: TokenLogprobs) -> list[dict[str, Any]]:
    pairs = zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
    return [
        {"rank": rank, "token_id": token, "token": None, "logprob": logprob}
        for rank, (token, logprob) in enumerate(pairs, start=1)
    ]


if __name__ == "__main__":
    try:
        run(ShiftEngine)
    except ConfigError as error:
        sys.exit("\n".join(error.problems))
