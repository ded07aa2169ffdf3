"""The engine's own steps, compiled for GPUs from shapes alone: no weight, pool or input exists.

    PYTHONPATH=.:.venv/gpu JAX_PLATFORMS=cpu python tests/compile/steps.py

prints what the compiler planned, as the table of docs/gpu.md.
"""

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

import aot
import jax
import jax.numpy as jnp
import numpy as np
from hlo import collectives, counted, launches
from lean import greedy, greedy_collectives

from serving.bench.thunks import Thunk, dumped_thunks, top_level
from shiftjax.arch.config import ModelConfig
from shiftjax.arch.formats import FORMATS, Formats, formats_of
from shiftjax.arch.numerics import NUMERICS, NumericsName
from shiftjax.arch.presets import PRESETS
from shiftjax.costs.buckets import Bucket
from shiftjax.costs.collectives import Collective, sampling_collectives, step_collectives
from shiftjax.costs.expert_modes import ExpertModes, by_bytes
from shiftjax.costs.query_modes import QueryModes
from shiftjax.device.all_reduces import all_reduce_kinds
from shiftjax.device.gpu_options import gpu_options
from shiftjax.device.mesh import make_mesh
from shiftjax.device.mode_weights import ModeWeights
from shiftjax.device.place import define
from shiftjax.device.pool import PoolOptions, abstract_pools
from shiftjax.device.programs import abstract_inputs
from shiftjax.device.sampling import SampleOutput, sample
from shiftjax.device.step import StepDef
from shiftjax.models.attention_backend import AttentionNeeds, choose_attention, xla_attention
from shiftjax.models.attention_heads import by_heads, layouts_by_heads
from shiftjax.models.expert_backend import XLA_EXPERTS, choose_experts
from shiftjax.models.norm_backend import choose_norms
from shiftjax.models.product_backend import choose_products, fixed_products
from shiftjax.models.sum_backend import SumBackend
from shiftjax.parallel.grid import Device, Mode, Use
from shiftjax.parallel.layout import Layout

NUM_DEVICES = 8
CHIP = "h200"
MESHES = ((8, 1), (4, 2), (2, 4), (1, 8))
FLEETS = {(8, 1): (8, 2), (4, 2): (4, 1)}  # units, tp: widths whose blocks hold 16 to 128 tokens
NUM_LAYERS = 80
BLOCK_SIZE = 16
LONGEST = 8192  # tokens of a sequence
# One pool of K, of one layer, on one device: 256 MiB, more than all temporaries of a step.
NUM_TOKENS_AND_HEADS = 1 << 20
# No matrix has as many rows as a device has of 1,536 tokens, or parts of them: what moves
# activations is not taken for what moves weights.
PREFILL, DECODE = Bucket(1536, 64), Bucket(64, 64, rows_alone=True)
KERNEL = 'custom_call_target="mosaic_gpu'
SPLIT_BY_MODE = ("vocab", "heads", "kv_heads", "intermediate", "blocks")


SUMS = {"one shot": SumBackend("multimem", splits_rows=False)}
Sampler = Callable[..., SampleOutput]


