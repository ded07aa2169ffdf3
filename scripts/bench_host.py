"""Host time of a decode step, verb by verb: what the device waits for if nothing overlaps.

    python scripts/bench_host.py [--steps 300] [--sequences 1,64,256]

A step's host work is Python and NumPy over the running sequences, so it grows with their number
and not with the model; EchoRunner makes up the tokens, in no time that is counted:

    schedule   which tokens of which sequences, and their blocks
    choose     the mode
    pack       plan, attention work and sampling parameters as one vector for the device
    commit     new tokens into their sequences, events out

A step of SmolLM2-135M takes two CPU cores 10 ms or more, and a GPU a few: the sum has to stay well
below where nothing overlaps, and below one step where the loop does. Prints a table of medians
(and the 95th percentile of the sum), then one line of JSON.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from bench_machine import describe_machine

from shiftjax.control.echo import EchoRunner
from shiftjax.control.policy import ThresholdPolicy
from shiftjax.control.request import Request, SamplingParams, Sequence, StepPlan
from shiftjax.control.scheduler import Scheduler
from shiftjax.control.scheduler_config import SchedulerConfig
from shiftjax.costs.buckets import Bucket
from shiftjax.device.programs import PoolOptions, step_inputs
from shiftjax.device.sampling_inputs import RowParams, build_rows, refresh_params
from shiftjax.device.step import Packing
from shiftjax.models.attention_backend import xla_attention

VOCAB_SIZE = 49_152
BLOCK_SIZE = 16
HEAD_DIM = 64
PROMPT_TOKENS = 128
VERBS = ("schedule", "choose", "pack", "commit")
WARM_UP_STEPS = 20
LEAST_TOKENS = 8  # the smallest bucket
KEY = np.zeros(2, np.uint32)


def make_scheduler(num_sequences: int, num_steps: int) -> Scheduler:
    """A scheduler whose sequences all fit, with that many greedy requests of equal length."""
    num_tokens = num_steps + WARM_UP_STEPS + 2
    blocks_per_seq = -(-(PROMPT_TOKENS + num_tokens) // BLOCK_SIZE)
    config = SchedulerConfig(
        num_blocks=num_sequences * blocks_per_seq * 2,
        block_size=BLOCK_SIZE,
        max_num_seqs=num_sequences,
        max_num_batched_tokens=num_sequences * PROMPT_TOKENS,
    )
    scheduler = Scheduler(config)
    sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    for number in range(num_sequences):
        prompt = [(number * 31 + i) % VOCAB_SIZE for i in range(PROMPT_TOKENS)]
        request = Request(str(number), prompt, sampling)
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
        self.attention = xla_attention(HEAD_DIM, None, config.block_size)
        self.row_params: dict[Sequence, RowParams] = {}
        self.packing: Packing | None = None

    def __call__(self, plan: StepPlan) -> np.ndarray:
        """Lay out a decode step."""
        self.row_params = refresh_params(plan, self.row_params, VOCAB_SIZE)
        rows = build_rows(plan, self.row_params, self.bucket.rows, VOCAB_SIZE)
        inputs = step_inputs(plan, self.bucket, self.pool, self.attention, rows.scalars, KEY)
        self.packing = self.packing or Packing.of(inputs)
        return self.packing.pack(inputs)


def one_step(
    scheduler: Scheduler, runner: EchoRunner, policy: ThresholdPolicy, packer: Packer | None
) -> dict[str, float]:
    """The loop without overlap, once; seconds by verb."""
    seconds: dict[str, float] = {}
    plan = timed(seconds, "schedule", scheduler.schedule, 0.0)
    plan.mode = timed(seconds, "choose", policy.choose, plan, 0, None)
    if packer is not None:
        timed(seconds, "pack", packer, plan)
    output = runner.fetch(runner.run(plan, plan.mode, None))
    timed(seconds, "commit", scheduler.commit, plan, output, 0.0)
    return seconds


def measure(num_sequences: int, num_steps: int) -> dict[str, float]:
    """Median microseconds of each verb over decode steps of so many running sequences."""
    scheduler = make_scheduler(num_sequences, num_steps)
    runner, policy, packer = EchoRunner(VOCAB_SIZE), ThresholdPolicy(256), Packer(scheduler.config)
    one_step(scheduler, runner, policy, None)  # all prompts at once
    if len(scheduler.running) != num_sequences:
        raise RuntimeError(f"{len(scheduler.running)} of {num_sequences} sequences run")
    for _ in range(WARM_UP_STEPS):
        one_step(scheduler, runner, policy, packer)
    steps = [one_step(scheduler, runner, policy, packer) for _ in range(num_steps)]
    medians = {verb: statistics.median(step[verb] for step in steps) for verb in VERBS}
    sums = sorted(sum(step.values()) for step in steps)
    medians |= {"sum": statistics.median(sums), "sum_p95": sums[int(0.95 * len(sums))]}
    return {name: round(seconds * 1e6, 1) for name, seconds in medians.items()}


def main() -> None:
    """Measure each number of sequences and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300, help="decode steps to time")
    parser.add_argument("--sequences", default="1,64,256", help="running sequences, by commas")
    args = parser.parse_args()
    sizes = [int(size) for size in args.sequences.split(",")]
    results = {size: measure(size, args.steps) for size in sizes}
    columns = list(results[sizes[0]])
    print("sequences" + "".join(f"{name:>11s}" for name in columns) + "   microseconds per step")
    for size, medians in results.items():
        print(f"{size:9d}" + "".join(f"{medians[name]:11.1f}" for name in columns))
    machine = describe_machine() | {"load": round(os.getloadavg()[0], 2)}
    print(
        json.dumps(
            {
                "benchmark": "host",
                "unit": "microseconds per step",
                "steps": args.steps,
                "machine": machine,
                "sequences": results,
            }
        )
    )


if __name__ == "__main__":
    main()
