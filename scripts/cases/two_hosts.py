"""One engine over two processes of this machine, compared with one process of as many devices.

    python scripts/bench.py two_hosts [--devices 4] [--experts] [--latents] [--split] [--quick]
    python scripts/bench.py two_hosts --numerics invariant [--quick]

Two processes of so many virtual CPU devices each make one mesh (gloo): the first schedules, the
second repeats its calls, as `shiftjax serve --hosts 2` does. All run the same requests in random
modes: seeded and greedy ones with shared beginnings, drafts and tables, in too few KV blocks for
all, and one that is given up. Then four sequences decode, for the time of a step; processes share
the cores, so the ratio says what talking costs here, and nothing of GPUs. Last, what a message
takes for 1, 64 and 256 sequences of 512 blocks. With `--experts` the model has some, and both count
which ones tokens choose; with `--latents` it caches these (MLA), too. With `--split` devices of
both hosts split positions of KV. With strict `--numerics` numbers are bfloat16, and
log-probabilities are to have the same bits. With `--loras` two of three requests have an adapter.
"""

import argparse
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Generator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from cases.load_kit import free_port

from shiftjax.adapters.pool import AdapterPool
from shiftjax.arch.config import ModelConfig
from shiftjax.arch.numerics import NUMERICS
from shiftjax.arch.presets import PRESETS, preset
from shiftjax.config import EngineConfig
from shiftjax.core.engine import Engine
from shiftjax.core.policy import Policy
from shiftjax.core.request import Request, SamplingParams
from shiftjax.drafts.speculation import DraftStats
from shiftjax.hosts.calls import NOBODY, Recent, Step

_FAMILY = {"architecture": "llama", "vocab_size": 200, "max_position_embeddings": 256}
MODEL = preset("two hosts", _FAMILY, 64, 96, 2, 9, 3, 16)
WIDE = preset("wide", _FAMILY | {"vocab_size": 256}, 128, 512, 2, 8, 4, 16)  # for strict numerics
EXPERTS = replace(PRESETS["tiny-qwen2-moe"], vocab_size=200)
LATENTS = replace(PRESETS["tiny-deepseek-v3"], vocab_size=200)
SIZES: dict[str, Any] = {"max_model_len": 96, "block_size": 4, "token_buckets": (32,)}
SIZES |= {"num_blocks": 26, "max_num_seqs": 4, "max_num_batched_tokens": 32}  # too few for all
SETTINGS = SIZES | {"cache_dir": "none", "speculation": "ngram", "tp": 2}
SETTINGS["controls"] = {"prompt_lookup_min": 1, "fixed_drafts": True}
OPTIONS = {
    "--devices": (4, "of each process"),
    "--tokens": (100, "of the sequences that are timed"),
    "--experts": (False, "a model of experts"),
    "--latents": (False, "a model with latent attention, and experts"),
    "--split": (False, "devices of the pair split positions of KV"),
    "--numerics": ("fast", "how partial products are summed"),
    "--loras": (False, "two adapters, which have one slot in turn"),
    "--quick": (False, "compiled quickly, few tokens"),
}
ABORTED = "r2"  # of the requests, in turn 4
ROLES = ("alone", "leader", "follower")
MESSAGES = (1, 64, 256)  # sequences of a step


class RandomModes(Policy):
    """Base or shift, drawn for every step."""

    _random = random.Random(5)

    def mode_of(self, work: Any, modes: Any, num_waiting: int, last_mode: Any) -> Any:
        """The mode of a step."""
        return self._random.choice((modes[0], modes[-1]))


class Served(NamedTuple):
    """What each request was answered."""

    tokens: list[list[int]]
    logprobs: list[list[float]]


