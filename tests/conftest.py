"""Every test sees 8 virtual CPU devices and strict array rules."""

import gc
import os
import re
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
NUM_DEVICES = 9  # 9 for (SP=3, TP=3); everything else uses the first 8 or fewer
FLAGS = [
    f"--xla_force_host_platform_device_count={NUM_DEVICES}",
    # Programs run once or twice here: LLVM's optimisations cost a third of what compiling them
    # costs, and change neither the HLO nor what it means.
    "--xla_backend_optimization_level=0",
]
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS]).strip()

import jax  # noqa: E402
import kept  # noqa: E402
import pytest  # noqa: E402
import spent  # noqa: E402
from jax.experimental.compilation_cache import compilation_cache  # noqa: E402

assert len(jax.devices()) == NUM_DEVICES  # now, before a test asks for fewer
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Engines that differ in what no program contains (a policy, a kind of preemption) compile once, in
# whichever process of this run or of an earlier one comes first.
kept.use()
# Kernels for GPUs hold the places of their sources: a clone elsewhere has the same ones.
ROOT = re.escape(f"{Path(__file__).parents[1]}/")
jax.config.update("jax_hlo_source_file_canonicalization_regex", ROOT)


def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true", help="leave out what is marked thorough")
    parser.addoption("--exhaustive", action="store_true", help="take in what is marked exhaustive")
    parser.addoption("--mutants", action="store_true", help="take in what is marked mutant")


def pytest_configure(config):
    spent.QUICK = config.getoption("quick")
    config.pluginmanager.register(spent.Spent(is_limited=os.environ.get("CI") == "true"))


def pytest_collection_finish():
    """What is imported stays: collections of garbage need not pass over it."""
    from shiftjax.device.step import COMPILER_OPTIONS  # not before shape annotations are checked

    COMPILER_OPTIONS["cpu"]["xla_backend_optimization_level"] = "0"  # as FLAGS have it
    COMPILER_OPTIONS["gpu"]["xla_backend_optimization_level"] = "3"  # as without FLAGS
    gc.collect()
    gc.freeze()


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
