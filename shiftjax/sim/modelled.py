"""Deployments on a modelled machine: what they hold, and how steps are chosen. No JAX."""

from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

from shiftjax.arch.config import ModelConfig
from shiftjax.arch.formats import Formats
from shiftjax.config import EngineConfig
from shiftjax.core.policies import make_policy
from shiftjax.core.policy import Policy, wanted_modes
from shiftjax.costs.group_costs import GroupCosts
from shiftjax.costs.machine import EngineOverhead, Machine
from shiftjax.costs.machine_files import load_machine
from shiftjax.costs.memory import (
    Memory,
    expert_bytes,
    logit_bytes,
    padding_bytes,
    reserved_bytes,
    sampling_bytes,
    weight_bytes,
)
from shiftjax.deploy.budgets import budgets_for
from shiftjax.deploy.deployment import Deployment, Devices
from shiftjax.deploy.expert_storage import as_used
from shiftjax.deploy.resolve import base_rule, resolve
from shiftjax.options import ConfigError
from shiftjax.parallel.grid import Mode
from shiftjax.parallel.layout import Layout
from shiftjax.parallel.stored import codes_in, stored_weights
from shiftjax.phases.switch_costs import Reload, check_host_links
from shiftjax.sim.drafts import AcceptanceModel, ModelledDrafting

SIMULATED = MappingProxyType({"deterministic": (False,), "phases": (None,)})
"""Settings of which the replay knows these values."""


@dataclass(frozen=True)
class Target:
    """What is deployed, and on what."""

    model: ModelConfig
    machine: Machine
    engine: EngineOverhead
    formats: Formats

    @property
    def devices(self) -> Devices:
        """The machine's, with all of their memory free."""
        memory = int(self.machine.memory_bytes)
        num_devices, per_host = self.machine.num_devices, self.machine.devices_per_host
        is_cpu = self.machine.shared_cores > 0
        more = {"per_host": per_host, "budgets": budgets_for(is_cpu, memory)}
        more |= {"is_priced": not is_cpu, "has_kernels": not is_cpu}
        return Devices(num_devices, memory, memory, **more)

    def reserved_bytes(self, deployment: Deployment) -> int:
        """Of a device, beside weights, temporaries and KV, in its widest group."""
        widest = deployment.widths[-1] if deployment.widths else deployment.sp
        return reserved_bytes(self.machine, self.engine, widest * deployment.tp)


def deploy_config(target: Target, config: EngineConfig) -> Deployment:
    """What the engine would be with these settings on the target's machine.

    Raises ConfigError, also for settings that are not simulated.
    """
    wrong = not_simulated(config)
    believed = config.scheduler.machine
    hosts = target.machine.num_hosts
    if believed is not None and load_machine(believed, hosts) != target.machine:
        name = target.machine.name
        wrong.append(f"machine = {believed} is not simulated on {name}: let them be the same")
    if wrong:
        raise ConfigError(wrong)
    deployment = resolve(config, target.model, target.devices)
    deployment = as_used(deployment, partial(cost_model, target))
    return deployment.sized(memory_of(target, deployment))


def not_simulated(config: EngineConfig) -> list[str]:
    """Which of the settings no replay can follow, in words."""
    given = config.flat()
    return [
        f"{name} = {given[name]} is not simulated, only {' and '.join(map(str, known))}: drop it"
        for name, known in SIMULATED.items()
        if given[name] not in known
    ]


def as_built_by(engine: EngineOverhead, deployment: Deployment) -> Deployment:
    """The same of another engine: one may pad no steps, or copy SHIFT's weights."""
    if not engine.pads_to_buckets:
        deployment = replace(deployment, token_buckets=())
    if engine.copies_shift_weights and deployment.weights == "alias" and not deployment.widths:
        deployment = replace(deployment, weights="replicate")
    return deployment


def cost_model(target: Target, deployment: Deployment) -> GroupCosts:
    """The costs of one replica."""
    return deployment.costs(target.machine, target.engine)


def why_not_stored(target: Target, deployment: Deployment) -> str:
    """Return why devices cannot store the model's weights as codes, or "" where they can.

    A shard that would cut a group of codes with one scale is such a reason.
    """
    try:
        stored_weights(deployment.layout, target.formats)
    except ConfigError as error:
        return error.problems[0]
    return ""


