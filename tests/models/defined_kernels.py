"""What kernels give where devices split positions, in XLA: for programs of several devices.

Mosaic's interpreter keeps a kernel's state outside of the program, for one device.
"""

from math import log

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.prefill_work import Job
from pallas_kernels.window import first_seen
from shiftjax.models.position_backend import RowKernels
from shiftjax.models.softmaxes import State, of_normalised
from shiftjax.models.tile_backend import TileKernels


def by_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put XLA in the place of the kernels."""
    monkeypatch.setattr(RowKernels, "states", _rows)
    monkeypatch.setattr(TileKernels, "parts", _tiles)


def _rows(self: RowKernels, q, pool, block_tables, work, terms) -> State:
    """What `RowKernels.states` gives, in XLA."""
    both = (blocks[block_tables[work.row_seq], 0] for blocks in (pool[0], pool[-1]))
    k, v = (x.reshape(len(x), -1, x.shape[-1]).astype(jnp.float32) for x in both)
    v = v[..., : self.model.values_in_keys]
    position, count = jnp.arange(k.shape[1])[None], len(q)
    low = 0 if work.row_low is None else work.row_low[:, None]
    seen = (position < work.row_length[:, None]) & (position >= low) & (work.row_jobs[:, None] > 0)
    seen = seen[:count, None]
    scores = jnp.einsum("rhd,rtd->rht", q.astype(jnp.float32), k[:count])
    scores = jnp.where(seen, scores * self.model.attention_scale, -1e30)
    lse = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.where(seen, jnp.exp(scores - lse[..., None]), 0)
    values = jnp.where(jnp.isnan(v), 0, v)[:count]
    return of_normalised(
        jnp.einsum("rht,rtd->rhd", weights, values)[:, None], lse[:, None] / log(2)
    )


def _tiles(self: TileKernels, q, kv, work, terms) -> State:
    """What `TileKernels.parts` gives, in XLA."""
    k_pages, v_pages, tables, lens = kv
    jobs = Job(*work.jobs.T)
    token = jnp.arange(len(q))[None]
    own = (token >= jobs.begin[:, None]) & (token < jobs.end[:, None])
    own &= (jnp.arange(len(work.jobs)) < work.counts[0])[:, None]
    seq = jnp.where(own, jobs.seq[:, None], 0).sum(0)
    at = jnp.where(own, jobs.position[:, None] + token - jobs.begin[:, None], 0).sum(0)
    first, last = ((jnp.where(own, x[:, None], 0).sum(0) * 128)[:, None] for x in jobs[4:6])
    k, v = (pages[tables[seq], 0].astype(jnp.float32) for pages in (k_pages, v_pages))
    k, v = (x.reshape(len(q), -1, x.shape[-1]) for x in (k, v))
    key, window = jnp.arange(k.shape[1])[None], self.model.windows[terms.window]
    seen = (key >= first) & (key < last) & (key <= at[:, None]) & (key < lens[seq][:, None])
    if window is not None:
        seen &= key >= first_seen(at[:, None], window)
    seen = seen[:, None]
    scores = jnp.einsum("thd,tkd->thk", q.astype(jnp.float32), k) * self.model.attention_scale
    scores = jnp.where(seen, scores, -1e30)
    lse = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.where(seen, jnp.exp(scores - lse[..., None]), 0)
    values = jnp.einsum("thk,tkd->thd", weights, jnp.where(jnp.isnan(v), 0, v))
    return of_normalised(values[:, None], lse[:, None] / log(2))
