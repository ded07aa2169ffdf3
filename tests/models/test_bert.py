"""Encoders against Hugging Face transformers (tests/oracle/make_embeddings.py made the data)."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import silent

from shiftjax.arch.formats import formats_of
from shiftjax.device.mesh import rows_mesh
from shiftjax.device.place import define, load
from shiftjax.embed.embed_engine import EmbedPlan, Text, slots_of
from shiftjax.embed.step_device import pack
from shiftjax.models.bert import normalize, pool
from shiftjax.parallel.layout import Layout
from shiftjax.weights.huggingface import HuggingFaceSource

DATA = Path(__file__).parent.parent / "data" / "encoders"
WIDTH = 48
# float32 keeps 24 bits; a layer sums a few dozen products, in another order than torch.
TOLERANCE = 200 * np.finfo(np.float32).eps


@pytest.mark.parametrize("name", ["bert", "xlm-roberta"])
def test_every_layer_equals_transformers_for_texts_that_share_a_row(name):
    source, expected = HuggingFaceSource(DATA / name), np.load(DATA / name / "expected.npz")
    layout = Layout(source.config, 1, 1)
    model = define(layout, formats_of("float32"))
    leaves = load(model, layout, rows_mesh(jax.devices()[:1]), source, silent)
    texts = [Text(i, expected[f"token_ids_{i}"].tolist()) for i in range(2)]
    packed, _ = pack(EmbedPlan(WIDTH, [texts]), 2)  # the second row is empty
    hidden = jax.jit(lambda leaves, packed: model.merge(leaves)(*packed))(leaves, packed)
    start = 0
    for text in texts:
        stop = start + len(text.token_ids)
        states = expected[f"hidden_states_{text.key}"]
        assert len(hidden) == len(states)
        for layer, (got, want) in enumerate(zip(hidden, states, strict=True)):
            error = np.abs(np.asarray(got)[0, start:stop] - want).max() / np.abs(want).max()
            assert error < TOLERANCE, f"{name} text {text.key} after layer {layer}: {error:.2e}"
        start = stop


@pytest.mark.parametrize(
    ("kind", "of"),
    [("mean", lambda x: x.mean(0)), ("cls", lambda x: x[0]), ("last", lambda x: x[-1])],
)
def test_pooling_takes_the_tokens_of_a_text_and_no_others(kind, of):
    random = np.random.default_rng(1)
    hidden = random.normal(size=(2, WIDTH, 6)).astype(np.float32)
    plan = EmbedPlan(WIDTH, [[Text(0, [1] * 20), Text(1, [1]), Text(2, [1] * 27)], [Text(3, [1])]])
    packed, places = pack(plan, 2)
    slots = slots_of(WIDTH)
    pooled = pool(*map(jnp.asarray, (hidden, packed[1], packed[2])), slots, kind)
    assert pooled.dtype == jnp.float32
    spans = [(0, 0, 20), (0, 20, 21), (0, 21, 48), (1, 0, 1)]
    for (row, start, stop), got in zip(spans, np.asarray(pooled)[places], strict=True):
        np.testing.assert_allclose(got, of(hidden[row, start:stop]), rtol=1e-6, atol=1e-7)
    assert not np.asarray(pooled)[1, 1:].any()


def test_normalized_embeddings_have_length_1_and_empty_slots_stay_zero():
    lengths = np.linalg.norm(normalize(jnp.asarray([[3.0, 4.0], [0.0, 0.0]])), axis=1)
    np.testing.assert_allclose(lengths, [1.0, 0.0], rtol=1e-6)
