"""How far the devices of a group split the experts that they store. No JAX.

They are stored as the mode uses them that splits them least of all whose share fits; steps split
them further where that is quicker (`costs/expert_modes.py`). What no step uses is not stored.
"""

import math
from collections.abc import Callable
from dataclasses import replace

from shiftjax.arch.config import ModelConfig, stages_of
from shiftjax.arch.formats import Formats
from shiftjax.config import ParallelOptions
from shiftjax.costs.buckets import doubling
from shiftjax.costs.expert_modes import ExpertModes, by_bytes
from shiftjax.costs.group_costs import GroupCosts
from shiftjax.costs.memory import weight_bytes
from shiftjax.deploy.deployment import Deployment
from shiftjax.options import ConfigError
from shiftjax.parallel.layout import Layout


def expert_problems(parallel: ParallelOptions, model: ModelConfig, *, is_fleet: bool) -> list[str]:
    """What is wrong with the settings of experts for this model, in groups or in a fleet."""
    if parallel.experts == "auto":
        return []
    given = f"experts = {parallel.experts}"
    if parallel.experts not in ("whole", "all") and not ways_of(parallel):
        return [f"{given} is none of auto, whole, all, and no number of ways"]
    if model.experts is None:
        return [f"{given} has no meaning for {model.name}, which has none: drop it"]
    if parallel.experts != "all" and parallel.gathers:
        words = "with weights = gather each device stores 1/P of them"
        return [f"{given} cannot be had: {words}; use experts = all, or weights = alias"]
    if is_fleet and ways_of(parallel):
        words = "a unit of a fleet stores whole ones, for groups of all widths"
        return [f"{given} cannot be had: {words}; use experts = auto, whole or all"]
    return []


def experts_setting(deployment: Deployment) -> str | None:
    """What `experts` has to be for a deployment's group; None: there is nothing to say."""
    layout = deployment.layout
    if layout.model.experts is None or layout.sp == 1 or deployment.widths or layout.gathers:
        return None
    return str(layout.least_ways) if layout.experts_as is None else "whole"


def ways_of(parallel: ParallelOptions) -> int:
    """How many ways experts are split at least; 0: the settings give no number."""
    return int(parallel.experts) if parallel.experts.isascii() and parallel.experts.isdigit() else 0


def with_experts(
    layout: Layout, parallel: ParallelOptions, formats: Formats, widths: tuple[int, ...], room: int
) -> Layout:
    """Return the layout of a group, or of one of a fleet of `widths`, with its experts stored.

    As the settings say; `auto` and a forced degree split them least of all whose share of the
    weights fits in `room` bytes of a device, or over all devices where none does. Raises
    ConfigError for a number of ways that the group cannot split them.
    """
    if layout.model.experts is None or parallel.experts == "all" or layout.gathers:
        return layout
    if widths:  # whole in every unit, whatever steps do
        least = math.lcm(*widths)
    elif parallel.experts == "whole":
        least = layout.sp
    elif ways := ways_of(parallel):
        possible = {layout.ways(mode): mode.sp for mode in layout.modes}
        if ways not in possible:
            given = f"experts = {ways}: sp = {layout.sp} and tp = {layout.tp} can split them"
            raise ConfigError([f"{given} {' or '.join(map(str, sorted(possible)))} ways"])
        least = possible[ways]
    else:
        copies = parallel.shift_weights is not None and parallel.experts_as is None
        least = 1 if copies else _least_that_fits(layout, parallel.pp, formats, room)
    forced = least if parallel.experts == "whole" else parallel.experts_as
    return replace(layout, experts_sp=least, experts_as=forced)


def _least_that_fits(layout: Layout, pp: int, formats: Formats, room: int) -> int:
    models = stages_of(layout.model, pp)
    for mode in layout.modes:
        split = replace(layout, experts_sp=mode.sp)
        stages = (replace(split, model=model) for model in models)
        if max(weight_bytes(stage, formats) for stage in stages) <= room:
            return mode.sp
    return 1


def as_used(
    deployment: Deployment, costs_of: Callable[[Deployment], GroupCosts | None]
) -> Deployment:
    """Return the deployment with experts split as far as all of its steps use them.

    `costs_of` gives the costs by which its steps are chosen; None: they are unknown.
    """
    layout = deployment.layout
    if layout.experts_sp == 1 or layout.experts_as is not None or deployment.widths:
        return deployment
    if (costs := costs_of(deployment)) is None:
        layouts = (stage.layout for stage in deployment.stages)
        choices = [ExpertModes(each, by_bytes(deployment.formats)) for each in layouts]
    else:
        choices = [stage.expert_modes for stage in costs.stages]
    sizes = deployment.token_buckets or doubling(deployment.max_num_batched_tokens)
    used = {choose(mode, n).sp for choose in choices for mode in layout.modes for n in sizes}
    return replace(deployment, layout=replace(layout, experts_sp=math.lcm(*used)))
