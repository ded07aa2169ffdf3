"""Adapters on tiny models, and the tokens that a model with one of them would say."""

import itertools
import json
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
from engines import checkpoint, tokens
from oracle import numpy_llama
from safetensors.numpy import save_file

from shiftjax.adapters.pool import AdapterPool
from shiftjax.build import Built
from shiftjax.core.request import Event, Request, SamplingParams

ALL = "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
NUM_TOKENS = 8
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


@cache
def adapter(seed: int, rank: int = 4, experts: bool = False, **overrides) -> tuple[Path, dict]:
    """A random adapter of the model of `checkpoint(**overrides)`: its directory, and its tensors.

    So large that it changes what a model says; of all matrices, those of `experts` only if so.
    """
    *_, tensors = checkpoint(**overrides)
    directory = Path(tempfile.mkdtemp(prefix="shiftjax-test-"))
    rng, factors = np.random.default_rng(seed), {}
    for name, matrix in tensors.items():
        module, _, kind = name.rpartition(".")
        is_of_expert = ".experts." in name
        if kind != "weight" or module.rpartition(".")[2] not in ALL or is_of_expert > experts:
            continue
        outputs, inputs = matrix.shape
        size = np.std(matrix) * np.sqrt(inputs / rank)
        for part, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            values = rng.standard_normal(shape) * (size if part == "B" else inputs**-0.5)
            factors[f"base_model.model.{module}.lora_{part}.weight"] = values.astype(np.float32)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": [*ALL]}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file(factors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    return directory, factors


def merged(seed: int | None, **overrides) -> dict:
    """The tensors of the model with an adapter in its weights; None: of the model alone."""
    own = {name: overrides.pop(name) for name in ("rank", "experts") if name in overrides}
    *_, tensors = checkpoint(**overrides)
    if seed is None:
        return tensors
    _, factors = adapter(seed, **own, **overrides)
    found = dict(tensors)
    for name, b in factors.items():
        if ".lora_B." in name:
            a = factors[name.replace(".lora_B.", ".lora_A.")].astype(np.float64)
            target = name.removeprefix("base_model.model.").replace(".lora_B.", ".")
            found[target] = (tensors[target] + 2 * b.astype(np.float64) @ a).astype(np.float32)
    return found


@cache
def expected(
    prompt: tuple[int, ...], seed: int | None, num: int = NUM_TOKENS, **overrides
) -> list[int]:
    """Greedy tokens of a prompt with an adapter, by the oracle on merged weights."""
    tensors = merged(seed, **overrides)
    own = {name: value for name, value in overrides.items() if name not in ("rank", "experts")}
    _, config, _ = checkpoint(**own)
    return numpy_llama.greedy(config, tensors, list(prompt), num)


def modules(*seeds: int, **overrides) -> str:
    """The setting `lora_modules` of adapters that are named by their seeds."""
    return ",".join(f"a{seed}={adapter(seed, **overrides)[0]}" for seed in seeds)


def pool_of(built: Built) -> AdapterPool:
    """The adapters of an engine."""
    assert built.adapters is not None
    return built.adapters


def requests(
    built: Built, wanted: list[tuple[list[int], int | None]], sampling: SamplingParams = GREEDY
) -> list[Request]:
    """A request for each prompt and adapter."""
    numbers, pool = itertools.count(built.engine._num_requests), pool_of(built)
    return [
        Request(f"r{next(numbers)}", prompt, sampling, adapter=pool.key_of(f"a{seed}"))
        for prompt, seed in wanted
    ]


def serve(built: Built, requests: list[Request]) -> dict[str, list[Event]]:
    """Serve all together; events by request."""
    events: dict[str, list[Event]] = {}
    for request in requests:
        built.engine.add_request(request)
    for turn in itertools.count():
        if not built.engine.has_work():
            break
        for event in built.engine.step(float(turn)):
            events.setdefault(event.request_id, []).append(event)
    built.engine.check()
    return events


def said(built: Built, wanted: list[tuple[list[int], int | None]]) -> list[list[int]]:
    """The tokens of each prompt with its adapter, served together."""
    asked = requests(built, wanted)
    events = serve(built, asked)
    return [tokens(events[request.request_id]) for request in asked]
