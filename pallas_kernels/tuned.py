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


SXM_CORES = 132  # streaming multiprocessors of an H100 or H200 SXM; PCIe has 114, an H20 78
# Above so many query heads of a KV head two decode blocks need more registers than there are.
MOST_HEADS_OF_TWO_BLOCKS = 16
FIXED_ROUNDS = 4  # of a job, where that is fixed: 64 contexts of 1,024 tokens fill an H100


def safe_config(head_dim: int, q_per_kv: int = 8, cores: int | None = None) -> KernelConfig:
    """Return settings for every block size of 16 to 128: they fit shared memory and registers.

    Thread blocks all run at once on a GPU of `cores` multiprocessors (None: SXM_CORES): one of
    prefill on each, and two of decode where registers and shared memory have room for them.
    """
    cores = cores or SXM_CORES
    prefill = PrefillConfig(num_blocks=cores)
    if head_dim <= 128 and q_per_kv <= MOST_HEADS_OF_TWO_BLOCKS:
        return KernelConfig(prefill, DecodeConfig(num_blocks=2 * cores))
    one_a_core = DecodeConfig(num_blocks=cores, shared_memory_bytes=227 * 1024)
    return KernelConfig(prefill, one_a_core)


def fixed_config(config: KernelConfig) -> KernelConfig:
    """Return the same settings, with splits of a row that do not depend on the other rows."""
    decode = config.decode._replace(fixed_rounds=FIXED_ROUNDS)
    return config._replace(prefill=config.prefill._replace(fixed_rounds=0), decode=decode)


def config_for(
    device_kind: str, head_dim: int, block_size: int, q_per_kv: int = 8, cores: int | None = None
) -> tuple[KernelConfig, bool]:
    """Return the settings for a GPU, and whether they are tuned for it (else they are safe).

    The table is measured with few query heads of a KV head, so many get safe settings.
    """
    for row in json.loads(read_table() if q_per_kv <= MOST_HEADS_OF_TWO_BLOCKS else "[]"):
        if (row["gpu"], row["head_dim"], row["block_size"]) == (device_kind, head_dim, block_size):
            return from_row(row), True
    return safe_config(head_dim, q_per_kv, cores), False


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
