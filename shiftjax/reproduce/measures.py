"""What several papers measure: requests alone, full machines, rates. No JAX."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

from shiftjax.deploy.deployment import Deployment
from shiftjax.sim.drafts import AcceptanceModel
from shiftjax.sim.estimate import Workload, saturated_tokens_per_second
from shiftjax.sim.experiments import target_from
from shiftjax.sim.modelled import Target, cost_model, memory_of
from shiftjax.sim.named import deploy
from shiftjax.sim.replay import replay
from shiftjax.sim.replay_metrics import makespan
from shiftjax.sim.trace import TraceRequest

LONGEST = 131_072  # tokens that models take here; those of Qwen by YaRN
VLLM_BUDGETS: Mapping[str, Any] = {"max_num_seqs": 1024, "max_num_batched_tokens": 8192}
"""Those of `vllm serve` on a device of 70 GiB and more that is no A100."""


@cache
def target(
    model: str, machine: str = "h200x8", dtype: str = "fp8", kv: str = "bfloat16", hosts: int = 1
) -> Target:
    """A model by vLLM on a machine; weights in `dtype`, the cache in `kv`."""
    names = {"model": model, "machine": machine, "dtype": dtype, "kv_cache_dtype": kv}
    found = target_from(names | {"engine": "vllm-sort", "hosts": hosts})
    length = max(LONGEST, found.model.max_position_embeddings)
    longer = replace(found.model, max_position_embeddings=length)
    return replace(found, model=longer, engine=found.engine.completions)


class Latency(NamedTuple):
    """Of one request; milliseconds."""

    ttft: float
    tpot: float


def alone(
    of: Target,
    deployment: Deployment,
    prompt: int,
    output: int,
    acceptance: AcceptanceModel | None = None,
) -> Latency:
    """What one request gets with nothing beside it, of so many tokens in and out."""
    request = [TraceRequest(0.0, prompt, output)]
    (one,) = replay(request, of, deployment, acceptance=acceptance).requests
    return Latency(1e3 * one.ttft, 1e3 * (one.tpot or 0.0))


def batch_rate(of: Target, deployment: Deployment, prompt: int, output: int, count: int) -> float:
    """Tokens per second, in and out, of so many requests that are all there at once."""
    run = replay([TraceRequest(0.0, prompt, output)] * count, of, deployment)
    return count * (prompt + output) / makespan(run)


def steady_rate(of: Target, deployment: Deployment, prompt: int, output: int) -> float:
    """Tokens per second, in and out, of a stream without end, in closed form."""
    costs, memory = cost_model(of, deployment), memory_of(of, deployment)
    return saturated_tokens_per_second(costs, deployment, memory, Workload(prompt, output))


def by_name(of: Target, names: Mapping[str, str], **budgets: Any) -> dict[str, Deployment]:
    """Deployments of what `names` spells (`sim/named.py`), with the budgets of `vllm serve`."""
    return {name: deploy(of, text, **{**VLLM_BUDGETS, **budgets}) for name, text in names.items()}
