"""The cases of the throughput comparison: their requests, and the least time they could take."""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shiftjax.arch.config import ModelConfig
from shiftjax.arch.weights import layer_parameters

if TYPE_CHECKING:
    from pallas_kernels.measure import Ceilings

TEXT = Path(__file__).resolve().parents[2] / "tests" / "data" / "smollm2_greedy.json"
PROMPT_TOKENS, NEW_TOKENS = 128, 64
SEED = 20260801


class Workload(NamedTuple):
    """Requests that arrive together."""

    prompts: list[list[int]]
    max_tokens: list[int]


class Case(NamedTuple):
    """A number to report: what is timed, and of how many requests."""

    metric: str  # prefill, decode or total
    num_requests: int


CASES = {
    "decode8": Case("decode", 8),
    "decode32": Case("decode", 32),
    "prefill1": Case("prefill", 1),
    "prefill8": Case("prefill", 8),
    "prefill32": Case("prefill", 32),
    "stream1": Case("decode", 1),
    "mixed64": Case("total", 64),
}


# ---------------------------------------------------------------------- requests


def timed_tokens(case: Case, work: Workload) -> int:
    """The tokens that a case counts."""
    if case.metric == "prefill":
        return sum(map(len, work.prompts))
    return sum(work.max_tokens) - (case.num_requests if case.metric == "decode" else 0)


def draw_prompts(rng: np.random.Generator, lens: list[int]) -> list[list[int]]:
    """Windows of the token stream of the repository's own test prompts: text, not noise."""
    stream = [t for case in json.loads(TEXT.read_text())["cases"] for t in case["prompt_ids"]]
    starts = [int(rng.integers(len(stream) - n)) for n in lens]
    return [stream[start : start + n] for start, n in zip(starts, lens, strict=True)]


def make_workload(case: Case) -> Workload:
    """Return the requests of a case; equal for every engine and every run."""
    rng, count = np.random.default_rng((SEED, case.num_requests)), case.num_requests
    if case.metric != "total":
        return Workload(draw_prompts(rng, [PROMPT_TOKENS] * count), [NEW_TOKENS] * count)

    def log_uniform(low: int, high: int) -> list[int]:
        return np.exp(rng.uniform(math.log(low), math.log(high + 1), count)).astype(int).tolist()

    prompts = draw_prompts(rng, log_uniform(16, 512))
    return Workload(prompts, log_uniform(16, 128))


# ---------------------------------------------------------------------- physics


BF16_BYTES = 2


def prefill_flops(model: ModelConfig, num_tokens: int) -> int:
    """Operations of one prompt up to its first token; causal, so half of all pairs."""
    pairs = num_tokens * (num_tokens + 1) // 2
    products = layer_parameters(model) * num_tokens + model.vocab_size * model.hidden_size
    return 2 * products + _attention_flops(model) * pairs


def _attention_flops(model: ModelConfig) -> int:
    """Of a query and a key, in all layers."""
    return 4 * model.num_layers * model.num_heads * model.head_dim


def decode_flops(model: ModelConfig, contexts: list[int]) -> int:
    """Operations of a token for each context."""
    return 2 * _weights(model) * len(contexts) + _attention_flops(model) * sum(contexts)


def _weights(model: ModelConfig) -> int:
    """Of the matrices of the layers and of the LM head."""
    return layer_parameters(model) + model.vocab_size * model.hidden_size


def decode_bytes(model: ModelConfig, num_steps: int, contexts: list[int]) -> int:
    """Read by `num_steps` steps that between them decode a token for each context; bfloat16."""
    kv = model.num_layers * model.cache.numbers
    return BF16_BYTES * (num_steps * _weights(model) + kv * sum(contexts))


def least_seconds(metric: str, work: Workload, model: ModelConfig, ceilings: "Ceilings") -> float:
    """The time that a case would take if one ceiling were all that held it back."""
    flops = stream = 0
    if metric in ("prefill", "total"):
        flops += sum(prefill_flops(model, len(prompt)) for prompt in work.prompts)
        stream += decode_bytes(model, 1, [])
    if metric in ("decode", "total"):
        pairs = zip(work.prompts, work.max_tokens, strict=True)
        contexts = [len(prompt) + i for prompt, n in pairs for i in range(1, n)]
        flops += decode_flops(model, contexts)
        stream += decode_bytes(model, max(work.max_tokens) - 1, contexts)
    return max(flops / ceilings.flops_per_second, stream / ceilings.bytes_per_second)
