"""Attention of devices that split positions, against the definition; foreign slots hold NaN."""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from spent import exhaustive, thorough
from test_attention import STEPS, Case, make_case, row_errors, tolerance

from pallas_kernels import reference
from pallas_kernels.call import AttentionOptions, PagedKV
from pallas_kernels.window import Chunk
from shiftjax.device.mesh import make_mesh
from shiftjax.models.attention import LayerTerms
from shiftjax.models.attention_backend import AttentionBackend, xla_attention
from shiftjax.models.attention_work import CPU_SIZES, LoopSizes, RowLoop
from shiftjax.models.neighbours import Neighbours
from shiftjax.parallel.grid import ALL_AXES
from shiftjax.parallel.positions import Positions

SPLIT = Positions(4, 4)
DEVICES = 8
# Rows in several parts and waves, tiles in rounds of no whole number of chunks.
SMALL = LoopSizes(lambda rows: RowLoop(4, -(-(rows + 4) // 4), 8), 48, 48, gathered=32, gathers=2)
AT_STRIPES = [1, 3, 4, 5, 15, 16, 17, 31, 33]
STEPS_HERE = STEPS | {"decodes at stripes": ([1] * 9, AT_STRIPES, 16, 16)}


class Inputs(NamedTuple):
    """What `localise` reads of a step."""

    attention: object
    late: object
    positions: jax.Array
    sample_rows: jax.Array


def backend_of(head_dim: int, window, sizes, soft_cap=None) -> AttentionBackend:
    neighbours, own = Neighbours(SPLIT, DEVICES), {"soft_cap": soft_cap, "sizes": sizes}
    return xla_attention(head_dim, (window,), SPLIT.stripe, neighbours=neighbours, **own)


def pools_by_device(case: Case) -> list[jax.Array]:
    """`[devices, blocks, 1, block, head_dim]` of K and of V: a head, and a run of every stripe."""
    return [
        jnp.stack(
            [
                pool[:, place // SPLIT.ways, None, first : first + SPLIT.block]
                for place in range(DEVICES)
                for first in [SPLIT.run(place % SPLIT.ways) * SPLIT.block]
            ]
        )
        for pool in case.pool
    ]


def positions_of(case: Case) -> np.ndarray:
    found, of = np.zeros(len(case.q), np.int32), case.metadata
    for seq, length in enumerate(of.seq_lens):
        first, after = of.query_start_loc[seq : seq + 2]
        found[first:after] = np.arange(length - (after - first), length)
    return found


def run(case: Case, backend: AttentionBackend, sinks=None, *, of_all=False) -> np.ndarray:
    """What 8 devices make of a step, all heads of it.

    With `of_all` each has the queries of its neighbours, and what they find is added up.
    """
    of = case.metadata
    contexts = of.block_tables, of.seq_lens, of.query_start_loc, int(of.num_decodes)
    num_rows = max(len(of.seq_lens), int(of.query_start_loc[of.num_decodes]))
    work = backend.divide(*contexts, num_tokens=len(case.q), num_rows=num_rows)
    metadata = of._replace(work=work)
    inputs = Inputs(metadata, None, jnp.asarray(positions_of(case)), jnp.zeros(1, jnp.int32))
    by_head, localise = P(None, ALL_AXES), backend.localise
    assert localise is not None

    @jax.jit
    @partial(
        jax.shard_map,
        mesh=make_mesh(jax.devices()[:DEVICES], 1, DEVICES),
        in_specs=(by_head, P(ALL_AXES), P(), P(ALL_AXES)),
        out_specs=by_head,
        check_vma=False,
    )
    def attend(q, pools, inputs, sinks):
        terms, neighbours = LayerTerms(sinks=sinks, of_all=of_all), Neighbours(SPLIT, DEVICES)
        pool = tuple(each[0] for each in pools)
        q = neighbours.gather_queries(q) if of_all else q
        out = backend.attend(q, pool, localise(inputs).attention, terms)
        if not of_all:
            return out
        groups = np.arange(DEVICES).reshape(-1, SPLIT.ways).tolist()
        whole = jax.lax.psum(out.astype(jnp.float32), ALL_AXES, axis_index_groups=groups)
        return neighbours.own_heads(whole)

    return np.asarray(attend(case.q, pools_by_device(case), inputs, sinks), np.float64)


def check(case: Case, window=None, sizes=SMALL, soft_cap=None, sinks=None, *, of_all=False) -> None:
    backend = backend_of(case.q.shape[-1], window, sizes, soft_cap)
    out = run(case, backend, sinks, of_all=of_all)
    of = case.metadata
    k, v = case.pool
    kv = PagedKV(k, v, of.block_tables, of.seq_lens)
    options = AttentionOptions(case.q.shape[-1] ** -0.5, window, soft_cap, sinks=sinks)
    wanted = reference.ragged_paged_attention(case.q, kv, of.query_start_loc, options)
    assert (row_errors(case, out, wanted) <= tolerance(case)).all()
    assert not out[of.query_start_loc[-1] :].any()  # padding: finite, and zero


def case_of(name: str, **more) -> Case:
    return make_case(*STEPS_HERE[name], block_size=SPLIT.stripe, q_per_kv=8, **more)


@pytest.mark.parametrize(
    ("name", "of_all"),
    [
        ("decodes at stripes", False),
        ("decodes and prompts", False),
        ("decodes and prompts", True),
        *thorough(*((s, False) for s in STEPS if s != "nothing")),
        *exhaustive(("decodes at stripes", True)),
    ],
)
def test_equals_the_definition(name, of_all):
    check(case_of(name), of_all=of_all)


@pytest.mark.parametrize("splits", [4, *thorough(2)])
def test_runs_in_the_order_of_a_fleet_s_places(splits, monkeypatch):
    monkeypatch.setitem(globals(), "SPLIT", replace(SPLIT, splits=splits))
    check(case_of("decodes and prompts"))


@pytest.mark.parametrize(
    ("window", "of_all"),
    [(7, True), *thorough((1, False), (40, True), (Chunk(24), False)), *exhaustive((7, False))],
)
def test_windows_sinks_and_soft_caps(window, of_all):
    case = case_of("decodes and prompts", seed=1)
    sinks = jnp.linspace(-2, 3, case.q.shape[1])
    check(case, window, soft_cap=3.0, sinks=sinks, of_all=of_all)


@pytest.mark.thorough
def test_the_sizes_of_the_engine():
    check(case_of("decodes and prompts", max_len=1024), sizes=CPU_SIZES)


@pytest.mark.thorough
def test_rows_of_one_sequence_see_what_they_may():
    """As drafts are: five rows of a context, which end in different runs of a stripe."""
    lens = [33, 128, 20]
    case = make_case(
        [5, 5, 5], lens, 16, 4, block_size=SPLIT.stripe, q_per_kv=8, num_decodes=3, num_rows=15
    )
    check(case)
    check(case, of_all=True)
