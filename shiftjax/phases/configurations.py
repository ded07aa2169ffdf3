"""What the settings come to where prompts and decodes have a configuration each. No JAX."""

import logging
from collections.abc import Iterable
from dataclasses import replace

from shiftjax.arch.config import ModelConfig
from shiftjax.config import EngineConfig
from shiftjax.core.limits import RequestLimits
from shiftjax.deploy.deployment import Deployment, Devices
from shiftjax.deploy.numerics_rule import with_equal_leaves
from shiftjax.deploy.position_rule import on_one_stripe
from shiftjax.deploy.resolve import Suited, check_host_block, resolve
from shiftjax.deploy.window_rule import keeping_blocks
from shiftjax.options import ConfigError
from shiftjax.parallel.degrees import Degrees
from shiftjax.phases.resharding import PHASES, Phase

HOST_SHARE = 0.5  # of the available host memory, for what is parked, unless it is given
logger = logging.getLogger(__name__)


def resolve_phases(
    config: EngineConfig,
    model: ModelConfig,
    devices: Devices,
    suited: Suited | None = None,
    *,
    host_bytes: int = 0,
) -> dict[Phase, Deployment]:
    """What each phase is deployed as, by the setting `phases`, a pair.

    Of `host_bytes`, what the host has available, half is taken where `host_memory` is not given.
    Raises ConfigError where model or machine cannot take a phase.
    """
    pair = config.parallel.phase_degrees
    if pair is None:
        given = f"phases = {config.parallel.phases}"
        raise ConfigError([f"{given} is of batch, which reads the lengths: name a pair: pp8:tp8"])
    num_bytes = config.cache.host_bytes or int(HOST_SHARE * host_bytes)
    if not num_bytes:
        raise ConfigError([f"phases = {config.parallel.phases} needs host_memory, say 8GiB"])
    cache = replace(config.cache, preemption="swap", host_memory=str(num_bytes))
    cache = keeping_blocks(cache, model, "phases exchange whole blocks")
    config = replace(config, cache=cache)
    found: dict[Phase, Deployment] = {}
    problems: list[str] = []
    for phase, degrees in zip(PHASES, pair, strict=True):
        try:
            deployment = resolve(_settings_of(config, degrees), model, devices, suited)
            found[phase] = replace(deployment, name=degrees.name, parks=phase == "prefill")
        except ConfigError as error:
            problems += (f"phases, {phase} in {degrees.name}: {each}" for each in error.problems)
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    of_both = with_equal_leaves(on_one_stripe([*found.values()]))
    found = dict(zip(found, of_both, strict=True))
    for deployment in found.values():
        check_host_block(deployment)
    return found


def merge_phases(config: EngineConfig) -> EngineConfig:
    """The same settings, or those of one deployment where both phases are modes of it.

    Prefill with SP and decode with all TP on the same devices share weights and KV: modes, of
    which each step has its own, are then better than phases.
    """
    pair = config.parallel.phase_degrees
    if pair is None or not are_modes(*pair):
        return config
    name = pair[0].name
    logger.info("phases = %s: one deployment, %s, has both as modes", config.parallel.phases, name)
    return _settings_of(config, pair[0])


def limits_of(deployments: Iterable[Deployment]) -> RequestLimits:
    """What a request may ask for where all of these, with their blocks, have to hold it."""
    return min((each.limits for each in deployments), key=lambda limits: limits.num_kv_tokens)


def are_modes(prefill: Degrees, decode: Degrees) -> bool:
    """Whether decode is prefill, or SHIFT where prefill is BASE."""
    shift = prefill._replace(sp=1, tp=prefill.sp * prefill.tp)
    return decode == prefill or (prefill.pp == 1 and decode == shift)


def _settings_of(config: EngineConfig, degrees: Degrees) -> EngineConfig:
    return replace(config, parallel=replace(config.parallel, phases=None, **degrees._asdict()))
