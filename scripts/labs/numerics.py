"""What of a text depends on the mode, by the setting `numerics`: runs compared bit by bit.

    python scripts/bench.py numerics --model smollm2-135m --layers 30 --sp 4 --tp 2 --tokens 24
    python scripts/bench.py numerics --numerics invariant --fleet 1,2,4 --drafts
    python scripts/bench.py numerics --layers 3 --meshes 8x1,1x8 --model random:tiny-mixtral
    python scripts/bench.py numerics --rounds 5

Serves the same prompts in each mode, and the first ones alone in base and in shift, whose prompts
come whole if they fit a step, and in shift by chunks; every second one is sampled. With `--meshes`
base is compared with the modes of other meshes, too; with `--drafts` shift drafts by n-grams; with
`--fleet` units of `tp` form groups of these widths, and all are compared with base of the
narrowest. A row is a setting and two runs. Log-probabilities are compared as far as the tokens
before them are equal: the share of equal bits, and the mean and the largest difference.

`--rounds` measures CPU seconds instead: of serving all prompts together, of all virtual devices,
after a round that warms up. All settings have their turn in a round; ratios are those to `fast`, or
the first setting, of the same round: the median, the least and the most.
"""

import argparse
import re
import time
from collections.abc import Generator, Iterator
from dataclasses import replace
from itertools import count, product
from typing import Any, ClassVar

import numpy as np

from shiftjax.arch.numerics import NUMERICS
from shiftjax.build import Built, build
from shiftjax.config import EngineConfig
from shiftjax.core.lookahead import Lookahead
from shiftjax.core.policies import FixedPolicy
from shiftjax.core.request import Request, SamplingParams
from shiftjax.core.step_sizes import Demand, StepSizes
from shiftjax.drafts.speculation import DraftStats
from shiftjax.fleet.fleet_policy import FleetView, Wish
from shiftjax.fleet.regrouping import Fleet
from shiftjax.parallel.arrangements import equal_groups
from shiftjax.parallel.grid import Group
from shiftjax.settings import make_virtual_devices
from shiftjax.weights.locate import open_source, resolve_model

OPTIONS = {
    "--model": "smollm2-135m",
    "--layers": (0, "of the model, from the first on; 0: all"),
    "--sp": 4,
    "--tp": 2,
    "--meshes": ("", "others to compare base with, SP x TP, as 8x1,1x8"),
    "--dtype": "bfloat16",
    "--prompts": 16,
    "--tokens": 24,
    "--step": ([128], "tokens of a step; of several sizes each step has the least that will do"),
    "--chunk": (24, "tokens of a prompt in a step, where prompts come in chunks"),
    "--quantization": "auto",
    "--fleet": ("", "widths of groups, as 1,2,4; the widest has all devices"),
    "--drafts": (False, "compare shift with drafts, too"),
    "--numerics": ("all", "or some of " + ",".join(NUMERICS)),
    "--rounds": (0, "of CPU seconds, which are measured instead"),
}
MOST_ALONE = 4  # prompts
Texts = list[list[tuple[int, float]]]  # token ids and log-probabilities


