"""The advice as somebody reads it who buys: the answer, why, how sure, and the command."""

import math
from collections.abc import Mapping

from shiftjax.deploy.deployment import Deployment
from shiftjax.sim.advice import Advice
from shiftjax.sim.error_bands import band
from shiftjax.sim.load import SEEDS, Limits
from shiftjax.sim.serve_command import serve_command
from shiftjax.sim.trials import Trial


def in_words(advice: Advice, prices: Mapping[str, float], model: str = "") -> str:
    """The advice, a fact a line; `model` is what the user calls it."""
    best = advice.best
    lines = _answer(advice, best, prices) if best else _nothing(advice)
    lines.append(_why(advice, prices))
    if best is not None:
        lines += [*_start(best, model), *_sure(advice, best)]
    if not advice.is_complete:
        words = "the search ended before all was tried: fewer machines or settings make it whole"
        lines.append(f"After {advice.trials.num_replays} replays {words}.")
    return "\n".join(filter(None, lines))


def _limits(limits: Limits) -> str:
    return f"{seconds(limits.ttft)} to the first token and {seconds(limits.tpot)} a token"


def _wanted(advice: Advice) -> str:
    limits, load = advice.trials.limits, advice.trials.load
    return f"{limits.percentile}% get {_limits(limits)} ({load.in_words})"


def _answer(advice: Advice, best: Trial, prices: Mapping[str, float]) -> list[str]:
    """What to buy, or what it carries."""
    machine, num = best.target.machine.name, best.num_devices
    servers = "one server" if best.num_servers == 1 else f"{best.num_servers} servers"
    what = f"{num} devices of {machine}: {servers} of {best.server.num_devices}, {shape(best)}"
    if advice.question.rate is None:
        total = advice.trials.load.shown(best.rate * best.num_servers)
        sure = f"(throughput {band('throughput')})"
        lines = [f"{what}, carry {total} {sure}.", f"Of these {_wanted(advice)}."]
    else:
        lines = [
            f"Take {what}.",
            f"For {_asked(advice, advice.question.rate)}, of which {_wanted(advice)}.",
        ]
    if prices:
        row = best.row(prices)
        lines.append(
            f"That is ${row['dollars_per_hour']:,.2f} an hour, ${row['dollars_per_million']:.3g} "
            "for a million tokens in and out."
        )
    return lines


def _asked(advice: Advice, amount: float) -> str:
    """The load of the question, as it was asked."""
    return advice.trials.load.shown(amount, digits=6)


def shape(trial: Trial) -> str:
    """What one server is, for people: its cut, its KV cache, and what was changed."""
    deployment = trial.deployment
    changed = f", {trial.changed}" if trial.changed else ""
    return f"{_cut(deployment)}, KV cache {deployment.formats.kv}{changed}"


def _cut(deployment: Deployment) -> str:
    if deployment.widths:
        return f"a fleet of units of TP {deployment.tp}"
    names = ("dp", "pp", "sp", "tp")
    degrees = [f"{n.upper()} {getattr(deployment, n)}" for n in names if getattr(deployment, n) > 1]
    return " x ".join(degrees) or "TP 1"


def _nothing(advice: Advice) -> list[str]:
    rate, num = advice.question
    what = _asked(advice, rate) if rate is not None else f"any load with {num} devices"
    return [f"Nothing that was tried answers {what}, of which {_wanted(advice)}."]


def _why(advice: Advice, prices: Mapping[str, float]) -> str:
    """What came next, and what was not tried."""
    trials, field = advice.trials, advice.field
    if not trials.all:
        if not advice.reasons:
            return "Why: no cut of these machines has so many devices."
        where, reason = next(iter(advice.reasons.items()))
        return f"Why: the first of {len(advice.reasons)} reasons: {where} {reason}."
    num = len(field.servers) + len(field.reasons)
    order = "the cheapest" if advice.question.rate is not None else "what may carry most"
    words = (
        f"Why: of {num} cuts {len(field.reasons)} miss the limits with a request alone, and "
        f"{advice.left_out} cannot be better by closed form; {trials.num_replays} replays tried "
        f"the others, {order} first."
    )
    return f"{words}{_next(advice, prices)}"


def _next(advice: Advice, prices: Mapping[str, float]) -> str:
    """What came next to the best, or to the limits; a sentence, or nothing."""
    trials, best = advice.trials, advice.best
    if best is not None and advice.question.rate is None:
        own = best.deployment.name
        kept = [each for each in trials.all if each.meets and len(each.measured) == SEEDS]
        others = [each for each in kept if each.deployment.name != own]
        most = max(others, key=lambda each: each.rate * each.num_servers, default=None)
        return f" Next comes {_figures(advice, most)}." if most else ""
    others = [
        each
        for each in trials.all
        if not each.meets and (best is None or each.cost(prices) < best.cost(prices))
    ]
    limits = trials.limits
    near = min(others, key=lambda each: limits.ratio(each.ttft, each.tpot), default=None)
    head = "Closest with less" if best is not None else "Closest"
    return f" {head}: {_figures(advice, near)}{_refused(near)}." if near else ""


def _figures(advice: Advice, trial: Trial) -> str:
    changed = f", {trial.changed}" if trial.changed else ""
    each = advice.trials.load.shown(trial.rate)
    return (
        f"{trial.num_servers} x {trial.deployment.name} ({trial.num_devices} devices, KV "
        f"{trial.deployment.formats.kv}{changed}) at {each} each, with "
        f"{seconds(trial.ttft)} and {seconds(trial.tpot)}"
    )


def _refused(trial: Trial) -> str:
    if not trial.refused:
        return ""
    return f"; {trial.refused} of its requests are longer than its KV cache"


def _sure(advice: Advice, best: Trial) -> list[str]:
    """What is predicted, how much room that leaves, and how far such predictions were off."""
    limits, seeds = advice.trials.limits, len(best.measured)
    kinds = (
        ("to the first token", "ttft", best.ttft, limits.ttft),
        ("for each token after it", "tpot", best.tpot, limits.tpot),
    )
    lines = [
        f"Predicted for each at {advice.trials.load.shown(best.rate)}, means of {seeds} replays: "
        f"{best.inside:.1%} of the requests inside both limits, and {limits.percentile}% get"
    ]
    wrong = []
    for words, name, value, limit in kinds:
        error = band(name)
        lines.append(
            f"  {seconds(value)} {words}, {1 - value / limit:.0%} below the limit ({error})"
        )
        if value * (1 + error.limit) > limit:
            wrong.append(error.limit / (1 + error.limit))
    if wrong:
        lines.append(
            "Within such errors a limit can be missed: plan with "
            f"--margin {math.ceil(100 * max(wrong)) / 100:.2f} to be on the safe side, or measure."
        )
    return lines


def seconds(value: float) -> str:
    """Seconds for people."""
    return f"{1e3 * value:.3g} ms" if value < 1 else f"{value:.3g} s"


def _start(best: Trial, model: str) -> list[str]:
    deployment = best.deployment
    command = serve_command(model or best.target.model.name, deployment)
    which = "Start it:" if best.num_servers == 1 else "Start each:"
    return [f"{which} {command}"]
