"""The size of the KV pool: what fits into free memory, or what was compiled before and fits.

The number of blocks is in the shapes of every program, and so in the program's key in the
compilation cache. Free memory is never twice the same. It is rounded (`stable`), but where it lies
at a border the next start would come out on the other side, and compile everything again. So a
start takes the largest size that an earlier one has compiled, if it fits into what is free and is
at least `LEAST_SHARE` of what would be taken without it. What a CPU gives to a pool is a share by
choice (`sizing.CPU_SHARE`), so there it may be `MOST_SHARE_ON_CPU` of what fits.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax

from shiftjax.deploy.deployment import Deployment
from shiftjax.device import kept
from shiftjax.device.sizing import measure
from shiftjax.hosts.calls import Alone, Hosts
from shiftjax.parallel.grid import Device

FOLDER = "pool_sizes"
LEAST_SHARE = 0.75  # a step of rounding is an eighth at most
MOST_SHARE_ON_CPU = 1.25
LEAST_WORKSPACE_BYTES = 64 << 20  # kept for a step's temporaries until they are compiled and known
MOST_SIZES = 8  # remembered: of servers that share a machine each finds another


class Compiled(NamedTuple):
    """A pool that steps were compiled for, and the temporaries that they turned out to need."""

    num_blocks: int
    workspace_bytes: int


class PoolSizes:
    """The sizes that a deployment was compiled with on such devices; written by every start.

    Without a directory, with `num_blocks` in the settings or on several hosts, nothing is read or
    kept.
    `is_loaded`: the stored weights are in place when free memory is measured.
    """

    def __init__(
        self,
        deployment: Deployment,
        devices: Sequence[Device],
        directory: Path | None,
        *,
        is_loaded: bool = True,
        hosts: Hosts | None = None,
    ):
        self._deployment, self._devices, self._is_loaded = deployment, devices, is_loaded
        self._hosts = hosts or Alone()
        forgets = deployment.num_blocks or self._hosts.num > 1  # each host would recall its own
        self._directory = None if forgets else directory
        self._key = key_of(deployment, devices[0])
        self._known = _sizes_in(kept.read(self._directory, FOLDER, self._key))

    def size(self, workspace_bytes: int) -> tuple[Deployment, int]:
        """The deployment with its blocks, and the bytes that it leaves for temporaries.

        By the memory that is free now; steps need at least `workspace_bytes`. Raises ConfigError
        where there is no room for blocks.
        """
        now = measure(self._devices, self._hosts)
        held = 0
        if self._is_loaded:  # on the devices that are asked
            held = self._deployment.stages[0].memory(now).weight_bytes
        before = now._replace(free_bytes=now.free_bytes + held)  # as if they were not there yet
        share = MOST_SHARE_ON_CPU if self._devices[0].platform == "cpu" else 1
        for known in sorted(self._known, reverse=True):
            workspace = max(workspace_bytes, known.workspace_bytes)
            memory = self._deployment.memory(before, workspace)
            most = share * self._deployment.fitting_blocks(memory)
            taken = self._deployment.blocks_for(memory)
            if LEAST_SHARE * taken <= known.num_blocks <= most:
                return self._deployment.with_blocks(known.num_blocks, memory), workspace
        memory = self._deployment.memory(before, workspace_bytes)
        return self._deployment.sized(memory), workspace_bytes

    def keep(self, num_blocks: int, workspace_bytes: int) -> None:
        """Remember what the steps have been compiled with, for later starts."""
        size = Compiled(num_blocks, workspace_bytes)
        if size in self._known or self._directory is None:
            return
        others = _sizes_in(kept.read(self._directory, FOLDER, self._key))  # by now
        sizes = [size, *(other for other in others if other.num_blocks != num_blocks)]
        kept.keep(self._directory, FOLDER, self._key, {"sizes": sizes[:MOST_SIZES]})


def key_of(deployment: Deployment, device: Device) -> dict[str, Any]:
    """All that makes other programs, but for the size that is looked for, and what it follows.

    How much the host may hold makes none, nor where else blocks are kept, and how long.
    """
    none = {"disk_dir": None, "disk_bytes": 0, "retention_fraction": 0.0}
    deployment = replace(deployment, host_bytes=min(1, deployment.host_bytes), **none)
    return {
        "jax": jax.__version__,
        "device": f"{device.platform} {device.device_kind}",
        "deployment": repr(deployment),
    }


def _sizes_in(fields: dict[str, Any]) -> list[Compiled]:
    """The sizes that a file holds, newest first; none in what is not such a file."""
    try:
        sizes = [Compiled(int(blocks), int(workspace)) for blocks, workspace in fields["sizes"]]
    except (LookupError, TypeError, ValueError, OverflowError):
        return []
    return [size for size in sizes if size.num_blocks >= 2 and size.workspace_bytes >= 0]