def memory_of(target: Target, deployment: Deployment) -> Memory:
    """What a device holds; `kv_bytes` are those of the blocks, where their number is known.

    Raises ConfigError where these do not fit.
    """
    workspace = target.reserved_bytes(deployment) + sum_buffers_of(target, deployment)
    step = max(each.temporary_bytes for each in deployment.by_width.values())
    rows, vocab_size = deployment.budgets.max_rows, target.model.vocab_size
    if sampling := sampling_bytes(target.engine, rows, vocab_size):  # after a step, in its place
        step = max(sampling, step - logit_bytes(deployment.layout, rows))
    workspace += step
    workspace += padding_bytes(target.engine, deployment.layout, target.formats)
    memory = deployment.memory(target.devices, workspace)
    if target.engine.pool_of_free:
        kept = memory.weight_bytes + memory.shift_weight_bytes + memory.workspace_bytes
        more = int((1 - deployment.memory_fraction) * kept)
        memory = memory._replace(kv_bytes=memory.kv_bytes + more)
    if target.engine.steps_beside_pool:
        outside = int(deployment.memory_fraction * target.reserved_bytes(deployment))
        memory = memory._replace(kv_bytes=memory.kv_bytes + memory.workspace_bytes - outside)
    if not deployment.num_blocks:
        return memory
    pool = deployment.num_blocks * deployment.block_bytes
    if pool > memory.kv_bytes:
        raise ConfigError(
            [
                f"num_blocks = {deployment.num_blocks} take {pool / 1e9:.1f} GB of a device, but "
                f"{memory.kv_bytes / 1e9:.1f} GB are left on {target.machine.name}"
            ]
        )
    return memory._replace(kv_bytes=pool)


def sum_buffers_of(target: Target, deployment: Deployment) -> int:
    """Bytes that the engine's sums hold on a device, of all programs."""
    if not target.engine.buffers_each_sum or not target.machine.reads_peers:
        return 0
    wanted = {}
    for width, of_width in deployment.by_width.items():
        costs = cost_model(target, of_width)
        policy, modes = policy_of(of_width, costs, costs), modes_of(costs, of_width)
        wanted[width] = wanted_modes(policy, of_width.buckets, modes)
    has_switch = target.engine.sums_by_switch and bool(target.machine.switch_sum)
    return deployment.sum_buffer_bytes(wanted, has_switch=has_switch)


def sized_of(target: Target, deployment: Deployment) -> Deployment:
    """With as many KV blocks as fit. Raises ConfigError where none do."""
    memory = memory_of(target, deployment)
    return deployment.with_blocks(deployment.fitting_blocks(memory), memory)


def reload_of(target: Target, deployment: Deployment) -> Reload:
    """The load of a replica's weights from the host, which holds what the checkpoint has.

    Raises ConfigError where that is unknown.
    """
    check_host_links(target.machine)
    layouts = [stage.layout for stage in deployment.stages]
    pool = memory_of(target, deployment).kv_bytes
    formats = target.formats
    codes = codes_in(target.model, formats)
    if codes is None or codes.are_made_anew:
        formats = replace(formats, weights=formats.activations)
    return Reload(layouts, formats, target.machine, pool)


def least_tp(target: Target) -> int:
    """TP of the base configuration, by the engine's own rule. Raises ConfigError if none fits."""
    model, devices = target.model, target.devices
    weights = weight_bytes(Layout(model, 1, 1), target.formats)
    experts = expert_bytes(model, target.formats)
    memory, num_devices = devices.total_bytes, devices.num_devices
    _, tp = base_rule(weights, memory, num_devices, experts, devices.per_host)
    return tp


def modes_of(costs: GroupCosts, deployment: Deployment) -> tuple[Mode, ...]:
    """The modes that a deployment may use, base first and shift last.

    Those of its policy; an engine that copies weights has copies for SHIFT alone.
    """
    modes = costs.layout.modes
    if costs.engine.copies_shift_weights:
        modes = tuple(dict.fromkeys((modes[0], modes[-1])))
    return tuple(deployment.policy_class.modes_used(modes))


def policy_of(deployment: Deployment, costs: GroupCosts, belief: GroupCosts) -> Policy:
    """The policy of a deployment. It decides by `belief`; a simulated one knows true `costs`."""
    believed = costs if deployment.policy_class.is_simulated else belief
    return make_policy(deployment.policy, deployment.threshold, believed)


def drafting_of(
    target: Target, deployment: Deployment, acceptance: AcceptanceModel | None
) -> ModelledDrafting | None:
    """What guesses in one group; None: nothing does.

    An engine that pads no steps leaves nothing to fill: without a cost policy, drafts are then as
    long as they come, as they are in such engines.

    Raises:
        ConfigError: nobody says how often drafts are right, or nothing can be filled.
    """
    options = deployment.drafts
    if options.speculation == "none":
        return None
    if acceptance is None:
        raise ConfigError(["drafts are simulated with an acceptance: how often they are right"])
    if not deployment.token_buckets and not deployment.needs_costs:
        if options.draft_choice == "fill" and not options.fixed_drafts:
            raise ConfigError(
                [f"{target.engine.name} pads no steps: draft_choice = fill does nothing"]
            )
        options = replace(options, fixed_drafts=True)
    return ModelledDrafting(options, acceptance, target.engine.draft_seconds)
