"""Kernels of devices that split positions, against the definition; foreign slots hold NaN."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_split_attention as split
from defined_kernels import by_definition
from jax.experimental.pallas import mosaic_gpu as plgpu
from spent import exhaustive, thorough
from test_attention import STEPS, Case, make_case, row_errors

from pallas_kernels import reference
from pallas_kernels.call import AttentionOptions, PagedKV
from pallas_kernels.decode_work import DecodeConfig
from pallas_kernels.step_work import KernelConfig
from pallas_kernels.window import Chunk
from shiftjax.arch.config import LayerKind
from shiftjax.arch.formats import FORMATS
from shiftjax.arch.latent import Latent
from shiftjax.arch.presets import PRESETS
from shiftjax.device import position_cases
from shiftjax.device.attention_steps import Shape
from shiftjax.models.attention import LayerTerms
from shiftjax.models.position_backend import position_attention
from shiftjax.parallel.layout import Layout
from shiftjax.parallel.positions import Positions

# Shared memory that nothing was written to is NaN, and masked afterwards.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")

WAYS, BLOCK = 4, 16
STRIPE = WAYS * BLOCK
INTERPRETED = plgpu.InterpretGPUParams(detect_races=False)
# Two workers whose rings of two stages are filled again.
CONFIG = DecodeConfig(64, 2, 45_000)
AT_STRIPES = (1, 15, 16, 17, 63, 64, 65, 129, 333)
MOST_ERROR = 5e-3  # of a row, relative to its norm: of bfloat16


def shape_of(window=None, **more) -> Shape:
    own = (window,), "bfloat16", "bfloat16", (16, 16, 16)
    return Shape(8, 1, 64, STRIPE, *own, ways=WAYS, **more)


def decodes_of(lengths=AT_STRIPES, tokens=12, **more) -> Case:
    """One KV head that four devices have: decodes in stripes."""
    own = {"block_size": STRIPE, "kv_heads": 1, "q_per_kv": 8, "head_dim": 64, "dtype": "bfloat16"}
    return make_case([1] * len(lengths), lengths, tokens, tokens, **(own | more))


def expected(case: Case, options: AttentionOptions) -> np.ndarray:
    of = case.metadata
    kv = PagedKV(*case.pool, of.block_tables, of.seq_lens)
    return reference.ragged_paged_attention(case.q, kv, of.query_start_loc, options)


def answered(case: Case, shape: Shape, terms: LayerTerms, config=CONFIG) -> np.ndarray:
    """What the places of a device find together, rows alone."""
    both, of = KernelConfig(decode=config), case.metadata
    kernels = position_cases.in_turn(shape, both, INTERPRETED)
    contexts = of.block_tables, of.seq_lens, of.query_start_loc, int(of.num_decodes)
    work = kernels.divide(*contexts, num_tokens=None, num_rows=len(case.q))
    metadata = jax.tree.map(jnp.asarray, of._replace(work=work))
    attend = jax.jit(lambda q, pool, metadata: kernels.attend(q, pool, metadata, terms))
    return np.asarray(attend(case.q, case.pool, metadata), np.float64)


def check(case: Case, shape: Shape, sinks=None, config=CONFIG) -> None:
    (window,) = shape.windows
    wanted = expected(case, AttentionOptions(64**-0.5, window, shape.soft_cap, sinks=sinks))
    out = answered(case, shape, LayerTerms(sinks=sinks), config)
    assert (row_errors(case, out, wanted) <= MOST_ERROR).all()
    assert not out[case.metadata.query_start_loc[-1] :].any()


@pytest.mark.costs(10)
def test_rows_that_end_around_edges_of_stripes():
    check(decodes_of(), shape_of())


@pytest.mark.costs(10)
@pytest.mark.parametrize("window", [40, *thorough(1, 16, 130, Chunk(48))])
def test_windows_sinks_and_soft_caps(window):
    sinks = jnp.linspace(-2, 3, 8)
    check(decodes_of((1, 40, 64, 81, 333)), shape_of(window, soft_cap=3.0), sinks)


@pytest.mark.thorough
def test_rows_of_one_sequence_see_what_they_may():
    """As drafts are: five rows of a context, which end in parts of different devices."""
    own = {"block_size": STRIPE, "kv_heads": 1, "q_per_kv": 8, "head_dim": 64, "dtype": "bfloat16"}
    case = make_case([5, 5, 5], [66, 256, 20], 16, 4, num_decodes=3, num_rows=16, **own)
    check(case, shape_of())
    check(case, shape_of(30))


@pytest.mark.thorough
def test_jobs_of_fixed_length():
    check(
        decodes_of((20, 333, 1100), max_len=1152),
        shape_of(),
        config=CONFIG._replace(fixed_rounds=2),
    )


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["fp8", "bfloat16"])
def test_head_dims_that_are_no_blocks_of_columns_and_codes(dtype):
    head_dim = 96 if dtype == "bfloat16" else 128
    shape = replace(shape_of(), head_dim=head_dim, kv_dtype=dtype)
    case = decodes_of((1, 70, 333), head_dim=head_dim)
    scales = None
    if dtype == "fp8":
        pool = tuple(x.astype(jnp.float8_e4m3fn) for x in case.pool)
        case, scales = case._replace(pool=pool), jnp.float32([[0.5], [2.0]])
    options = AttentionOptions(head_dim**-0.5, kv_scales=scales if dtype == "fp8" else (1.0, 1.0))
    out = answered(case, shape, LayerTerms(kv_scales=scales), DecodeConfig(64, 2, 113 * 1024))
    assert (row_errors(case, out, expected(case, options)) <= MOST_ERROR).all()


@pytest.mark.costs(10)
@pytest.mark.parametrize("kv_dtype", ["bfloat16", *thorough("fp8")])
def test_latents_are_keys_and_values(kv_dtype):
    """Twenty heads, on the long side; the values are the first 128 numbers of 192."""
    shape = replace(shape_of(), heads=20, head_dim=192, values_in_keys=128, kv_dtype=kv_dtype)
    case = decodes_of((1, 64, 81, 333), q_per_kv=20, head_dim=192)
    k, scales = case.pool[0].astype(FORMATS[kv_dtype].dtype), (1.0, 1.0)
    terms = LayerTerms()
    if kv_dtype == "fp8":
        scales = jnp.float32([[0.5], [2.0]])
        terms = LayerTerms(kv_scales=scales)
    values = jnp.where(jnp.arange(192) < 128, k, jnp.zeros_like(k))
    options = AttentionOptions(shape.layout.model.attention_scale, kv_scales=scales)
    wanted = expected(case._replace(pool=(k, values)), options)
    config = CONFIG._replace(shared_memory_bytes=100_000)
    out = answered(case._replace(pool=(k,)), shape, terms, config)
    out = np.pad(out, ((0, 0), (0, 0), (0, 64)))
    assert (row_errors(case, out, wanted) <= MOST_ERROR).all()


# ------------------------------------------------------------------------- on devices


@pytest.mark.costs(8)
@pytest.mark.parametrize("splits", [True, False])
def test_decodes_of_latents_beside_prompts(splits, monkeypatch):
    """On four devices, which split positions, or on one; the values are 32 of 64 numbers."""
    by_definition(monkeypatch)
    latent = Latent(rank=32, rope_dim=32, nope_dim=16, value_dim=16)
    sizes = {"num_heads": 8, "num_kv_heads": 1, "head_dim": 64, "num_layers": 1}
    model = replace(PRESETS["llama-8b"], latent=latent, **sizes)
    degrees, ways = ((2, 2), 4) if splits else ((1, 1), 1)
    monkeypatch.setattr(split, "DEVICES", ways)
    monkeypatch.setattr(split, "SPLIT", Positions(ways, BLOCK))
    layout = Layout(model, *degrees, by_position=splits)
    backend = position_attention(layout, KernelConfig(decode=CONFIG), ways * BLOCK)
    own = {"block_size": ways * BLOCK, "q_per_kv": 8, "head_dim": 64, "dtype": "bfloat16"}
    case = make_case(*STEPS["decodes and prompts"], kv_heads=1, **own)
    k, _ = case.pool
    values = jnp.where(jnp.arange(64) < 32, k, 0)
    options = AttentionOptions(model.attention_scale)
    wanted = expected(case._replace(pool=(k, values)), options)
    if not splits:
        backend = backend._replace(localise=lambda inputs: inputs)
    out = np.pad(split.run(case._replace(pool=(k,)), backend), ((0, 0), (0, 0), (0, 32)))
    assert (row_errors(case, out, wanted) <= MOST_ERROR).all()


@pytest.mark.costs(8)
@pytest.mark.parametrize(
    ("name", "of_all"),
    [
        ("decodes and prompts", True),
        ("decodes at stripes", False),
        *exhaustive(("decodes and prompts", False), ("decodes at stripes", True)),
    ],
)
def test_devices_answer_each_other(name, of_all, monkeypatch):
    """Two KV heads on four devices: queries and parts travel, or normalisers; of prompts keys."""
    monkeypatch.setattr(split, "DEVICES", 4)
    monkeypatch.setattr(split, "SPLIT", Positions(2, BLOCK))
    by_definition(monkeypatch)
    kind = LayerKind.of_window(50)
    sizes = {"num_heads": 16, "num_kv_heads": 2, "head_dim": 64, "num_layers": 1}
    model = replace(PRESETS["llama-8b"], layer_kinds=(kind,), attention_sinks=True, **sizes)
    layout = Layout(model, 2, 2, by_position=True)
    backend = position_attention(layout, KernelConfig(decode=CONFIG), 2 * BLOCK)
    steps = STEPS | {"decodes at stripes": ([1] * len(AT_STRIPES), AT_STRIPES, 16, 16)}
    own = {"block_size": 2 * BLOCK, "q_per_kv": 8, "head_dim": 64, "dtype": "bfloat16"}
    case, sinks = make_case(*steps[name], **own), jnp.linspace(-2, 3, 16)
    out = split.run(case, backend, sinks, of_all=of_all)
    wanted = expected(case, AttentionOptions(64**-0.5, 50, sinks=sinks))
    assert (row_errors(case, out, wanted) <= MOST_ERROR).all()
    assert not out[case.metadata.query_start_loc[-1] :].any()
