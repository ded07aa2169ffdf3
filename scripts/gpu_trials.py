"""What a start tries before it relies on the kernels, for deployments on 8 GPUs, of each the part
that is one GPU's.

A start ends with the first case that fails. Here the other cases run, too: what else is wrong
should not need another machine.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import jax
from gpu_parts import BLOCK_SIZE, Row, Run

from shiftjax.arch.config import LoraSlots
from shiftjax.arch.formats import Formats
from shiftjax.arch.presets import PRESETS
from shiftjax.costs.buckets import Bucket
from shiftjax.device.attention_cases import Problem, Trial, build, tries_of
from shiftjax.device.attention_check import shape_of
from shiftjax.device.attention_steps import Cases, Shape
from shiftjax.models.product_backend import plain_shape
from shiftjax.parallel.layout import Layout

LARGEST = Bucket(8192, 256, 256)
DETAIL = 800  # characters of what was raised


class Deployed(NamedTuple):
    """A model on so many GPUs."""

    model: str
    formats: Formats = Formats()
    sp: int = 8
    tp: int = 1
    deterministic: bool = False
    by_position: bool = False
    lora: LoraSlots | None = None


CODES, ADAPTERS = Formats("fp8", "fp8"), LoraSlots(8, 16)
TRIALS = {
    "llama-8b, 1 GPU": Deployed("llama-8b", sp=1),
    "llama-8b, fp8, 1 GPU": Deployed("llama-8b", CODES, sp=1),
    "llama-70b": Deployed("llama-70b"),
    "llama-70b, fp8": Deployed("llama-70b", CODES),
    "llama-70b, deterministic": Deployed("llama-70b", deterministic=True),
    "qwen3-30b-a3b": Deployed("qwen3-30b-a3b", sp=4),
    "qwen3-30b-a3b, fp8": Deployed("qwen3-30b-a3b", CODES, sp=4),
    "qwen3-30b-a3b, by position": Deployed("qwen3-30b-a3b", by_position=True),
    "gpt-oss-120b": Deployed("gpt-oss-120b", Formats("mxfp4")),
    "gemma-3-27b": Deployed("gemma-3-27b"),
    "deepseek-v3": Deployed("deepseek-v3", Formats("fp8")),
    "llama-8b, adapters, 1 GPU": Deployed("llama-8b", sp=1, lora=ADAPTERS),
    "llama-70b, adapters": Deployed("llama-70b", lora=ADAPTERS),
    "llama-70b, fp8, adapters": Deployed("llama-70b", CODES, lora=ADAPTERS),
    "llama-8b, adapters of rank 8": Deployed("llama-8b", lora=LoraSlots(3, 8)),
}


def trial_rows(name: str, run: Run) -> Iterator[Row]:
    """Yield a row for each case, with what is wrong with it, and its seconds."""
    if run.dry:
        yield {"skipped": "tests try the kernels in an interpreter"}
        return
    device = jax.devices()[0]
    tries: list[tuple[str, Callable[[], Problem | None]]] = []
    for shape in shapes_of(TRIALS[name]):
        trial = Trial(shape, Cases(), device.device_kind, (device.id,))
        tries = [*tries_of(trial, build(trial, device), [device]), *tries]
    # attention last: an address that is wrong ends the process's use of the device
    tries.sort(key=lambda each: " decodes " in each[0])
    for case, attempt in tries:
        start = time.monotonic()
        found = found_by(attempt)
        yield {"row": case, "seconds": round(time.monotonic() - start, 2)} | found


def shapes_of(deployed: Deployed) -> list[Shape]:
    """Return what is tried together, and then the products of numbers, if there are any."""
    model, formats = replace(PRESETS[deployed.model], lora=deployed.lora), deployed.formats
    options: dict[str, Any] = {"by_position": True} if deployed.by_position else {}
    layout = Layout(model, deployed.sp, deployed.tp, **options)
    shape = shape_of(layout, formats, BLOCK_SIZE, LARGEST, deployed.deterministic)
    plain = plain_shape(layout, formats)
    alone = [replace(shape, plain=plain)] if plain is not None and plain.matrices else []
    return [shape, *alone]


def found_by(attempt: Callable[[], Problem | None]) -> Row:
    """Return whether a case is right, and else what it says."""
    problem = attempt()
    if problem is None:
        return {"right": True}
    return {"right": False, "problem": problem.problem, "detail": problem.detail[-DETAIL:]}
