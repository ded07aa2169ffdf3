"""Seesaw (arXiv 2503.06433): PP for prompts and TP for decodes in turns, beside vLLM 0.5.4.

Requests are all there at once, in 16 bits. Static configurations take the best of `BUDGETS`, as the
authors tuned the size of chunks; those of several stages that of small steps, which mix prompts and
decodes evenly. Replicas are engines of their own: one is run with its share of the devices and of
the requests.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from shiftjax.costs.machine_files import load_machine
from shiftjax.options import ConfigError
from shiftjax.parallel.degrees import parse_degrees
from shiftjax.reproduce.figures import Curve, Figure, Options, Published
from shiftjax.reproduce.lengths import DATASETS
from shiftjax.sim.experiments import target_from
from shiftjax.sim.modelled import Target
from shiftjax.sim.named import deploy_named
from shiftjax.sim.replay import Replay, replay
from shiftjax.sim.replay_metrics import makespan, phase_shares
from shiftjax.sim.trace import TraceRequest

COUNTS = {"arxiv": 200, "sharegpt": 1000}  # requests; published: 500 and 2,000
QUICK_COUNTS = {"arxiv": 40, "sharegpt": 80}
BUDGETS = (512, 2048)  # tokens of a step
PHASES_BUDGET = 2048
HOST_BYTES = 80 << 30  # for KV, of each device
STATIC: Mapping[int, Sequence[str]] = {
    4: ("tp4", "pp2tp2", "pp4", "dp2tp2", "dp2pp2"),
    8: ("tp8", "pp2tp4", "pp4tp2", "pp8", "dp2tp4", "dp2pp2tp2"),
}
PHASES: Mapping[int, Sequence[str]] = {
    4: ("pp4:tp4", "pp4:pp2tp2"),
    8: ("pp8:tp8", "pp8:pp2tp4", "dp2pp4:dp2tp4"),
}
QUICK = {"tp8", "tp4", "pp2tp2", "pp4:tp4", "pp2tp4", "pp4tp2", "pp8:tp8", "pp8:pp2tp4"}
A100_BYTES, A100_RATE = 40_960 << 20, 1555e9  # the 40 GB kind, table 1
OPEN = "Lengths are drawn, for the texts are not here; fewer requests."
LABELS = {  # figure 10: the best of vLLM, and Seesaw's
    ("a10x8", "15b", "arxiv"): ("dp2tp2", "pp4:tp4"),
    ("a10x8", "34b", "arxiv"): ("dp2pp2tp2", "dp2pp4:dp2tp4"),
    ("a10x8", "70b", "arxiv"): ("pp4tp2", "pp8:pp2tp4"),
    ("a10x8", "15b", "sharegpt"): ("dp2pp2", "pp4:tp4"),
    ("a10x8", "34b", "sharegpt"): ("dp2pp2tp2", "dp2pp4:dp2tp4"),
    ("a10x8", "70b", "sharegpt"): ("pp2tp4", "pp8:pp2tp4"),
    ("l4x8", "15b", "arxiv"): ("pp2tp2", "pp4:tp4"),
    ("l4x8", "34b", "arxiv"): ("dp2tp4", "dp2pp4:dp2tp4"),
    ("l4x8", "70b", "arxiv"): ("pp2tp4", "pp8:pp2tp4"),
    ("l4x8", "15b", "sharegpt"): ("pp4", "pp4:tp4"),
    ("l4x8", "34b", "sharegpt"): ("dp2tp4", "pp8:pp2tp4"),
    ("l4x8", "70b", "sharegpt"): ("pp2tp4", "pp8:pp2tp4"),
}
MODELS = {"15b": ("llama-3-15b", 4), "34b": ("codellama-34b", 8), "70b": ("llama-2-70b", 8)}


class Best(NamedTuple):
    """The best configuration of a kind."""

    name: str
    rate: float  # requests per second


def target(model: str, machine: str, num_devices: int = 8) -> Target:
    """A model in 16 bits on some devices of a machine, served by engines that are independent."""
    found = target_from({"model": model, "machine": machine, "engine": "vllm-v0.5"})
    engine = replace(found.engine.offline, replicas_in_step=False)
    return replace(found, machine=replace(found.machine, num_devices=num_devices), engine=engine)


def small_a100(machine: str) -> Target:
    """Llama-3 70B on eight A100 of 40 GB, with the links of a machine of larger ones."""
    found = target("llama-70b", machine)
    fields = {"memory_bytes": A100_BYTES, "memory_bytes_per_second": A100_RATE}
    return replace(found, machine=replace(load_machine(machine), **fields))


def run(of: Target, name: str, requests: Sequence[TraceRequest], budget: int) -> Replay:
    """One replica of a configuration, or of a pair of them, with its share of the requests.

    Raises ConfigError where the model does not fit.
    """
    degrees = [parse_degrees(part) for part in name.split(":")]
    dp = degrees[0].dp
    devices = of.machine.num_devices // dp
    share = replace(of, machine=replace(of.machine, num_devices=devices))
    spelled = ":".join(each._replace(dp=1).name for each in degrees)
    host = {"host_bytes": HOST_BYTES * devices} if len(degrees) > 1 else {}
    deployment = deploy_named(share, spelled, max_num_batched_tokens=budget, **host)
    return replay(requests[::dp], share, deployment)


def rate(of: Target, name: str, requests: Sequence[TraceRequest], budget: int) -> float:
    """Requests per second of all replicas; 0 where the model does not fit."""
    try:
        return len(requests) / makespan(run(of, name, requests, budget))
    except ConfigError:
        return 0.0


def best(of: Target, names: Sequence[str], requests: Sequence[TraceRequest], quick: bool) -> Best:
    """The quickest of these configurations, each with its best budget."""
    names = [name for name in names if name in QUICK] if quick else names
    found = (
        Best(name, rate(of, name, requests, each)) for name in names for each in budgets_of(name)
    )
    return max(found, key=lambda one: one.rate)


def budgets_of(name: str) -> tuple[int, ...]:
    """The sizes of steps that are tried."""
    if ":" in name:
        return (PHASES_BUDGET,)
    return BUDGETS[:1] if parse_degrees(name).pp > 1 else BUDGETS


def drawn(dataset: str, options: Options) -> list[TraceRequest]:
    """The requests of a data set."""
    return DATASETS[dataset]((QUICK_COUNTS if options.quick else COUNTS)[dataset])


def compared(of: Target, dataset: str, options: Options) -> tuple[Best, Best]:
    """The best static configuration, and the best in phases."""
    requests, devices = drawn(dataset, options), of.machine.num_devices
    static, phases = (best(of, kind[devices], requests, options.quick) for kind in (STATIC, PHASES))
    return static, phases


def pcie(paper: Published, options: Options) -> Iterator[Figure]:
    """Figure 10: three models, two data sets, A10 and L4. Its bars have no numbers."""
    every = []
    for machine in ("a10x8", "l4x8"):
        gains = []
        for size, (model, devices) in MODELS.items():
            of = target(model, machine, devices)
            for dataset in DATASETS:
                static, phases = compared(of, dataset, options)
                gains.append(phases.rate / static.rate)
                theirs = LABELS[machine, size, dataset]
                note = f"Best static {static.name}, phases {phases.name}; published as best: "
                note += f"{theirs[0]}, {theirs[1]}. Published as a bar without a number."
                what = f"{machine.removesuffix('x8').upper()}, {size}, {dataset}: gain of phases"
                yield paper.alone("figure 10", what, gains[-1], "ratio", note)
        kind = machine.removesuffix("x8")
        yield paper.beside(f"{kind}-mean", statistics.geometric_mean(gains), OPEN)
        yield paper.beside(f"{kind}-most", max(gains), OPEN)
        every += gains
    yield paper.beside("all-mean", statistics.geometric_mean(every), OPEN)
    yield paper.beside("all-least", min(every), OPEN)


def a100(paper: Published, options: Options) -> Iterator[Figure]:
    """Figure 11: Llama-3 70B on eight A100 of 40 GB, joined by PCIe and by NVLink."""
    for dataset in DATASETS:
        found = {
            links: compared(small_a100(machine), dataset, options)
            for links, machine in (("pcie", "a100x8-pcie"), ("nvlink", "a100x8"))
        }
        for links, (static, phases) in found.items():
            gain = max(1.0, phases.rate / static.rate)
            note = f"{OPEN} Best static {static.name}, phases {phases.name}."
            note += " One that gains nothing keeps the static one." if gain == 1.0 else ""
            yield paper.beside(f"{links}-gain-{dataset}", gain, note)
        whole = found["nvlink"][0].rate
        static, phases = found["pcie"]
        yield paper.beside(f"pcie-static-{dataset}", static.rate / whole, OPEN)
        yield paper.beside(f"pcie-phases-{dataset}", phases.rate / whole, OPEN)


def breakdown(paper: Published, options: Options) -> Iterator[Figure]:
    """Figure 12: where the time goes, 34B on four A10 with arXiv's articles."""
    of, requests = target("codellama-34b", "a10x8", 4), drawn("arxiv", options)
    seconds = {}
    for name in ("tp4", "pp4", "pp2tp2", "pp4:tp4"):
        quickest = min((run(of, name, requests, b) for b in budgets_of(name)), key=makespan)
        seconds[name] = makespan(quickest)
        shares = phase_shares(quickest)
        parts = ", ".join(f"{part} {share:.0%}" for part, share in shares.items())
        note = "Published as a bar without a number." + (f" Of ours: {parts}." if parts else "")
        what = f"34B, 4 x A10, arxiv: {name}"
        yield paper.alone("figure 12", what, seconds[name], "s", note)
    gain = seconds["pp2tp2"] / seconds["pp4:tp4"]
    note = "Published: phases are quicker, and pp2tp2 is the best of the static ones."
    yield paper.alone("figure 12", "34B, 4 x A10, arxiv: phases over pp2tp2", gain, "ratio", note)


