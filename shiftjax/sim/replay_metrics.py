"""What a replay amounts to: its row, throughput over time, steps by mode. No JAX."""

from collections import Counter, defaultdict
from collections.abc import Iterable

import numpy as np

from shiftjax.fleet.stats import FleetStats
from shiftjax.parallel.arrangements import Arrangement, spelled
from shiftjax.sim.columns import Row, latencies, percentiles, row_of_run
from shiftjax.sim.replay import Replay
from shiftjax.sim.roles import RolesRun

PEAK_SECONDS = 5.0  # the window in which the peak throughput is counted


def makespan(replay: Replay) -> float:
    """Seconds from the start of the trace to the last step's end."""
    return replay.steps[-1].done if replay.steps else 0.0


def throughput_over_time(
    replay: Replay, seconds: float, labels: Iterable[str] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(start of each window, tokens computed per second in it), of steps of all or some modes.

    Tokens that the prefix cache had are not computed, so they do not count here.
    """
    wanted = set(replay.labels if labels is None else labels)
    steps = [s for s in replay.steps if s.mode.label in wanted]
    edges = np.arange(0.0, makespan(replay) + seconds, seconds)
    done, tokens = [s.done for s in steps], [s.num_tokens for s in steps]
    totals, _ = np.histogram(done, bins=edges, weights=tokens)
    return edges[:-1], totals / seconds


def longest_mode(replay: Replay, seconds: float) -> tuple[list[float], list[str]]:
    """(start of each window with steps, mode that took most of the devices' time in it)."""
    times: dict[int, defaultdict[str, float]] = {}
    for step in replay.steps:
        spent = times.setdefault(int(step.done / seconds), defaultdict(float))
        spent[step.mode.label] += step.device_seconds
    windows = sorted(times)
    longest = [max(times[w], key=times[w].__getitem__) for w in windows]
    return [w * seconds for w in windows], longest


def arrangements(replay: Replay) -> list[tuple[float, float, Arrangement]]:
    """(from, to, which groups there were) of a fleet, in seconds; else nothing."""
    if replay.fleet is None:
        return []
    turns, first = replay.fleet.turns, replay.fleet.first
    begins = [0.0, *(turn.seconds for turn in turns)]
    shapes = [first, *(turn.arrangement for turn in turns)]
    return list(zip(begins, [*begins[1:], makespan(replay)], shapes, strict=True))


def shares(replay: Replay) -> dict[str, float]:
    """The share of time that each arrangement had, the largest first."""
    spent: defaultdict[str, float] = defaultdict(float)
    for begin, end, arrangement in arrangements(replay):
        spent[spelled(arrangement)] += end - begin
    total = makespan(replay)
    return {
        name: spent[name] / total for name in sorted(spent, key=spent.__getitem__, reverse=True)
    }


def phase_spans(replay: Replay) -> list[tuple[float, float, str]]:
    """(from, to, prefill, decode or switch) of a run in phases, in seconds; else nothing."""
    if replay.phases is None:
        return []
    spans, at, phase = [], 0.0, "prefill"
    for switch in replay.phases.switches:
        spans += [(at, switch.begin, phase), (switch.begin, switch.end, "switch")]
        at, phase = switch.end, switch.phase
    return [*spans, (at, max(at, makespan(replay)), phase)]


def phase_shares(replay: Replay) -> dict[str, float]:
    """The share of time of each phase, and of the switches between them."""
    spent: defaultdict[str, float] = defaultdict(float)
    for begin, end, name in phase_spans(replay):
        spent[name] += end - begin
    return {name: seconds / makespan(replay) for name, seconds in spent.items()}


def role_shares(replay: Replay) -> dict[str, float]:
    """The share of time of each split, as prompt groups + others, the largest first."""
    if replay.roles is None:
        return {}
    spent: defaultdict[str, float] = defaultdict(float)
    turns, end = replay.roles.turns, makespan(replay)
    ends = [*(turn.seconds for turn in turns[1:]), end]
    for turn, until in zip(turns, ends, strict=True):
        num = turn.roles.count("prefill")
        spent[f"{num}+{len(turn.roles) - num}"] += until - turn.seconds
    return {name: spent[name] / end for name in sorted(spent, key=spent.__getitem__, reverse=True)}


def queue_by_priority(replay: Replay) -> list[Row]:
    """Seconds in the queue of every class of requests, the most urgent first."""
    classes = sorted({request.priority for request in replay.requests})
    name = replay.deployment.name
    return [
        {"name": name, "priority": priority, "requests": len(queues)} | percentiles("queue", queues)
        for priority in classes
        for queues in [[r.queue for r in replay.requests if r.priority == priority]]
    ]


def peak_throughput(replay: Replay) -> float:
    """Tokens computed per second in the best window of `PEAK_SECONDS`."""
    return float(max(throughput_over_time(replay, PEAK_SECONDS)[1], default=0.0))


def summary(replay: Replay) -> Row:
    """One flat row: the deployment, the columns of any run, and what only a replay knows."""
    deployment, requests = replay.deployment, replay.requests
    row: Row = {
        name: getattr(deployment, name) for name in ("name", "dp", "pp", "sp", "tp", "policy")
    }
    limits = deployment.targets.default
    row |= row_of_run(requests, replay.num_refused, makespan(replay), *limits)
    row |= percentiles("queue", latencies(requests, "queue"))
    row["peak_tokens_per_second"] = peak_throughput(replay)
    steps = Counter(step.mode.label for step in replay.steps)
    row |= {"steps_base": steps.pop("base", 0), "steps_shift": steps.pop("shift", 0)}
    row["steps_between"] = sum(steps.values())
    row["mode_switches"] = replay.mode_switches
    row["preemptions"] = replay.num_preemptions
    row |= _of_fleet(replay)
    row |= _of_phases(replay)
    row |= _of_roles(replay)
    row["best_in_windows"] = " ".join(f"{name}:{n}" for name, n in (replay.best or {}).items())
    prompts = sum(r.num_prompt_tokens for r in requests)
    row["drafted_tokens"] = sum(r.num_proposed_tokens for r in requests)
    row["accepted_tokens"] = sum(r.num_accepted_tokens for r in requests)
    row["accepted_per_step"] = row["accepted_tokens"] / max(1, len(replay.steps))
    row["cached_share"] = sum(r.num_cached_tokens for r in requests) / max(1, prompts)
    return row


def _of_phases(replay: Replay) -> Row:
    """What became of its phases; without them there is nothing to say."""
    run, shares_of_time = replay.phases, phase_shares(replay)
    row: Row = {f"{n}_share": shares_of_time.get(n, 0.0) for n in ("prefill", "decode", "switch")}
    row["phase_switches"] = len(run.switches) if run else 0
    row["weights_moved_bytes"] = sum(each.num_bytes for each in run.switches) if run else 0
    row["kv_parked_bytes"] = run.num_parked_bytes if run else 0
    row["kv_restored_bytes"] = run.num_restored_bytes if run else 0
    row["restore_wait_seconds"] = run.waited_seconds if run else 0.0
    return row


def _of_roles(replay: Replay) -> Row:
    """What became of roles; without them there is nothing to say."""
    run = replay.roles or RolesRun()
    return {
        "role_changes": max(0, len(run.turns) - 1),
        "kv_sent_sequences": run.num_sent,
        "kv_sent_bytes": run.num_sent_bytes,
        "kv_send_seconds": run.send_seconds,
        "splits": " ".join(f"{name}:{share:.0%}" for name, share in role_shares(replay).items()),
    }


def _of_fleet(replay: Replay) -> Row:
    """What became of its groups; without a fleet there is nothing to say."""
    run = replay.fleet
    stats = run.stats if run else FleetStats()
    return {
        "binds": sum(stats.binds.values()),
        "releases": sum(stats.releases.values()),
        "moved_sequences": stats.num_moved_sequences,
        "moved_bytes": run.num_moved_bytes if run else 0,
        "move_seconds": run.move_seconds if run else 0.0,
        "arrangements": " ".join(f"{name}:{share:.0%}" for name, share in shares(replay).items()),
    }
