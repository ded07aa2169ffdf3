"""The memory that devices really have, and have free."""

from collections.abc import Sequence
from pathlib import Path

from shiftjax.costs.machine_files import MACHINE_OF_DEVICE
from shiftjax.deploy.budgets import budgets_for
from shiftjax.deploy.deployment import Devices
from shiftjax.hosts.calls import Alone, Hosts
from shiftjax.parallel.grid import Device

# On a CPU the memory belongs to everybody and zeroing it takes time: no pool takes more than this
# share of what weights leave, however large memory_fraction is.
CPU_SHARE = 0.2


def measure(devices: Sequence[Device], hosts: Hosts | None = None) -> Devices:
    """Ask the first of this host's, which are alike; virtual ones share the host's evenly.

    Of several hosts all have to ask, and get what the poorest has.

    Raises:
        RuntimeError: the backend does not say how much memory it has.
    """
    from shiftjax.device.mesh import own_devices  # whoever asks for the host's alone needs no JAX

    own = own_devices(devices)
    first, hosts, share = own[0], hosts or Alone(), 1.0
    if first.platform == "cpu":
        total, free = (each // len(own) for each in host_memory())
        share = CPU_SHARE
    else:
        stats = first.memory_stats()
        if not stats or "bytes_limit" not in stats:
            raise RuntimeError(f"{first} does not report its memory; set num_blocks")
        total, free = stats["bytes_limit"], stats["bytes_limit"] - stats["bytes_in_use"]
    total, free = hosts.least("to measure memory", (total, free))
    budgets = budgets_for(first.platform == "cpu", total)
    # Every CPU has the same kind, which does not say how fast it is.
    is_priced = first.platform != "cpu" and first.device_kind in MACHINE_OF_DEVICE
    known = share, len(own), budgets, is_priced, first.platform != "cpu"
    return Devices(len(devices), total, free, *known)


def host_memory() -> tuple[int, int]:
    """Return (total, available) bytes of the host, from /proc/meminfo."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    total, available = (
        int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable")
    )
    return total, available
