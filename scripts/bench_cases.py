"""The cases of the throughput comparison: their requests, and the least time they could take."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from pallas_kernels.measure import Ceilings

TEXT = Path(__file__).resolve().parent.parent / "tests" / "data" / "smollm2_greedy.json"
PROMPT_TOKENS, NEW_TOKENS = 128, 64
SEED = 20260801


@dataclass(frozen=True)
class Workload:
    """Requests that arrive together."""

    prompts: list[list[int]]
    max_tokens: list[int]

    @property
    def num_prompt_tokens(self) -> int:
        """Over all requests."""
        return sum(map(len, self.prompts))

    @property
    def num_new_tokens(self) -> int:
        """Over all requests."""
        return sum(self.max_tokens)


@dataclass(frozen=True)
class Case:
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
        return work.num_prompt_tokens
    return work.num_new_tokens - (case.num_requests if case.metric == "decode" else 0)


def draw_prompts(rng: np.random.Generator, lens: list[int]) -> list[list[int]]:
    """Windows of the token stream of the repository's own test prompts: text, not noise."""
    stream = [t for case in json.loads(TEXT.read_text())["cases"] for t in case["prompt_ids"]]
    starts = [int(rng.integers(len(stream) - n)) for n in lens]
    return [stream[start : start + n] for start, n in zip(starts, lens, strict=True)]


def log_uniform(rng: np.random.Generator, low: int, high: int, count: int) -> list[int]:
    """Whole numbers in [low, high] whose logarithm is uniform."""
    return np.exp(rng.uniform(math.log(low), math.log(high + 1), count)).astype(int).tolist()


def make_workload(case: Case) -> Workload:
    """The requests of a case; equal for every engine and every run."""
    rng = np.random.default_rng((SEED, case.num_requests))
    if case.metric != "total":
        prompts = draw_prompts(rng, [PROMPT_TOKENS] * case.num_requests)
        return Workload(prompts, [NEW_TOKENS] * case.num_requests)
    prompts = draw_prompts(rng, log_uniform(rng, 16, 512, case.num_requests))
    return Workload(prompts, log_uniform(rng, 16, 128, case.num_requests))


# ---------------------------------------------------------------------- physics


@dataclass(frozen=True)
class Cost:
    """What the arithmetic of a model needs, from its `config.json`; bfloat16."""

    layer_weights: int
    head_weights: int
    kv_bytes: int  # per token of context
    attention_flops: int  # per query and key

    @classmethod
    def of(cls, config: dict) -> "Cost":
        """Count weights and flops."""
        layers, hidden = config["num_hidden_layers"], config["hidden_size"]
        query = config["num_attention_heads"] * config["head_dim"]
        kv = config["num_key_value_heads"] * config["head_dim"]
        per_layer = hidden * (2 * query + 2 * kv + 3 * config["intermediate_size"])
        head = hidden * config["vocab_size"]
        return cls(layers * per_layer, head, layers * 2 * kv * 2, layers * 4 * query)

    def prefill_flops(self, prompt_tokens: int) -> int:
        """Of one prompt up to its first token; causal, so half of all pairs."""
        pairs = prompt_tokens * (prompt_tokens + 1) // 2
        return 2 * (self.layer_weights * prompt_tokens + self.head_weights) + (
            self.attention_flops * pairs
        )

    def decode_flops(self, context: int) -> int:
        """Of one token."""
        return 2 * (self.layer_weights + self.head_weights) + self.attention_flops * context

    def decode_bytes(self, num_steps: int, contexts: list[int]) -> int:
        """Read by `num_steps` steps that between them decode a token of each context."""
        weights = 2 * (self.layer_weights + self.head_weights)
        return num_steps * weights + self.kv_bytes * sum(contexts)


def least_seconds(metric: str, work: Workload, cost: Cost, ceilings: "Ceilings") -> float:
    """The time that a case would take if one ceiling were all that held it back."""
    flops = stream = 0
    if metric in ("prefill", "total"):
        flops += sum(cost.prefill_flops(len(prompt)) for prompt in work.prompts)
        stream += 2 * (cost.layer_weights + cost.head_weights)
    if metric in ("decode", "total"):
        contexts = [
            len(prompt) + i
            for prompt, n in zip(work.prompts, work.max_tokens, strict=True)
            for i in range(1, n)
        ]
        flops += sum(map(cost.decode_flops, contexts))
        stream += cost.decode_bytes(max(work.max_tokens) - 1, contexts)
    return max(flops / ceilings.flops_per_second, stream / ceilings.bytes_per_second)
