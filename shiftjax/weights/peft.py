"""Reads adapters as PEFT writes them."""

import json
from hashlib import blake2b
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from shiftjax.adapters.adapter import Adapter, Factor
from shiftjax.arch.config import ModelConfig


def read_adapter(
    name: str, path: Path, model: ModelConfig, dtype: np.dtype, max_rank: int
) -> Adapter:
    """Return an adapter in host memory."""
    config = json.loads((path / "adapter_config.json").read_text(encoding="utf-8"))
    tensors = load_file(path / "adapter_model.safetensors")
    scale, factors = np.float32(config["lora_alpha"] / config["r"]), {}
    for own, a in tensors.items():
        if ".lora_A" in own:
            b = tensors[own.replace("lora_A", "lora_B")] * scale
            ours = own.removeprefix("base_model.model.").replace(".lora_A", "")
            factors[ours] = Factor(a.astype(dtype), b.astype(dtype))
    digest = blake2b(b"".join(x.tobytes() for x in tensors.values()), digest_size=8).hexdigest()
    return Adapter(name, str(path), digest, config["r"], factors)
