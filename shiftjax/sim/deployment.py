"""A deployment on a modelled machine: how a model is spread, what fits, how steps are chosen."""

from dataclasses import dataclass, replace
from typing import Any

from shiftjax.arch.config import ModelConfig
from shiftjax.arch.formats import Formats
from shiftjax.config import DEFAULT_SHIFT_THRESHOLD, base_rule
from shiftjax.control.policy import CostPolicy, Policy, make_policy
from shiftjax.costs.buckets import Bucket, doubling, make_buckets
from shiftjax.costs.machine import EngineOverhead, Machine
from shiftjax.costs.memory import shift_copy_bytes, weight_bytes
from shiftjax.costs.step import CostModel
from shiftjax.options import ConfigError
from shiftjax.parallel.grid import Mode
from shiftjax.parallel.layout import Layout


@dataclass(frozen=True)
class Target:
    """What is deployed, and on what."""

    model: ModelConfig
    machine: Machine
    engine: EngineOverhead
    formats: Formats


@dataclass(frozen=True)
class Deployment:
    """`dp` replicas of `sp * tp` devices each; budgets are a replica's.

    `policy` chooses the mode of a step: base, shift, threshold, cost, or oracle (the mode that
    is quicker in hindsight).
    """

    name: str
    dp: int
    sp: int
    tp: int
    policy: str
    threshold: int = DEFAULT_SHIFT_THRESHOLD
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    block_size: int = 16
    memory_fraction: float = 0.9
    prefix_caching: bool = True


@dataclass(frozen=True)
class Memory:
    """Bytes of one device, and the tokens that the KV cache of one replica holds."""

    weight_bytes: int
    shift_weight_bytes: int  # of a second copy, where the engine keeps one
    workspace_bytes: int
    kv_bytes: int
    num_kv_tokens: int


def cost_model(target: Target, deployment: Deployment) -> CostModel:
    """The costs of one replica."""
    model, sp, tp, engine = target.model, deployment.sp, deployment.tp, target.engine
    buckets: list[Bucket] = []
    if engine.pads_to_buckets:
        sizes = doubling(deployment.max_num_batched_tokens)
        buckets = make_buckets(sizes, deployment.max_num_seqs, Layout(model, sp, tp))
    return CostModel(model, sp, tp, target.machine, engine, target.formats, buckets)


def memory_of(target: Target, deployment: Deployment) -> Memory:
    """What a device holds. `num_kv_tokens` is 0 or less where the weights leave no room."""
    costs = cost_model(target, deployment)
    layout, formats = costs.layout, target.formats
    weights = weight_bytes(layout, formats)
    shifts = deployment.sp > 1 and deployment.policy != "base"
    strategy = "replicate" if target.engine.copies_shift_weights else "alias"
    copy = shift_copy_bytes(layout, formats, strategy) if shifts else 0
    activations = _activation_bytes(target, deployment, layout)
    logits = 3 * deployment.max_num_seqs * layout.vocab_size * 4 // layout.num_devices
    workspace = int(target.engine.reserved_bytes) + activations + logits
    room = int(target.machine.memory_bytes * deployment.memory_fraction)
    kv = room - weights - copy - workspace
    return Memory(weights, copy, workspace, kv, kv // costs.kv_token_bytes)


def _activation_bytes(target: Target, deployment: Deployment, layout: Layout) -> int:
    """Temporaries of the largest step of the hungrier mode: BASE splits its tokens over SP.

    An engine that compiles every size in both modes keeps room for SHIFT's largest step, too;
    another needs only what a threshold lets through.
    """
    hidden, inner = target.model.hidden_size, layout.intermediate_size
    tokens = deployment.max_num_batched_tokens
    numbers = -(-tokens // layout.sp) * (4 * hidden + 3 * inner // layout.tp)
    if layout.sp > 1 and deployment.policy != "base":
        bounded = deployment.policy == "threshold" and not target.engine.pads_to_buckets
        shifted = min(tokens, deployment.threshold) if bounded else tokens
        numbers = max(numbers, shifted * (4 * hidden + 3 * inner // layout.num_devices))
    return numbers * target.formats.activation_bytes


def standard_deployments(target: Target, **budgets: Any) -> dict[str, Deployment]:
    """The configurations that are compared, by name.

    dp: as many replicas as fit, each the least TP that holds the model; tp: all devices; sp and
    the shifting ones: the least TP that fits, the rest SP (the base rule).
    """
    devices = target.machine.num_devices
    tp = least_tp(target)
    sp = devices // tp
    base = Deployment("sp", 1, sp, tp, "base", **budgets)
    return {
        "dp": Deployment("dp", sp, 1, tp, "base", **budgets),
        "tp": Deployment("tp", 1, 1, devices, "base", **budgets),
        "sp": base,
        "shift": replace(base, name="shift", policy="threshold"),
        "cost": replace(base, name="cost", policy="cost"),
        "oracle": replace(base, name="oracle", policy="oracle"),
    }


def least_tp(target: Target) -> int:
    """TP of the base configuration, by the engine's own rule. Raises ConfigError if none fits."""
    model, machine = target.model, target.machine
    weights = weight_bytes(Layout(model, 1, 1), target.formats)
    _, tp = base_rule(weights, int(machine.memory_bytes), machine.num_devices)
    return tp


def modes_of(costs: CostModel, deployment: Deployment) -> tuple[Mode, ...]:
    """The modes that a deployment may use, base first and shift last.

    A threshold knows these two only; an engine that copies weights has copies for SHIFT alone.
    """
    modes = costs.layout.modes
    ends = tuple(dict.fromkeys((modes[0], modes[-1])))
    fixed = {"base": modes[:1], "shift": modes[-1:], "threshold": ends}
    return fixed.get(deployment.policy, ends if costs.engine.copies_shift_weights else modes)


def policy_of(deployment: Deployment, costs: CostModel, belief: CostModel) -> Policy:
    """The policy of a deployment. It decides by `belief`; an oracle knows the true `costs`."""
    if deployment.policy == "oracle":
        return CostPolicy(costs, margin=0.0)
    try:
        return make_policy(deployment.policy, deployment.threshold, belief)
    except ValueError as error:
        raise ConfigError([str(error)]) from None
