"""Write `tests/data/quantised`: matrices as compressed-tensors and transformers pack and read them.

Both the script and the record of the oracle. It runs in an environment with torch, transformers and
compressed-tensors, which the project itself never needs:

    python tests/oracle/make_quantised.py [tests/data/quantised]

Each case is a file NAME.safetensors with the tensors of one matrix, `proj.SUFFIX`, written by
safetensors' torch side, and the numbers that its owner makes of them, `expected`, float32;
`cases.json` has the `quantization_config` of each, and `versions`.
"""

import json
import sys
from pathlib import Path

import compressed_tensors
import torch
import transformers
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

SHAPE = 24, 96
FLOAT = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
INT = {"type": "int", "dynamic": False}
TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
# name: format, arguments of the weights, of the activations
CASES: dict[str, tuple[str, dict, dict | None]] = {
    "float-channel": ("float-quantized", FLOAT | {"strategy": "channel"}, TOKEN),
    "float-tensor": ("float-quantized", FLOAT | {"strategy": "tensor"}, TOKEN),
    "float-block": (
        "float-quantized",
        FLOAT | {"strategy": "block", "block_structure": [16, 32]},
        TOKEN | {"strategy": "group", "group_size": 32},
    ),
    "int8-channel": (
        "int-quantized",
        INT | {"num_bits": 8, "strategy": "channel", "symmetric": True},
        None,
    ),
    "int4-group": (
        "pack-quantized",
        INT | {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True},
        None,
    ),
    "int4-zeros": (
        "pack-quantized",
        INT | {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False},
        None,
    ),
    "int8-packed": (
        "pack-quantized",
        INT | {"num_bits": 8, "strategy": "channel", "symmetric": True},
        None,
    ),
}


def scales_of(weight: torch.Tensor, args: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """A scale and a zero point for each group, block, channel or for all, as a calibration has."""
    strategy = args["strategy"]
    rows, columns = weight.shape
    sizes = {
        "tensor": (rows, columns),
        "channel": (1, columns),
        "group": (1, args.get("group_size")),
        "block": tuple(args.get("block_structure", ())),
    }[strategy]
    blocks = [part.split(sizes[1], dim=1) for part in weight.split(sizes[0], dim=0)]
    low = torch.tensor([[each.min().clamp(max=0) for each in row] for row in blocks])
    high = torch.tensor([[each.max().clamp(min=0) for each in row] for row in blocks])
    if args["type"] == "float":
        scale, zero = torch.maximum(high, -low) / 448, torch.zeros_like(low)
    elif args["symmetric"]:
        scale = torch.maximum(high, -low) * 2 / (2 ** args["num_bits"] - 1)
        zero = torch.zeros_like(low)
    else:
        scale = (high - low) / (2 ** args["num_bits"] - 1)
        zero = (-low / scale).round() - 2 ** (args["num_bits"] - 1)
    if strategy == "tensor":
        scale, zero = scale.reshape(1), zero.reshape(1)
    return scale, zero.to(torch.int8)


def compressed(weight: torch.Tensor, format: str, args: dict) -> tuple[dict, torch.Tensor]:
    """The tensors of a matrix in a file, and what their owner reads out of them."""
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args))
    compressor = BaseCompressor.get_value_from_registry(format)
    scale, zero = scales_of(weight, args)
    state = {"weight": weight.clone(), "weight_scale": scale}
    if args["type"] == "int" and not args["symmetric"]:
        state["weight_zero_point"] = zero
    stored = compressor.compress(state, scheme)
    return stored, compressor.decompress(stored, scheme)["weight"]


def main(directory: Path) -> None:
    """Write every case."""
    torch.manual_seed(20260801)
    directory.mkdir(parents=True, exist_ok=True)
    cases: dict[str, dict] = {}
    for name, (format, args, inputs) in CASES.items():
        stored, expected = compressed(torch.randn(SHAPE), format, args)
        tensors = {f"proj.{suffix}": x.contiguous() for suffix, x in stored.items()}
        save_file(tensors | {"expected": expected.float()}, directory / f"{name}.safetensors")
        group = {"targets": ["Linear"], "weights": args, "input_activations": inputs}
        cases[name] = {
            "quant_method": "compressed-tensors",
            "format": format,
            "config_groups": {"group_0": group},
        }
    blocks = torch.randint(0, 256, (2, 8, 3, 16), dtype=torch.uint8)
    powers = torch.randint(110, 140, (2, 8, 3), dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks, powers, dtype=torch.float32)
    tensors = {"experts.proj_blocks": blocks, "experts.proj_scales": powers}
    tensors["expected"] = expected.contiguous()
    save_file(tensors, directory / "mxfp4.safetensors")
    cases["mxfp4"] = {"quant_method": "mxfp4"}
    versions = {each.__name__: each.__version__ for each in (compressed_tensors, transformers)}
    text = json.dumps({"versions": versions, "cases": cases}, indent=1)
    (directory / "cases.json").write_text(text + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "tests/data/quantised"))
