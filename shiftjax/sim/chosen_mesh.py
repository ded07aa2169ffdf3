"""Mesh and policy of a model with experts, by costs, where settings leave them open. No JAX.

A dense model's is the rule's (`deploy.resolve.base_rule`): the least TP, and SP over the rest. With
experts a step reads little of the weights for each token, so that what devices tell each other
costs more than a replica does, and the rule's one wide group is far from the best.
"""

import logging
from dataclasses import replace

from shiftjax.arch.contexts import longest_context
from shiftjax.config import SERVER_BUDGETS, EngineConfig
from shiftjax.deploy.expert_storage import experts_setting, ways_of
from shiftjax.options import ConfigError
from shiftjax.sim.best_row import best_of
from shiftjax.sim.estimate import Workload
from shiftjax.sim.kv_positions import with_chosen_split
from shiftjax.sim.modelled import Target
from shiftjax.sim.planning import all_deployments
from shiftjax.sim.stored_experts import estimate_stored

PROMPT, OUTPUT = 4096, 250  # tokens of the requests that a mesh is chosen for
_OWN = (*SERVER_BUDGETS, "block_size", "memory_fraction", "max_model_len", "prefix_caching")
_OWN += ("experts",)
logger = logging.getLogger(__name__)


def leaves_mesh_open(config: EngineConfig, target: Target) -> bool:
    """Whether nothing in the settings says how the devices of one host are grouped."""
    parallel = config.parallel
    says = parallel.sp, parallel.tp, parallel.phases
    return (
        target.model.experts is not None
        and all(each is None for each in says)
        and (parallel.dp, parallel.pp) == (1, 1)
        and not ways_of(parallel)  # a number is one of a mesh
        and not (parallel.gathers or config.fleet.fleet or config.host.is_one_of_several)
        and target.machine.num_hosts == 1
    )


def with_costs(config: EngineConfig, target: Target) -> EngineConfig:
    """Return the settings with what costs say, where they leave it open.

    Whether devices split positions of KV; of a model with experts its mesh and experts, too
    (`with_chosen_mesh`), and the cost policy: a threshold knows base and shift alone, and modes
    between them gather less than base and move less than shift.
    """
    chosen = with_chosen_split(with_chosen_mesh(config, target), target)
    scheduler = config.scheduler
    is_open = scheduler.policy is None and scheduler.shift_threshold is None
    has_modes = chosen.parallel.sp != 1 or config.fleet.fleet
    if target.model.experts is None or not (is_open and has_modes) or config.parallel.phases:
        return chosen
    return replace(chosen, scheduler=replace(scheduler, policy="cost"))


def with_chosen_mesh(config: EngineConfig, target: Target) -> EngineConfig:
    """The settings with the mesh and the experts of the recommended row, where they are open.

    As they are for a dense model, and where nothing fits: whoever resolves them says why.
    """
    if not leaves_mesh_open(config, target):
        return config
    devices = config.parallel.devices or target.machine.num_devices
    target = replace(target, machine=replace(target.machine, num_devices=devices))
    most = longest_context(target.model, config.model.max_model_len)
    prompt = max(1, min(PROMPT, most - OUTPUT))
    workload = Workload(prompt, min(OUTPUT, max(1, most - prompt)))
    given = config.flat()
    own = {name: given[name] for name in _OWN if given[name] is not None}
    try:
        deployments = all_deployments(target, **own, drafts=config.drafts)
    except ConfigError:
        return config
    plain = [each for each in deployments if each.pp == 1 and not each.layout.gathers]
    as_run = replace(target, machine=target.machine.as_run)
    best = best_of([estimate_stored(as_run, each, workload) for each in plain], workload)
    if best is None:
        return config
    dp, sp, tp = (getattr(best.deployment, name) for name in ("dp", "sp", "tp"))
    degrees = {"dp": dp, "sp": sp, "tp": tp}
    experts = experts_setting(best.deployment)
    if config.parallel.experts == "auto" and experts is not None:
        degrees["experts"] = experts
    logger.info(
        "experts on %d devices: %s by predicted costs; flags of these names say others",
        *(devices, ", ".join(f"{name} {value}" for name, value in degrees.items())),
    )
    return replace(config, parallel=replace(config.parallel, **degrees))
