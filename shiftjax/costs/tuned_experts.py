"""Shapes of experts that vLLM has tuned the tiles of Triton's kernels for. No JAX.

Of others it takes default tiles, whose rate is `Machine.fused_expert_flops`. There is a file for
each number of experts, width on a device and kind of device in its `fused_moe/configs`; here are
those of 128 experts in bfloat16, with what tuning brings: fitted to `moe_perf` of
ai-dynamo/aiconfigurator 0.7.0 (vLLM 0.12, routing by a power law, 1,024 to 8,192 tokens, hidden
sizes of 2,048 and 4,096), which single rows are 6% to 16% off.
"""

from collections.abc import Mapping

TUNED: Mapping[tuple[str, int, int], float] = {
    ("h100x8", 128, 192): 1.7,
    ("h200x8", 128, 192): 1.25,
    ("h200x8", 128, 384): 1.65,
    ("h200x8", 128, 768): 1.85,
    ("a100x8", 128, 192): 1.95,
}
"""By machine, experts and columns of each on a device: the rate over that of default tiles."""


def tuned_rate(machine: str, num_experts: int, width: int, fmt: str) -> float:
    """How many times the rate of default tiles such experts reach; 1 where none are tuned."""
    return TUNED.get((machine, num_experts, width), 1.0) if fmt == "bfloat16" else 1.0
