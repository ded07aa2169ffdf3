"""Speculators draft what a speculator in NumPy drafts, however devices split them."""

import tempfile
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import silent
from hlo import collectives, entry
from jax.sharding import PartitionSpec as P
from oracle import numpy_sampling, numpy_speculator
from oracle.numpy_speculator import EXAMPLES

from shiftjax.arch.config import Speculator
from shiftjax.arch.formats import formats_of
from shiftjax.arch.presets import PRESETS
from shiftjax.device.mesh import make_mesh, mesh_of
from shiftjax.device.mode_weights import ModeWeights
from shiftjax.device.place import define, load
from shiftjax.device.sampling import sample
from shiftjax.device.sampling_inputs import SamplingInputs, VocabSplit, neutral_rows
from shiftjax.models.exchange import Parallel
from shiftjax.models.speculator import DraftRows, choose
from shiftjax.parallel.grid import ALL_AXES, Mode
from shiftjax.parallel.layout import Layout
from shiftjax.weights.random import RandomSource
from shiftjax.weights.speculator_checkpoints import with_speculator

KEY = jax.random.key(5)
TINY = PRESETS["tiny"]  # 256 token ids, hidden states of 64
ONE, BASE, SHIFT = (1, 1, 1), (2, 2, 2), (2, 2, 1)  # sp, tp, and the sp of the mode
MESHES = {"mlp": BASE, "mlp tied": ONE, "lstm": SHIFT, "lstm tied": BASE}
TEMPERATURES = np.array([0.0, 0.7, 0.0, 1.0, 1.6], np.float32)
ROWS = len(TEMPERATURES)
Drafts = tuple[np.ndarray, np.ndarray]  # ids and probabilities


@cache
def checkpoint(name: str) -> tuple[Path, dict, dict[str, np.ndarray]]:
    config = EXAMPLES[name]
    tensors = numpy_speculator.random_tensors(config, seed=len(name))
    directory = Path(tempfile.mkdtemp(prefix="shiftjax-test-"))
    return numpy_speculator.save(directory, config, tensors), config, tensors


def draft_rows(temperature: np.ndarray, seed: int = 0) -> DraftRows:
    rng = np.random.default_rng(seed)
    return DraftRows(
        hidden=rng.standard_normal((ROWS, 64)).astype(np.float32),
        token_ids=rng.integers(0, 256, ROWS).astype(np.int32),
        positions=rng.integers(0, 1000, ROWS).astype(np.int32),
        seeds=rng.integers(0, 2**32, (ROWS, 2)).astype(np.uint32),
        temperature=temperature.astype(np.float32),
    )


@cache
def compiled(name: str, mesh: tuple[int, int, int], draft_vocab: int | None = None):
    """The program of a mode and its weights."""
    sp, tp, mode_sp = mesh
    source = with_speculator(RandomSource(TINY), checkpoint(name)[0], draft_vocab)
    layout, mode = Layout(source.config, sp, tp), Mode(sp, mode_sp)
    devices = make_mesh(jax.devices()[: sp * tp], sp, tp)
    model = define(layout, formats_of("float32"))
    weights = ModeWeights(model, layout, "alias")
    params = weights.of(mode, weights.with_head(load(model, layout, devices, source, silent)))

    def run(params, rows, num_steps):
        speculator = model.merge(weights.local(mode, params)).speculator
        return speculator(rows, KEY, num_steps, Parallel(layout, mode))

    mapped = jax.shard_map(
        run,
        mesh=mesh_of(devices, mode),
        in_specs=(weights.specs(), P(), P()),
        out_specs=(P(), P()),
        check_vma=False,
    )
    return jax.jit(mapped).lower(params, draft_rows(TEMPERATURES), np.int32(0)).compile(), params


def drafts_of(
    name: str,
    mesh: tuple[int, int, int],
    rows: DraftRows,
    num_steps: int = 3,
    draft_vocab: int | None = None,
) -> Drafts:
    program, params = compiled(name, mesh, draft_vocab)
    ids, probabilities = program(params, rows, np.int32(num_steps))
    return np.asarray(ids), np.asarray(probabilities)


@jax.jit
def random_words(rows: DraftRows, steps: jax.Array) -> jax.Array:
    """The words of the noise `[rows, steps, 2]`."""

    def words(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(KEY, seed[0]), seed[1])
        return jax.random.bits(jax.random.fold_in(key, position), (2,), dtype=jnp.uint32)

    positions = rows.positions[:, None] + steps[None]
    return jax.vmap(jax.vmap(words, (None, 0)))(rows.seeds, positions)


def assert_drafted(name: str, rows: DraftRows, drafts: Drafts, vocab: int | None = None) -> None:
    """The drafts and their probabilities are the oracle's."""
    _, config, tensors = checkpoint(name)
    words = np.asarray(random_words(rows, np.arange(3, dtype=np.int32)))
    for row in range(ROWS):
        noise = [numpy_sampling.noise(word, 256) for word in words[row]]
        temperature = float(rows.temperature[row])
        given = rows.hidden[row], int(rows.token_ids[row]), 3, vocab, temperature, noise
        ids, probabilities = numpy_speculator.draft(config, tensors, *given)
        assert drafts[0][row].tolist() == ids
        np.testing.assert_allclose(drafts[1][row], probabilities, atol=1e-5)


