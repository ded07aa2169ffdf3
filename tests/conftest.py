"""Every test sees 8 virtual CPU devices and strict array rules."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
NUM_DEVICES = 9  # 9 for (SP=3, TP=3); everything else uses the first 8 or fewer
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + f" --xla_force_host_platform_device_count={NUM_DEVICES}"
).strip()

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
    """JAX keeps every compiled program, and what it closes over, until told otherwise."""
    yield
    jax.clear_caches()