def outputs(paper: Published, options: Options) -> Iterator[Figure | Curve]:
    """Figure 13: 70B on eight A10, 3,000 tokens in and 1 to 900 out."""
    of, prompt, count = target("llama-2-70b", "a10x8"), 3000, 30 if options.quick else 100
    phases, names = "pp8:pp2tp4", ("pp2tp4", "pp4tp2", "pp8")
    over: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for output in (1, 100) if options.quick else (1, 100, 300, 600):
        requests = [TraceRequest(0.0, prompt, output)] * count
        whole = rate(of, phases, requests, PHASES_BUDGET)
        for name in names:
            value = rate(of, name, requests, BUDGETS[0]) / whole
            over[name].append((max(output / prompt, 1 / 64), value))
    yield Curve(
        "requests/s over those of phases",
        "tokens out for a token in (1/64: one token)",
        "ratio",
        over,
    )
    notes = "Published without numbers: "
    first = {name: points[0][1] for name, points in over.items()}
    what = "70B, 8 x A10, 3,000 in, 1 out: {} over phases"
    note = notes + "alike."
    yield paper.alone("figure 13", what.format("pp8"), first["pp8"], "ratio", note)
    note = notes + "worse, by its all-reduces."
    yield paper.alone("figure 13", what.format("pp2tp4"), first["pp2tp4"], "ratio", note)
    later = max(value for points in over.values() for _, value in points[1:])
    note = notes + "phases are the quickest at all lengths."
    what = "70B, 8 x A10, 3,000 in, more out: the best static over phases, most"
    yield paper.alone("figure 13", what, later, "ratio", note)


