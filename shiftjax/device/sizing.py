"""The memory that devices really have, and have free."""

from collections.abc import Sequence
from pathlib import Path

from shiftjax.control.deployment import Devices
from shiftjax.parallel.grid import Device

# On a CPU the memory belongs to everybody and zeroing it takes time: no pool takes more than this
# share of what weights leave, however large memory_fraction is.
CPU_SHARE = 0.2


def measure(devices: Sequence[Device]) -> Devices:
    """Ask the first of these devices, which are alike; virtual ones share the host's evenly.

    Raises:
        RuntimeError: the backend does not say how much memory it has.
    """
    first, count = devices[0], len(devices)
    per_host = sum(device.process_index == first.process_index for device in devices)
    if first.platform == "cpu":
        total, available = host_memory()
        return Devices(count, total // per_host, available // per_host, CPU_SHARE, per_host)
    stats = first.memory_stats()
    if not stats or "bytes_limit" not in stats:
        raise RuntimeError(f"{first} does not report its memory; set num_blocks")
    limit, used = stats["bytes_limit"], stats["bytes_in_use"]
    return Devices(count, limit, limit - used, per_host=per_host)


def host_memory() -> tuple[int, int]:
    """Return (total, available) bytes of the host, from /proc/meminfo."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    total, available = (
        int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable")
    )
    return total, available
