"""Every test sees 8 virtual CPU devices and strict array rules."""

import atexit
import os
import shutil
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
NUM_DEVICES = 9  # 9 for (SP=3, TP=3); everything else uses the first 8 or fewer
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + f" --xla_force_host_platform_device_count={NUM_DEVICES}"
).strip()

import jax  # noqa: E402
import pytest  # noqa: E402
from jax.experimental.compilation_cache import compilation_cache  # noqa: E402

assert len(jax.devices()) == NUM_DEVICES  # now, before a test asks for fewer
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Engines that differ in what no program contains (a policy, a kind of preemption) compile once.
COMPILED = tempfile.mkdtemp(prefix="shiftjax-compiled-")
atexit.register(shutil.rmtree, COMPILED, ignore_errors=True)
jax.config.update("jax_compilation_cache_dir", COMPILED)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
jax.config.update("jax_persistent_cache_enable_xla_caches", "none")


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
    """JAX keeps every compiled program, and what it closes over, until told otherwise."""
    yield
    jax.clear_caches()
    if not jax.config.jax_enable_compilation_cache:  # switched off in this module
        _use_compilation_cache(True)


@pytest.fixture
def uncached():
    """Every program of this test is compiled, none comes out of the compilation cache."""
    _use_compilation_cache(False)
    yield
    _use_compilation_cache(True)


def _use_compilation_cache(use: bool) -> None:
    jax.config.update("jax_enable_compilation_cache", use)
    compilation_cache.reset_cache()  # JAX asks once whether there is one
