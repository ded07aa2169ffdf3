"""What the rows of `gpu_run.py` should say, written down before one runs.

From the data sheet's rates and the efficiencies of `shiftjax/costs/machines`, each with its source
there, the amounts of work of the rows, and the few assumptions named below. A prediction is a value
between two bounds: below the lower one the measurement is wrong (faster than the memory or the
matrix units), above the upper one the program is not what was meant. `decides` says what is to be
done in either case.

    python scripts/gpu_run.py --predict h100 h200 >benchmarks/gpu_predictions.json
"""

import json
from collections.abc import Mapping
from itertools import product
from typing import Any

from cases.throughput_work import BF16_BYTES, decode_bytes, prefill_flops
from gpu_cases import EXPERTS, FP8, SHAPES
from gpu_parts import ENGINES, LARGE, LARGEST, MEMORY_SHARE
from gpu_writes import WRITES

from pallas_kernels.measure import FOUR_BIT_GROUPS, ExpertsShape, PrefillShape
from shiftjax.arch.config import ModelConfig
from shiftjax.arch.formats import Formats
from shiftjax.arch.presets import PRESETS
from shiftjax.costs.machine import Machine, Transfer, of_format
from shiftjax.costs.machine_files import load_engine, load_machine
from shiftjax.costs.step_costs import CostModel
from shiftjax.costs.work import Work
from shiftjax.parallel.grid import Mode
from shiftjax.parallel.layout import Layout

PLAIN = Formats()
COPY, GEMM = 0.9, 0.79  # shares of the data sheet: 3.0 TB/s and 780 TFLOP/s of an H100 SXM
LAUNCH_US = (0.8, 2.0, 4.0)  # `kernel_seconds` of the machines; XLA's graphs may be quicker
FP8_DECODE, FP8_PREFILL = (1.5, 2.0), 0.8  # codes are widened in shared memory: compiled, not run
DECODE_FIXED_US = (6.0, 9.0, 13.0)  # a launch or two, the first bytes, the last reduction
PREFILL_RATE = (350e12, 500e12, 620e12)  # FLOP/s at head dim 128; FlashAttention-3 has 600 to 650
PING_PONG_GAIN = 1.1  # FlashAttention-3, arXiv 2407.08608, section 3.1: 570 to 620-640 TFLOP/s
LAUNCHES, LOOP_LAUNCHES = 11, 60  # of a layer, as compiled; with 4 rounds of the loops instead
STREAM_US = 1.5  # more from one kernel to the next one where they are launched, not in a graph
# Of experts: what launches and the first bytes take; shares of the GEMM that full tiles have, of a
# copy; and how many more bytes than the rows' own are read and written around the products.
EXPERTS_FIXED_US = (12.0, 22.0, 40.0)
EXPERTS_PRODUCT = (0.9, 0.75, 0.55)
EXPERTS_ROW_TRAFFIC = (2.0, 5.0, 8.0)
# Of experts of four bits: seconds of decodes beside those of reading, and shares of the GEMM. A
# word of eight codes takes 19 instructions, 15 of them at 64 lanes a cycle: 3.8 TB/s of codes at
# 1.7 GHz, if all else overlaps. The products of a step wait for its operands.
FOUR_BIT_READING, FOUR_BIT_PRODUCT = (1.0, 1.35, 2.2), (0.8, 0.5, 0.3)
BLOCKED_US = (150.0, 400.0, 900.0)  # host and launch, where the sampler makes the host wait
LOOP_TRAFFIC = (2.0, 3.0, 6.0)  # keys and values are read, written side by side, and read again
# Small messages on 8 GPUs: 12 us, and 50 us for 4 MiB on H100 (vLLM pull request 42324).
NCCL = Transfer(12e-6, 193e9)


def predictions(chip: str) -> list[dict[str, Any]]:
    """Return the predictions for `h100` or `h200`; machines are those of 8 GPUs with NVLink."""
    machine = load_machine(f"{chip}x8")
    tables = (
        *(_ceilings, _products, _kernels, _writes, _experts, _engine, _large_engines, _torch),
        *(_all_reduces, _large),
    )
    return [row for table in tables for row in table(machine)]


def _row(part: str, row: str, field: str, bounds: Any, decides: str) -> dict[str, Any]:
    low, value, high = (float(f"{x:.3g}") for x in bounds)
    between = {"low": low, "predicted": value, "high": high}
    return {"part": part, "row": row, "field": field} | between | {"decides": decides}


