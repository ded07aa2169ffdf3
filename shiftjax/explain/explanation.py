"""Why an engine's steps, sizes and groups are as they are, beside what others cost. No JAX.

One schema for all who read it: `GET /explain`, `Admin.Explain`, `LLM.explain`, and the page.
"""

from typing import Any

from shiftjax.core.engine import Engine
from shiftjax.core.lane import Lane
from shiftjax.core.policy import Policy
from shiftjax.explain.step_samples import Sample, StepSamples, plain_sample
from shiftjax.fleet.regrouping import Fleet
from shiftjax.sizing.size_stats import SizeStats, plain_choice

UNKNOWN = (
    "Nothing is predicted, because no costs of these devices are in use: --machine names a file "
    "with them."
)
AS_LARGE = "Steps with prompts are as large as they may be: no size is chosen by costs."
PAGE_SECONDS = 60.0  # of which the page gets steps


def explain(engine: Engine, now: float) -> dict[str, Any]:
    """Return the last steps, sizes and arrangements with those not chosen, as plain data.

    `steps` are the last that was kept of each group and mode, `sizes` the last of each group, and
    `fleet` is what other groups would make all wait, where groups come and go. Times are seconds
    before `now`, which is by the clock of the engine. For the thread of the engine.
    """
    steps = [
        {"seconds_ago": now - each.at} | _plain(engine, each) for each in _samples(engine).latest()
    ]
    sizes = [each for lane in engine.lanes for each in _sizes(lane)]
    chooses = any(lane.scheduler.sizes.chooses for lane in engine.lanes)
    told = {
        "policy": engine.policy.name,
        "steps": steps,
        "sizes": sizes,
        "sizes_unknown": "" if chooses else AS_LARGE,
    }
    return _known(engine) | told | _fleet(engine, now)


def page_part(engine: Engine, now: float) -> dict[str, Any]:
    """Return what the page shows: of each step mode, tokens, reason, seconds; and the fleet."""
    samples = _samples(engine).since(now - PAGE_SECONDS)
    steps = [
        {
            "at": each.at,
            "mode": each.mode.label,
            "width": each.lane.group.width,
            "tokens": each.work.num_tokens,
            "sequences": each.work.num_sequences,
            "reason": _reason(engine, each),
            "seconds": round(each.seconds, 6),
            "predicted": {mode: round(took, 6) for mode, took in each.predicted.items()},
        }
        for each in samples
    ]
    return _known(engine) | {"steps": steps} | _fleet(engine, now)


def _known(engine: Engine) -> dict[str, str]:
    names = {lane.costs.machine.name for lane in engine.lanes if lane.costs is not None}
    return {"machine": ", ".join(sorted(names)), "unknown": "" if names else UNKNOWN}


def _samples(engine: Engine) -> StepSamples:
    """Those of an engine; none of one that was assembled without."""
    found = (watch for watch in engine.watchers if isinstance(watch, StepSamples))
    return next(found, StepSamples())


def _policy(engine: Engine, lane: Lane) -> Policy:
    return lane.policy or engine.policy


def _reason(engine: Engine, sample: Sample) -> str:
    policy = _policy(engine, sample.lane)
    modes = policy.modes_used(sample.lane.modes)
    return policy.reason(sample.mode, sample.work, modes, sample.last_mode)


def _plain(engine: Engine, sample: Sample) -> dict[str, Any]:
    lane = sample.lane
    allowed = _policy(engine, lane).modes_used(lane.modes)
    return plain_sample(sample, _reason(engine, sample), allowed)


def _sizes(lane: Lane) -> list[dict[str, Any]]:
    """The last size of a group, if it has had one."""
    group = {"first": lane.group.first, "width": lane.group.width}
    states = (each for each in lane.scheduler.states() if isinstance(each, SizeStats))
    return [group | plain_choice(each.last) for each in states if each.last is not None]


def _fleet(engine: Engine, now: float) -> dict[str, Any]:
    fleet = engine.topology.find(Fleet)
    if fleet is None or fleet.alternatives is None:
        return {}
    return {"fleet": fleet.alternatives.told(now)}
