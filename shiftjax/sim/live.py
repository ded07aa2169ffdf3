"""An engine on virtual devices whose steps take real time: machines to try before they are there.

Everything that decides is the code that serves; the host is the one it runs on, whose own work
comes on top of the predicted seconds where no step hides it.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from shiftjax.config import EngineConfig
from shiftjax.core.engine import Engine
from shiftjax.core.limits import NO_LOGPROBS
from shiftjax.deploy.deployment import Deployment
from shiftjax.fleet.regrouping import MOST_REMEMBERED, Fleet
from shiftjax.options import ConfigError
from shiftjax.sim.chosen_mesh import with_costs
from shiftjax.sim.devices import Clock, WallClock
from shiftjax.sim.made_up import MadeUpTokens
from shiftjax.sim.modelled import Target, deploy_config
from shiftjax.sim.sim_backend import make_engine

REFUSED = {
    "speculation": (("none",), "nobody says how often guesses at made-up tokens are right"),
    "task": (("auto", "generate"), "embedding has no simulated steps"),
    "routed_experts": ((False,), "made-up tokens choose no experts"),
    "phases": ((None,), "requests that wait for a phase are late"),
}
"""Settings of which a server on simulated devices knows these values alone, and why."""


def deploy_live(target: Target, config: EngineConfig) -> Deployment:
    """What the settings come to on the target's machine.

    Raises ConfigError, also for what is not simulated.
    """
    given = config.flat()
    wrong = [
        f"{name} = {given[name]} cannot be had on simulated devices: {why}; drop it"
        for name, (known, why) in REFUSED.items()
        if given[name] not in known
    ]
    if wrong:
        raise ConfigError(wrong)
    return deploy_config(target, with_costs(config, target))


def live_engine(
    target: Target,
    deployment: Deployment,
    text_ids: Sequence[int],
    clock: Clock | None = None,
) -> Engine:
    """An engine whose outputs are made of `text_ids`; `clock` is by default that of the wall.

    Raises ConfigError where the model does not fit.
    """
    target = replace(target, engine=target.engine.offline)  # the server has a front end of its own
    engine, runners = make_engine(target, [deployment], clock or WallClock())
    tokens = MadeUpTokens(text_ids, target.model.eos_token_ids)
    for runner in runners:
        runner.tokens, runner.steps = tokens, deque(maxlen=0)  # it runs for ever
    if (fleet := engine.topology.find(Fleet)) is not None:
        fleet.history = deque(maxlen=MOST_REMEMBERED)
    engine.limits = replace(engine.limits, max_logprobs=NO_LOGPROBS)
    return engine
