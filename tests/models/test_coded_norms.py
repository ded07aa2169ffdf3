"""Norms that give codes: products read the same as if they made codes themselves."""

from functools import partial
from pathlib import Path

import harness
import numpy as np
import pytest

from shiftjax.arch.formats import Formats
from shiftjax.models import layers
from shiftjax.models.layers import Context
from shiftjax.models.norm_backend import XLA_NORMS
from shiftjax.parallel.grid import Mode

DATA = Path(__file__).parent.parent / "data" / "parity"
FP8 = Formats("fp8", "bfloat16")
CODED = XLA_NORMS._replace(gives_codes=True)


# Layers are traced twice: the first, to whose stream nothing is added, and the others. Llama has
# two norms, Command R one for both parts. One of Qwen's layers has experts, whose router reads
# numbers; OLMo 2 has norms behind its parts alone.
@pytest.mark.costs(12)
@pytest.mark.parametrize(
    ("name", "num_coded"), [("llama", 4), ("cohere", 2), ("qwen2_moe", 3), ("olmo2", 0)]
)
def test_codes_of_norms_are_those_that_products_make(name, num_coded, monkeypatch):
    ids = np.load(DATA / name / "expected.npz")["token_ids_0"].tolist()

    def logits() -> np.ndarray:
        given = ids, 2, 2, Mode(2, 2), "alias"
        return harness.forward(DATA / name, *given, formats=FP8)[1]

    plain, made, make = logits(), [], layers.quantise_blocks

    def counted(x):
        made.append(x.shape)
        return make(x)

    monkeypatch.setattr(layers, "quantise_blocks", counted)
    monkeypatch.setattr(harness, "Context", partial(Context, norms=CODED))
    np.testing.assert_array_equal(logits(), plain)
    assert len(made) == num_coded
