"""Kernels for the check of kernels: right ones in Mosaic's interpreter, and broken ones.

`shiftjax.device.attention_cases` imports a function of this file by name, in a process of its own.
"""

import os
import signal
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode_work import DecodeConfig
from pallas_kernels.prefill_work import PrefillConfig
from pallas_kernels.step_work import KernelConfig
from shiftjax.device.attention_steps import Shape
from shiftjax.models.attention_backend import AttentionBackend, loops_of, pallas_attention

# The interpreter runs thread blocks one by one: few of them.
FEW_BLOCKS = KernelConfig(PrefillConfig(64, 2, 1), DecodeConfig(64, 1, 45_000))
INTERPRETED = plgpu.InterpretGPUParams(detect_races=False)


def right(shape: Shape) -> AttentionBackend:
    return pallas_attention(shape.layout, FEW_BLOCKS, shape.block_size, interpret=INTERPRETED)


def wrong_mask(shape: Shape) -> AttentionBackend:
    """Tokens see 14 keys at most, although nobody asked for a window."""
    narrow = replace(shape, windows=(14,))
    return pallas_attention(narrow.layout, FEW_BLOCKS, shape.block_size, interpret=INTERPRETED)


def wrong_scale(shape: Shape) -> AttentionBackend:
    """Scores are 5% too large."""
    kernels = right(shape)

    def attend(q, pool, metadata, terms):
        large = (q.astype(jnp.float32) * 1.05).astype(q.dtype)
        return kernels.attend(large, pool, metadata, terms)

    return kernels._replace(attend=attend)


def swapped_scales(shape: Shape) -> AttentionBackend:
    """Codes of keys are in units of those of values."""
    kernels = right(shape)

    def attend(q, pool, metadata, terms):
        swapped = replace(terms, kv_scales=terms.kv_scales[::-1])
        return kernels.attend(q, pool, metadata, swapped)

    return kernels._replace(attend=attend)


def _then(shape: Shape, function) -> AttentionBackend:
    """XLA's loops, which are quick to compile, and a function of NumPy arrays after them."""
    loops = loops_of(shape.layout.model, shape.block_size)

    def attend(q, pool, metadata, terms):
        out = loops.attend(q, pool, metadata, terms)
        return jax.pure_callback(function, jax.ShapeDtypeStruct(out.shape, out.dtype), out)

    return loops._replace(attend=attend)


def racy(shape: Shape) -> AttentionBackend:
    """One number is a bit off, now and then: of every run another one."""
    places = iter(range(1 << 20))

    def disturb(out):
        out = np.array(out)
        out.reshape(-1).view(np.uint16)[next(places)] ^= 1
        return out

    return _then(shape, disturb)


def wrong_on_one(shape: Shape) -> AttentionBackend:
    """The second device adds up wrong."""
    loops = loops_of(shape.layout.model, shape.block_size)

    def attend(q, pool, metadata, terms):
        error = jnp.where(jax.lax.axis_index("dp") == 1, 0.1, 0.0).astype(q.dtype)
        out = loops.attend(q, pool, metadata, terms)
        return jnp.where(out == 0, out, out + error)

    return loops._replace(attend=attend)


def does_not_compile(shape: Shape) -> AttentionBackend:
    """These are for a GPU, and there is none."""
    return pallas_attention(shape.layout, FEW_BLOCKS, shape.block_size)


def hangs(shape: Shape) -> AttentionBackend:
    """As one does that waits at a barrier for something that does not come."""

    def wait(out):
        time.sleep(3600)
        return out

    return _then(shape, wait)


def dies(shape: Shape) -> AttentionBackend:
    """As a driver may, of a fault on the device."""

    def abort(out):
        os.kill(os.getpid(), signal.SIGSEGV)
        return out

    return _then(shape, abort)
