"""Speculators draft what a speculator in NumPy drafts, however devices split them."""

import tempfile
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import silent
from jax.sharding import PartitionSpec as P
from oracle import numpy_sampling, numpy_speculator

from shiftjax.arch.presets import PRESETS
from shiftjax.device.mesh import make_mesh, mesh_of
from shiftjax.device.mode_weights import ModeWeights
from shiftjax.device.place import define, load
from shiftjax.models.exchange import Parallel
from shiftjax.models.speculator import DraftRows
from shiftjax.parallel.grid import Mode
from shiftjax.parallel.layout import Layout
from shiftjax.weights.random import RandomSource
from shiftjax.weights.speculator import with_speculator

KEY = jax.random.key(5)
TINY = PRESETS["tiny"]  # 256 token ids, hidden states of 64
COMMON = {"vocab_size": 256, "n_predict": 3, "num_lookahead_tokens": 3}
MLP = COMMON | {"architectures": ["ArcticMLPSpeculatorPreTrainedModel"], "emb_dim": 64}
LSTM = COMMON | {
    "architectures": ["ArcticLSTMSpeculatorPreTrainedModel"],
    "method": "sum_lstm",
    "input_hidden_dim": 64,
    "tie_weights": True,
}
# The NumPy speculator wants widths as numbers.
WIDE = {"inner_dim": 64, "scale_input": True}
NARROW = {"inner_dim": 40, "scale_input": False}
KINDS = {
    "mlp": MLP | NARROW | {"tie_weights": False},
    "mlp, scaled input": MLP | WIDE | {"tie_weights": False},
    "mlp, tied": MLP | NARROW | {"tie_weights": True},
    "mlp, tied, scaled input": MLP | WIDE | {"tie_weights": True},
    "lstm": LSTM | NARROW | {"tie_lstm_embs": False},
    "lstm, scaled input": LSTM | WIDE | {"tie_lstm_embs": False},
    "lstm, tied": LSTM | NARROW | {"tie_lstm_embs": True},
    "lstm, tied, scaled input": LSTM | WIDE | {"tie_lstm_embs": True},
}
for _config in KINDS.values():
    if "method" in _config:
        _config |= {"emb_dim": _config["inner_dim"], "proj_dim": _config["inner_dim"]}
MESHES = {"one device": (1, 1, 1), "base": (2, 2, 2), "shift": (2, 2, 1)}


@cache
def checkpoint(kind: str) -> tuple[Path, dict, dict[str, np.ndarray]]:
    config = KINDS[kind]
    tensors = numpy_speculator.random_tensors(config, seed=len(kind))
    directory = Path(tempfile.mkdtemp(prefix="shiftjax-test-"))
    return numpy_speculator.save(directory, config, tensors), config, tensors


def rows_of(num: int, temperature: float) -> DraftRows:
    rng = np.random.default_rng(num)
    return DraftRows(
        hidden=rng.standard_normal((num, 64)).astype(np.float32),
        token_ids=rng.integers(0, 256, num).astype(np.int32),
        positions=rng.integers(0, 1000, num).astype(np.int32),
        seeds=rng.integers(0, 2**32, (num, 2)).astype(np.uint32),
        temperature=np.full(num, temperature, np.float32),
    )


@cache
def drafter(kind: str, mesh_name: str, draft_vocab: int | None = None):
    """A compiled speculator of a mode: `(rows, num_steps) -> (ids, probabilities)`."""
    sp, tp, mode_sp = MESHES[mesh_name]
    source = with_speculator(RandomSource(TINY), checkpoint(kind)[0], draft_vocab)
    layout, mode = Layout(source.config, sp, tp), Mode(sp, mode_sp)
    mesh = make_mesh(jax.devices()[: sp * tp], sp, tp)
    model = define(source.config, layout, jnp.float32)
    weights = ModeWeights(model, layout, "alias")
    params = weights.of(mode, weights.with_head(load(model, layout, mesh, source, silent)))

    def run(params, rows, num_steps):
        speculator = model.merge(weights.local(mode, params)).speculator
        return speculator(rows, KEY, num_steps, Parallel(layout, mode))

    mapped = jax.shard_map(
        run,
        mesh=mesh_of(mesh, mode),
        in_specs=(weights.specs(), P(), P()),
        out_specs=(P(), P()),
        check_vma=False,
    )
    compiled = jax.jit(mapped)
    return lambda rows, n: [np.asarray(x) for x in compiled(params, rows, np.int32(n))]


def noise_of(rows: DraftRows, row: int, num: int) -> list[np.ndarray]:
    """Noise of all tokens for each draft, from the words that the key makes."""
    key = KEY
    for word in rows.seeds[row]:
        key = jax.random.fold_in(key, word)
    words = [
        jax.random.bits(jax.random.fold_in(key, rows.positions[row] + i), (2,), dtype=jnp.uint32)
        for i in range(num)
    ]
    return [numpy_sampling.noise(np.asarray(word), 256) for word in words]


def check(kind: str, mesh: str, temperature: float, draft_vocab: int | None = None) -> None:
    _, config, tensors = checkpoint(kind)
    rows = rows_of(5, temperature)
    ids, probabilities = drafter(kind, mesh, draft_vocab)(rows, 3)
    for i in range(5):
        noise = noise_of(rows, i, 3) if temperature else None
        args = rows.hidden[i], int(rows.token_ids[i]), 3, draft_vocab, temperature, noise
        expected, p = numpy_speculator.draft(config, tensors, *args)
        assert ids[i].tolist() == expected
        np.testing.assert_allclose(probabilities[i], p, atol=1e-5)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_the_oracles(kind, mesh):
    check(kind, mesh, temperature=0.0)
