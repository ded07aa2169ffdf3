"""Deployments on a modelled machine: which are compared, what they hold, how steps are chosen."""

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from shiftjax.arch.config import ModelConfig
from shiftjax.arch.formats import Formats
from shiftjax.config import DEFAULT_SHIFT_THRESHOLD, SERVER_BUDGETS, EngineConfig
from shiftjax.core.policy import Policy, make_policy, wanted_modes
from shiftjax.costs.buckets import doubling
from shiftjax.costs.machine import EngineOverhead, Machine
from shiftjax.costs.machine_files import load_machine
from shiftjax.costs.memory import Memory, expert_bytes, weight_bytes
from shiftjax.costs.stages import GroupCosts
from shiftjax.deploy.deployment import Deployment, Devices
from shiftjax.deploy.resolve import base_rule, draft_rows, resolve, stage_problems
from shiftjax.draft_options import NO_DRAFTS
from shiftjax.options import ConfigError
from shiftjax.parallel.degrees import Degrees
from shiftjax.parallel.grid import Mode
from shiftjax.parallel.layout import Layout
from shiftjax.phases.costs import Reload, check_host_links
from shiftjax.sim.drafts import AcceptanceModel, ModelledDrafting

SIMULATED = MappingProxyType(
    {"weights": ("alias", "gather"), "deterministic": (False,), "phases": (None,)}
)
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
        return Devices(num_devices, memory, memory, per_host=per_host)

    @property
    def reserved_bytes(self) -> int:
        """Of a device, beside weights, temporaries and KV: the machine says, or the engine."""
        return int(self.machine.reserved_bytes or self.engine.reserved_bytes)


def deploy(
    target: Target,
    name: str,
    mesh: tuple[int, int, int],
    policy: str,
    *,
    gathers: bool = False,
    **settings: Any,
) -> Deployment:
    """A deployment on a mesh (DP, SP, TP) as an engine of the target's kind makes it.

    `policy` chooses the mode of a step: base, shift, threshold, cost, or greedy (the mode that
    is quicker, without a margin). With `gathers`, devices store SHIFT's weights alone. Budgets that
    `settings` lack are a server's, not the engine's own.
    """
    dp, sp, tp = mesh
    copied = "replicate" if target.engine.copies_shift_weights else "alias"
    own: dict[str, Any] = {"threshold": DEFAULT_SHIFT_THRESHOLD, **SERVER_BUDGETS}
    own |= {"max_model_len": target.model.max_position_embeddings} | settings
    own.setdefault("max_draft_rows", draft_rows(own.get("drafts", NO_DRAFTS), own["max_num_seqs"]))
    if target.engine.pads_to_buckets:
        own["token_buckets"] = doubling(own["max_num_batched_tokens"])
    return Deployment(
        name=name,
        layout=Layout(target.model, sp, tp, gathers=gathers),
        formats=target.formats,
        dp=dp,
        policy=policy,
        weights="gather" if gathers else copied,
        **own,
    )


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


def deploy_degrees(target: Target, degrees: Degrees, **settings: Any) -> Deployment:
    """Groups of these degrees; as many as the machine holds, where `dp` is 1. With SP they shift.

    Raises ConfigError where the devices or the model cannot be cut so.
    """
    dp, pp, sp, tp = degrees
    problems = stage_problems(pp, target.model)
    num_devices = target.machine.num_devices
    groups, rest = divmod(num_devices, pp * sp * tp)
    if rest or not groups or groups % dp:
        problems.append(f"{num_devices} devices cannot be cut into {degrees.name}")
    if sp * tp > target.model.num_heads:
        problems.append(f"sp * tp = {sp * tp} is more than {target.model.num_heads} query heads")
    if pp > 1 and settings.get("drafts", NO_DRAFTS).speculation != "none":
        problems.append("drafts keep all stages but one waiting: drop them")
    if problems:
        raise ConfigError([f"{degrees.name}: {problem}" for problem in problems])
    dp = groups if dp == 1 else dp
    policy = "threshold" if sp > 1 else "base"
    return deploy(target, degrees.name, (dp, sp, tp), policy, pp=pp, **settings)


def cost_model(target: Target, deployment: Deployment) -> GroupCosts:
    """The costs of one replica."""
    return deployment.costs(target.machine, target.engine)


def memory_of(target: Target, deployment: Deployment) -> Memory:
    """What a device holds; `kv_bytes` are those of the blocks, where their number is known.

    Raises ConfigError where these do not fit.
    """
    workspace = target.reserved_bytes + sum_buffers_of(target, deployment)
    workspace += max(each.temporary_bytes for each in deployment.by_width.values())
    memory = deployment.memory(target.devices, workspace)
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
    return deployment.sum_buffer_bytes(wanted)


def sized_of(target: Target, deployment: Deployment) -> Deployment:
    """With as many KV blocks as fit. Raises ConfigError where none do."""
    memory = memory_of(target, deployment)
    return deployment.with_blocks(memory.num_kv_tokens // deployment.block_size, memory)


def reload_of(target: Target, deployment: Deployment) -> Reload:
    """The load of a replica's weights from the host, which holds what the checkpoint has.

    Raises ConfigError where that is unknown.
    """
    check_host_links(target.machine)
    layouts = [stage.layout for stage in deployment.stages]
    pool = memory_of(target, deployment).kv_bytes
    formats = target.formats
    if not target.model.has_codes:
        formats = replace(formats, weights=formats.activations)
    return Reload(layouts, formats, target.machine, pool)


def deploy_gathered(target: Target, name: str, policy: str = "cost", **settings: Any) -> Deployment:
    """All devices as one group with SP alone, whose base steps gather their weights.

    Raises ConfigError where the model has too few heads for that.
    """
    devices, heads = target.machine.num_devices, target.model.num_heads
    if devices > heads:
        raise ConfigError([f"{name}: sp = {devices} is more than {heads} query heads"])
    return deploy(target, name, (1, devices, 1), policy, gathers=True, **settings)


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
        if options.draft_choice == "fill":
            raise ConfigError(
                [f"{target.engine.name} pads no steps: draft_choice = fill does nothing"]
            )
        options = replace(options, draft_choice="fixed")
    return ModelledDrafting(options, acceptance, target.engine.draft_seconds)