@pytest.mark.parametrize("name", EXAMPLES)
def test_drafts_are_the_oracles(name):
    """Greedy and drawn rows beside each other, and greedy ones alone."""
    for temperature in (TEMPERATURES, np.zeros(ROWS)):
        rows = draft_rows(temperature, seed=len(name))
        assert_drafted(name, rows, drafts_of(name, MESHES[name], rows))


def test_only_the_first_ids_are_drafted():
    rows, draft_vocab = draft_rows(TEMPERATURES), 101  # of 256: no device's share is full
    drafts = drafts_of("mlp", BASE, rows, draft_vocab=draft_vocab)
    assert_drafted("mlp", rows, drafts, draft_vocab)
    assert (drafts_of("mlp", BASE, rows)[0] >= draft_vocab).any()


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_what_is_not_asked_for_is_not_drafted(num_steps):
    rows = draft_rows(TEMPERATURES)
    ids, probabilities = drafts_of("lstm", SHIFT, rows, num_steps)
    whole = drafts_of("lstm", SHIFT, rows)
    for some, every in zip((ids, probabilities), whole, strict=True):
        np.testing.assert_array_equal(some[:, :num_steps], every[:, :num_steps])
    assert (ids[:, num_steps:] == -1).all()
    assert (probabilities[:, num_steps:] == 0).all()


@pytest.mark.parametrize("name", ["mlp", "lstm", "lstm tied"])
def test_a_draft_sums_an_embedding_and_five_numbers_a_row_of_each_device(name):
    """In a branch of its own, so that no draft is computed that is not asked for."""
    mesh, width = MESHES[name], EXAMPLES[name]["inner_dim"] * (4 if name == "lstm" else 1)
    text = compiled(name, mesh)[0].as_text()
    expected = {("all-reduce", ROWS * width * 4): 3, ("all-reduce", 4 * ROWS * 5 * 4): 3}
    assert collectives(text) == expected
    assert not {one.opcode for one in entry(text)} & {"dot", "all-reduce", "all-gather"}


# --------------------------------------------------------------- the choice, from given logits


@cache
def chooser(num_ids: int):
    """`choose` on four devices that each have a quarter of the padded logits."""
    speculator = Speculator("mlp", num_predict=3, inner_dim=8, draft_vocab=num_ids)
    layout = Layout(replace(TINY, vocab_size=1000, speculator=speculator), 2, 2)
    parallel = Parallel(layout, layout.base)
    mapped = jax.shard_map(
        lambda logits, rows: choose(logits, rows, KEY, parallel),
        mesh=mesh_of(make_mesh(jax.devices()[:4], 2, 2), layout.base),
        in_specs=(P(None, ALL_AXES), P()),
        out_specs=P(),
        check_vma=False,
    )
    return jax.jit(mapped)


def chosen(logits: np.ndarray, rows: DraftRows) -> tuple[np.ndarray, np.ndarray]:
    num_ids = logits.shape[1]
    padded = np.pad(logits, ((0, 0), (0, -num_ids % 4)), constant_values=1e6)  # never wins
    ids, probabilities = chooser(num_ids)(padded, rows)
    return np.asarray(ids), np.asarray(probabilities)


@cache
def sampler(num_ids: int):
    layout = Layout(TINY, 1, 1)
    parallel = Parallel(layout, layout.shift)
    return jax.jit(partial(sample, parallel=parallel, vocab_size=num_ids))


def sampled(logits: np.ndarray, rows: DraftRows) -> np.ndarray:
    """What the target draws from the same logits."""
    scalars, tables = neutral_rows(ROWS, VocabSplit(logits.shape[1], logits.shape[1]))
    asked = {"temperature": rows.temperature, "seeds": rows.seeds, "positions": rows.positions}
    pending = {"pending_ids": np.full(ROWS, -1, np.int32)}
    inputs = SamplingInputs(**{**scalars, **tables._asdict(), **pending, **asked})
    return np.asarray(sampler(logits.shape[1])(logits, inputs, KEY).token_ids)


@pytest.mark.parametrize("num_ids", [5, 998])
def test_a_draft_from_the_targets_logits_is_what_the_target_draws(num_ids):
    """Also where a device has padding alone, and all logits are below what padding might be."""
    rng = np.random.default_rng(num_ids)
    seen = set()
    for turn in range(5):
        logits = (3 * rng.standard_normal((ROWS, num_ids)) - 50).astype(np.float32)
        rows = draft_rows(TEMPERATURES, seed=turn)
        ids, probabilities = chosen(logits, rows)
        np.testing.assert_array_equal(ids, sampled(logits, rows))
        for row in range(ROWS):
            p = numpy_sampling.softmax(logits[row] / (TEMPERATURES[row] or 1.0))
            np.testing.assert_allclose(probabilities[row], p[ids[row]], atol=1e-5)
        seen |= set((4 * ids // num_ids).tolist())
    assert len(seen) > 2  # the winners were on several devices


def test_equal_logits_draft_the_lowest_id():
    logits = np.zeros((ROWS, 998), np.float32)
    logits[:, [300, 700, 701]] = 1.0
    ids, _ = chosen(logits, draft_rows(np.zeros(ROWS)))
    assert ids.tolist() == [300] * ROWS


def test_logits_that_differ_by_one_bit_are_told_apart_across_devices():
    logits = np.full((ROWS, 998), -3.0, np.float32)
    small = np.float32(1e-3)  # so that exp of the difference is 1
    logits[:, 10], logits[:, 900] = small, np.nextafter(small, np.float32(1.0))
    assert chosen(logits, draft_rows(np.zeros(ROWS)))[0].tolist() == [900] * ROWS