def measure(args: argparse.Namespace) -> Generator[dict[str, Any], None, None]:
    """Yield a row for each setting and two runs that are compared; or its CPU seconds."""
    make_virtual_devices(config_of(args, "fast", args.sp, args.tp))
    source = model_of(args)
    vocabulary, rng = source.config.vocab_size, np.random.default_rng(0)
    sizes = rng.integers(4, 100, args.prompts)
    prompts = [rng.integers(vocabulary // 50, vocabulary // 5, size).tolist() for size in sizes]
    settings = list(NUMERICS) if args.numerics == "all" else args.numerics.split(",")
    yield from (costs if args.rounds else comparisons)(args, source, prompts, settings)


def comparisons(
    args: argparse.Namespace, source: Any, prompts: list[list[int]], settings: list[str]
) -> Iterator[dict[str, Any]]:
    """Yield a row for each setting and two runs."""
    for numerics in settings:
        built, found = engine(args, source, numerics, args.sp, args.tp), dict[str, Texts]()
        for one, other, texts in runs(args, built, prompts):
            found[other] = texts
            if one:
                yield {"numerics": numerics, "text": one, "against": other} | compared(
                    found[one], texts
                )
        for mesh in filter(None, args.meshes.split(",")):
            built = engine(args, source, numerics, *map(int, mesh.split("x")))
            for place, mode in enumerate(Group(0, built.deployment.layout.sp).modes):
                texts, _ = served(built, place, [prompts], args.tokens)
                row = {"numerics": numerics, "text": "base", "against": f"{mode.label} of {mesh}"}
                yield row | compared(found["base"], texts)


def costs(
    args: argparse.Namespace, source: Any, prompts: list[list[int]], settings: list[str]
) -> Iterator[dict[str, Any]]:
    """Yield the CPU seconds of each setting in base and in shift."""
    engines = {name: engine(args, source, name, args.sp, args.tp) for name in settings}
    places, seconds = {"base": 0, "shift": -1}, dict[tuple[str, str], list[float]]()
    for number, name, mode in product(range(-1, args.rounds), engines, places):
        cpu = served(engines[name], places[mode], [prompts], args.tokens)[1]
        seconds.setdefault((name, mode), []).extend([cpu] * (number >= 0))
    for (name, mode), own in seconds.items():
        ratios = np.array(own) / np.array(seconds[settings[0], mode])
        yield {
            "numerics": name,
            "mode": mode,
            "CPU s": round(float(np.median(own)), 2),
            "of the first": round(float(np.median(ratios)), 2),
            "least": round(float(np.min(ratios)), 2),
            "most": round(float(np.max(ratios)), 2),
        }


Run = tuple[str | None, str, Texts]  # the run it is compared with, its name, what it said


def runs(args: argparse.Namespace, built: Built, prompts: list[list[int]]) -> Iterator[Run]:
    """Serve the prompts in every mode of every width, base first; alone, in chunks; with drafts."""
    schedulers = [lane.scheduler for lane in built.engine.lanes]
    drafting = [scheduler.lookahead for scheduler in schedulers]
    for scheduler in schedulers:
        scheduler.lookahead = Lookahead()
    first: str | None = None
    base = shift = ""
    for width in built.deployment.by_width:
        if fleet := built.engine.topology.find(Fleet):
            fleet.policy = OneWidth(width)
        modes = Group(0, width).modes
        labels = [f"{mode.label} of {width}" if fleet else mode.label for mode in modes]
        base, shift = labels[0], labels[-1]
        for place, label in enumerate(labels):
            yield first, label, served(built, place, [prompts], args.tokens)[0]
            first = first or label
    alone = [[prompt] for prompt in prompts[:MOST_ALONE]]
    for place, label in {0: base, -1: shift}.items():
        yield label, f"{label}, alone", served(built, place, alone, args.tokens)[0]
    sizes = [scheduler.sizes for scheduler in schedulers]
    for scheduler in schedulers:
        scheduler.sizes = Chunks(args.chunk)
    chunked = served(built, -1, alone, args.tokens)[0]
    yield f"{shift}, alone", f"the same, chunks of {args.chunk}", chunked
    for scheduler, own, lookahead in zip(schedulers, sizes, drafting, strict=True):
        scheduler.sizes, scheduler.lookahead = own, lookahead
    if args.drafts:
        texts = served(built, -1, [prompts], args.tokens)[0]
        drafts = built.engine.stats().find(DraftStats) or DraftStats()
        taken = f"{drafts.num_accepted} of {drafts.tokens.total()} drafted tokens taken"
        yield shift, f"{shift}, {taken}", texts


class Chunks(StepSizes):
    """Steps have so many tokens of prompts at most."""

    chooses = True

    def __init__(self, num_tokens: int):
        self.num_tokens = num_tokens

    def choose(self, demand: Demand) -> int:
        """Return how many tokens the step may have at most, decodes included."""
        return demand.num_decodes + self.num_tokens


class OneWidth:
    """All units stay in groups of one width."""

    widens: ClassVar[bool] = True

    def __init__(self, width: int):
        self.width = width

    def rule(self) -> str:
        """Return when groups change."""
        return "never"

    def width_for(self, request: Request) -> int:
        """Return the width that a request starts in."""
        return self.width

    def arrange(self, view: FleetView) -> Wish:
        """Return the groups that there shall be."""
        return Wish(equal_groups(view.units, self.width), "told", "move")


def config_of(args: argparse.Namespace, numerics: str, sp: int, tp: int) -> EngineConfig:
    """Return the settings of an engine."""
    sizes = {"max_num_batched_tokens": args.step[-1], "token_buckets": args.step, "num_blocks": 400}
    sizes |= {"dtype": args.dtype, "quantization": args.quantization, "max_model_len": 256}
    sizes |= {"tp": tp, "speculation": "ngram" if args.drafts else "none"}
    if args.fleet:
        widths = [int(width) for width in args.fleet.split(",")]
        sizes |= {"fleet": True, "devices": max(widths) * tp, "fleet_widths": widths}
    else:
        sizes["sp"] = sp
    return EngineConfig.from_options(
        model=args.model, numerics=numerics, prefix_caching=False, max_num_seqs=16, **sizes
    )


def model_of(args: argparse.Namespace) -> Any:
    """The first layers of the model."""
    source: Any = open_source(resolve_model(args.model))
    if args.layers:
        source.config = replace(source.config, num_layers=args.layers)
        behind = re.compile(r"model\.layers\.(\d+)\.")
        source.tensors = {
            name: tensor
            for name, tensor in source.tensors.items()
            if not (found := behind.match(name)) or int(found[1]) < args.layers
        }
    return source


def engine(args: argparse.Namespace, source: Any, numerics: str, sp: int, tp: int) -> Built:
    """An engine on these layers."""
    return build(config_of(args, numerics, sp, tp), source, lambda *_: None, None)


def served(
    built: Built, place: int, batches: list[list[list[int]]], num_tokens: int
) -> tuple[Texts, float]:
    """Return the texts of prompts in the mode at a place, and the CPU seconds that they took."""
    for lane in built.engine.lanes:
        lane.policy = FixedPolicy(place)  # those of a fleet have their own
    started = time.process_time()
    texts, numbers = [], count(built.engine._num_requests)
    for prompts in batches:
        found: dict[str, list[tuple[int, float]]] = {}
        for prompt in prompts:
            seed, name = len(texts) + len(found), f"r{next(numbers)}"
            params = SamplingParams(
                temperature=seed % 2, seed=seed, max_tokens=num_tokens, ignore_eos=True, logprobs=0
            )
            built.engine.add_request(Request(name, prompt, params))
            found[name] = []
        while built.engine.has_work():
            for event in built.engine.step(time.monotonic()):
                if event.error:
                    raise RuntimeError(event.error)
                found[event.request_id] += [(e.token_id, e.logprob) for e in event.logprobs or ()]
        texts += found.values()
    return texts, time.process_time() - started


def compared(one: Texts, other: Texts) -> dict[str, Any]:
    """Return how many texts are equal, and how far their log-probabilities are."""
    differences, texts = [], list(zip(one, other, strict=False))
    for pair in texts:
        for (token, mine), (theirs, yours) in zip(*pair, strict=True):
            if token != theirs:
                break
            differences.append(abs(mine - yours))
    is_equal = [[t for t, _ in a] == [t for t, _ in b] for a, b in texts]
    return {
        "greedy texts equal": f"{sum(is_equal[::2])} of {len(is_equal[::2])}",
        "sampled": f"{sum(is_equal[1::2])} of {len(is_equal[1::2])}",
        "equal bits": f"{np.mean(np.array(differences) == 0):.1%}",
        "mean difference": float(f"{np.mean(differences):.2g}"),
        "largest": float(f"{np.max(differences):.2g}"),
    }
