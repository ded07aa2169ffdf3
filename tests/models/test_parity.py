"""Layer by layer against Hugging Face transformers (tests/oracle/make_parity.py made the data)."""

from pathlib import Path

import numpy as np
import pytest
from harness import forwards
from spent import quick

from shiftjax.parallel.grid import Mode

DATA = Path(__file__).parent.parent / "data" / "parity"
MODELS = sorted(path.name for path in DATA.iterdir() if path.is_dir())
# float32 keeps 24 bits; a layer sums a few hundred products, in another order than torch.
TOLERANCE = 500 * np.finfo(np.float32).eps


def assert_close(got: np.ndarray, expected: np.ndarray, what: str) -> None:
    error = np.abs(got - expected).max() / np.abs(expected).max()
    assert error < TOLERANCE, f"{what}: relative error {error:.2e}"


HERE = (1, 1, Mode(1, 1), "alias")
BASE = (2, 2, Mode(2, 2), "alias")
# Biases, norms of heads one by one and together, replicated heads: what a split could get wrong.
SPLITS = [
    (2, 2, Mode(2, 1), "alias"),
    (4, 2, Mode(4, 2), "alias"),
    (3, 2, Mode(3, 1), "slice"),
    (3, 2, Mode(3, 3), "slice"),
]
CASES = [(name, *BASE) for name in MODELS]
CASES += [(name, *HERE) for name in ("llama", "llama3_rope", "mistral", "qwen2", "gemma3_text")]
CASES += [
    (name, *mesh)
    for name in (
        *("llama_bias", "qwen3", "olmo2", "gpt_oss", "qwen2_moe", "glm4_moe"),
        *("cohere", "minimax_m2", "llama4_text", "llama4_chunks", "gemma4_text"),
        *("gemma4_inputs", "gemma4_experts"),
        *("deepseek_v2", "deepseek_v2_groups", "deepseek_v3", "deepseek_v3_halves", "glm_moe_dsa"),
    )
    for mesh in SPLITS
]


QUICK_ONES = {
    ("llama", 2),
    ("gemma3_text", 2),
    ("qwen3", 3),
    ("llama4_chunks", 2),
    ("gemma4_text", 4),
}
QUICK_ONES |= {("gemma4_experts", 4), ("deepseek_v3_halves", 4)}
QUICK = [case for case in CASES if case[:2] in QUICK_ONES]


@pytest.mark.costs(8)
@pytest.mark.parametrize(
    ("name", "sp", "tp", "mode", "strategy"),
    quick(CASES, *QUICK, times=2),
)
def test_every_layer_equals_transformers(name, sp, tp, mode, strategy):
    check(name, sp, tp, mode, strategy)


EVERYWHERE = ("qwen2_moe", "gpt_oss")  # shared experts; biases
IN_TURNS = ("qwen3_moe", "mixtral", "llama4_text", "gemma4_experts")  # two of them in each use
# (sp, tp), then how many ways modes split tokens: the step's, and those as which experts are stored
# and used. Every relation of the two, and padding.
USES = [(4, 2, m, 4, e) for m in (4, 2, 1) for e in (4, 2, 1)]
USES += [(8, 1, 8, 8, 8), (8, 1, 2, 8, 8), (8, 1, 8, 8, 2), (2, 2, 2, 2, 2), (2, 4, 1, 2, 2)]
USES += [(4, 2, 4, 2, 1), (4, 2, 4, 2, 2), (8, 1, 1, 4, 2)]
USE_CASES = [
    (name, use)
    for i, use in enumerate(USES)
    for place, name in enumerate((*IN_TURNS, *EVERYWHERE))
    if name in EVERYWHERE or (place + i % 3 + i // 3) % 2 == 0
]
QUICK_USES = ("qwen2_moe", (4, 2, 2, 4, 4)), ("gpt_oss", (4, 2, 4, 2, 1))


@pytest.mark.parametrize(("name", "use"), quick(USE_CASES, *QUICK_USES))
def test_every_use_of_experts_equals_transformers(name, use):
    sp, tp, m, stored, used = use
    check(name, sp, tp, Mode(sp, m), "alias", (stored, used))


def check(
    name: str, sp: int, tp: int, mode: Mode, strategy: str, experts: tuple[int, int] = (1, 1)
) -> None:
    expected = np.load(DATA / name / "expected.npz")
    prompts = [expected[f"token_ids_{i}"].tolist() for i in range(2)]
    found = forwards(DATA / name, prompts, sp, tp, mode, strategy, experts=experts)
    for i, (hidden, logits, _) in enumerate(found):
        kept = expected.get(f"kept_{i}", slice(None))
        states = expected[f"hidden_states_{i}"]
        for layer, (got, want) in enumerate(zip(hidden, states[:-1], strict=True)):
            assert_close(got[kept], want, f"{name} prompt {i} after layer {layer}")
        assert_close(logits[kept], expected[f"logits_{i}"], f"{name} prompt {i} logits")
