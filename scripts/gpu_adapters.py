"""Adapters on a GPU: what they say, and how long steps with them take.

Factors are functions of their names, as weights are (`gpu_weights.py`): NumPy makes them here.
"""

import json
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from gpu_parts import ENGINES, Row, Run

from shiftjax.arch.config import ModelConfig
from shiftjax.arch.lora import adapted

RANK, SLOTS = 16, 8
MASK = np.uint64(0xFFFFFFFF)
NAMES = "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
ENGINES_WITH = {
    "bf16": ENGINES["pallas, one graph"],
    "fp8": ENGINES["fp8, one graph"],
}
LAYERS = 8  # a quarter of the model's, which start in a quarter of the time


def hashed(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return a matrix of a checkpoint, float64, whose variance is about 1 / columns."""
    start = np.uint64(zlib.crc32(name.encode()))
    h = (np.arange(np.prod(shape), dtype=np.uint64) * np.uint64(0x9E3779B1) + start) & MASK
    h = ((h ^ (h >> np.uint64(15))) * np.uint64(0x85EBCA77)) & MASK
    byte = ((h ^ (h >> np.uint64(13))) >> np.uint64(24)).astype(np.float64)
    return ((byte - 127.5) * 2.0 ** round(np.log2(shape[-1] ** -0.5 / 73.9))).reshape(shape)


def factors(model: ModelConfig, seed: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return factors a `[RANK, in]` and b `[out, RANK]` of an adapter, by names of matrices.

    They change a product by about as much as it is.
    """
    found = {}
    for name, matrix in adapted(model).items():
        a = hashed(f"{seed} {name} a", (RANK, matrix.inputs))
        found[name] = a, hashed(f"{seed} {name} b", (matrix.outputs, RANK))
    return found


def write_adapter(folder: Path, model: ModelConfig, seed: int) -> Path:
    """Write an adapter as PEFT does; returns its directory."""
    from safetensors.numpy import save_file

    directory, tensors = folder / f"a{seed}", {}
    directory.mkdir()
    for name, pair in factors(model, seed).items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        for part, values in zip("AB", pair, strict=True):
            tensors[f"{module}.lora_{part}.weight"] = values.astype(np.float32)
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": [*NAMES]}
    (directory / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def options_with(paths: Mapping[str, Path]) -> dict[str, object]:
    """Return the settings of an engine with these adapters."""
    modules = ",".join(f"{name}={path}" for name, path in paths.items())
    return {
        "enable_lora": True,
        "lora_modules": modules,
        "max_loras": SLOTS,
        "max_lora_rank": RANK,
    }


def adapter_rows(name: str, run: Run) -> Iterator[Row]:
    """Yield decode steps of some layers of a Llama-8B with room for adapters: without, and with.

    As many slots are multiplied whatever they hold, so one adapter is enough. Then the kernels.
    """
    from gpu_engine import PROFILED, Sizes, make_chain, make_engine, make_plan, step_seconds
    from gpu_profile import profile

    from shiftjax.arch.presets import PRESETS

    model = replace(PRESETS["llama-8b"], num_layers=LAYERS)
    sizes, options = Sizes((1, 64), 1024, (), (1, 16, 16), 20), {}
    if run.dry:
        model, sizes = PRESETS["tiny"], Sizes((2,), 64, (), (1, 16, 4), 2)
    else:
        options = ENGINES_WITH[name]
    with tempfile.TemporaryDirectory(prefix="shiftjax-adapters-") as folder:
        paths = {"a": write_adapter(Path(folder), model, 0)}
        built = make_engine(model, sizes, dict(options) | options_with(paths))
        (runner,) = built.runners
        assert built.adapters is not None
        key, shift = built.adapters.key_of("a"), runner.step.layout.shift
        for batch in sizes.batches:
            seconds = {}
            for what, own in (("none", None), ("adapters", key)):
                plan = make_plan(batch, sizes.context, 1)
                for item in plan.scheduled:
                    item.sequence.request = replace(item.sequence.request, adapter=own)
                found = step_seconds(runner, plan, sizes.repeats)
                seconds[what] = found["device_seconds"]
                yield {"row": f"decode of {batch}, {what}", "batch": batch} | found
                if not run.dry:
                    steps = [(shift, runner.compiled(runner.program_for(plan), shift))] * PROFILED
                    keep = run.out / f"adapters-{name}-{batch}-{what}.xplane.pb"
                    chain = partial(make_chain(runner, plan), steps)
                    yield {"row": f"profile of {batch}, {what}"} | profile(chain, PROFILED, keep)
            more = (seconds["adapters"] - seconds["none"]) / model.num_layers
            yield {"row": f"adapters add to a layer of a decode of {batch}", "us": more * 1e6}
