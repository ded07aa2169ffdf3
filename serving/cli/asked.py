"""What `plan` and `mesh` are asked about: a model on a machine, and settings of deployments.

From flags alone, or with `--config` from the engine's settings. A model may be a checkpoint, too.
"""

import argparse
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from serving.cli.measured import with_kernels
from serving.cli.mesh_flags import MODEL
from serving.run.flags import read_settings
from serving.run.model_config import model_of
from shiftjax.config import SERVER_BUDGETS, SETTINGS, EngineConfig, budget_holds_the_decodes
from shiftjax.deploy.deployment import Deployment
from shiftjax.deploy.lora_rule import with_adapters
from shiftjax.draft_options import DraftOptions
from shiftjax.lora_options import NO_LORA
from shiftjax.options import ConfigError, from_text, problem_with, settings_of
from shiftjax.parallel.arrangements import NO_FLEET, FleetOptions
from shiftjax.settings import load_plugins_of
from shiftjax.sim.chosen_mesh import with_costs
from shiftjax.sim.experiments import target_from, target_of
from shiftjax.sim.modelled import Target, deploy_config
from shiftjax.weights.locate import hub_of

BUDGETS = ("max_num_seqs", "max_num_batched_tokens", "block_size")
SHARED = (*BUDGETS, "threshold", "memory_fraction", "max_model_len", "prefix_caching", "drafts")
FLAGS = ("model", "dtype", "kv_cache_dtype", "shift_threshold", *BUDGETS)
DRAFTS = DraftOptions(speculation="suffix")
FLEET_SETTINGS = settings_of(FleetOptions)


class Asked(NamedTuple):
    """What is deployed on what, the settings of all deployments, and the one of --config."""

    target: Target
    settings: dict[str, Any]
    own: list[Deployment]
    fleet: FleetOptions = NO_FLEET


def asked_of(arguments: argparse.Namespace, machine: str | None = None) -> Asked:
    """What the flags of `plan` or `mesh simulate` ask about. Raises ConfigError."""
    flags = {name: getattr(arguments, name, None) for name in FLAGS}
    flags = {name: value for name, value in flags.items() if value is not None}
    if getattr(arguments, "no_prefix_caching", False):
        flags["prefix_caching"] = False
    drafts = getattr(arguments, "acceptance", None) is not None
    target = {"machine": machine or arguments.machine, "engine": arguments.engine}
    target["hosts"] = arguments.hosts
    if arguments.config is None:
        load_plugins_of()
        settings = _settings(flags) | ({"drafts": DRAFTS} if drafts else {})
        fleet = _fleet_options(arguments, EngineConfig())
        named = flags | target | {"model": model_of(flags.get("model", MODEL))}
        asked = target_from(named)
        slots = EngineConfig.from_options(**lora_settings(arguments))
        asked = replace(asked, model=with_adapters(slots, asked.model))
        return Asked(with_kernels(asked, arguments.kernels), settings, [], fleet)
    config, _ = read_settings(flags, arguments.config)
    if arguments.loras is not None or arguments.lora_rank is not None:
        raise ConfigError(["--loras and --lora-rank: the --config says them, as enable_lora"])
    if config.host.is_one_of_several:
        target["hosts"] = arguments.hosts or config.host.hosts
    model = model_of(config.model.model.removeprefix("random:"), hub_of(config.model))
    asked = target_of(config, model, **target)
    asked = replace(asked, model=with_adapters(config, asked.model))
    asked = with_kernels(asked, arguments.kernels)
    own = deploy_config(asked, with_costs(config, asked))
    if drafts and not own.drafts.copies:
        raise ConfigError(["--acceptance needs speculation in --config"])
    settings = {name: getattr(own, name) for name in SHARED}
    return Asked(asked, settings, [own], _fleet_options(arguments, config))


def lora_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings of the slots that the flags ask for, if any. Raises ConfigError."""
    num, rank = arguments.loras, arguments.lora_rank
    if num is None:
        if rank is not None:
            raise ConfigError(["--lora-rank is for --loras"])
        return {}
    values = {"max_loras": num, "max_lora_rank": rank or NO_LORA.max_lora_rank}
    _check(values)
    return {"enable_lora": True, **values}


def _fleet_options(arguments: argparse.Namespace, config: EngineConfig) -> FleetOptions:
    """Those of the settings, but for flags. Raises ConfigError."""
    given = {n: from_text(FLEET_SETTINGS[n], text) for n, text in fleet_flags(arguments).items()}
    _check(given)
    return replace(config.fleet, fleet=True, **given)


def _check(values: Mapping[str, Any]) -> None:
    """Raise ConfigError for values that the settings of these names cannot have."""
    problems = ((name, problem_with(SETTINGS[name], value)) for name, value in values.items())
    if wrong := [f"{name} {problem}" for name, problem in problems if problem]:
        raise ConfigError(wrong)


def fleet_flags(arguments: argparse.Namespace) -> dict[str, str]:
    """The flags of fleets that were given."""
    values = ((name, getattr(arguments, name, None)) for name in FLEET_SETTINGS)
    return {name: value for name, value in values if value}


def _settings(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of the deployments to compare, from flags alone. Raises ConfigError."""
    known = {"shift_threshold": "threshold"} | {name: name for name in SHARED}
    budgets = {**SERVER_BUDGETS, **{name: flags[name] for name in BUDGETS if name in flags}}
    _check(budgets)
    sizes = budgets["max_num_batched_tokens"], budgets["max_num_seqs"]
    if problem := budget_holds_the_decodes(*sizes):
        raise ConfigError([problem])
    return {known[name]: value for name, value in flags.items() if name in known}