class Case(NamedTuple):
    """Which step to compile. A few layers stand for 80: every layer is the same program."""

    sp: int
    tp: int
    mode: Mode
    size: str = "bf16"
    strategy: str = "alias"
    attention: str = "pallas"
    num_layers: int = 2
    late_layers: int = 0  # of them, SwiftKV's
    gpu_options: str = "auto"
    units: int = 0  # of the fleet, of which this is a group of `sp` units; 0: all devices are one
    num_tokens: int = PREFILL.tokens  # of a base step
    num_decodes: int = DECODE.tokens  # of a shift step
    model: ModelConfig | None = None  # in the place of Llama-70B: a stage of it, say
    experts_sp: int = 1  # experts are stored and used as in the mode that splits tokens so
    sums: str = "xla"  # or multimem; "one shot": that of models whose streams devices keep whole
    by_position: bool = False  # devices split positions of KV
    numerics: NumericsName = "fast"
    normalisers: bool = False  # in SHIFT then nothing but these travels of rows
    sampler: Sampler = greedy  # or `sample`, the engine's own, which takes three times as long

    @property
    def experts(self) -> Mode:
        """The mode as which the step uses experts."""
        return Mode(self.sp, self.experts_sp)

    @property
    def bucket(self) -> Bucket:
        """A prefill step in BASE, a decode step in SHIFT; with adapters where there is room."""
        if self.model is not None and self.model.lora is not None:
            return self._replace(model=None).bucket._replace(has_adapters=True)
        prefill = PREFILL._replace(tokens=self.num_tokens)
        decode = DECODE._replace(tokens=self.num_decodes, rows=self.num_decodes)
        return prefill if self.mode.sp == self.sp > 1 else decode

    @property
    def layout(self) -> Layout:
        """How the model falls on the devices of the group."""
        config = self.model or llama_70b(self.num_layers)
        if self.late_layers:
            early = self.num_layers - self.late_layers
            config = replace(config, architecture="llama_swiftkv", num_kv_layers=early)
        layout = Layout(config, self.sp, self.tp, self.units, self.strategy == "gather")
        own = {"experts_as": self.experts_sp, "by_position": self.by_position}
        own["normalisers"] = self.normalisers
        return replace(layout, experts_sp=self.experts_sp, **own)

    @property
    def pool(self) -> PoolOptions:
        """The pools: in a fleet of blocks that hold as many bytes in every group."""
        layout = self.layout
        size = layout.block_tokens(BLOCK_SIZE) if self.units else BLOCK_SIZE
        own_tokens = size // layout.position_ways
        blocks = NUM_TOKENS_AND_HEADS // (layout.kv_heads_per_device * own_tokens)
        return PoolOptions(blocks, size, LONGEST // size, self.kv_dtype)

    @property
    def formats(self) -> Formats:
        """Of size "fp8" the matrices are codes, and so is the KV cache; else of a format's name."""
        own = {"bf16": Formats(), "fp8": Formats("fp8", "fp8")}
        found = own[self.size] if self.size in own else formats_of(self.size)
        return replace(found, sums=self.numerics)

    @property
    def kv_dtype(self) -> np.dtype:
        """Of the pools."""
        return FORMATS[self.formats.kv].dtype


class CompiledStep(NamedTuple):
    """One program and what it was compiled from."""

    case: Case
    step: StepDef
    params: tuple[jax.ShapeDtypeStruct, ...]
    pools: list[tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]]
    inputs: Any  # the packed vector, the last tokens and the sampling tables
    text: str
    thunks: list[Thunk]  # what the host does
    argument_bytes: int  # on one device, as all of these
    temporary_bytes: int
    aliased_bytes: int

    @property
    def pool_bytes(self) -> int:
        """K, or V, of one layer on a device."""
        return device_bytes(self.pools) // (2 * self.step.layout.model.num_layers)

    @property
    def shards(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Every declared weight in the mode of the step, as if each were an array."""
        weights = self.step.weights._replace(is_joined=False)
        return weights.abstract(self.case.mode, self.step.mesh, used(self.step, self.case))


def modes_of(sp: int) -> list[Mode]:
    """Base and shift; with SP = 1 they are one."""
    return list(dict.fromkeys([Mode(sp, sp), Mode(sp, 1)]))


def cases(size: str) -> list[Case]:
    """Every mesh and mode, with weights that SHIFT sees in place."""
    return [Case(sp, tp, mode, size) for sp, tp in MESHES for mode in modes_of(sp)]


def fleet_cases(units: int, tp: int, widths: Iterable[int]) -> list[Case]:
    """A decode step of a group of each width; that of the widest has a static twin."""
    return [
        Case(width, tp, Mode(width, 1), num_layers=1 + (width == units), units=units)
        for width in widths
    ]


def llama_70b(num_layers: int) -> ModelConfig:
    """Return the published shapes, with fewer layers."""
    return replace(PRESETS["llama-70b"], num_layers=num_layers)


def chip_devices() -> list[Device]:
    """Return devices that are not here."""
    return list(aot.make_mesh(CHIP, (NUM_DEVICES,), ("x",)).devices.flat)


class Compiler:
    """Compiles cases, each once."""

    def __init__(self):
        self.devices = chip_devices()
        self._steps: dict[Case, CompiledStep] = {}

    def __call__(self, case: Case) -> CompiledStep:
        """The program. What a second copy of the weights is for is that of `alias`."""
        if case.strategy == "replicate":
            case = case._replace(strategy="alias")
        if case not in self._steps:
            self._steps[case] = compile_step(case, self.devices)
        return self._steps[case]


def compile_step(case: Case, devices: list[Device]) -> CompiledStep:
    """Compile a step the way the engine does."""
    step, pool = define_step(case, devices)
    params = step.weights.abstract(case.mode, step.mesh, used(step, case))
    pools = pools_of(step, pool)
    packing, tables = abstract_inputs(step, pool, case.bucket)
    with dumped_thunks() as (dump, thunks):
        dumping = replace(step, gpu_options={**step.gpu_options, **dump})
        compiled = dumping.compile(case.mode, pools, packing, tables)
        sequence = thunks()
    memory = compiled.memory_analysis()
    vectors = [jax.ShapeDtypeStruct((n,), jnp.int32) for n in (packing.size, step.max_rows)]
    return CompiledStep(
        case,
        step,
        params,
        pools,
        (vectors, tables),
        compiled.as_text(),
        sequence,
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.alias_size_in_bytes,
    )


def used(step: StepDef, case: Case) -> Use:
    """As in which modes the step of a case uses experts, and q and o."""
    return step.use_in(case.mode, case.bucket[:2])


def define_step(case: Case, devices: list[Device]) -> tuple[StepDef, PoolOptions]:
    """Define the step of a case, with the attention that the engine chooses on these devices."""
    layout, pool = case.layout, case.pool
    mesh = make_mesh(devices, case.sp, case.tp)
    dtypes, numerics = (jnp.bfloat16, case.kv_dtype), NUMERICS[case.numerics]
    needs = AttentionNeeds(numerics.is_strict, in_tiles=numerics.is_strict)
    attention = (
        xla_attention(layout.model.head_dim, layout.model.windows, pool.block_size)
        if case.attention == "xla"
        else by_heads(
            layout.model,
            [
                choose_attention(own, devices[0], dtypes, pool.block_size, needs)
                for own in layouts_by_heads(layout)
            ],
        )
    )
    assert attention.name == case.attention
    model = define(layout, case.formats)
    rows, size = case.bucket.rows, pool.block_size
    experts = choose_experts(layout.model, case.formats, devices[0], attention.name)
    products = choose_products(layout, case.formats, devices[0], attention.name)
    if numerics.is_strict:
        products = fixed_products(products, devices[0])
    weights = ModeWeights(model, layout, case.strategy, True, experts.name == XLA_EXPERTS.name)
    step = StepDef(
        weights,
        mesh,
        rows,
        attention,
        size,
        gpu_options=_options(devices[0], case.gpu_options),
        experts=experts,
        expert_modes=ExpertModes(layout, by_bytes(case.formats)),
        query_modes=QueryModes(layout),
        products=products,
        norms=choose_norms(
            layout, case.formats, attention.name, gives_codes=products.codes.name == "pallas"
        ),
        sums=SUMS.get(case.sums, SumBackend(case.sums)),
        numerics=numerics,
        sampler=case.sampler,
    )
    return step, pool


_options = functools.cache(gpu_options)  # as the engine asks for them, once


def sampler_collectives(one: CompiledStep) -> list[Collective]:
    """What its sampler moves beside the best tokens."""
    more = greedy_collectives if one.case.sampler is greedy else sampling_collectives
    return more(one.step.layout, one.case.bucket.rows, sums=one.case.numerics)


def predicted_moves(one: CompiledStep) -> list[Collective]:
    """All collectives of its program, as the costs have them and its sampler adds to them."""
    layout, bucket = one.step.layout, one.case.bucket
    own = one.case.formats, used(one.step, one.case)
    moves = step_collectives(layout, one.case.mode, *bucket[:2], *own)
    return moves + sampler_collectives(one)


def predicted_collectives(one: CompiledStep) -> Counter[tuple[str, int]]:
    """The same by kind and bytes, as `hlo.collectives` counts them."""
    return counted(predicted_moves(one))


def pools_of(step: StepDef, pool: PoolOptions) -> Any:
    """Describe the KV pools."""
    return abstract_pools(step.mesh, step.layout, pool.num_blocks, pool.block_size, pool.dtype)


def device_bytes(tree: Any) -> int:
    """Bytes of arrays on one device; those without a sharding are whole on each."""
    total = 0
    for x in jax.tree.leaves(tree):
        shape = x.sharding.shard_shape(x.shape) if x.sharding else x.shape
        total += int(np.prod(shape)) * x.dtype.itemsize
    return total


def resident_bytes(case: Case, devices: list[Device]) -> int:
    """Weights of the whole model on one device, of all programs of the deployment.

    `alias` and `slice` store those of BASE alone, `replicate` both.
    """
    step, _ = define_step(case._replace(num_layers=NUM_LAYERS), devices)
    stored = modes_of(case.sp) if case.strategy == "replicate" else modes_of(case.sp)[:1]
    weights = step.weights._replace(is_joined=False)
    first, *others = (weights.abstract(mode, step.mesh) for mode in stored)
    declared = step.model.declared
    copied = [  # what SHIFT splits differently
        [
            x
            for weight, x in zip(declared, other, strict=True)
            if weight.split in SPLIT_BY_MODE and not weight.in_shift
        ]
        for other in others
    ]
    return device_bytes((first, copied))


def table(compiler: Compiler) -> Iterator[str]:
    """Yield the lines of a table of all cases, for people."""
    yield (
        "| weights | (SP, TP) | step | weights GB, 80 layers | temporaries MB | host's | launches "
        "| kernels | all-reduces | collectives of 2 layers (count x KB a device) |"
    )
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    every = [case for size in ("bf16", "fp8") for case in cases(size)]
    every += [Case(4, 2, Mode(4, 1), strategy=strategy) for strategy in ("slice", "replicate")]
    for case in every:
        one = compiler(case._replace(sampler=sample))
        moved = (
            f"{name} {count} x {size / 1e3:,.0f}"
            for (name, size), count in sorted(collectives(one.text).items())
        )
        weights = resident_bytes(case, compiler.devices) / 1e9
        name = case.size if case.strategy == "alias" else f"{case.size} {case.strategy}"
        yield (
            f"| {name} | ({case.sp}, {case.tp}) | {case.mode.label} {case.bucket.tokens} "
            f"| {weights:.1f} | {one.temporary_bytes / 1e6:.1f} | {len(top_level(one.thunks))} "
            f"| {len(launches(one.text))} | {one.text.count(KERNEL) // case.num_layers} "
            f"| {', '.join(all_reduce_kinds(one.text))} | {', '.join(moved)} |"
        )


if __name__ == "__main__":
    if reason := aot.unavailable():
        raise SystemExit(reason)
    for line in table(Compiler()):
        print(line, flush=True)
