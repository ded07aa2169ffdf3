"""How many KV blocks fit: from the memory that is really free after the weights."""

from pathlib import Path

from shiftjax.parallel.grid import Device

# On a CPU the memory belongs to everybody and zeroing it takes time: no pool grows beyond this
# share of what is available, however large memory_fraction is.
CPU_SHARE = 0.25


def device_memory(device: Device, num_devices: int) -> tuple[int, int]:
    """Return (total, free) bytes of one device; virtual CPU devices share the host's evenly.

    Raises:
        RuntimeError: the backend does not say how much memory it has.
    """
    if device.platform == "cpu":
        total, available = host_memory()
        return total // num_devices, int(available * CPU_SHARE) // num_devices
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        raise RuntimeError(f"{device} does not report its memory; set num_blocks")
    return stats["bytes_limit"], stats["bytes_limit"] - stats["bytes_in_use"]


def host_memory() -> tuple[int, int]:
    """Return (total, available) bytes of the host, from /proc/meminfo."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    total, available = (
        int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable")
    )
    return total, available


def num_blocks_for(
    free_bytes: int, total_bytes: int, fraction: float, temporary_bytes: int, block_bytes: int
) -> int:
    """Return the blocks that fit beside a step's temporaries, leaving `1 - fraction` of all."""
    room = free_bytes - int((1 - fraction) * total_bytes) - temporary_bytes
    return max(0, room // block_bytes)
