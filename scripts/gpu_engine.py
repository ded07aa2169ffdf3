"""The engine on GPUs: how fast the steps of models are.

A decode step must read every weight (of the embedding only some rows, of experts those that any
token has) and the keys and values of its sequences; a prefill step must multiply by every weight.
The limits are these bytes over the measured copy bandwidth, and these operations over the measured
rate of a GEMM of bfloat16, whatever the formats are. The weights are random, but the same
everywhere (`gpu_weights`): `scripts/peers/hf_gpu.py` measures Hugging Face transformers with them.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from cases.throughput_work import prefill_flops
from gpu_parts import ENGINES, LARGEST, SERVED, Row, Run
from gpu_profile import profile
from gpu_weights import hashed_weights, prompt

from pallas_kernels.measure import Ceilings
from serving.bench.steps import Case, generate, plan_of
from shiftjax.arch.config import ModelConfig
from shiftjax.arch.formats import Formats
from shiftjax.arch.presets import PRESETS
from shiftjax.build import Built, start
from shiftjax.config import EngineConfig
from shiftjax.core.engine import Engine
from shiftjax.core.request import StepPlan
from shiftjax.costs.memory import kv_token_bytes, weight_bytes
from shiftjax.deploy.deployment import Deployment
from shiftjax.deploy.resolve import resolve
from shiftjax.device.backend import DeviceBackend
from shiftjax.device.group_memory import GroupMemory
from shiftjax.device.groups import Placed, define_steps
from shiftjax.device.pool import DevicePools
from shiftjax.device.runner import DeviceRunner
from shiftjax.device.sizing import measure
from shiftjax.parallel.grid import Mode
from shiftjax.parallel.layout import Layout
from shiftjax.parallel.stored import dtype_of, stored_weights
from shiftjax.weights.hf_config import to_json
from shiftjax.weights.random import RandomSource

BLOCK_SIZE = 16
WEIGHTS_SHARE = 0.85  # of a device's memory at most, beside keys, values and temporaries
PROFILED = 3  # steps


class Sizes(NamedTuple):
    """What to measure of a model."""

    batches: tuple[int, ...]  # sequences that decode
    context: int  # tokens of each
    prompts: tuple[int, ...]  # tokens of a prompt that is computed in one step
    serve: tuple[int, int, int]  # requests, tokens of each prompt, tokens to generate
    repeats: int

    @property
    def num_blocks(self) -> int:
        """KV blocks for the hungriest of these."""
        requests, before, after = self.serve
        served = requests * (before + after + BLOCK_SIZE)
        tokens = max(self.batches[-1] * self.context, served, *self.prompts)
        return 1 + -(-tokens // BLOCK_SIZE)

    @property
    def token_buckets(self) -> list[int]:
        """One for each batch and prompt."""
        return sorted({*(max(8, batch) for batch in self.batches), *self.prompts})


def formats_with(options: Mapping[str, str]) -> Formats:
    """Return the number formats of an engine with these settings."""
    weights, kv = options.get("quantization", "bfloat16"), options.get("kv_cache_dtype", "bfloat16")
    return Formats(weights, kv)


def largest_model(
    names: Sequence[str], options: Mapping[str, str], memory_bytes: float
) -> ModelConfig | None:
    """Return the first of these presets whose weights leave room on one device; None: none does."""
    for model in map(PRESETS.get, names):
        size = model and weight_bytes(Layout(model, 1, 1), formats_with(options))
        if size and size <= WEIGHTS_SHARE * memory_bytes:
            return model
    return None


def make_engine(
    model: ModelConfig, sizes: Sizes, options: Mapping[str, Any], sp: int = 1, tp: int = 1
) -> Built:
    """Return an engine on the first sp * tp devices, on which the weights are made.

    `options`: settings of the engine beside those that the sizes ask for.
    """
    config = EngineConfig.from_options(
        dtype="bfloat16",
        devices=sp * tp,
        sp=sp,
        tp=tp,
        max_model_len=max(sizes.context, *sizes.prompts, sum(sizes.serve[1:])),
        max_num_seqs=max(*sizes.batches, sizes.serve[0]),
        max_num_batched_tokens=sizes.token_buckets[-1],
        token_buckets=sizes.token_buckets,
        block_size=BLOCK_SIZE,
        num_blocks=sizes.num_blocks,
        prefix_caching=False,
        **options,
    )
    devices = jax.devices()[: sp * tp]
    deployment = resolve(config, model, measure(devices))
    return start(HashedBackend(devices, RandomSource(model), lambda *_: None), [deployment])


class HashedBackend(DeviceBackend):
    """Devices that make their weights themselves: no host makes those of a large model in time."""

    def place(self, deployment: Deployment) -> list[Placed]:
        """Return the only group."""
        ((group, step),) = define_steps(deployment, self.devices).items()
        placed = Placed(group, step, GroupMemory(step.weights, step.mesh, DevicePools()))
        placed.memory.fill(hashed_weights(step))
        return [placed]


def make_plan(seqs: int, context: int, num_tokens: int) -> StepPlan:
    """Return a step of `seqs` sequences of `context` tokens, the last `num_tokens` of them new."""
    return plan_of(Case("", ((context - num_tokens, num_tokens),) * seqs), context)


def median_seconds(action: Callable[[], Any], repeats: int) -> float:
    """Median seconds of one of the `repeats` steps of an action; the first action is not counted.

    Steps depend on each other through the pools, so a row of them has no gaps but the host's.
    """
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        jax.block_until_ready(action())
        seconds.append((time.perf_counter() - start) / repeats)
    return statistics.median(seconds[1:])


Compiled = tuple[Mode, Any]  # a mode and a step compiled for it


def last_tokens_of(runner: DeviceRunner, plan: StepPlan, mode: Mode) -> jax.Array:
    """Run a step; what it samples."""
    handle = runner.run(plan, mode, None)
    assert handle is not None, "it computes something"
    return handle.last_tokens


def make_chain(runner: DeviceRunner, plan: StepPlan) -> Callable[[list[Compiled]], Any]:
    """Return a function that runs the plan once by each step, the host doing nothing between."""
    program, memory = runner.program_for(plan), runner.memory
    last_tokens = last_tokens_of(runner, plan, runner.step.layout.shift)
    flat = jax.device_put(runner.prepare(plan).flat, last_tokens.sharding)

    def chain(steps: list[Compiled]) -> Any:
        result: Any = None
        for mode, step in steps:
            arguments = memory.params(mode), memory.pools, last_tokens, flat, program.tables
            memory.pools, *result = step(*arguments)
        return result

    return chain


def step_seconds(runner: DeviceRunner, plan: StepPlan, repeats: int) -> dict[str, float]:
    """Time a step: on the device alone, and as the engine's runner dispatches it."""
    chain, shift = make_chain(runner, plan), runner.step.layout.shift
    step = shift, runner.compiled(runner.program_for(plan), shift)

    def dispatched() -> Any:
        handle = None
        for _ in range(repeats):
            handle = runner.run(plan, shift, handle)
        return handle and handle.last_tokens

    device = median_seconds(lambda: chain([step] * repeats), repeats)
    engine = median_seconds(dispatched, repeats)
    return {"device_seconds": device, "engine_seconds": engine, "bubble_seconds": engine - device}


