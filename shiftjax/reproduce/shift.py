"""Shift Parallelism (arXiv 2509.16495): vLLM 0.10.1 with DP, TP, SP and Shift on 8 x H200.

FP8 weights and KV; 4,096 tokens in and 250 out where nothing else is said.
"""

from collections.abc import Iterator
from functools import cache

from shiftjax.costs.work import Work
from shiftjax.reproduce.figures import Figure, Options, Published
from shiftjax.sim.estimate import Workload, saturated_tokens_per_second
from shiftjax.sim.experiments import target_from
from shiftjax.sim.modelled import Target, cost_model, memory_of
from shiftjax.sim.named import standard_deployments

PROMPT, OUTPUT = 4096, 250  # tokens
NAMES = ("dp", "tp", "sp", "shift")


@cache
def target(model: str) -> Target:
    """A model in FP8 on the machine of the paper, with vLLM's overhead."""
    names = {"machine": "h200x8", "engine": "vllm", "dtype": "fp8"}
    return target_from({"model": model} | names)


def quiet(paper: Published, options: Options) -> Iterator[Figure]:
    """One request at a time."""
    llama = target("llama-70b")
    costs = cost_model(llama, standard_deployments(llama)["shift"])
    base, shift = costs.layout.base, costs.layout.shift
    tpot = costs.seconds(shift, Work.decode(1, PROMPT + OUTPUT // 2))
    yield paper.beside("quiet-tpot", 1e3 * tpot)
    prompt = Work.prefill(PROMPT)
    ratio = costs.seconds(shift, prompt) / costs.seconds(base, prompt)
    yield paper.beside("quiet-ttft-tp", ratio, "steps alone, without the queue")


def saturated(paper: Published, options: Options) -> Iterator[Figure]:
    """More requests than the machine can take, in closed form."""
    llama = target("llama-70b")
    rate = {}
    for name, each in standard_deployments(llama, NAMES).items():
        costs, memory = cost_model(llama, each), memory_of(llama, each)
        workload = Workload(PROMPT, OUTPUT)
        rate[name] = saturated_tokens_per_second(costs, each, memory, workload)
    for name in ("tp", "shift"):
        yield paper.beside(f"peak-{name}", rate[name] / rate["dp"])


PARTS = {each.__name__: each for each in (quiet, saturated)}
