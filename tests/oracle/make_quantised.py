"""Write `tests/data/quantised`: matrices as those who own the formats pack and read them.

Both the script and the record of the oracle. It runs in an environment with torch, transformers,
accelerate and compressed-tensors, which the project itself never needs, beside the unpacked
archives of two packages whose other parts want a GPU:

    pip download --no-deps --no-build-isolation autoawq==0.2.9 auto-gptq==0.7.1
    tar xf autoawq-*.tar.gz && unzip -d auto_gptq-0.7.1 auto_gptq-*.whl
    PYTHONPATH=autoawq-0.2.9:auto_gptq-0.7.1 python tests/oracle/make_quantised.py [DIRECTORY]

Each case is a file NAME.safetensors with the tensors of one matrix, `proj.SUFFIX`, written by
safetensors' torch side, and the numbers that its owner makes of them, `expected`, float32;
`cases.json` has the `quantization_config` of each, and `versions`.
"""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import compressed_tensors
import torch
import transformers
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

SHAPE = 24, 96
OUTPUTS = 32  # of matrices that are packed along them in words, too
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

# name: bits, numbers of a group (None: all inputs), whether groups take inputs in any order
GPTQ = {"gptq": (4, 32, False), "gptq-ordered": (4, 32, True), "gptq-2": (2, 32, False)}
GPTQ |= {"gptq-8": (8, None, False)}
AWQ = {"awq": 32, "awq-channel": None}


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


def part_of(module: str) -> ModuleType:
    """Import one module of a package without what the package imports at its start."""
    parts = module.split(".")[:-1]
    for depth in range(1, len(parts) + 1):
        package = ModuleType(".".join(parts[:depth]))
        folders = (Path(root, *parts[:depth]) for root in sys.path)
        package.__path__ = [str(folder) for folder in folders if folder.is_dir()]
        sys.modules.setdefault(package.__name__, package)
    return importlib.import_module(module)


def grouped(bits: int, order: torch.Tensor) -> tuple[torch.nn.Linear, torch.Tensor, torch.Tensor]:
    """A product; a scale and a zero point for each output and group, `order` being an input's."""
    linear = torch.nn.Linear(SHAPE[1], OUTPUTS, bias=False)
    weight, most = linear.weight.data, 2**bits - 1
    groups = [weight[:, order == i] for i in range(int(order.max()) + 1)]
    low = torch.stack([each.min(dim=1).values.clamp(max=0) for each in groups], dim=1)
    high = torch.stack([each.max(dim=1).values.clamp(min=0) for each in groups], dim=1)
    scale = ((high - low) / most).half().float()
    return linear, scale, (-low / scale).round().clamp(1, most)


def gptq(bits: int, group: int | None, is_ordered: bool) -> tuple[dict, torch.Tensor]:
    """The tensors of a matrix as AutoGPTQ packs them, and the numbers that it multiplies by."""
    layer = part_of("auto_gptq.nn_modules.qlinear.qlinear_cuda").QuantLinear
    order = torch.arange(SHAPE[1]) // (group or SHAPE[1])
    order = order[torch.randperm(SHAPE[1])] if is_ordered else order
    linear, scale, zero = grouped(bits, order)
    packed = layer(bits, group or -1, linear.in_features, linear.out_features, bias=False)
    packed.pack(linear, scale, zero, order.to(torch.int32))
    names = "qweight", "qzeros", "scales", "g_idx"
    stored = {name: getattr(packed, name) for name in names}
    packed.scales = packed.scales.float()
    return stored | {"scales": stored["scales"].half()}, packed(torch.eye(SHAPE[1])).T


def awq(group: int | None) -> tuple[dict, torch.Tensor]:
    """The tensors of a matrix as AutoAWQ packs them, and the numbers that it makes of them."""
    gemm = part_of("awq.modules.linear.gemm")
    size = group or SHAPE[1]
    linear, scale, zero = grouped(4, torch.arange(SHAPE[1]) // size)
    packed = gemm.WQLinear_GEMM.from_linear(linear, 4, size, False, scale.T, zero.T)
    stored = {name: getattr(packed, name) for name in ("qweight", "qzeros", "scales")}
    codes, zeros, scales = stored.values()
    return stored, gemm.dequantize_gemm(codes, zeros, scales.float(), 4, size).T


def main(directory: Path) -> None:
    """Write every case."""
    torch.manual_seed(20260801)
    directory.mkdir(parents=True, exist_ok=True)
    cases: dict[str, dict] = {}

    def write(name: str, stored: dict, expected: torch.Tensor) -> None:
        tensors = {f"proj.{suffix}": x.contiguous() for suffix, x in stored.items()}
        tensors["expected"] = expected.float().contiguous()
        save_file(tensors, directory / f"{name}.safetensors")

    for name, (format, args, inputs) in CASES.items():
        stored, expected = compressed(torch.randn(SHAPE), format, args)
        write(name, stored, expected)
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
    for name, (bits, size, is_ordered) in GPTQ.items():
        write(name, *gptq(bits, size, is_ordered))
        cases[name] = {"quant_method": "gptq", "bits": bits, "group_size": size or -1}
        cases[name] |= {"desc_act": is_ordered, "sym": False}
    for name, size in AWQ.items():
        write(name, *awq(size))
        cases[name] = {"quant_method": "awq", "bits": 4, "group_size": size or -1}
        cases[name] |= {"zero_point": True, "version": "gemm"}
    versions = {each.__name__: each.__version__ for each in (compressed_tensors, transformers)}
    versions |= {"autoawq": "0.2.9", "auto_gptq": "0.7.1"}
    text = json.dumps({"versions": versions, "cases": cases}, indent=1)
    (directory / "cases.json").write_text(text + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "tests/data/quantised"))
