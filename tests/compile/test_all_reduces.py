"""How XLA sums over 8 GPUs: its own kernels for small sums, if NVLink joins the devices."""

from collections import Counter

import aot
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from shiftjax.device.all_reduces import all_reduce_kinds

aot.require()

SIZES = {"one shot": 128 << 10, "two shot": 1 << 20, "nccl": 16 << 20}  # bytes
NVLINK = "device_interconnect_info { active_links: 18 }"


def kinds_of(description: str) -> dict[str, int]:
    """Compile a sum of each size."""
    mesh = aot.mesh_of(description, (8,), ("x",))
    total = jax.shard_map(
        lambda x: jax.lax.psum(x, "x"), mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
    )
    found = Counter()
    for size in SIZES.values():
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


def test_without_nvlink_all_sums_are_nccls():
    description = (aot.TARGETS / "h200.txtpb").read_text()
    assert NVLINK in description
    assert kinds_of(description.replace(NVLINK, "")) == {"nccl": len(SIZES)}
