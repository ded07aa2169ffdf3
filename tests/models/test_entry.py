"""Heads that enter attention by one function, also in modes that exchange tokens for them.

The function is made of the model's own operations; its kernel's numbers have tests of their own.
"""

import numpy as np
import pytest
from engines import checkpoint
from harness import BLOCK_SIZE, forwards
from oracle import numpy_llama

from shiftjax.arch.presets import PRESETS
from shiftjax.device.entry_cases import made_heads
from shiftjax.models.attention_backend import loops_of
from shiftjax.parallel.grid import Group, Mode

PROMPT = list(range(3, 40))
TOLERANCE = 500 * np.finfo(np.float32).eps
NORMED, BIASED = {"model_type": "qwen3"}, {"model_type": "qwen2"}
CASES = [
    *(((4, 1), mode, NORMED) for mode in Group(0, 4).modes),
    *(((2, 2), mode, BIASED) for mode in Group(0, 2).modes),
    ((4, 2), Mode(4, 2), NORMED),
]


@pytest.mark.parametrize(("mesh", "mode", "model"), CASES)
def test_heads_that_enter_by_one_function_are_those_of_the_definition(mesh, mode, model):
    shapes, loops = [], loops_of(PRESETS["tiny"], BLOCK_SIZE)

    def enter(shape):
        shapes.append(shape)

        def run(projected, given, pool, metadata, terms):
            q, k, v = made_heads(shape, projected, given)
            return q, loops.write(pool, k, v, metadata.slot_mapping, terms)

        return run

    directory, config, tensors = checkpoint(num_hidden_layers=2, **model)
    expected = numpy_llama.forward(config, tensors, PROMPT)["logits"]
    ((_, logits, _),) = forwards(directory, [PROMPT], *mesh, mode, "alias", enter=enter)
    assert np.abs(logits - expected).max() < TOLERANCE * np.abs(logits).max()
    assert shapes  # it was asked for
