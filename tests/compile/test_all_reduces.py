"""How XLA sums over 8 GPUs: its own kernels for small sums, if NVLink joins the devices."""

from collections import Counter
from collections.abc import Iterable

import aot
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from shiftjax.costs.sum_buffers import MOST_BYTES
from shiftjax.device.all_reduces import all_reduce_kinds

aot.require()

SIZES = {"one shot": 128 << 10, "two shot": 1 << 20, "nccl": 16 << 20}  # bytes
NVLINK = "device_interconnect_info { active_links: 18 }"


def kinds_of(
    description: str, num_devices: int = 8, sizes: Iterable[int] = SIZES.values()
) -> dict[str, int]:
    """Compile a sum of each size."""
    mesh = aot.mesh_of(description, (num_devices,), ("x",))
    total = jax.shard_map(
        lambda x: jax.lax.psum(x, "x"), mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
    )
    found = Counter()
    for size in sizes:
        array = jax.ShapeDtypeStruct((size // 2,), jnp.bfloat16)
        with jax.set_mesh(mesh):
            compiled = jax.jit(total).lower(aot.on_device(mesh, array)).compile()
        found += all_reduce_kinds(compiled.as_text())
    return dict(found)


@pytest.mark.parametrize("path", sorted(aot.TARGETS.glob("*.txtpb")), ids=lambda path: path.stem)
def test_small_sums_take_kernels_where_the_target_has_nvlink(path):
    description = path.read_text()
    if NVLINK in description:
        assert kinds_of(description) == dict.fromkeys(SIZES, 1)
    else:
        assert kinds_of(description) == {"nccl": len(SIZES)}


@pytest.mark.parametrize("num_devices", [2, 4, 8])
def test_the_largest_sum_that_has_buffers(num_devices):
    """`costs/sum_buffers.py` counts up to there."""
    description, most = (aot.TARGETS / "h200.txtpb").read_text(), MOST_BYTES // num_devices
    assert kinds_of(description, num_devices, [most]) == {"two shot": 1}
    assert kinds_of(description, num_devices, [most + 1024]) == {"nccl": 1}


def test_without_nvlink_all_sums_are_nccls():
    description = (aot.TARGETS / "h200.txtpb").read_text()
    assert NVLINK in description
    assert kinds_of(description.replace(NVLINK, "")) == {"nccl": len(SIZES)}
