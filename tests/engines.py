"""Engines on tiny random models, and ways to run requests through them."""

import itertools
import random
import shutil
import tempfile
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from harness import silent
from lean import greedy_steps
from oracle import numpy_llama
from safetensors.numpy import save_file

from shiftjax.build import Built, build
from shiftjax.config import EngineConfig
from shiftjax.core.engine import Engine
from shiftjax.core.policy import Policy
from shiftjax.core.request import Event, Request, SamplingParams
from shiftjax.costs.work import Work
from shiftjax.device.runner import DeviceRunner
from shiftjax.parallel.grid import Mode
from shiftjax.weights.locate import open_source, resolve_model

# 9 query and 3 KV heads, as SmolLM2 has: every device count pads or replicates them.
MODEL = {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}

# Experts behind an MLP, and one that all tokens use.
MOE = {
    "model_type": "qwen2_moe",
    "num_experts": 16,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 64,
    "norm_topk_prob": True,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "decoder_sparse_step": 2,  # the first layer has an MLP
}


@cache
def checkpoint(**overrides) -> tuple[Path, dict, dict]:
    """A tiny random checkpoint: its directory, config and tensors."""
    directory = Path(tempfile.mkdtemp(prefix="shiftjax-test-"))
    config, tensors = numpy_llama.random_checkpoint(directory, seed=7, **(MODEL | overrides))
    return directory, config, tensors


@cache
def scaled_checkpoint(**overrides) -> tuple[Path, dict, dict]:
    """The same with scales of a KV cache: of K a head each, some too small, of V one for all."""
    plain, config, tensors = checkpoint(**overrides)
    directory, rng = Path(tempfile.mkdtemp(prefix="shiftjax-test-")), np.random.default_rng(3)
    scales = {}
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}.self_attn"
        heads = 2.0 ** rng.uniform(-9, -5, config["num_key_value_heads"])  # 448 are 0.9 to 14
        scales[f"{at}.k_scale"] = heads.astype(np.float32)
        scales[f"{at}.v_scale"] = np.float32(rng.uniform(0.01, 0.02, 1))
    shutil.copy(plain / "config.json", directory)
    save_file(tensors | scales, directory / "model.safetensors", metadata={"format": "pt"})
    return directory, config, tensors | scales


def make(directory: Path, sp: int, tp: int, cache: Path | None = None, **options) -> Built:
    """Build an engine in float32 with small budgets; no compilation cache unless one is given."""
    return build_tiny(directory, cache, sp=sp, tp=tp, **options)


def build_tiny(
    directory: Path, cache: Path | None = None, *, whole: bool = False, **options
) -> Built:
    """The same in whatever degrees the options say.

    All rows are greedy, and one that asks for more fails, unless the sampler is `whole`.
    """
    defaults = {
        "dtype": "float32",
        "max_model_len": 128,
        "block_size": 4,
        "num_blocks": 200,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 32,
        "token_buckets": [32],  # one size: half the programs; tests of sizes name theirs
        "cache_dir": "none",
    }
    config = EngineConfig.from_options(**(defaults | options))
    source = open_source(resolve_model(str(directory)), drafts=config.drafts)
    with nullcontext() if whole else greedy_steps():
        return build(config, source, silent, cache)


def crowd(seed: int, count: int = 9) -> list[list[int]]:
    """Prompts with shared beginnings, some of which take several steps."""
    rng = random.Random(seed)
    stem = [rng.randrange(3, 199) for _ in range(20)]
    return [
        stem[: rng.randrange(21)] + [rng.randrange(3, 199) for _ in range(rng.randrange(1, 40))]
        for _ in range(count)
    ]


class RandomPolicy(Policy):
    """A mode of the group, or one of base and shift, drawn at random for every step."""

    def __init__(self, seed: int, *, ends: bool = False):
        self.random, self.ends = random.Random(seed), ends

    def mode_of(self, work: Work, modes, num_waiting: int, last_mode: Mode | None) -> Mode:
        return self.random.choice((modes[0], modes[-1]) if self.ends else modes)


def run(
    engine: Engine,
    prompts: list[list[int]],
    sampling: list[SamplingParams],
    abort_at: dict[int, int] | None = None,
) -> dict[tuple[int, int], list[Event]]:
    """Serve all prompts together; events by (prompt, continuation). `abort_at`: step -> prompt."""
    numbers = itertools.count(engine._num_requests)
    names = {f"r{next(numbers)}": i for i in range(len(prompts))}
    for name, i in names.items():
        engine.add_request(Request(name, prompts[i], sampling[i]))
    events: dict[tuple[int, int], list[Event]] = {}
    by_number = list(names)
    for turn in itertools.count():
        if not engine.has_work():
            break
        got = engine.step(float(turn))
        if abort_at and turn in abort_at:
            got += engine.abort(by_number[abort_at[turn]])
        for event in got:
            events.setdefault((names[event.request_id], event.index), []).append(event)
    engine.check()
    return events


def tokens(events: list[Event]) -> list[int]:
    """The sampled tokens of one continuation."""
    assert all(event.error is None for event in events), events[-1].error
    return [token for event in events for token in event.token_ids]


def fail_once(monkeypatch: pytest.MonkeyPatch, runner: DeviceRunner) -> None:
    """Let the fourth launch of a runner fail."""
    launch, times = DeviceRunner.launch, itertools.count()

    def launch_or_fail(self, *given):
        if self is runner and next(times) == 3:
            raise RuntimeError("this stage is out of order")
        return launch(self, *given)

    monkeypatch.setattr(DeviceRunner, "launch", launch_or_fail)
