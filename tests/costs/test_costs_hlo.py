"""The cost model's collectives are those of the engine's own compiled steps, byte for byte."""

from collections import Counter

import pytest
from engines import checkpoint, make
from hlo import FLOAT32_BYTES, collectives

from shiftjax.costs.collectives import step_collectives

MESHES = [(8, 1), (4, 2), (2, 4), (1, 8)]
HEADS = {  # query and KV heads on 8 devices
    "even": (8, 8),
    "replicated": (16, 2),
    "padded": (9, 3),
}
SWIFTKV = {"model_type": "llama_swiftkv", "num_hidden_layers": 3, "num_key_value_layers": 1}
# Odd sizes, so that no two kinds of collective happen to have the same bytes.
ODD = {"hidden_size": 80, "intermediate_size": 272, "vocab_size": 331, "head_dim": 32}


@pytest.mark.parametrize("heads", list(HEADS))
@pytest.mark.parametrize(("sp", "tp"), MESHES)
def test_predicted_collectives_equal_the_compiled_ones(sp, tp, heads):
    num_heads, num_kv_heads = HEADS[heads]
    sizes = ODD | {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads}
    sizes["num_hidden_layers"] = 2 if heads == "padded" else 1
    check(sp, tp, sizes)


@pytest.mark.parametrize(("sp", "tp"), [(4, 2), (1, 8)])
def test_late_layers_gather_once_and_reduce_rows(sp, tp):
    check(sp, tp, ODD | SWIFTKV)


def check(sp: int, tp: int, sizes: dict) -> None:
    """Compare the compiled steps of every mode with what is predicted."""
    directory, _, _ = checkpoint(**sizes)
    options = {"token_buckets": (24,), "max_num_batched_tokens": 24}
    (runner,) = make(directory, sp, tp, **options).runners
    (program,) = runner.programs
    for mode in runner.step.layout.modes:
        predicted: Counter[tuple[str, int]] = Counter()
        for move in step_collectives(runner.step.layout, mode, *program.bucket[:2], FLOAT32_BYTES):
            predicted[move.kind, move.num_bytes] += move.num_times
        assert collectives(runner.compiled(program, mode).as_text()) == predicted, mode
