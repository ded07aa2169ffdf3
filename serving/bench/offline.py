"""`shiftjax bench latency|throughput|startup`: the engine without a server. JAX when it runs.

Prompts are made up, answers are greedy and have exactly the lengths asked for, so that numbers of
different settings compare the same work.
"""

import argparse
import multiprocessing
import tempfile
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from serving.bench.flags import OFFLINE
from serving.bench.load import TOKEN_IDS
from serving.bench.report import open_results, write_json
from serving.run.progress import print_table
from serving.run.start import open_llm
from shiftjax.config import EngineConfig
from shiftjax.core.request import SamplingParams
from shiftjax.options import ConfigError
from shiftjax.sim.columns import percentiles, rates
from shiftjax.sim.trace import TraceRequest

if TYPE_CHECKING:
    from shiftjax.llm import LLM


def run(arguments: argparse.Namespace, config: EngineConfig, sampling: SamplingParams) -> int:
    """Measure and report."""
    counts = {
        name: getattr(arguments, name.replace("-", "_")) for name in OFFLINE[arguments.kind][1]
    }
    wrong = [f"--{name} must be 1 or more, got {n}" for name, n in counts.items() if n < 1]
    if wrong:
        raise ConfigError(wrong)
    open_results(arguments.json)
    if arguments.kind == "startup":
        row = startup(config, counts["starts"])
    else:
        lengths = counts["prompt-tokens"], counts["output-tokens"]
        llm = open_llm(config, arguments.server)
        if arguments.kind == "latency":
            row = latency(llm, counts["batch"], *lengths, counts["rounds"])
        else:
            row = throughput(llm, counts["requests"], *lengths)
        row |= {name: llm.stats()[name] for name in ("mesh", "steps_by_mode")}
    print_table(arguments.kind, row, stderr=arguments.json == "-")
    if arguments.json:
        write_json(arguments.json, row)
    return 0


def answer_seconds(llm: "LLM", first: int, num: int, num_prompt: int, num_output: int) -> float:
    """Seconds for answering `num` prompts that begin differently, so that no prefix is shared."""
    sampling = SamplingParams(max_tokens=num_output, temperature=0, ignore_eos=True)
    request = TraceRequest(0.0, num_prompt, num_output)
    prompts = [request.prompt(first + index, TOKEN_IDS) for index in range(num)]
    start = time.perf_counter()
    llm.generate(prompts, sampling)
    return time.perf_counter() - start


def latency(llm: "LLM", batch: int, num_prompt: int, num_output: int, rounds: int) -> dict:
    """Seconds of a batch from its first prompt to its last token."""
    firsts = range(0, batch * (rounds + 1), batch)  # of which the first warms up
    times = [answer_seconds(llm, first, batch, num_prompt, num_output) for first in firsts][1:]
    mean = sum(times) / rounds
    row = {"batch": batch, "rounds": rounds, "mean_seconds": mean, **percentiles("batch", times)}
    return row | {"seconds_per_output_token": mean / num_output}


def throughput(llm: "LLM", num: int, num_prompt: int, num_output: int) -> dict:
    """Requests and tokens per second."""
    answer_seconds(llm, num, 1, num_prompt, 1)  # warms up
    seconds = answer_seconds(llm, 0, num, num_prompt, num_output)
    row = {"requests": num, "seconds": seconds}
    return row | rates(num, num * num_prompt, num * num_output, seconds)


def startup(config: EngineConfig, starts: int) -> dict:
    """Seconds until an engine is ready, each time in a new process; the first has no cache."""
    with tempfile.TemporaryDirectory() as directory:
        compile_part = replace(config.compile, cache_dir=directory)
        config = replace(config, compile=compile_part)
        with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
            cold, *warm = [pool.apply(_start, (config,)) for _ in range(starts + 1)]
    names = cold.keys()
    return {"cold": cold, "warm_best": {name: min(each[name] for each in warm) for name in names}}


def _start(config: EngineConfig) -> dict[str, float]:
    begin = time.perf_counter()
    stats = open_llm(config).stats()
    total = time.perf_counter() - begin
    parts = {name: stats[name] for name in ("load_seconds", "compile_seconds")}
    return {"total_seconds": total, "cpu_seconds": time.process_time(), **parts}
