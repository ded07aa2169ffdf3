"""JAX's persistent cache of compiled programs."""

import logging
from collections.abc import Sequence
from pathlib import Path

import jax

from shiftjax.deploy.deployment import Deployment
from shiftjax.parallel.grid import Device

logger = logging.getLogger(__name__)


def use_cache_for(
    deployments: Sequence[Deployment], device: Device, cache_dir: Path | None
) -> Path | None:
    """Use a compilation cache where it helps; returns where it is."""
    loads = any(each.widths or each.dp > 1 or each.pp > 2 for each in deployments)
    if device.platform == "cpu" and loads:
        # What a CPU reads from the cache cannot be loaded on other devices.
        logger.info("several groups on a CPU: compiled at every start, without the cache")
        cache_dir = None
    use_compile_cache(cache_dir)
    return cache_dir


def use_compile_cache(directory: Path | None) -> None:
    """Point JAX at a persistent cache; every program counts, however quick to compile."""
    if directory is not None:
        jax.config.update("jax_compilation_cache_dir", str(directory))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
