"""What copies of often chosen experts would save, by the cost model; Markdown.

    curl -s localhost:8000/routing > counts.json
    python scripts/labs/expert_copies.py qwen3-30b-a3b sp8,policy=cost --counts counts.json
    python scripts/labs/expert_copies.py qwen3-30b-a3b sp8,policy=cost --spread 0.2 0.6 1.07

Counts are what a server tells at `/routing`, or drawn: `--spread S` lets the chances of a layer's
experts be log-normal with such a deviation (the distribution that the authors of pull request 393
of deepseek-ai/DeepEP found to fit DeepSeek-V3's best), equal ones in even layers and odd ones.

Each device holds as many experts. `moved`: the same, but sorted so that devices have about as much
to do (the heaviest goes to the lightest device that has room). `copies`: `--copies` more experts on
every device, each of that which has most to do for one copy. `even`: nothing is uneven but chance.
For every size of steps the quickest mode is taken, anew in each row; numbers are means of steps
from 3/4 to 5/4 of a size, since products are priced by whole tiles of equal experts. What copies
take of memory is said, and what bringing them up to date takes is left out.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from shiftjax.costs.group_costs import GroupCosts
from shiftjax.costs.routing import Routing, num_counted
from shiftjax.sim.experiments import target_from
from shiftjax.sim.modelled import cost_model
from shiftjax.sim.named import deploy

SIZES = (8, 64, 512, 2048, 8192, 16384)
AROUND = [0.75 + i / 32 for i in range(17)]  # of a size


def drawn_chances(layers: int, experts: int, per_token: int, spread: float) -> np.ndarray:
    """Return `[layers, experts]` of log-normal weights; no token chooses an expert twice."""
    weights = np.random.default_rng(0).lognormal(0, spread, (layers, experts))
    chances = np.minimum(1, per_token * weights / weights.sum(axis=1, keepdims=True))
    for _ in range(100):
        full = chances >= 1
        left, rest = per_token - full.sum(axis=1, keepdims=True), weights * ~full
        chances = np.where(full, 1, np.minimum(1, left * rest / rest.sum(axis=1, keepdims=True)))
    return chances


def placed(chances: np.ndarray, devices: int, copies: int) -> np.ndarray:
    """Return a layer's chances in the order of devices, with so many more experts on each."""
    total = -(-len(chances) // devices) * devices + copies * devices
    num = np.ones(len(chances), int)
    for _ in range(total - len(chances) if copies else 0):
        num[np.argmax(chances / num)] += 1
    pieces = np.repeat(chances / num, num)
    pieces = np.pad(pieces, (0, total - len(pieces)))
    room, loads = [total // devices] * devices, np.zeros(devices)
    held: list[list[float]] = [[] for _ in range(devices)]
    for piece in np.sort(pieces)[::-1]:
        best = min((d for d in range(devices) if room[d]), key=lambda d: loads[d])
        held[best].append(piece)
        loads[best] += piece
        room[best] -= 1
    return np.array([piece for each in held for piece in each])


def seconds(costs: GroupCosts, chances: np.ndarray) -> list[float]:
    """Return the seconds of steps of all `SIZES` in their quickest modes, but for attention."""
    (stage,) = costs.stages
    stage.price(Routing(chances))
    modes = costs.layout.modes

    def quickest(num_tokens: int) -> float:
        num = -(-num_tokens // 8) * 8
        return min(costs.mode_seconds(mode, (num, min(num, 256))) for mode in modes)

    return [statistics.mean(quickest(round(n * part)) for part in AROUND) for n in SIZES]


def table(costs: GroupCosts, chances: np.ndarray, copies: int) -> None:
    """Print what each way of placing experts takes, and what it saves."""
    devices = costs.layout.num_devices
    chances = np.pad(chances, ((0, 0), (0, -chances.shape[1] % devices)))
    k = chances.sum(axis=1, keepdims=True)
    ways = {
        "as they are": chances,
        "moved": np.array([placed(layer, devices, 0) for layer in chances]),
        f"{copies} copies": np.array([placed(layer, devices, copies) for layer in chances]),
        "even": np.broadcast_to(k / chances.shape[1], chances.shape),
    }
    skews = {name: Routing(each).skews(devices).mean() for name, each in ways.items()}
    found = {name: seconds(costs, each) for name, each in ways.items()}
    first = found["as they are"]
    print("| tokens of a step | " + " | ".join(map(str, SIZES)) + " | skew |")
    print("| --- |" + " --- |" * (len(SIZES) + 1))
    for name, each in found.items():
        cells = [f"{1e3 * value:.2f}" for value in each]
        if each is not first:
            cells = [f"{value / base - 1:+.1%}" for value, base in zip(each, first, strict=True)]
        print(f"| {name} | " + " | ".join(cells) + f" | {skews[name]:.2f} |", flush=True)
    print()


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table for each spread, or of the counts."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("mesh", help="as --compare has them")
    parser.add_argument("--machine", default="h200x8")
    parser.add_argument("--dtype", default="fp8")
    parser.add_argument("--counts", type=Path)
    parser.add_argument("--spread", type=float, nargs="*", default=[])
    parser.add_argument("--copies", type=int, default=1, help="more experts on each device")
    given = parser.parse_args(arguments)
    names = {"model": given.model, "machine": given.machine, "dtype": given.dtype}
    target = target_from({**names, "engine": "shiftjax"})
    deployment = deploy(target, given.mesh)
    experts, num = target.model.experts, num_counted(target.model)
    if experts is None:
        raise SystemExit(f"{given.model} has no experts.")
    costs = cost_model(target, deployment)
    each = 3 * target.model.hidden_size * experts.intermediate_size
    size = given.copies * each * num * target.formats.weight_bytes / 1e9
    print(f"{given.model}, {given.mesh}, {given.dtype}: {size:.1f} GB of a device for copies\n")
    if given.counts is not None:
        counts = np.array(json.loads(given.counts.read_text())["counts"])
        table(costs, Routing.of_counts(counts, experts.per_token).chances, given.copies)
    for spread in given.spread:
        print(f"spread {spread}\n")
        table(costs, drawn_chances(num, experts.num, experts.per_token, spread), given.copies)


if __name__ == "__main__":
    main()