def links(paper: Published, options: Options) -> Iterator[Figure | Curve]:
    """Figure 14: 34B on eight A10, all-reduces that take a part or a multiple of their time."""
    of, phases = target("codellama-34b", "a10x8"), "dp2pp4:dp2tp4"
    requests = DATASETS["arxiv"](40 if options.quick else 100)
    statics = [name for name in STATIC[8] if name in QUICK] if options.quick else STATIC[8]
    scales = (0.1, 10.0) if options.quick else (0.1, 0.5, 2.0, 10.0, 50.0)
    drawn: dict[str, list[tuple[float, float]]] = {name: [] for name in (*statics, phases)}
    for scale in scales:
        ways = tuple(way.scaled(1 / scale, scale) for way in of.machine.all_reduce)
        scaled = replace(of, machine=replace(of.machine, all_reduce=ways))
        for name, points in drawn.items():
            points.append((scale, rate(scaled, name, requests, budgets_of(name)[-1])))
    yield Curve("by speed of all-reduces", "times as quick as PCIe", "requests/s", drawn)
    gains = [
        drawn[phases][place][1] / max(drawn[name][place][1] for name in statics)
        for place in range(len(scales))
    ]
    note = "Published without numbers: above 1 from 0.1 to 50 times PCIe's speed."
    for what, gain in (("least", min(gains)), ("most", max(gains))):
        words = f"34B, 8 x A10, arxiv, 0.1 to 50 times PCIe: gain of {phases}, {what}"
        yield paper.alone("figure 14", words, gain, "ratio", note)


PARTS = {each.__name__: each for each in (pcie, a100, breakdown, outputs, links)}
