"""Which implementation of attention a step uses: a table of functions, chosen once at build time.

    xla       plain XLA loops: every platform, every shape
    pallas    Mosaic kernels (`pallas_kernels`): Hopper GPUs, and the shapes that the kernels have

Nothing changes between the two but speed and the last bits: pools of fp8 are written and read by
the same rule. A GPU that gets the XLA loops is told so in one warning that names the reason. The
setting `attention` can ask for one of them by name: `xla` never comes near the kernels, `pallas`
makes every reason an error.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_kernels.prefill_work import PrefillConfig
from pallas_kernels.rows import Sequences
from pallas_kernels.step_work import KernelConfig
from pallas_kernels.window import Window
from shiftjax.arch.config import ModelConfig
from shiftjax.models.attention import (
    AttentionMetadata,
    LayerPool,
    LayerTerms,
    LoopOptions,
    divide_attention,
    ragged_paged_attention,
    row_attention,
    write_kv,
)
from shiftjax.models.attention_table import AttentionBackend
from shiftjax.models.attention_work import (
    CPU_SIZES,
    LoopSizes,
    check_contexts,
    divide_rows,
    loop_sizes,
)
from shiftjax.models.entry_backend import kv_scales, pallas_entry, pallas_write, why_not_traced
from shiftjax.models.gathered_tiles import in_gathered_tiles
from shiftjax.models.gpu_software import what_tracing_says, why_not_assembled
from shiftjax.models.neighbours import Neighbours, filled, localise_by, neighbours_of
from shiftjax.models.position_backend import position_attention
from shiftjax.models.products import Codes
from shiftjax.options import ConfigError
from shiftjax.parallel.grid import ALL_AXES, Device, axis_sizes
from shiftjax.parallel.layout import Layout

logger = logging.getLogger(__name__)
FP8 = jnp.dtype(jnp.float8_e4m3fn)
KERNEL_CAPABILITY = 9  # Hopper; the matrix instructions of later chips are others


def xla_attention(
    head_dim: int,
    windows: tuple[Window | None, ...],
    block_size: int,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    sizes: LoopSizes = CPU_SIZES,
    frees_blocks: bool = False,
    neighbours: Neighbours | None = None,
    values_in_keys: int | None = None,
) -> AttentionBackend:
    """Return the XLA loops, whose rounds are as large as `sizes` say.

    `scale` None is head_dim ** -0.5; `soft_cap` is of the scaled scores. With `frees_blocks` what
    is behind a window may be anything. With `neighbours` devices split positions: blocks are
    stripes of theirs. `values_in_keys`: see `LoopOptions`.
    """
    positions = None if neighbours is None else neighbours.positions
    factor = head_dim**-0.5 if scale is None else scale

    def for_each_window(divide: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        own = {"block_size": block_size, "sizes": sizes, "positions": positions} | kwargs
        return tuple(divide(*args, window=window, **own) for window in windows)

    def divide(block_tables, seq_lens, query_start_loc, num_decodes, *, num_tokens, num_rows=None):
        sequences = Sequences(seq_lens, query_start_loc, num_decodes, num_rows)
        return for_each_window(divide_attention, block_tables, sequences, num_tokens=num_tokens)

    def attend(q, pool, metadata, terms):
        work = metadata.work[terms.window]
        tables = terms.block_tables(pool, metadata.block_tables)
        if neighbours is None:
            return ragged_paged_attention(q, pool, tables, work, of_layer(terms))
        out = row_attention(q, pool, tables, work.rows, of_layer(terms))

        def tiles(q, out):
            return in_gathered_tiles(q, out, pool, tables, work, of_layer(terms))

        num_rows = metadata.query_start_loc[metadata.num_decodes]
        return filled(neighbours, tiles, q, out, num_rows, of_all=terms.of_all)

    def attend_rows(q, pool, block_tables, work, terms):
        tables = terms.block_tables(pool, block_tables)
        return row_attention(q, pool, tables, work[terms.window], of_layer(terms))

    def of_layer(terms: LayerTerms) -> LoopOptions:
        own = windows[terms.window], terms.kv_scales, terms.sinks
        own = *own, sizes, frees_blocks, neighbours, values_in_keys, terms.of_all
        return LoopOptions(factor, soft_cap, *own)

    def write(pool, k, v, slot_mapping, terms):
        return write_kv(pool, k, v, terms.slots(pool, slot_mapping), terms.kv_scales)

    localise = None if neighbours is None else localise_by(neighbours, windows)
    rows = functools.partial(for_each_window, divide_rows)
    loops = AttentionBackend("xla", divide, rows, attend, attend_rows, write)
    return loops._replace(localise=localise)


class AttentionNeeds(NamedTuple):
    """What the settings ask of attention."""

    deterministic: bool = False  # a row has the same bits whatever the others are
    drafts: bool = False  # sequences may have several rows
    wanted: Literal["auto", "pallas", "xla"] = "auto"  # the setting `attention`
    largest_block: int = 1  # tokens, of all groups that a sequence may come to
    in_tiles: bool = False  # and whether it is a decode: of kernels there is one for all


NO_NEEDS = AttentionNeeds()


def choose_attention(
    layout: Layout,
    device: Device,
    dtypes: tuple[DTypeLike, DTypeLike],
    block_size: int,
    needs: AttentionNeeds = NO_NEEDS,
    check: Callable[[], str | None] | None = None,
) -> AttentionBackend:
    """Return the kernels where device and shapes allow them, else the XLA loops.

    `dtypes` are those of activations and of keys and values. `check` tries the kernels on the
    devices and returns what is wrong with them; it is asked last, and None does not ask. On a GPU
    without kernels, or with a tuning table that does not know it, this warns; call it once for a
    deployment.

    Raises:
        ConfigError: `wanted` are the kernels, and they cannot be had.
    """
    deterministic, drafts, wanted, largest_block, in_tiles = needs
    reason = "the setting attention = xla" if wanted == "xla" else why_not(device)
    if reason is None:
        own = layout, device, block_size, deterministic
        kernels, is_tuned = tuned_attention(*own, in_tiles=in_tiles)
        reason = _why_not_traced(kernels, layout, *dtypes, block_size)
        if reason is None and check is not None:
            reason = check()
        if reason is None:
            if words := why_not_traced(layout.model, dtypes):
                logger.info("XLA rotates and writes heads: %s", words)
            if not is_tuned:
                own_size = block_size // layout.position_ways
                _warn_of_safe_settings(device, layout.model.head_dim, own_size)
            if layout.model.latent is not None:
                logger.warning("prompts run as XLA loops where latents (MLA) are cached: slower")
            return kernels._replace(reason="passed its check" if check else "not checked")
    if wanted == "pallas":
        raise ConfigError(
            [f"attention = pallas: {device.device_kind} cannot run the attention kernels: {reason}"]
        )
    if device.platform == "gpu" and wanted != "xla":
        logger.warning(
            "attention on %s runs as XLA loops, several times slower than the kernels: %s",
            device.device_kind,
            reason,
        )
    kind = {"deterministic": deterministic, "drafts": drafts, "largest_block": largest_block}
    own = {"neighbours": neighbours_of(layout, block_size), **kind}
    return loops_of(layout.model, block_size, device.platform, **own)._replace(reason=reason)


def loops_of(
    model: ModelConfig,
    block_size: int,
    platform: str = "cpu",
    *,
    deterministic: bool = False,
    drafts: bool = False,
    neighbours: Neighbours | None = None,
    largest_block: int = 1,
) -> AttentionBackend:
    """Return the XLA loops of a model, for a platform, and for drafts or not.

    `deterministic` ones never split the context of a row, nor take more of it where rows are few;
    nor in groups with smaller blocks. With `neighbours` devices split positions.
    """
    sizes = loop_sizes(platform, deterministic, drafts, neighbours is not None, largest_block)
    return xla_attention(
        model.head_dim,
        model.windows,
        block_size,
        scale=model.attention_scale,
        soft_cap=model.attention_soft_cap,
        sizes=sizes,
        frees_blocks=model.frees_blocks,
        neighbours=neighbours,
        values_in_keys=model.values_in_keys,
    )


def why_not(device: Device) -> str | None:
    """Return why a device cannot run the kernels, whatever the shapes; None if it can."""
    if device.platform != "gpu":
        return f"the kernels are for GPUs, not for {device.platform}"
    if int(str(device.compute_capability).partition(".")[0]) != KERNEL_CAPABILITY:
        return (
            f"the kernels are for compute capability {KERNEL_CAPABILITY}.x (H100, H200, H20), not "
            f"{device.compute_capability}"
        )
    return why_not_assembled()


def tuned_attention(
    layout: Layout,
    device: Device,
    block_size: int,
    deterministic: bool,
    *,
    in_tiles: bool = False,
) -> tuple[AttentionBackend, bool]:
    """Return the kernels with the best settings known, and whether they are for this device."""
    config, is_tuned = tuned_config(layout, device, block_size, deterministic)
    if in_tiles:  # the same rounds whatever blocks a group has
        prefill = PrefillConfig(num_blocks=config.prefill.num_blocks, fixed_rounds=0)
        config = config._replace(prefill=prefill, in_tiles=True)
    if layout.position_ways > 1 or layout.model.latent is not None:
        return position_attention(layout, config, block_size), is_tuned
    return pallas_attention(layout, config, block_size), is_tuned


def tuned_config(
    layout: Layout, device: Device, block_size: int, deterministic: bool
) -> tuple[KernelConfig, bool]:
    """Return the best settings known for the kernels, and whether they are for this device."""
    from pallas_kernels.tuned import config_for, fixed_config

    cores = getattr(device, "core_count", None)  # not every device says
    ways = layout.position_ways  # each of whom attends with the heads of all
    q_per_kv = ways * layout.heads_per_device // layout.kv_heads_per_device
    sizes = layout.model.head_dim, block_size // ways, q_per_kv
    config, is_tuned = config_for(device.device_kind, *sizes, cores)
    return fixed_config(config) if deterministic else config, is_tuned


def _warn_of_safe_settings(device: Device, head_dim: int, block_size: int) -> None:
    logger.warning(
        "the attention kernels are not tuned for %s, head_dim %d, block_size %d: they run with "
        "safe settings (scripts/tune_kernels.py finds better ones)",
        device.device_kind,
        head_dim,
        block_size,
    )


def pallas_attention(
    layout: Layout,
    config: Any,
    block_size: int,
    *,
    interpret: Any = False,
) -> AttentionBackend:
    """Return the kernels with their settings (`pallas_kernels.step_work.KernelConfig`).

    Shapes that the kernels do not have raise ValueError where they are traced. `interpret` is for
    tests alone. The output is codes where `gives_codes`. Where heads do not `enter` by a kernel,
    keys and values are written by XLA's scatters: it fuses the sum of a split GEMM and the rotary
    embedding into them, two launches a layer, where `pallas_kernels.kv_write` needs three. Pools of
    fp8 go by the kernel.
    """
    from pallas_kernels import decode, decode_work, paged_attention, step_work
    from pallas_kernels.call import AttentionOptions, PagedKV
    from pallas_kernels.head_codes import CodedHeads, Heads

    model, windows = layout.model, layout.model.windows

    def options(terms: LayerTerms, dtype: DTypeLike) -> AttentionOptions:
        scores = model.attention_scale, windows[terms.window], model.attention_soft_cap
        own = kv_scales(terms), terms.sinks, interpret
        return AttentionOptions(*scores, *own, terms.codes if gives_codes(layout, dtype) else None)

    def left(out: Heads) -> jax.Array | Codes:
        if isinstance(out, CodedHeads):
            return Codes(out.values.reshape(out.values.shape[0], -1), out.scale)
        return out

    def divide(block_tables, seq_lens, query_start_loc, num_decodes, *, num_tokens, num_rows=None):
        check_contexts(block_tables, seq_lens, block_size)
        divided = functools.partial(
            step_work.divide_step,
            Sequences(seq_lens, query_start_loc, num_decodes, num_rows),
            num_tokens=num_tokens,
            heads=(layout.heads_per_device, layout.kv_heads_per_device),
            max_context=block_tables.shape[1] * block_size,
            config=config,
        )
        return tuple(divided(window=window) for window in windows)

    def divide_rows(rows, num_rows):
        divided = functools.partial(
            decode_work.divide_decode,
            rows,
            num_rows,
            kv_heads=layout.kv_heads_per_device,
            config=config.decode,
        )
        return tuple(divided(window=window) for window in windows)

    @jax.jit  # layers of a window share what is traced and lowered, once a step
    def attend(q, pool: LayerPool, metadata, terms: LayerTerms):
        k, v = terms.own(pool)
        kv = PagedKV(k, v, metadata.block_tables, metadata.seq_lens)
        work, own = metadata.work[terms.window], options(terms, q.dtype)
        return left(paged_attention.ragged_paged_attention(q, kv, work, own, config))

    @jax.jit
    def attend_rows(q, pool: LayerPool, block_tables, work, terms: LayerTerms):
        k, v = terms.own(pool)
        kv = PagedKV(k, v, block_tables, None)  # rows say how much they see
        own = work[terms.window], options(terms, q.dtype), config.decode
        return left(decode.decode_attention(q, kv, *own))

    write = jax.jit(pallas_write(interpret))
    workers = decode_work.num_workers(config.decode.num_blocks, layout.kv_heads_per_device)
    reads = decode_work.LEAST_ROUNDS * config.decode.kv_tile * workers
    if config.decode.fixed_rounds is not None:
        reads = 0  # a prompt's tokens are always tiles: what a row gives differs in the last bits
    if config.in_tiles:
        reads = None  # no bucket has rows alone
    own = divide, divide_rows, attend, attend_rows, write, reads
    return AttentionBackend("pallas", *own, enter=pallas_entry(interpret))


def gives_codes(layout: Layout, dtype: DTypeLike) -> bool:
    """Whether the kernels give codes, with activations of this type, where these are wanted.

    Else XLA makes them of numbers.
    """
    from pallas_kernels.head_codes import wrong_codes

    return jnp.dtype(dtype) == jnp.bfloat16 and not wrong_codes(layout.model.head_dim)


def _why_not_traced(
    kernels: AttentionBackend,
    layout: Layout,
    dtype: DTypeLike,
    kv_dtype: DTypeLike,
    block_size: int,
) -> str | None:
    """Trace a small step; return what the kernels cannot do, in their own words."""
    tokens, seqs, head_dim = 8, 8, layout.model.head_dim
    tables = np.zeros((seqs, 1), np.int32)
    lens, starts = np.zeros(seqs, np.int32), np.zeros(seqs + 1, np.int32)
    slots = np.zeros(tokens, np.int32)
    q = jax.ShapeDtypeStruct((tokens, layout.heads_per_device, head_dim), dtype)
    new = jax.ShapeDtypeStruct((tokens, layout.kv_heads_per_device, head_dim), dtype)
    own_size = block_size // layout.position_ways
    shapes = (entry.pool_shape(2, own_size) for entry in layout.cache.entries)
    pool = tuple(jax.ShapeDtypeStruct(shape, kv_dtype) for shape in shapes)
    scales = jax.ShapeDtypeStruct((2, layout.kv_heads_per_device), jnp.float32)
    sinks = jax.ShapeDtypeStruct((layout.heads_per_device,), jnp.float32)

    # Neighbours exchange what they have along the axes of a mesh.
    sizes = axis_sizes(layout.shift, layout.shift, layout.tp)
    attend = jax.make_jaxpr(kernels.attend, axis_env=list(zip(ALL_AXES, sizes, strict=True)))

    def trace() -> None:
        work = kernels.divide(tables, lens, starts, 0, num_tokens=tokens)
        metadata = AttentionMetadata(slots, tables, lens, starts, np.zeros((), np.int32), work)
        for window in range(len(layout.model.windows)):
            kv_scales = scales if jnp.dtype(kv_dtype) == FP8 else None
            terms = LayerTerms(window, kv_scales, sinks if layout.model.attention_sinks else None)
            attend(q, pool, metadata, terms)
            values = new if layout.model.latent is None else None
            jax.eval_shape(kernels.write, pool, new, values, slots, terms)

    return what_tracing_says(trace)
