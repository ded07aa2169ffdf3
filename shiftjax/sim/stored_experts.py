"""How far experts are split as they are stored, by what that is worth in requests. No JAX.

Experts that are stored less split make large steps quicker and leave less room for KV. By the
settings alone they are as whole as fits (`deploy/expert_storage.py`). Where costs are known, and
the requests too, the room that they take is weighed against the time that they save.
"""

from dataclasses import replace
from typing import Any

from shiftjax.costs.expert_part import ways_in_words
from shiftjax.costs.step_costs import CostModel
from shiftjax.deploy.deployment import Deployment
from shiftjax.parallel.grid import Mode
from shiftjax.sim.best_row import AS_NEAR, distances
from shiftjax.sim.estimate import Estimate, Workload, estimate
from shiftjax.sim.modelled import Target, cost_model, modes_of

STEPS = (8, 64, 512, 2048, 8192, 16_384, 32_768)  # tokens of steps that tables show
ROWS = 8  # logit rows of such a step


def estimate_stored(target: Target, deployment: Deployment, workload: Workload) -> Estimate:
    """The estimate of a deployment with experts as they are best stored, if it leaves that open.

    Of those that are as near to the best in TTFT, TPOT and tokens per second, the one that leaves
    most room for KV.
    """
    found = [estimate(target, each, workload) for each in storages(deployment)]
    fitting = [one for one in found if one.fits]
    if not fitting:
        return max(found, key=lambda one: one.memory.num_kv_tokens)
    behind = distances(fitting)
    near = (one for far, one in zip(behind, fitting, strict=True) if far <= AS_NEAR * min(behind))
    return min(near, key=lambda one: one.memory.weight_bytes)


def storages(deployment: Deployment) -> list[Deployment]:
    """A deployment, and the same with experts that are split further as they are stored."""
    layout = deployment.layout
    if layout.model.experts is None or layout.experts_as is not None or deployment.widths:
        return [deployment]
    stored = (mode.sp for mode in layout.modes if layout.experts_sp % mode.sp == 0)
    return [replace(deployment, layout=replace(layout, experts_sp=sp)) for sp in stored]


def step_rows(target: Target, deployment: Deployment) -> list[dict[str, Any]]:
    """Rows by tokens of a step: its quickest mode, how many ways that splits experts, and why.

    Beside it the quickest where all devices split experts in every step. Up to the largest step.
    """
    layout = deployment.layout
    if layout.model.experts is None or layout.num_devices == 1:
        return []
    over_all = replace(deployment, layout=replace(layout, experts_sp=1, experts_as=None))
    rows, kinds = [], (deployment, over_all)
    for size in STEPS:
        if size > deployment.max_num_batched_tokens:
            break
        (seconds, mode, stage), (before, other, _) = (_quickest(target, e, size) for e in kinds)
        used = stage.expert_modes.of(mode, size)
        rows.append(
            {
                "step": f"{size:,}",
                "mode": mode.label,
                "experts": ways_in_words(layout.ways(used.mode)),
                "ms": 1e3 * seconds,
                "over all": other.label,
                "ms over all": 1e3 * before,
                "shorter": f"{1 - seconds / before:.0%}",
                "because": used.why,
            }
        )
    return rows


def _quickest(target: Target, deployment: Deployment, size: int) -> tuple[float, Mode, CostModel]:
    """Seconds of a step without attention in its quickest mode, and whose they are."""
    costs = cost_model(target, deployment)
    modes = modes_of(costs, deployment)
    return *min((costs.mode_seconds(mode, (size, ROWS)), mode) for mode in modes), costs.stages[0]
