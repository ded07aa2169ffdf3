"""What of a text depends on the mode, by the setting `numerics`: base against others, bit by bit.

    python scripts/bench.py numerics --model smollm2-135m --layers 30 --sp 4 --tp 2 --tokens 24
    python scripts/bench.py numerics --numerics invariant --fleet 1,2,4 --drafts

Serves the same prompts in each mode, and some in shift one by one, whose prompts come whole if they
fit a step; every second one is sampled. With `--drafts` shift drafts by n-grams, too; with
`--fleet` units of `tp` form groups of these widths, and all are compared with base of the
narrowest. A row is a setting and what base is compared with. Log-probabilities are compared as far
as the tokens before them are equal: the share of equal bits, and the mean and the largest
difference. CPU seconds are those of serving all prompts together, of all virtual devices.
"""

import argparse
import re
import time
from collections.abc import Generator, Iterator
from dataclasses import replace
from itertools import count
from typing import Any, ClassVar

import numpy as np

from shiftjax.arch.numerics import NUMERICS
from shiftjax.build import Built, build
from shiftjax.config import EngineConfig
from shiftjax.core.lookahead import Lookahead
from shiftjax.core.policies import FixedPolicy
from shiftjax.core.request import Request, SamplingParams
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
    "--dtype": "bfloat16",
    "--prompts": 16,
    "--tokens": 24,
    "--step": (64, "tokens of a step"),
    "--quantization": "auto",
    "--fleet": ("", "widths of groups, as 1,2,4; the widest has all devices"),
    "--drafts": (False, "compare shift with drafts, too"),
    "--numerics": ("all", "or one of " + ", ".join(NUMERICS)),
}
MOST_ALONE = 4  # prompts
Texts = list[list[tuple[int, float]]]  # token ids and log-probabilities


def measure(args: argparse.Namespace) -> Generator[dict[str, Any], None, None]:
    """Yield a row for each setting and what base is compared with."""
    make_virtual_devices(config_of(args, "fast"))
    rng = np.random.default_rng(0)
    sizes = rng.integers(4, 100, args.prompts)
    prompts = [rng.integers(1000, 9000, size).tolist() for size in sizes]
    for numerics in NUMERICS if args.numerics == "all" else (args.numerics,):
        built = engine(args, numerics)
        first: Texts | None = None
        for name, texts, cpu in runs(args, built, prompts):
            row = {"numerics": numerics, "base against": name}
            if first is None:
                first = texts
            else:
                row |= compared(first, texts)
            yield row | ({} if cpu is None else {"CPU s": round(cpu, 1)})


Run = tuple[str, Texts, float | None]  # its name, what it said, CPU seconds


def runs(args: argparse.Namespace, built: Built, prompts: list[list[int]]) -> Iterator[Run]:
    """Serve the prompts in every mode of every width, base first; then alone, and with drafts."""
    schedulers = [lane.scheduler for lane in built.engine.lanes]
    drafting = [scheduler.lookahead for scheduler in schedulers]
    for scheduler in schedulers:
        scheduler.lookahead = Lookahead()
    for width in built.deployment.by_width:
        if fleet := built.engine.topology.find(Fleet):
            fleet.policy = OneWidth(width)
        modes = Group(0, width).modes
        for place, mode in enumerate(modes):
            name = f"{mode.label} of {width}" if fleet else mode.label
            yield name, *served(built, place, [prompts], args.tokens)
    alone = [[prompt] for prompt in prompts[:MOST_ALONE]]
    yield "shift, alone", served(built, -1, alone, args.tokens)[0], None
    if args.drafts:
        for scheduler, lookahead in zip(schedulers, drafting, strict=True):
            scheduler.lookahead = lookahead
        yield "shift, drafts", *served(built, -1, [prompts], args.tokens)


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


def config_of(args: argparse.Namespace, numerics: str) -> EngineConfig:
    """Return the settings of an engine with one size of steps."""
    sizes = {"max_num_batched_tokens": args.step, "token_buckets": [args.step], "num_blocks": 400}
    sizes |= {"dtype": args.dtype, "quantization": args.quantization, "max_model_len": 256}
    sizes |= {"tp": args.tp, "speculation": "ngram" if args.drafts else "none"}
    if args.fleet:
        widths = [int(width) for width in args.fleet.split(",")]
        sizes |= {"fleet": True, "devices": max(widths) * args.tp, "fleet_widths": widths}
    else:
        sizes["sp"] = args.sp
    return EngineConfig.from_options(
        model=args.model, numerics=numerics, prefix_caching=False, max_num_seqs=16, **sizes
    )


def engine(args: argparse.Namespace, numerics: str) -> Built:
    """An engine on the first layers of the model."""
    source: Any = open_source(resolve_model(args.model))
    if args.layers:
        source.config = replace(source.config, num_layers=args.layers)
        behind = re.compile(r"model\.layers\.(\d+)\.")
        source.tensors = {
            name: tensor
            for name, tensor in source.tensors.items()
            if not (found := behind.match(name)) or int(found[1]) < args.layers
        }
    return build(config_of(args, numerics), source, lambda *_: None, None)


def served(
    built: Built, place: int, batches: list[list[list[int]]], num_tokens: int
) -> tuple[Texts, float]:
    """Return the texts of prompts in the mode at a place, and the CPU seconds that they took."""
    built.engine.policy, started = FixedPolicy(place), time.process_time()
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
