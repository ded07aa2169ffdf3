"""The command, or the file of settings, that starts an engine as it was planned. No JAX."""

import json
import math
from dataclasses import asdict
from typing import Any

from shiftjax.config import SETTINGS
from shiftjax.core.policies import POLICIES
from shiftjax.deploy.deployment import Deployment
from shiftjax.deploy.expert_storage import experts_setting
from shiftjax.options import Setting
from shiftjax.parallel.arrangements import without_unread
from shiftjax.targets import NONE, Targets

# Fields of a deployment that are settings of the same name.
_SAME = (
    *("dp", "pp", "sp", "tp", "max_num_seqs", "max_num_batched_tokens", "policy", "weights"),
    *("attention", "block_size", "memory_fraction", "prefix_caching", "preemption"),
    *("logprobs_mode", "routed_experts", "numerics", "deterministic", "gpu_options", "overlap"),
)
_ALWAYS = ("sp", "tp", "max_num_seqs", "max_num_batched_tokens", "dtype")  # the default, too


def serve_command(model: str, deployment: Deployment) -> str:
    """`shiftjax serve` with every flag that makes this deployment of a model on its machine."""
    flags = (_spelled(SETTINGS[name], value) for name, value in _said(deployment).items())
    return " ".join(["shiftjax serve", model, *flags])


def settings_file(model: str, deployment: Deployment) -> str:
    """The same as YAML, for `shiftjax serve --config FILE`."""
    lines = {"model": model} | _said(deployment)
    return "".join(f"{name}: {json.dumps(value)}\n" for name, value in lines.items())


def _said(deployment: Deployment) -> dict[str, Any]:
    """The settings that are not what they are by default, and those that a reader looks for."""
    return {
        name: value
        for name, value in settings_of_deployment(deployment).items()
        if name in _ALWAYS or value != SETTINGS[name].default
    }


def settings_of_deployment(deployment: Deployment) -> dict[str, Any]:
    """The settings that a deployment comes of, by name; of its drafts none."""
    values = {name: getattr(deployment, name) for name in _SAME}
    formats, is_fleet = deployment.formats, bool(deployment.widths)
    if is_fleet:
        fleet = asdict(without_unread(deployment.fleet))
        values = fleet | {n: v for n, v in values.items() if n not in ("dp", "pp", "sp")}
        values["devices"] = deployment.grid.num_devices  # else all that there are
    values["dtype"] = formats.activations
    is_plain = formats.weights == formats.activations
    values["quantization"] = "auto" if is_plain else formats.weights
    values["kv_cache_dtype"] = "auto" if formats.kv == formats.activations else formats.kv
    values |= _targets(deployment.targets)
    if (experts := experts_setting(deployment)) is not None:
        values["experts"] = experts
    values["host_memory"] = str(deployment.host_bytes)
    if (slots := deployment.layout.model.lora) is not None:
        values |= {"enable_lora": True, "max_loras": slots.num, "max_lora_rank": slots.rank}
    if POLICIES[deployment.policy].has_threshold and (deployment.sp > 1 or is_fleet):
        values["shift_threshold"] = deployment.threshold
    return {name: value for name, value in values.items() if name in SETTINGS}


def _targets(targets: Targets) -> dict[str, Any]:
    """The three settings of targets, None where there is none."""
    classes = [
        f"{priority}:{_or_none(target.ttft)}/{_or_none(target.tpot)}"
        for priority, target in targets.by_priority
    ]
    default = targets.default
    return {
        "target_ttft": default.ttft if default.ttft < math.inf else None,
        "target_tpot": default.tpot if default.tpot < math.inf else None,
        "targets_by_priority": ",".join(classes) or None,
    }


def _or_none(seconds: float) -> str:
    return f"{seconds!r}" if seconds < math.inf else NONE


def _spelled(setting: Setting, value: Any) -> str:
    """A setting as a command has it, by its shortest flag."""
    flag = min((flag for flag in setting.flags if flag.startswith("--")), key=len)
    if setting.kind is bool:
        return flag if value else flag.replace("--", "--no-", 1)
    return f"{flag} {value}"