def _peaks(machine: Machine) -> tuple[float, float]:
    """Return GB/s of a copy and TFLOP/s of a GEMM."""
    copy = COPY * machine.memory_bytes_per_second / 1e9
    return copy, GEMM * machine.matmul_flops["bfloat16"] / 1e12


def _ceilings(machine: Machine) -> list[dict[str, Any]]:
    copy, gemm = _peaks(machine)
    broken = "lower: clocks or power are limited, or the GPU is shared; nothing else counts then"
    return [
        _row("ceilings", "copy", "rate", (0.94 * copy, copy, 1.06 * copy), broken),
        _row("ceilings", "GEMM", "rate", (0.85 * gemm, gemm, 1.06 * gemm), broken),
        _row("ceilings", "launch", "us", LAUNCH_US, "every other prediction of a step: renew them"),
    ]


def _products(machine: Machine) -> list[dict[str, Any]]:
    from gpu_products import PRODUCTS, predicted_seconds

    rows = []
    for name, shape in PRODUCTS.items():
        us = 1e6 * predicted_seconds(shape, machine)
        decides = "higher with 8, 64: the inputs' codes; with 4,096: cuBLASLt's products instead"
        rows.append(_row("products", name, "us", (0.7 * us, us, 1.6 * us), decides))
    return rows


def _kernels(machine: Machine) -> list[dict[str, Any]]:
    rate = COPY * machine.memory_bytes_per_second
    rows = []
    for name, (shape, _) in SHAPES["decode"].items():
        read = shape.amount / rate * 1e6
        low, fixed, high = DECODE_FIXED_US
        slow, slowest = 1.0, 1.15
        decides = "higher by a constant: launches (combine, empty prefill); by a factor: tune"
        if shape.dtype == FP8:
            slow, slowest = FP8_DECODE
            decides = "by more than half of bfloat16's: codes are widened too slowly"
        bounds = read + low / 2, slow * read + fixed, slowest * read + high
        if name.startswith("1 x"):
            decides = "higher: parts of one context do not fill the chip, or combining is serial"
        rows.append(_row("decode", name, "us", bounds, decides))
    for name, (shape, settings) in SHAPES["prefill"].items():
        rates = [one / (1 if settings["ping_pong"] else PING_PONG_GAIN) for one in PREFILL_RATE]
        decides = "the quicker of the two becomes PrefillConfig.ping_pong"
        if "after" in name:
            decides = "4 times higher: the chunk is not split over keys"
        if "fp8" in name:
            rates = [FP8_PREFILL * one for one in rates[:2]] + rates[2:]
            decides = "far above bfloat16's: codes are widened too slowly"
        if "sinks" in name:
            decides = "by more than 3% above the same without: where sinks are read is wrong"
        bounds = (shape.amount / one * 1e6 for one in reversed(rates))
        rows.append(_row("prefill", name, "us", bounds, decides))
    return rows


def _writes(machine: Machine) -> list[dict[str, Any]]:
    """A launch, then bytes, which may stay in the cache of the chip."""
    copy = COPY * machine.memory_bytes_per_second
    rows, decides = [], "higher than `xla_us`: XLA's scatter writes codes, too"
    for name, shape in WRITES.items():
        moved = shape.amount / copy * 1e6
        low, launch, high = LAUNCH_US
        bounds = low + moved / 3, launch + moved, 1.5 * high + 2 * moved
        rows.append(_row("writes", name, "us", bounds, decides))
    return rows


def _experts(machine: Machine) -> list[dict[str, Any]]:
    """Decodes read weights; chunks multiply tiles of 128 rows, the last of an expert not full."""
    copy = COPY * machine.memory_bytes_per_second
    rows = []
    for name, shape in EXPERTS.items():
        if shape.unit == "GB/s":
            is_packed = shape.dtype in FOUR_BIT_GROUPS
            shares = FOUR_BIT_READING if is_packed else (1.0, 1.1, 1.35)
            seconds = [share * shape.amount / copy for share in shares]
            decides = "higher by a constant: launches of the division; by a factor: stages, tiles"
            decides += ", or what widens codes" * is_packed
        else:
            seconds = _chunk_seconds(shape, machine, copy)
            decides = "higher: the last wave of items, then rows collected and put in order"
        bounds = (1e6 * one + us for one, us in zip(seconds, EXPERTS_FIXED_US, strict=True))
        rows.append(_row("experts", name, "us", bounds, decides))
    return rows