def serve(engine: Engine, requests: list[Request], aborted: str = "") -> Served:
    """Return the answers. Raises RuntimeError for a request that ends with an error."""
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    logprobs: dict[str, list[float]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add_request(request)
    turn = 0
    while engine.has_work():
        events = engine.step(float(turn))
        if aborted and turn == 4:
            events += engine.abort(aborted)
        for event in events:
            if event.error is not None:
                raise RuntimeError(event.error)
            tokens[event.request_id] += event.token_ids
            logprobs[event.request_id] += [each.logprob for each in event.logprobs or ()]
        turn += 1
    engine.check()
    _ = tokens.pop(aborted, None), logprobs.pop(aborted, None)
    return Served([*tokens.values()], [*logprobs.values()])


def workload(engine: Engine) -> dict[str, Any]:
    """What the requests come to; the aborted one has no say."""
    engine.policy = RandomModes()
    rng = random.Random(3)
    stem = [rng.randrange(3, 199) for _ in range(20)]
    prompts = [
        stem[: rng.randrange(21)] + [rng.randrange(3, 199) for _ in range(rng.randrange(1, 40))]
        for _ in range(9)
    ]
    extra: dict[int, dict[str, Any]] = {1: {"logprobs": 3}, 4: {"presence_penalty": 0.5}}
    extra |= {5: {"logit_bias": {17: 2.0}}, 6: {"allowed_token_ids": [5, 6, 7, 8]}}
    each = {"max_tokens": 12, "ignore_eos": True, "logprobs": 0}
    pool, requests = engine.limits.adapters, []
    names = [pool.key_of(name) for name in pool.names] if isinstance(pool, AdapterPool) else []
    for i, prompt in enumerate(prompts):
        own = each | extra.get(i, {})
        how = SamplingParams(temperature=0.8 * (i % 2), seed=i, **own)
        adapter = [None, *names][i % (1 + len(names))]
        requests.append(Request(f"r{i}", prompt, how, adapter=adapter))
    again = [replace(request, request_id=f"again-{i}") for i, request in enumerate(requests[:2])]
    served = serve(engine, requests, ABORTED), serve(engine, again)
    stats = engine.stats()
    drafts = stats.find(DraftStats)
    return {
        "tokens": [each.tokens for each in served],
        "logprobs": [each.logprobs for each in served],
        "steps": stats.steps_by_mode,
        "preemptions": stats.num_preemptions["recompute"],
        "prefix_hit_tokens": stats.num_prefix_hit_tokens,
        "drafted_steps": sum(drafts.steps.values()) if drafts else 0,
    }


def routed(engine: Engine) -> list[list[int]]:
    """The pairs of every layer and expert, as far as they were counted."""
    from shiftjax.routing.history import RoutingState

    runner: Any = engine.lanes[0].runner
    counted = getattr(runner, "_runner", runner).counted
    if counted is None:
        return []
    counted.flush()
    state = engine.stats().find(RoutingState)
    return [] if state is None else state.counts.round().astype(int).tolist()


def decode(engine: Engine, num_tokens: int) -> float:
    """The median milliseconds of a step of four sequences."""
    prompts = [[i + 5] for i in range(4)]
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.7, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        engine.add_request(Request(f"decode-{i}", prompt, sampling))
    seconds = []
    while engine.has_work():
        begin = time.perf_counter()
        engine.step(time.monotonic())
        seconds.append(time.perf_counter() - begin)
    return round(1e3 * statistics.median(seconds), 3)


def is_strict(args: argparse.Namespace) -> bool:
    """Whether log-probabilities are to have the same bits."""
    return NUMERICS[args.numerics].is_strict


def model_of(args: argparse.Namespace) -> ModelConfig:
    """Return the model that the flags name."""
    plain = WIDE if is_strict(args) else MODEL
    return LATENTS if args.latents else EXPERTS if args.experts else plain


def modules_of(args: argparse.Namespace, folder: Path) -> str:
    """Write two adapters of the model to a folder; returns the setting that names them."""
    from labs.lora import TARGETS, make_adapter

    from shiftjax.weights.random import RandomSource

    tensors = RandomSource(model_of(args)).tensors
    shapes = {n: t.shape for n, t in tensors.items() if n.removesuffix(".weight").endswith(TARGETS)}
    return ",".join(f"a{n}={make_adapter(folder, shapes, 4, n, 0.5)}" for n in range(2))


def run_role(role: str, args: argparse.Namespace, port: int, secret: str) -> dict[str, Any]:
    """Return what one of the three processes has to say."""
    from serving.hosts.follower import FollowerHosts
    from serving.hosts.leader import LeaderHosts
    from serving.hosts.terms import Terms, facts_of
    from shiftjax.build import build, build_follower
    from shiftjax.device.programs import CompileCounter
    from shiftjax.device.step import COMPILER_OPTIONS
    from shiftjax.hosts.steps_device import follow, join
    from shiftjax.routing import counts_device
    from shiftjax.settings import make_virtual_devices
    from shiftjax.weights.random import RandomSource

    options = SETTINGS | {"sp": args.devices, "devices": 2 * args.devices}
    rank, address = ROLES.index(role) - 1, f"127.0.0.1:{port}"
    if args.split:  # blocks of as many tokens, in too few again
        options |= {"kv_split": "position", "block_size": 1 if args.latents else 2}
    if role != "alone":
        options |= {"hosts": 2, "host_rank": rank, "coordinator": address}
        options |= {"host_secret_file": "unused"}
    if args.quick:
        COMPILER_OPTIONS["cpu"]["xla_backend_optimization_level"] = "0"
    if args.modules is not None:
        options |= {"enable_lora": True, "max_loras": 1, "lora_modules": args.modules}
    options |= {"numerics": args.numerics, "dtype": "bfloat16" if is_strict(args) else "float32"}
    config, source = EngineConfig.from_options(**options), RandomSource(model_of(args))
    counts_device.EVERY = 1  # so that all count the same steps
    make_virtual_devices(config)
    counter, silent = CompileCounter(), lambda *_: None
    if role == "alone":
        engine = build(config, source, silent).engine
        told = workload(engine) | {"routed": routed(engine)}
        return told | {"step_ms": decode(engine, args.tokens)}
    terms = Terms(rank, 2, address, secret, facts_of(config, source), limit=120)
    if role == "follower":
        hosts = FollowerHosts(terms, lambda _: os._exit(75))
        hosts.connect()
        join(f"127.0.0.1:{port + 1}", 2, rank)
        (runner,), slots = build_follower(config, source, silent, hosts)
        counter.start()
        follow(runner, hosts, slots)
        return {"compiles": counter.count}
    hosts = LeaderHosts(terms, lambda _: os._exit(75))
    hosts.start()
    hosts.gather()
    join(f"127.0.0.1:{port + 1}", 2, rank)
    built = build(config, source, silent, leader=hosts)
    engine = built.engine
    counter.start()
    sizes, send = [], hosts.send
    hosts.send = lambda number, call: (sizes.append(len(call)), send(number, call))[1]
    told = workload(engine) | {"routed": routed(engine)}
    told |= {
        "step_ms": decode(engine, args.tokens),
        "position_ways": built.deployment.layout.position_ways,
    }
    hosts.close()
    return told | {"compiles": counter.count, "message_bytes_p50": statistics.median(sizes)}


def message_cost(num_seqs: int, repeats: int = 200) -> dict[str, float]:
    """Bytes and microseconds of writing the message of a decode step; medians."""
    num_blocks, recent = 512, Recent()
    flat = np.zeros(num_seqs * (num_blocks + 24), np.int32)  # as many scalars as a step has
    table = flat[24 * num_seqs :].reshape(num_seqs, num_blocks)
    sizes, seconds = [], []
    for number in range(1, 1 + repeats):
        flat[: 4 * num_seqs] += 1  # positions, slots, lengths, positions that are sampled
        table[number % 16 :: 16, number // 16] = number  # a block of 16 tokens is full
        begin = time.perf_counter()
        call = recent.encode(Step(number, NOBODY, 0, 1, (flat.copy(),)))
        seconds.append(time.perf_counter() - begin)
        sizes.append(len(call))
    micros = round(1e6 * statistics.median(seconds[1:]), 1)
    return {"bytes": statistics.median(sizes[1:]), "microseconds": micros}


def be_role(pipe: Connection, role: str, *arguments: Any) -> None:
    """Be one of the processes."""
    pipe.send(run_role(role, *arguments))
    os._exit(0)  # JAX would wait for the other process


def run_together(roles: Sequence[str], *arguments: Any) -> dict[str, dict[str, Any]]:
    """Return what processes say that run at once. Raises EOFError if one fails."""
    context, running = multiprocessing.get_context("spawn"), {}
    for role in roles:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=be_role, args=(theirs, role, *arguments))
        process.start()
        theirs.close()
        running[role] = ours, process
    try:
        return {role: pipe.recv() for role, (pipe, _) in running.items()}
    finally:
        for _, process in running.values():
            process.kill()


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Run all three, the pair after the one."""
    with tempfile.TemporaryDirectory(prefix="shiftjax-lora-") as folder:
        args.modules = modules_of(args, Path(folder)) if args.loras else None
        arguments = args, free_port(), os.urandom(16).hex()
        results = run_together(("alone",), *arguments)
        results |= run_together(("leader", "follower"), *arguments)
    alone, leader = results["alone"], results["leader"]
    same = ("preemptions", "prefix_hit_tokens", "drafted_steps", "steps", "message_bytes_p50")
    return {
        "tokens_equal": alone["tokens"] == leader["tokens"],
        "logprobs_equal": alone["logprobs"] == leader["logprobs"],
        "routed_equal": alone["routed"] == leader["routed"],
        "routed_pairs": sum(map(sum, leader["routed"])),
        "devices": 2 * args.devices,
        "position_ways": leader["position_ways"],
        **{name: leader[name] for name in same},
        "compiles": [leader["compiles"], results["follower"]["compiles"]],
        "step_ms": {"one process": alone["step_ms"], "two": leader["step_ms"]},
    }


def measure(args: argparse.Namespace) -> Generator[dict[str, Any], None, dict[str, Any]]:
    """Yield what messages cost; return how the pair compares with the one."""
    args.tokens = min(args.tokens, 20) if args.quick else args.tokens
    for num_seqs in MESSAGES:
        yield {"message_of_sequences": num_seqs} | message_cost(num_seqs)
    return compare(args)
