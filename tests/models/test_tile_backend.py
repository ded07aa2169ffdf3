"""Tiles of prompts as kernels over gathered pages, against the definition; unused slots are NaN."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_split_attention as split
from defined_kernels import by_definition
from jax.experimental.pallas import mosaic_gpu as plgpu
from races import watched_races
from spent import thorough
from test_attention import Case, make_case, row_errors

from pallas_kernels import reference
from pallas_kernels.call import AttentionOptions, PagedKV
from pallas_kernels.decode_work import DecodeConfig
from pallas_kernels.prefill_work import PrefillConfig
from pallas_kernels.rows import Sequences
from pallas_kernels.step_work import KernelConfig
from pallas_kernels.window import Chunk
from shiftjax.arch.config import LayerKind
from shiftjax.arch.presets import PRESETS
from shiftjax.device import position_cases
from shiftjax.device.attention_steps import Shape
from shiftjax.models.attention import LayerTerms
from shiftjax.models.attention_work import GPU_SIZES, gathered_of
from shiftjax.models.position_backend import RowKernels, position_attention
from shiftjax.models.softmaxes import State, of_normalised
from shiftjax.parallel.layout import Layout
from shiftjax.parallel.positions import Positions

# Shared memory that nothing was written to is NaN, and masked afterwards.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")

WAYS, BLOCK = 2, 16
STRIPE = WAYS * BLOCK
INTERPRETED = plgpu.InterpretGPUParams(detect_races=True)
CONFIG = KernelConfig(PrefillConfig(64, 2, 2), DecodeConfig(64, 1, 45_000))
SMALL = GPU_SIZES._replace(gathered=128, gathers=2)  # rounds of 256 tokens
MOST_ERROR = 5e-3  # of a row, relative to its norm: of bfloat16
CHUNKS = ((70, 300), (33, 150), (5, 5))


def case_of(chunks=CHUNKS, ways=WAYS, heads=1, head_dim=64, max_len=320) -> Case:
    """Chunks of prompts in stripes; of each KV head there are eight heads of queries."""
    new, contexts = zip(*chunks, strict=True)
    own = {"kv_heads": heads, "q_per_kv": 8, "head_dim": head_dim, "dtype": "bfloat16"}
    sizes = 128, len(chunks)
    more = {"block_size": ways * BLOCK, "max_len": max_len, "num_decodes": 0}
    return make_case(new, contexts, *sizes, **own, **more)


def shape_of(window=None, **more) -> Shape:
    own = (window,), "bfloat16", "bfloat16", (128, 16, 16)
    return Shape(8, 1, 64, STRIPE, *own, ways=WAYS, **more)


def expected(case: Case, options: AttentionOptions) -> np.ndarray:
    of = case.metadata
    kv = PagedKV(*case.pool, of.block_tables, of.seq_lens)
    return reference.ragged_paged_attention(case.q, kv, of.query_start_loc, options)


def filled(case: Case, shape: Shape, terms: LayerTerms, sizes, config=CONFIG) -> np.ndarray:
    """What each neighbour makes of its heads in the interpreter, which watches races."""
    kernels = position_cases.in_turn(shape, config, INTERPRETED, sizes)
    of, tokens = case.metadata, len(case.q)
    contexts = of.block_tables, of.seq_lens, of.query_start_loc, 0
    work = kernels.divide(*contexts, num_tokens=tokens, num_rows=8)
    metadata = jax.tree.map(jnp.asarray, of._replace(work=work))
    # Rows have none of the tokens: they are left out, as the interpreter is slow.
    with pytest.MonkeyPatch.context() as patch, watched_races() as states:
        patch.setattr(RowKernels, "states", no_rows)
        attend = jax.jit(lambda q, pool, metadata: kernels.attend(q, pool, metadata, terms))
        out = np.asarray(attend(case.q, case.pool, metadata).astype(jnp.float32), np.float64)
    assert states and not any(state.races_found for state in states)
    return out


def no_rows(self, q, pool, block_tables, work, terms) -> State:
    shape = len(q), 1, *q.shape[1:]
    return of_normalised(jnp.zeros(shape), jnp.full(shape[:-1], -1e30))


def check(case: Case, shape: Shape, sinks=None, sizes=SMALL, config=CONFIG) -> None:
    (window,) = shape.windows
    options = AttentionOptions(64**-0.5, window, shape.soft_cap, sinks=sinks)
    out = filled(case, shape, LayerTerms(sinks=sinks), sizes, config)
    assert (row_errors(case, out, expected(case, options)) <= MOST_ERROR).all()
    assert not out[case.metadata.query_start_loc[-1] :].any()


@pytest.mark.costs(20)
def test_contexts_longer_than_a_buffer_take_rounds():
    check(case_of(), shape_of())


@pytest.mark.thorough
def test_a_buffer_that_holds_all_contexts_is_one_round():
    check(case_of(), shape_of(), sizes=GPU_SIZES)


@pytest.mark.thorough
@pytest.mark.parametrize("window", [200, Chunk(150)])
def test_windows_sinks_and_soft_caps(window):
    check(case_of(), shape_of(window, soft_cap=3.0, has_sinks=True), jnp.linspace(-2, 3, 8))


@pytest.mark.thorough
def test_parts_of_a_context_that_rounds_cut_again():
    config = CONFIG._replace(prefill=PrefillConfig(64, 2, 2, fixed_rounds=1))
    check(case_of(((20, 600), (33, 150))[:1], max_len=640), shape_of(), config=config)


@pytest.mark.thorough
def test_codes():
    pool = tuple(x.astype(jnp.float8_e4m3fn) for x in case_of().pool)
    case, scales = case_of()._replace(pool=pool), jnp.float32([[0.5], [2.0]])
    wanted = expected(case, AttentionOptions(64**-0.5, kv_scales=scales))
    out = filled(case, replace(shape_of(), kv_dtype="fp8"), LayerTerms(kv_scales=scales), SMALL)
    assert (row_errors(case, out, wanted) <= MOST_ERROR).all()


# ------------------------------------------------------------------------- on devices


@pytest.mark.costs(10)
@pytest.mark.parametrize(("window", "splits"), [(50, 1), *thorough((None, 2), (Chunk(90), 1))])
def test_neighbours_gather_what_the_kernel_reads(window, splits, monkeypatch):
    """Two KV heads on four devices; with `splits` in the order of a fleet's places."""
    positions = Positions(WAYS, BLOCK, splits)
    monkeypatch.setattr(split, "DEVICES", 4)
    monkeypatch.setattr(split, "SPLIT", positions)
    by_definition(monkeypatch)
    monkeypatch.setattr(Layout, "positions", lambda self, block_size: positions)
    small = "shiftjax.models.position_backend.loop_sizes"
    monkeypatch.setattr(small, lambda *_, **__: SMALL._replace(gathers=1))
    sizes = {"num_heads": 16, "num_kv_heads": 2, "head_dim": 64, "num_layers": 1}
    kinds = {"layer_kinds": (LayerKind.of_window(window),), "attention_sinks": True}
    layout = Layout(replace(PRESETS["llama-8b"], **kinds, **sizes), 2, 2, by_position=True)
    backend = position_attention(layout, CONFIG, STRIPE)
    case, sinks = case_of(heads=2), jnp.linspace(-2, 3, 16)
    out = split.run(case, backend, sinks)
    wanted = expected(case, AttentionOptions(64**-0.5, window, sinks=sinks))
    assert (row_errors(case, out, wanted) <= MOST_ERROR).all()
    assert not out[case.metadata.query_start_loc[-1] :].any()


def test_contexts_are_gathered_from_span_to_span():
    lens, starts = np.array([26, 700, 333], np.int32), np.array([0, 1, 21, 53], np.int32)
    sequences, unit = Sequences(lens, starts, 1), 128 // STRIPE
    whole, seen = (gathered_of(sequences, STRIPE, window, unit) for window in (None, 150))
    assert whole.seq_first.tolist() == [0, 0, 0] and whole.seq_begin.tolist() == [0, 0, 6 * unit]
    assert whole.num_blocks == 9 * unit
    # Token 680 sees 531 and on, token 301 sees 152 and on.
    assert seen.seq_first.tolist() == [0, 4 * unit, unit] and seen.num_blocks == 4 * unit
