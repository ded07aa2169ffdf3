"""The settings of the kernels, by GPU, head dim and block size: `tuned.json`. No JAX.

`scripts/tune_kernels.py` measures settings and writes the file. A GPU, head dim or block size that
is not in it gets settings that compile for every Hopper GPU and are the best nowhere.
"""

import json
from importlib import resources
from typing import Any

from pallas_kernels.decode_work import DecodeConfig
from pallas_kernels.prefill_work import PrefillConfig
from pallas_kernels.step_work import KernelConfig

FILE = "tuned.json"


def safe_config(head_dim: int) -> KernelConfig:
    """Return settings for every block size of 16 to 128: they fit shared memory and registers."""
    if head_dim <= 128:
        return KernelConfig()
    one_per_processor = DecodeConfig(num_blocks=132, shared_memory_bytes=227 * 1024)
    return KernelConfig(PrefillConfig(), one_per_processor)


def config_for(device_kind: str, head_dim: int, block_size: int) -> tuple[KernelConfig, bool]:
    """Return the settings for a GPU, and whether they are tuned for it (else they are safe)."""
    for row in json.loads(read_table()):
        if (row["gpu"], row["head_dim"], row["block_size"]) == (device_kind, head_dim, block_size):
            return from_row(row), True
    return safe_config(head_dim), False


def read_table() -> str:
    """Return the text of the table that comes with the package."""
    return resources.files("pallas_kernels").joinpath(FILE).read_text(encoding="utf-8")


def from_row(row: dict[str, Any]) -> KernelConfig:
    """Read the settings of a row; an unknown one raises TypeError."""
    return KernelConfig(PrefillConfig(**row["prefill"]), DecodeConfig(**row["decode"]))


def to_row(gpu: str, head_dim: int, block_size: int, config: KernelConfig) -> dict[str, Any]:
    """Return a row of the table."""
    return {
        "gpu": gpu,
        "head_dim": head_dim,
        "block_size": block_size,
        "prefill": config.prefill._asdict(),
        "decode": config.decode._asdict(),
    }
