"""Views of rows of a buffer: the same memory, the right rows, alive as long as anybody looks."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shiftjax.device.place import aligned_zeros
from shiftjax.device.views import dlpack_view, host_view, row_view
from shiftjax.options import ConfigError

DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]
SHAPES = [(64, 32), (8, 16, 32)]  # a matrix, and heads


def placed(shape: tuple[int, ...], dtype) -> tuple[jax.Array, np.ndarray]:
    """An array on the first device, in memory that a CPU device takes as it is; and its values."""
    values = np.random.default_rng(0).integers(-100, 100, shape).astype(np.float32)
    memory = aligned_zeros(shape, np.dtype(dtype))
    memory[:] = values
    return jax.device_put(memory, jax.devices()[0]), values


@pytest.mark.parametrize("make", [dlpack_view, host_view])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("part", range(4))
def test_a_view_is_the_rows_in_place(make, shape, dtype, part):
    base, values = placed(shape, dtype)
    rows = shape[0] // 4
    view = make(base, part * rows, rows)
    offset = view.unsafe_buffer_pointer() - base.unsafe_buffer_pointer()
    assert offset == base.nbytes // 4 * part
    assert view.shape == (rows, *shape[1:]) and view.dtype == base.dtype
    assert view.devices() == base.devices()
    np.testing.assert_array_equal(
        np.asarray(view, np.float32), values[part * rows : (part + 1) * rows]
    )


@pytest.mark.parametrize("make", [dlpack_view, host_view])
def test_a_view_keeps_the_memory_alive(make):
    base, values = placed((512, 512), jnp.float32)
    view = make(base, 128, 128)
    del base
    gc.collect()
    noise = [jax.block_until_ready(jnp.full((512, 512), float(i))) for i in range(8)]
    np.testing.assert_array_equal(np.asarray(view), values[128:256])
    del noise


@pytest.mark.parametrize("make", [dlpack_view, host_view])
def test_views_stay_put_through_steps_that_donate_something_else(make):
    base, values = placed((64, 32), jnp.float32)
    view = make(base, 16, 16)
    pointer = view.unsafe_buffer_pointer()
    step = jax.jit(lambda weight, pool: pool + weight.sum(), donate_argnums=1)
    pool = jnp.zeros((1024,), jnp.float32)
    for _ in range(4):
        pool = step(view, pool)
    assert view.unsafe_buffer_pointer() == pointer
    assert base.unsafe_buffer_pointer() + base.nbytes // 4 == pointer
    np.testing.assert_array_equal(np.asarray(pool), np.full(1024, 4 * values[16:32].sum()))
    np.testing.assert_array_equal(np.asarray(base), values)


def test_a_view_that_would_be_a_copy_is_refused():
    base, _ = placed((8, 3), jnp.float32)  # rows of 12 bytes: no row but the first is aligned
    with pytest.raises(ConfigError, match=r"q: rows 1\.\.3 at byte 12 .* weights=gather"):
        row_view(base, 1, 2, "q")
