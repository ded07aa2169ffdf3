"""Host time of a decode step, verb by verb: what the device waits for if nothing overlaps.

    python scripts/bench.py host [--steps 300] [--sequences 1 64 256]
    python scripts/bench.py host --device 8        # with the real runner on 8 virtual devices
    python scripts/bench.py host --groups 5 50     # groups of 5 and 50 ms steps beside each other

A step's host work is Python and NumPy over the running sequences, so it grows with their number
and not with the model; EchoRunner makes up the tokens, in no time that is counted:

    schedule   which tokens of which sequences, and their blocks
    choose     the mode
    pack       plan, attention work and sampling parameters as one vector for the device
    commit     new tokens into their sequences, events out

A step of SmolLM2-135M takes two CPU cores 10 ms or more, and a GPU a few: the sum has to stay well
below where nothing overlaps, and below one step where the loop does. Rows are medians in
microseconds, with the 95th percentile of the sum.

With `--device`, `pack` is followed by `dispatch`: the vector goes to the devices and a compiled
step of 30 layers is called, in shift mode: as many arrays as SmolLM2-135M has, but narrow ones, so
that computing takes little. What it computes is waited for, and not counted; the devices have the
host's cores, so this is an upper bound for a host of GPUs.

With `--groups`, the steps of echo runners take the given milliseconds on a clock of their own,
and the row has the steps per second of the first group `alone` and `beside` the others. A group
that steps on its own does as many beside them as alone.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from cases.kit import (
    BLOCK_SIZE,
    THRESHOLD,
    VOCAB_SIZE,
    Row,
    echo_engine,
    greedy,
    medians,
    random_engine,
)

from shiftjax.arch.presets import PRESETS
from shiftjax.core.policies import ThresholdPolicy
from shiftjax.core.request import SequenceState, StepOutput, StepPlan
from shiftjax.core.scheduler import Scheduler
from shiftjax.core.scheduler_config import SchedulerConfig
from shiftjax.costs.buckets import Bucket
from shiftjax.device.pack import step_inputs
from shiftjax.device.pool import PoolOptions
from shiftjax.device.runner import DeviceRunner
from shiftjax.device.sampling_inputs import RowParams, VocabSplit, build_rows, refresh_params
from shiftjax.device.step import Packing
from shiftjax.models.attention_backend import xla_attention
from shiftjax.parallel.grid import Group, Mode
from shiftjax.sim.echo import EchoRunner

VOCAB = VocabSplit(VOCAB_SIZE, VOCAB_SIZE)
HEAD_DIM = 64
PROMPT_TOKENS = 128
WARM_UP_STEPS = 20
LEAST_TOKENS = 8  # the smallest bucket
KEY = np.zeros(2, np.uint32)
MODES = Group(0, 2).modes
ECHO, POLICY = EchoRunner(VOCAB_SIZE), ThresholdPolicy(THRESHOLD)


def make_scheduler(num_sequences: int, num_steps: int) -> Scheduler:
    """A scheduler whose sequences all fit, with that many greedy requests of equal length."""
    num_tokens = num_steps + WARM_UP_STEPS + 2
    blocks_per_seq = -(-(PROMPT_TOKENS + num_tokens) // BLOCK_SIZE)
    num_blocks = num_sequences * blocks_per_seq * 2
    step_tokens = num_sequences * PROMPT_TOKENS
    scheduler = Scheduler(SchedulerConfig(num_blocks, BLOCK_SIZE, num_sequences, step_tokens))
    for number in range(num_sequences):
        prompt = [(number * 31 + i) % VOCAB_SIZE for i in range(PROMPT_TOKENS)]
        request = greedy(number, prompt, num_tokens)
        scheduler.add(request, number, number, PROMPT_TOKENS + num_tokens)
    return scheduler


def timed(seconds: dict[str, float], verb: str, call: Callable[..., Any], *args: Any) -> Any:
    """Call, and note how long it took."""
    start = time.perf_counter()
    result = call(*args)
    seconds[verb] = time.perf_counter() - start
    return result


class Packer:
    """What DeviceRunner does on the host before it hands one vector to the device."""

    def __init__(self, config: SchedulerConfig) -> None:
        rows = config.max_num_seqs
        blocks_per_seq = config.num_blocks // rows
        self.bucket = Bucket(max(rows, LEAST_TOKENS), rows)
        self.pool = PoolOptions(
            config.num_blocks, config.block_size, blocks_per_seq, np.dtype(np.float32)
        )
        self.attention = xla_attention(HEAD_DIM, (None,), config.block_size)
        self.row_params: dict[SequenceState, RowParams] = {}
        self.packing: Packing | None = None

    def __call__(self, plan: StepPlan) -> np.ndarray:
        """Lay out a decode step."""
        self.row_params = refresh_params(plan, self.row_params, VOCAB_SIZE)
        rows = build_rows(plan, self.row_params, self.bucket.rows, VOCAB)
        scalars = rows.scalars
        inputs = step_inputs(
            plan, self.bucket, self.pool, self.attention, scalars, KEY, model=PRESETS["tiny"]
        )
        self.packing = self.packing or Packing.of(inputs)
        return self.packing.pack(inputs)


def one_step(
    scheduler: Scheduler, packer: Packer | None, runner: DeviceRunner | None = None
) -> dict[str, float]:
    """Run the loop without overlap once, also on a device if there is one: seconds by verb."""
    seconds: dict[str, float] = {}
    plan = timed(seconds, "schedule", scheduler.schedule, 0.0)
    mode = timed(seconds, "choose", POLICY.choose, plan, MODES, 0, None)
    if packer is not None:
        if runner is not None:
            packer.bucket = runner.program_for(plan).bucket
        timed(seconds, "pack", packer, plan)
    if runner is not None:
        runner.fetch(timed(seconds, "run", runner.run, plan, runner.step.layout.shift, None))
        seconds["dispatch"] = seconds.pop("run") - seconds["pack"]
    output = ECHO.fetch(ECHO.run(plan, mode, None))
    timed(seconds, "commit", lambda: list(scheduler.commit(plan, mode, output, 0.0)))
    return seconds


def measure_host(runner: DeviceRunner | None, num_sequences: int, num_steps: int) -> Row:
    """Return median microseconds of each verb over decode steps of so many running sequences."""
    scheduler = make_scheduler(num_sequences, num_steps)
    packer = Packer(scheduler.config)
    if runner is not None:
        packer.pool, packer.attention = runner.pool, runner.step.attention
    one_step(scheduler, None)  # all prompts at once
    if len(scheduler.running) != num_sequences:
        raise RuntimeError(f"{len(scheduler.running)} of {num_sequences} sequences run")
    steps = [one_step(scheduler, packer, runner) for _ in range(WARM_UP_STEPS + num_steps)]
    rows = [{verb: 1e6 * each for verb, each in step.items()} for step in steps[WARM_UP_STEPS:]]
    rows = [row | {"sum": sum(row.values())} for row in rows]
    p95 = float(np.percentile([row["sum"] for row in rows], 95))
    return medians(rows, 1) | {"sum_p95": round(p95, 1)}


def start_runner(num_devices: int, most: int) -> DeviceRunner:
    """Return the runner of a narrow model of 30 layers, for steps of up to `most` sequences."""
    narrow = {"hidden_size": 64, "head_dim": 8, "intermediate_size": 128, "vocab_size": 1024}
    sizes = {"max_num_seqs": most, "max_num_batched_tokens": most, "num_blocks": most * 32 + 1}
    sizes |= {"token_buckets": sorted({LEAST_TOKENS, 64, most}), "max_model_len": 512}
    sizes |= {"devices": num_devices, "sp": 1, "tp": num_devices}
    model = replace(PRESETS["smollm2-135m"], **narrow)
    return random_engine(model, **sizes).runners[0]


class SleepingRunner(EchoRunner):
    """Steps that take so many seconds on devices which do one after the other."""

    def __init__(self, seconds: float) -> None:
        super().__init__(VOCAB_SIZE)
        self.seconds, self.idle_at, self.num_ended = seconds, 0.0, 0

    def run(self, plan: StepPlan, mode: Mode, previous_handle: Any) -> Any:
        """Queue it."""
        self.idle_at = max(time.monotonic(), self.idle_at) + self.seconds
        return self.idle_at, super().run(plan, mode, previous_handle and previous_handle[1])

    def is_ready(self, handle: Any) -> bool:
        """Whether its time has passed."""
        return handle[0] <= time.monotonic()

    def fetch(self, handle: Any) -> StepOutput:
        """Sleep until it has."""
        time.sleep(max(0.0, handle[0] - time.monotonic()))
        self.num_ended += 1
        return handle[1]


def steps_per_second(milliseconds: list[float], seconds: float) -> float:
    """Of the first of these groups, each with one long request."""
    runners = [SleepingRunner(each / 1000) for each in milliseconds]
    num_tokens = int(2 * seconds / min(runner.seconds for runner in runners))
    engine = echo_engine(runners, 8, PROMPT_TOKENS, num_tokens + 1, num_tokens)
    for number in range(len(runners)):
        engine.add_request(greedy(number, [1], num_tokens))
    start = time.monotonic()
    while time.monotonic() < start + seconds:
        engine.step(time.monotonic())
    return runners[0].num_ended / (time.monotonic() - start)


def measure_groups(milliseconds: list[float], seconds: float = 1.5) -> Row:
    """Return steps per second of the first group alone and beside the others, in turn: medians."""
    rounds = [
        {
            "alone": steps_per_second(milliseconds[:1], seconds),
            "beside": steps_per_second(milliseconds, seconds),
        }
        for _ in range(3)
    ]
    return medians(rounds, 1)


OPTIONS = {
    "--steps": (300, "decode steps to time"),
    "--sequences": ([1, 64, 256], "running"),
    "--device": (int, "virtual devices to dispatch a real step to"),
    "--groups": ([float], "instead: milliseconds of a step of each group"),
}


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Yield medians for each number of sequences, or steps per second."""
    if args.groups:
        yield measure_groups(args.groups)
        return
    runner = start_runner(args.device, max(args.sequences)) if args.device else None
    for size in args.sequences:
        yield {"sequences": size} | measure_host(runner, size, args.steps)