def _chunk_seconds(shape: ExpertsShape, machine: Machine, copy: float) -> list[float]:
    chosen = shape.chosen()
    sizes = [int((chosen == expert).sum()) for expert in range(shape.own)]
    tiles = sum(-(-size // 128) for size in sizes)
    is_fp8 = shape.dtype == FP8
    peak = GEMM * machine.matmul_flops["bfloat16"] * (1.6 if is_fp8 else 1.0)
    products = shape.amount * tiles * 128 / sum(sizes) / peak
    row_bytes = BF16_BYTES * sum(sizes) * (shape.hidden + shape.width) / copy
    own = FOUR_BIT_PRODUCT if shape.dtype in FOUR_BIT_GROUPS else EXPERTS_PRODUCT
    return [
        products / share + traffic * row_bytes
        for share, traffic in zip(own, EXPERTS_ROW_TRAFFIC, strict=True)
    ]


def _costs(name: str, machine: Machine, devices: int = 1, formats: Formats = PLAIN) -> CostModel:
    """The model of costs of a preset at TP = `devices`, from which `plan` predicts."""
    layout = Layout(PRESETS[name], 1, devices)
    return CostModel(layout, machine, load_engine("shiftjax").offline, formats)


def _seconds(costs: CostModel, work: Work) -> float:
    return costs.device_seconds(Mode(1, 1), work)


def _kv_bytes(model: ModelConfig, batch: int) -> int:
    """Bytes of keys and values that a decode step reads at 1,024 tokens a sequence."""
    return BF16_BYTES * model.num_layers * model.cache.numbers * batch * 1024


def _apart_seconds(options: Mapping[str, str], model: ModelConfig, machine: Machine) -> float:
    """What a step takes longer whose kernels are not in one graph, or whose loops have more."""
    loops, graph = options["attention"] == "xla", options["gpu_options"] == "auto"
    launches = LOOP_LAUNCHES if loops else LAUNCHES
    more = (launches - LAUNCHES) * machine.kernel_seconds
    return model.num_layers * (more + (0.0 if graph else launches * STREAM_US * 1e-6))


def _engine(machine: Machine) -> list[dict[str, Any]]:
    from gpu_engine import formats_with

    costs, rows = _costs("llama-8b", machine), []
    model, rate = costs.model, machine.memory_bytes_per_second
    for name, options in ENGINES.items():
        graph, loops = options["gpu_options"] == "auto", options["attention"] == "xla"
        formats = formats_with(options)
        own = _costs("llama-8b", machine, formats=formats)
        for batch in (1, 64):
            least = decode_bytes(model, 1, [1024] * batch) / rate
            least /= 1 if formats == PLAIN else 2
            value = _seconds(own, Work.decode(batch, 1024))
            value += _apart_seconds(options, model, machine)
            more = _kv_bytes(model, batch) / rate / of_format(machine.kv_efficiency, "bfloat16")
            low, mid, high = (more * (one - 1) if loops else 0.0 for one in LOOP_TRAFFIC)
            row = f"engine: {name}", f"decode of {batch}"
            bounds = least + low, value + mid, 1.35 * value + high
            bubble = (0.0, 2e-5, 1.5e-4) if graph else [us * 1e-6 for us in BLOCKED_US]
            rows.append(_row(*row, "device_seconds", bounds, _DEVICE))
            rows.append(_row(*row, "bubble_seconds", bubble, _BUBBLE))
    return rows + _users(machine, costs)


_DEVICE = (
    "pallas against xla: the kernels stay `auto` if they are quicker at 64; one graph against "
    "XLA's options: gpu_options stays `auto` if it is not slower"
)
_BUBBLE = "with one graph near 0, else the host waits in a step: look for a cond outside of graphs"


def _users(machine: Machine, costs: CostModel) -> list[dict[str, Any]]:
    """Prefill, serving and a change of mode, of the first engine."""
    part, peak = "engine: pallas, one graph", machine.matmul_flops["bfloat16"]
    attention = PrefillShape(8192).amount * costs.model.num_layers
    products = prefill_flops(costs.model, 8192) - attention
    least = products / (GEMM * peak) + attention / PREFILL_RATE[-1]
    value = _seconds(costs, Work.prefill(8192))
    prefill = least, value, 1.5 * value
    serve = 64 * _seconds(costs, Work.prefill(512)) + 128 * _seconds(costs, Work.decode(64, 576))
    slow = "higher: look at the GEMMs' share first (autotuning), then at attention's"
    return [
        _row(part, "prefill of 8,192", "device_seconds", prefill, slow),
        _row(part, "serve", "seconds", (0.6 * serve, serve, 1.5 * serve), "the host, if decode is"),
        _row(part, "switch", "switch_seconds", (-2e-5, 0.0, 1e-4), "higher: switching costs"),
    ]


def _large_engines(machine: Machine) -> list[dict[str, Any]]:
    """The models that a device has room for, by the model of costs."""
    from gpu_engine import formats_with, largest_model

    rows = []
    for kind, (names, _, options, batches, context, prompts) in LARGEST.items():
        model = largest_model(names, options, MEMORY_SHARE * machine.memory_bytes)
        if model is None:
            continue
        formats = formats_with(options)
        costs = CostModel(Layout(model, 1, 1), machine, load_engine("shiftjax").offline, formats)
        works = {f"decode of {n}": Work.decode(n, context) for n in batches}
        works |= {f"prefill of {n:,}": Work.prefill(n) for n in prompts}
        for name, work in works.items():
            value = costs.device_seconds(Mode(1, 1), work)
            bounds, decides = (0.6 * value, value, 1.4 * value), f"{model.name}: {_LARGE}"
            rows.append(_row(f"engine: {kind}", name, "device_seconds", bounds, decides))
    return rows


_LARGE = "higher: the profile says which kernels, and how many launches"


def _torch(machine: Machine) -> list[dict[str, Any]]:
    """The same ceilings, and attention of FlashAttention-2 to cuDNN's."""
    copy, gemm = _peaks(machine)
    sdpa, same = (300.0, 520.0, 640.0), "far from ours: one of the two programs is not what it says"
    return [
        _row("torch", "copy", "rate", (0.9 * copy, copy, 1.06 * copy), same),
        _row("torch", "GEMM", "rate", (0.85 * gemm, gemm, 1.06 * gemm), same),
        _row("torch", "SDPA, 8,192", "rate", sdpa, "above our prefill: what it does is to be had"),
    ]


def _all_reduces(machine: Machine) -> list[dict[str, Any]]:
    """Of 8 GPUs; the first two lines of the machine are those of kernels, one and two shot."""
    from gpu_collectives import HIDDEN, TOKENS

    rows, decides = [], "XLA's kernels stay on while they are quicker from 16 KB to 1 MB"
    kinds = {"XLA's kernels": machine.all_reduce[:2], "NCCL": [NCCL]}
    for size, (kind, lines) in product((BF16_BYTES * n * HIDDEN for n in TOKENS), kinds.items()):
        volumes = {"one_shot": 7 * size, "ring": 2 * 7 / 8 * size}  # `Transfer` says which count
        seconds = (
            line.latency_seconds + volumes[line.volume] / line.bytes_per_second for line in lines
        )
        value = 1e6 * min(seconds)
        bounds = value / 2, value, 2 * value
        rows.append(_row("all-reduce", f"{size >> 10} KB, {kind}", "us", bounds, decides))
    return rows


def _large(machine: Machine) -> list[dict[str, Any]]:
    """A step of 64 sequences of Llama-70B at (1, 8)."""
    costs, rows = _costs("llama-70b", machine, 8), []
    for name, options in LARGE.items():
        value = _seconds(costs, Work.decode(64, 1024))
        value += _apart_seconds(options, costs.model, machine)
        bounds = 0.7 * value, value, 1.4 * value
        part, row = f"llama-70b: {name}", "decode of 64"
        rows.append(_row(part, row, "device_seconds", bounds, "higher: all-reduces, then launches"))
        rows.append(_row(part, "switch", "switch_seconds", (-5e-5, 0.0, 3e-4), "higher: it costs"))
    return rows


def shown(chips: list[str]) -> str:
    """Return the predictions as JSON, a row a line."""
    tables = []
    for chip in chips:
        lines = ",\n".join(json.dumps(row) for row in predictions(chip))
        tables.append(f'"{chip}": [\n{lines}\n]')
    return "{\n" + ",\n".join(tables) + "\n}"
