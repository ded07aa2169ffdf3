"""Deployments by name, as `--compare` reads them: a name is a fragment of the engine's settings.

    tp                      a name of the table below, or of a policy
    pp4tp2                  degrees; as many such groups as the machine holds
    pp8:tp8                 degrees of prompts and of decodes, in turns
    fleet:load:tp2          a fleet, and words of `FLEET_WORDS` or degrees after colons
    roles:dp2+dp3tp2        degrees of the groups for prompts and of those that decode
    roles:dp8               degrees of groups whose roles a policy changes
    shift,max_num_seqs=64   names and settings, or controls, joined; these win over names

All go through the same `resolve` as the settings of an engine.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, get_args, get_type_hints

from shiftjax.config import CONTROLS, SERVER_BUDGETS, SETTINGS, EngineConfig
from shiftjax.core.policies import DEFAULT_POLICY, POLICIES
from shiftjax.deploy.deployment import Deployment
from shiftjax.deploy.expert_storage import as_used
from shiftjax.deploy.resolve import resolve, stage_problems
from shiftjax.draft_options import NO_DRAFTS
from shiftjax.options import ConfigError, from_text, unknown_name
from shiftjax.parallel.arrangements import (
    FIXED,
    FLEET_POLICIES,
    NO_FLEET,
    FleetOptions,
    without_unread,
)
from shiftjax.parallel.degrees import Degrees, parse_degrees, parse_phases
from shiftjax.phases.configurations import merge_phases, resolve_phases
from shiftjax.phases.resharding import Phase
from shiftjax.phases.switch_costs import check_host_links
from shiftjax.sim.modelled import Target, as_built_by, cost_model, least_tp

Fragment = dict[str, Any]  # settings, and controls, by their names
FLEET = "fleet"
ROLES = "roles"
FLEET_WORDS: Mapping[str, Fragment] = {
    **{name: {"policy": name} for name in ("greedy", "threshold", "shift")},
    **{name: {"fleet_policy": name} for name in FLEET_POLICIES},
    **{name: {"switch": name} for name in get_args(get_type_hints(FleetOptions)["switch"])},
}
_BETWEEN = re.compile(r",(?!\d)")  # what follows a number is of a list: token_buckets=16,64
ONE_HOST = "requests that move between groups stay on one host: drop it, or --hosts"


@dataclass(frozen=True)
class Phases:
    """A configuration for prompts and one for decodes, in turns on the same devices."""

    name: str
    by_phase: Mapping[Phase, Deployment]


@dataclass(frozen=True)
class RoleSplit:
    """Groups for prompts and groups that decode, side by side; one kind alone: roles by cost."""

    name: str
    sides: tuple[Deployment, ...]


def _replicas(target: Target) -> Fragment:
    """As many as fit, each the least TP that holds the model."""
    tp = least_tp(target)
    return {"dp": target.machine.num_devices // tp, "sp": 1, "tp": tp, "policy": "base"}


NAMED: Mapping[str, Callable[[Target], Fragment]] = {
    "dp": _replicas,
    "tp": lambda target: {"sp": 1, "tp": target.machine.num_devices, "policy": "base"},
    "sp": lambda _: {"policy": "base"},  # degrees are as the engine chooses them
    "shift": lambda _: {"policy": "threshold"},  # what Shift Parallelism is, not a mode alone
    "gather": lambda target: {
        **{"weights": "gather", "sp": target.machine.num_devices, "tp": 1, "policy": "cost"}
    },
    FLEET: lambda _: {"fleet": True, "policy": "cost"},
}
STANDARD = ("dp", "tp", "sp", "shift", "cost", "greedy")


def deploy_named(target: Target, text: str, **budgets: Any) -> Deployment | Phases | RoleSplit:
    """What a name says, as an engine of the target's kind makes it.

    `budgets` are of all that is compared: settings, or `threshold`, `drafts`, `fleet` and
    `host_bytes` as a `Deployment` has them; what a name has no use for is left out. Those of a
    server, not the engine's own, are taken where they are not given.

    Raises ConfigError for words that are none, and for what model or machine cannot take.
    """
    fragment = fragment_of(target, text)
    try:
        return _deploy(target, text, fragment, budgets)
    except ConfigError as error:
        raise ConfigError([f"{text}: {problem}" for problem in error.problems]) from None


def deploy(target: Target, text: str, **budgets: Any) -> Deployment:
    """As `deploy_named`, for a name without phases."""
    found = deploy_named(target, text, **budgets)
    assert isinstance(found, Deployment), text
    return found


def standard_deployments(
    target: Target, names: Sequence[str] = STANDARD, **budgets: Any
) -> dict[str, Deployment]:
    """The configurations that are compared, by name, but for those of phases."""
    return {name: deploy(target, name, **budgets) for name in names}


def fragment_of(target: Target, text: str) -> Fragment:
    """The settings that a name says. Raises ConfigError."""
    words = [word.strip().partition("=") for word in _BETWEEN.split(text)]
    found: Fragment = {}
    for name, is_setting, _ in words:
        found |= {} if is_setting else _named(target, name)
    given = {name: value for name, is_setting, value in words if is_setting}
    known = {**SETTINGS, **CONTROLS}
    if wrong := [unknown_name(name, SETTINGS) for name in given if name not in known]:
        raise ConfigError(wrong)
    return found | {name: from_text(known[name], value) for name, value in given.items()}


def _named(target: Target, name: str) -> Fragment:
    head, colon, rest = name.partition(":")
    if head == FLEET:
        found = NAMED[FLEET](target)
        for word in rest.split(":") if colon else ():
            found |= _of_fleet(word)
        return found
    if head == ROLES:
        return {ROLES: rest, "policy": "cost"}
    if name in NAMED:
        return NAMED[name](target)
    if name in POLICIES:
        return {"policy": name}
    if colon:
        try:
            pair = parse_phases(name)
        except ValueError as error:
            raise ConfigError([str(error)]) from None
        return {"phases": ":".join(_filling(target, degrees).name for degrees in pair)}
    spelled = None
    with suppress(ValueError):
        spelled = parse_degrees(name)
    if spelled is not None:
        policy = "threshold" if spelled.sp > 1 else "base"
        return _filling(target, spelled)._asdict() | {"policy": policy}
    known = list(dict.fromkeys([*POLICIES, *NAMED]))
    there = ", ".join([*known, "oracle", "degrees as pp4tp2, phases as pp8:tp8, settings as tp=8"])
    raise ConfigError([f"{unknown_name(name, known, 'deployment')}; there are {there}"])


def _of_fleet(word: str) -> Fragment:
    if word[:1].isdigit():
        return {"fleet_policy": FIXED + word}
    if word in FLEET_WORDS:
        return FLEET_WORDS[word]
    if word.startswith("tp") and word[2:].isdigit():
        return {"tp": int(word[2:])}
    raise ConfigError([unknown_name(word, FLEET_WORDS, "word")])


def _filling(target: Target, degrees: Degrees) -> Degrees:
    """With as many groups as the machine holds, where `dp` is 1. Raises ConfigError."""
    dp, pp, sp, tp = degrees
    num_devices = target.machine.num_devices
    problems = stage_problems(pp, target.model)
    groups, rest = divmod(num_devices, pp * sp * tp)
    if rest or not groups or groups % dp:
        problems.append(f"{num_devices} devices cannot be cut into {degrees.name}")
    if sp * tp > target.model.num_heads:
        problems.append(f"sp * tp = {sp * tp} is more than {target.model.num_heads} query heads")
    if problems:
        raise ConfigError(problems)
    return degrees._replace(dp=groups if dp == 1 else dp)


def _deploy(
    target: Target, name: str, fragment: Fragment, budgets: Mapping[str, Any]
) -> Deployment | Phases | RoleSplit:
    """A policy of simulations takes the place of the cost policy, for no engine has it."""
    if ROLES in fragment:
        return _role_split(target, name, fragment, budgets)
    policy = POLICIES.get(str(fragment.get("policy")))
    is_simulated = policy is not None and policy.is_simulated
    known = fragment | ({"policy": "cost"} if is_simulated else {})
    options = _shared(target, known, budgets) | known
    controls = {name: options.pop(name) for name in CONTROLS if name in options}
    config = merge_phases(EngineConfig.from_options(controls=controls, **options))
    if target.machine.num_hosts > 1 and (config.fleet.fleet or config.parallel.phases):
        raise ConfigError([ONE_HOST])
    if config.parallel.phases:
        return Phases(name, _phases(target, config))
    deployment = resolve(config, target.model, target.devices)
    own = policy.name if policy is not None else deployment.policy
    built = as_built_by(target.engine, replace(deployment, name=name, policy=own))
    return as_used(built, partial(cost_model, target))


def _role_split(
    target: Target, name: str, fragment: Fragment, budgets: Mapping[str, Any]
) -> RoleSplit:
    """Each side on its part of the machine. Raises ConfigError."""
    spelled, rest = fragment[ROLES].split("+"), {n: v for n, v in fragment.items() if n != ROLES}
    try:
        sides = [parse_degrees(text) for text in spelled]
    except ValueError as error:
        raise ConfigError([str(error)]) from None
    num_devices = target.machine.num_devices
    wrong = []
    if len(sides) > 2 or sum(each.num_devices for each in sides) != num_devices:
        wrong.append(f"roles are PREFILL+DECODE on all {num_devices} devices, or groups alike")
    if any(each.pp > 1 for each in sides):
        wrong.append("groups with roles have no stages")
    if len(sides) == 1 and sides[0].dp == 1:
        wrong.append("one group alone has no roles to share")
    if wrong:
        raise ConfigError(wrong)
    found = []
    for each in sides:
        part = replace(target, machine=replace(target.machine, num_devices=each.num_devices))
        found.append(_deploy(part, name, each._asdict() | rest, budgets))
    plain = tuple(each for each in found if isinstance(each, Deployment))
    if any(any(each.windows) or each.widths or each.drafts.copies for each in plain):
        raise ConfigError(["roles with windows, fleets or drafts are not simulated"])
    return RoleSplit(name, plain)


def _phases(target: Target, config: EngineConfig) -> dict[Phase, Deployment]:
    """Raises ConfigError, also where the links to the host are unknown, or its memory."""
    machine = target.machine
    check_host_links(machine)
    num_bytes = int(machine.host_memory_bytes)
    if not (num_bytes or config.cache.host_bytes):
        raise ConfigError([f"{machine.name}: say how much host_memory there is, as 64GiB"])
    found = resolve_phases(config, target.model, target.devices, host_bytes=num_bytes)
    return {phase: as_built_by(target.engine, each) for phase, each in found.items()}


def _shared(target: Target, fragment: Fragment, budgets: Mapping[str, Any]) -> Fragment:
    """What all names have in common, as settings, but for what this fragment does not read."""
    shared, formats = {**SERVER_BUDGETS, **budgets}, target.formats
    shared |= {"dtype": formats.activations, "kv_cache_dtype": formats.kv}
    shared["quantization"] = "none" if formats.weights == formats.activations else formats.weights
    threshold, host_bytes = shared.pop("threshold", None), shared.pop("host_bytes", 0)
    fleet, drafts = shared.pop("fleet", NO_FLEET), shared.pop("drafts", NO_DRAFTS)
    policy = POLICIES.get(fragment.get("policy", DEFAULT_POLICY))
    if threshold is not None and policy is not None and policy.has_threshold:
        shared["shift_threshold"] = threshold
    if host_bytes and "phases" in fragment:
        shared["host_memory"] = str(host_bytes)
    if fragment.get("fleet"):
        kind = fragment.get("fleet_policy", fleet.fleet_policy)
        shared |= asdict(without_unread(replace(fleet, fleet=True, fleet_policy=kind)))
    return shared | asdict(drafts)
