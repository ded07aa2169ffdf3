"""Which deployments fit a machine and what each would do, in closed form. No JAX."""

from dataclasses import dataclass, replace
from typing import Any

from shiftjax.control.deployment import Deployment
from shiftjax.costs.memory import Memory
from shiftjax.costs.stages import GroupCosts
from shiftjax.costs.step import Work
from shiftjax.options import ConfigError
from shiftjax.sim.deployment import Target, cost_model, deploy, least_tp, memory_of, modes_of


@dataclass(frozen=True)
class Workload:
    """The requests that a plan is made for, all alike."""

    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(frozen=True)
class Estimate:
    """One deployment under one workload. A deployment that shifts takes the better mode."""

    deployment: Deployment
    memory: Memory
    fits: bool
    ttft_seconds: float  # one request alone
    tpot_seconds: float  # one request alone
    tokens_per_second: float  # input and output, saturated, all replicas

    def row(self) -> dict[str, Any]:
        """For a table or a file."""
        memory, gigabyte = self.memory, 1e9
        return {
            "name": self.deployment.name,
            "dp": self.deployment.dp,
            "sp": self.deployment.sp,
            "tp": self.deployment.tp,
            "fits": self.fits,
            "weights_gb": memory.weight_bytes / gigabyte,
            "shift_copy_gb": memory.shift_weight_bytes / gigabyte,
            "workspace_gb": memory.workspace_bytes / gigabyte,
            "kv_gb": memory.kv_bytes / gigabyte,
            "kv_tokens": memory.num_kv_tokens * self.deployment.dp,
            "ttft_seconds": self.ttft_seconds,
            "tpot_seconds": self.tpot_seconds,
            "tokens_per_second": self.tokens_per_second,
        }


def estimate(target: Target, deployment: Deployment, workload: Workload) -> Estimate:
    """What a deployment can hold and how quick it is.

    Raises ConfigError for pipeline stages, whose steps the closed form does not know.
    """
    if deployment.pp > 1:
        words = f"pp = {deployment.pp} is not planned for: ask shiftjax mesh simulate, or drop it"
        raise ConfigError([f"{deployment.name}: {words}"])
    memory, costs = memory_of(target, deployment), cost_model(target, deployment)
    prompt, output = workload.num_prompt_tokens, workload.num_output_tokens
    fits = memory.num_kv_tokens >= prompt + output
    if not fits:
        return Estimate(deployment, memory, False, 0.0, 0.0, 0.0)
    decode = Work.decode(1, prompt + output // 2)
    modes = modes_of(costs, deployment)
    return Estimate(
        deployment,
        memory,
        True,
        ttft_seconds=_prefill_seconds(costs, deployment, prompt),
        tpot_seconds=min(costs.seconds(mode, decode) for mode in modes),
        tokens_per_second=saturated_tokens_per_second(costs, deployment, memory, workload),
    )


def _prefill_seconds(costs: GroupCosts, deployment: Deployment, num_tokens: int) -> float:
    """A prompt alone, in chunks of the step's budget."""
    total, start = 0.0, 0
    while start < num_tokens:
        chunk = min(num_tokens - start, deployment.max_num_batched_tokens)
        work = Work.prefill(chunk, start)
        total += min(costs.seconds(mode, work) for mode in modes_of(costs, deployment))
        start += chunk
    return total


def saturated_tokens_per_second(
    costs: GroupCosts, deployment: Deployment, memory: Memory, workload: Workload
) -> float:
    """Throughput of a stream that never ends, of all replicas.

    With B sequences running, a step decodes B tokens and, since a request brings `prompt` tokens
    every `output` steps, computes B prompt / output tokens of prompts. B is bounded by sequences,
    by the step's tokens and by the KV cache, in which a sequence holds half its output on average.
    """
    prompt, output = workload.num_prompt_tokens, workload.num_output_tokens
    per_sequence = 1 + prompt / output
    running = min(
        deployment.max_num_seqs,
        deployment.max_num_batched_tokens / per_sequence,
        memory.num_kv_tokens / (prompt + output / 2),
    )
    running = max(1, int(running))
    chunks = running * prompt / output
    work = Work(
        num_tokens=round(running + chunks),
        num_rows=running,
        num_sequences=running,
        context_tokens=round(running * (prompt + output / 2)),
        chunk_context_tokens=round(chunks),
        attention_pairs=round(chunks * prompt / 2),
    )
    seconds = min(costs.seconds(mode, work) for mode in modes_of(costs, deployment))
    return deployment.dp * work.num_tokens / seconds


def all_deployments(target: Target, **budgets: Any) -> list[Deployment]:
    """Every (dp, sp, tp) of the machine with powers of two; those with SP shift."""
    devices = target.machine.num_devices
    sizes = [size for size in (2**k for k in range(devices.bit_length())) if devices % size == 0]
    most = target.model.num_heads
    return [
        deploy(
            target,
            f"dp{devices // (sp * tp)} sp{sp} tp{tp}",
            (devices // (sp * tp), sp, tp),
            "oracle" if sp > 1 else "base",
            **budgets,
        )
        for sp in sizes
        for tp in sizes
        if devices % (sp * tp) == 0 and sp * tp <= most
    ]


def shift_threshold(costs: GroupCosts, most: int = 1 << 16) -> int:
    """The largest step, in tokens, that is quicker in SHIFT, if all larger ones are in BASE.

    For prompt tokens; a step of decodes moves the crossing little, because attention costs the
    same in both modes. 0 where SHIFT never wins, `most` where it always does.
    """

    base, shift = costs.layout.base, costs.layout.shift

    def shift_wins(num_tokens: int) -> bool:
        work = Work.prefill(num_tokens)
        return costs.device_seconds(shift, work) < costs.device_seconds(base, work)

    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if shift_wins(middle) else (low, middle - 1)
    return low


def recommend(target: Target, **budgets: Any) -> tuple[Deployment, str]:
    """The base configuration by the rule, with its threshold, and the reason in one sentence."""
    tp = least_tp(target)
    sp = target.machine.num_devices // tp
    shifting = deploy(target, "recommended", (1, sp, tp), "threshold", **budgets)
    memory, costs = memory_of(target, shifting), cost_model(target, shifting)
    threshold = shift_threshold(costs) if sp > 1 else 0
    weights = (memory.weight_bytes + memory.shift_weight_bytes) / 1e9
    reason = (
        f"TP {tp} is the least whose share of the weights ({weights:.1f} GB of "
        f"{target.machine.memory_bytes / 1e9:.0f} GB) leaves room for KV "
        f"({memory.num_kv_tokens:,} tokens); SP takes the rest ({sp}), because what it moves per "
        f"token shrinks with SP. Steps of up to {threshold} tokens are quicker in SHIFT."
    )
    return replace(shifting, threshold=threshold), reason