def engine_rows(
    model: ModelConfig, sizes: Sizes, options: Mapping[str, str], run: Run, what: Sequence[str] = ()
) -> Iterator[Row]:
    """Yield how long an engine took to start, and steps of its model, on one GPU.

    `what` else: `users`: what these see; `switch`: changes of the mode; `profiles`: the kernels of
    steps; `all`: over all GPUs, in (1, number) beside (2, number / 2), since the fewest ways to
    split tokens leave most room beside the weights.
    """
    begin, ceilings, count = time.perf_counter(), run.ceilings, jax.device_count()
    built = make_engine(model, sizes, options, *((2, count // 2) if "all" in what else (1, 1)))
    seconds = time.perf_counter() - begin
    (runner,) = built.runners
    names = {"model": runner.step.layout.model.name, "attention": runner.step.attention.name}
    yield {"row": "start", "seconds": seconds} | names
    yield from step_rows(runner, sizes, ceilings)
    if "users" in what:
        yield greedy_row(built.engine)
        yield serve_row(built.engine, runner, sizes, ceilings)
    if "switch" in what:
        yield switch_row(runner, sizes)
    if "profiles" in what:
        yield from profile_rows(runner, sizes, run.out)


def decode_bytes(layout: Layout, formats: Formats, batch: int, context: int) -> float:
    """Bytes that one device reads in a decode step of `batch` sequences of `context` tokens."""
    experts = layout.model.experts
    chosen = 1 - (1 - experts.per_token / experts.num) ** batch if experts else 1.0
    num_bytes = batch * context * kv_token_bytes(layout, formats)
    for weight in stored_weights(layout, formats):
        if weight.name != "embed":
            share = chosen if weight.axes[0] == "experts" else 1.0
            size = weight.num_elements * dtype_of(weight, formats).itemsize
            num_bytes += share * size / layout.ways(layout.shift)
    return num_bytes


def profile_rows(runner: DeviceRunner, sizes: Sizes, folder: Path) -> Iterator[Row]:
    """Yield which kernels the fewest and the most decodes are, and a prompt; files are kept."""
    batches = {sizes.batches[0], sizes.batches[-1]}
    plans = {f"decode of {n}": make_plan(n, sizes.context, 1) for n in sorted(batches)}
    plans |= {f"prefill of {n:,}": make_plan(1, n, n) for n in sizes.prompts}
    shift = runner.step.layout.shift
    for name, plan in plans.items():
        chain = make_chain(runner, plan)
        steps = [(shift, runner.compiled(runner.program_for(plan), shift))] * PROFILED
        keep = folder / f"{runner.step.layout.model.name}-{name.replace(' ', '_')}.xplane.pb"
        yield {"row": f"profile of {name}"} | profile(partial(chain, steps), PROFILED, keep)


def _step_row(runner: DeviceRunner, what: Row, plan: StepPlan, repeats: int, limit: float) -> Row:
    """Return the times of a step beside their limit in seconds."""
    found = step_seconds(runner, plan, repeats)
    percent = {"percent_of_ceiling": 100 * limit / found["device_seconds"]}
    return what | {"limit_seconds": limit} | found | percent


def step_rows(runner: DeviceRunner, sizes: Sizes, ceilings: Ceilings) -> Iterator[Row]:
    """Yield a row for each batch, a token for each of so many sequences; then for each prompt."""
    layout, context = runner.step.layout, sizes.context
    for batch in sizes.batches:
        read = decode_bytes(layout, runner.step.model.formats, batch, context)
        what = {"row": f"decode of {batch}", "batch": batch, "context": context}
        limit = read / ceilings.bytes_per_second
        yield _step_row(runner, what, make_plan(batch, context, 1), sizes.repeats, limit)
    for length in sizes.prompts:
        limit = prefill_flops(layout.model, length) / ceilings.flops_per_second
        what, plan = (
            {"row": f"prefill of {length:,}", "tokens": length},
            make_plan(1, length, length),
        )
        row = _step_row(runner, what, plan, max(2, sizes.repeats // 4), limit)
        yield row | {"tokens_per_second": length / row["device_seconds"]}


def greedy_row(engine: Engine, num_tokens: int = 16) -> Row:
    """Return what one prompt becomes: to be compared with what the peer makes of it."""
    (tokens,) = generate(engine, [prompt(0, 32)], num_tokens)
    return {"row": "greedy", "token_ids": tokens}


def serve_row(engine: Engine, runner: DeviceRunner, sizes: Sizes, ceilings: Ceilings) -> Row:
    """Serve requests that are all there at once, through the whole engine.

    The limit: prompts one after the other at the GEMM rate, then steps of all sequences, half of
    their output long, at the copy bandwidth.
    """
    count, before, after = sizes.serve
    prompts = [prompt(i, before) for i in range(count)]
    generate(engine, prompts, 2)  # allocations, first calls
    start = time.perf_counter()
    generate(engine, prompts, after)
    seconds = time.perf_counter() - start
    layout, formats = runner.step.layout, runner.step.model.formats
    read = after * decode_bytes(layout, formats, count, before + after // 2)
    prefill = count * prefill_flops(layout.model, before) / ceilings.flops_per_second
    limit = prefill + read / ceilings.bytes_per_second
    what = {"row": "serve", "requests": count, "prompt": before, "output": after}
    rate = {"output_tokens_per_second": count * after / seconds}
    return what | {"limit_seconds": limit, "seconds": seconds} | rate


def switch_row(runner: DeviceRunner, sizes: Sizes) -> Row:
    """Time steps that alternate between the modes, against steps that stay in one.

    With one device the modes are one configuration, compiled twice: what is left is the change of
    the program. With several they are (SP, TP) and (1, SP * TP), over the same weights and pools.
    """
    layout, batch = runner.step.layout, sizes.batches[-1]
    plan = make_plan(batch, sizes.context, 1)
    program = runner.program_for(plan)
    ends = [layout.base, layout.shift]
    base, shift = ((mode, runner.compiled(program, mode)) for mode in ends)
    if layout.sp == 1:
        pools = runner.memory.pools
        again = runner.step.compile(layout.base, pools, program.packing, program.tables)
        base = layout.base, again
    repeats = 2 * sizes.repeats
    orders = {"base": [base] * 2, "shift": [shift] * 2, "alternating": [base, shift]}
    chain = make_chain(runner, plan)
    seconds = {
        f"{name}_seconds": median_seconds(lambda order=order: chain(order * sizes.repeats), repeats)
        for name, order in orders.items()
    }
    alone = (seconds["base_seconds"] + seconds["shift_seconds"]) / 2
    tokens = [np.asarray(last_tokens_of(runner, plan, mode))[:batch] for mode in ends]
    what = {"row": "switch", "devices": layout.num_devices, "sp": layout.sp, "tp": layout.tp}
    cost = {"switch_seconds": seconds["alternating_seconds"] - alone}
    same = {"same_tokens": int((tokens[0] == tokens[1]).sum()), "batch": batch}
    return what | seconds | cost | same


# ---------------------------------------------------------------------- parts of the run


def engine(options: dict[str, str], run: Run) -> Iterator[Row]:
    """Steps of a Llama-8B; as it is served, serving and changes of mode, too."""
    model, users = PRESETS["llama-8b"], options in [ENGINES[name] for name in SERVED]
    sizes = Sizes((1, 64), 1024, (8192,), (64, 512, 128), 20)
    if not users:
        sizes = sizes._replace(prompts=(), serve=(1, 16, 16))
    if run.dry and not users:
        yield {"skipped": "a CPU has neither the kernels nor the options of GPUs"}
        return
    if run.dry:
        sizes, model, options = Sizes((2,), 64, (32,), (3, 20, 4), 2), PRESETS["tiny"], {}
    if users:
        described = json.dumps(to_json(model, "bfloat16"))
        (run.out / "hf_config.json").write_text(described, encoding="utf-8")
    yield from engine_rows(model, sizes, options, run, ("users", "switch", "profiles") * users)


def large_engine(kind: str, run: Run) -> Iterator[Row]:
    """Steps of the first model of a list that fits the device, and where their time goes."""
    names, dry_name, formats, *counts = LARGEST[kind]
    memory_bytes = measure(jax.devices()[:1]).total_bytes
    model = PRESETS[dry_name] if run.dry else largest_model(names, formats, memory_bytes)
    if model is None:
        yield {"skipped": f"{memory_bytes / 1e9:.0f} GB are too few for {' and '.join(names)}"}
        return
    sizes = Sizes(*counts, serve=(1, 16, 16), repeats=10)
    if run.dry:
        sizes = Sizes((2,), 64, (32,) if sizes.prompts else (), (1, 16, 16), 2)
    options = formats if run.dry else ENGINES["pallas, one graph"] | formats
    yield from engine_rows(model, sizes, options, run, ("profiles",))


def large_model(options: dict[str, str], run: Run) -> Iterator[Row]:
    """Steps of a Llama-70B over all GPUs, in BASE and in SHIFT, which must agree."""
    model, sizes = PRESETS["llama-70b"], Sizes((64,), 1024, (), (64, 512, 128), 10)
    if run.dry and options == ENGINES["pallas, XLA's options"]:
        yield {"skipped": "a CPU has no options of GPUs"}
        return
    if run.dry:
        model, sizes, options = PRESETS["tiny"], Sizes((2,), 64, (), (3, 20, 4), 2), {}
    yield from engine_rows(model, sizes, options, run, ("switch", "all"))
