"""Seconds of single kernels on one device, without their launches. No JAX.

`step_costs.py` has the formulas, with their derivation, and what a step consists of; here is what a
machine makes of one kernel. Measured kernels are compared with the same (`sim/kernel_fit.py`).
"""

import math
from dataclasses import replace
from typing import NamedTuple

from pallas_kernels.decode_work import groups_of
from pallas_kernels.grouped_split import Items, count_parts, products_of, reading_share
from shiftjax.arch.cache import CacheSpec
from shiftjax.arch.formats import FORMATS, Formats
from shiftjax.arch.numerics import GPU_TILE, GPU_TILE_OF_CODES, NUMERICS
from shiftjax.costs.expert_load import Load
from shiftjax.costs.machine import ANY, Machine, of_format
from shiftjax.costs.work import Work

LOGIT_BYTES = 4  # logits are float32
# Of a number of a softmax that rounds put together: it is read and written in float32, and what a
# round has found is read. As many before the first round and after the last: it begins as zeros,
# and the output is made of it.
ROUND_BYTES = 4 + 4 + 2


def large_product_rate(machine: Machine, fmt: str) -> float:
    """FLOP/s of products of large matrices, on a chip that runs hot."""
    share = machine.matmul_efficiency * machine.sustained_efficiency
    return machine.matmul_flops[fmt] * share


def matmul_seconds(
    machine: Machine, rows: float, inner: int, columns: int, fmt: str, count: float = 1.0
) -> float:
    """Compute time of `count` equal products in one kernel, at the best height of its tiles."""
    rate = large_product_rate(machine, fmt) / machine.compute_units
    width = count * -(-columns // machine.tile_columns)
    return min(
        max(1.0, math.ceil(rows / height) * width / machine.compute_units)
        * (2 * height * machine.tile_columns * inner / rate + machine.tile_seconds)
        for height in machine.tile_rows
    )


def fixed_seconds(machine: Machine, product: "Product", fmt: str, num_bytes: int) -> float:
    """Compute time of a product whose tiles have one size, whatever is multiplied.

    Each tile reads its rows and channels, numbers of so many bytes, out of the L2 cache.
    """
    rows, inner, columns, count = product
    height = GPU_TILE if num_bytes > 1 else GPU_TILE_OF_CODES
    tiles = math.ceil(rows / height) * -(-columns // GPU_TILE) * count
    read = tiles * (height + GPU_TILE) * inner * num_bytes / machine.l2_bytes_per_second
    machine = replace(machine, tile_rows=(height,), tile_columns=GPU_TILE)
    return max(read, matmul_seconds(machine, rows, inner, columns, fmt, count))


def expert_numbers(pairs: float, num_tokens: int, per_token: int, hidden: int, inner: int) -> int:
    """Numbers that a layer of experts reads and writes beside its products.

    Rows of pairs are permuted and go through the activation; what all experts of a token gave is
    summed, whoever has them.
    """
    return int(pairs * (3 * inner + 2 * hidden)) + num_tokens * (per_token + 1) * hidden


def fused_numbers(pairs: float, num_tokens: int, hidden: int, inner: int) -> int:
    """As `expert_numbers`, where the products gather and scatter rows themselves."""
    return int(pairs * (3 * inner + hidden)) + num_tokens * hidden


class Product(NamedTuple):
    """`num` products [rows, inner] x [inner, columns] in one kernel."""

    rows: float
    inner: int
    columns: int
    num: float = 1.0


class Split(NamedTuple):
    """How devices split positions."""

    ways: int = 1
    gather: float = 0.0  # seconds of an exchange of contexts that tiles see
    gathered: int = 1  # tokens of such an exchange
    gathers: int = 1  # exchanges of a round, after which tiles attend


NOT_SPLIT = Split()


class KernelCosts(NamedTuple):
    """Predicts the kernels of a machine, with numbers in these formats.

    Devices that share a processor take turns: computing takes `contention` times as long, all else
    `queueing` times (`CostModel`).
    """

    machine: Machine
    formats: Formats
    contention: float = 1.0
    queueing: float = 1.0
    full_rate_codes: bool = False  # of an engine: `EngineOverhead`
    mixes_attention: bool = False

    @property
    def is_fixed(self) -> bool:
        """Whether kernels have one tile for all sizes: those of GPUs where numerics are strict."""
        return NUMERICS[self.formats.sums].is_strict and not self.machine.shared_cores

    @property
    def memory_rate(self) -> float:
        """Bytes per second of what is read and written in order."""
        return self.machine.memory_bytes_per_second * self.machine.memory_efficiency

    @property
    def product_format(self) -> str:
        """What experts are multiplied in: the weights' format, if the machine has such products."""
        return self._computed_in(self.formats.weights)

    def _computed_in(self, stored: str) -> str:
        """Return the format of products with weights of one; widened, if there is no such."""
        return stored if stored in self.machine.matmul_flops else self.formats.activations

    def moved(self, num_bytes: float) -> float:
        """Seconds of reading and writing so many bytes, all in all."""
        return num_bytes / self.memory_rate * self.queueing

    def product(self, rows: float, inner: int, columns: int, output: int = 0) -> float:
        """Seconds of a product with a weight of the layers that is no expert's.

        Results have `output` bytes; 0: as activations.
        """
        sizes, stored = Product(rows, inner, columns), self.formats.dense
        return self._product(sizes, stored, self._computed_in(stored), output=output)

    def plain(self, product: Product, reading: float = 1.0) -> float:
        """Seconds of products with a weight in the activations' format, whatever others have.

        They read at a share `reading` of the memory's rate at most.
        """
        fmt = self.formats.activations
        return self._product(product, fmt, fmt, reading=reading)

    def head(self, rows: int, inner: int, columns: int) -> float:
        """Seconds of the LM head's: its weight has the activations' format, logits are float32."""
        fmt = self.formats.activations
        return self._product(Product(rows, inner, columns), fmt, fmt, output=LOGIT_BYTES)

    def experts(
        self, load: Load, hidden: int, inner: int, cut: "CutExperts | None" = None
    ) -> float:
        """Seconds of the products of a layer's experts on one device, two kernels.

        They read as fast as the memory allows, or as the items into which they are `cut` do.
        """
        fmt, rows = self.product_format, load.pairs / load.experts
        share = of_format(self.machine.expert_efficiency, fmt)
        readings = cut.readings(load) if cut else (1.0, 1.0)
        products = (
            Product(rows, hidden, 2 * inner, load.experts),
            Product(rows, inner, hidden, load.experts),
        )
        return sum(
            self._product(sizes, self.formats.weights, fmt, share, reading)
            for sizes, reading in zip(products, readings, strict=True)
        )

    def fused_experts(self, load: Load, hidden: int, inner: int, tuned: float = 1.0) -> float:
        """As `experts`, by Triton's kernels, where the machine's file says what they reach.

        Or `tuned` times that: `tuned_experts`.
        """
        machine = self.machine
        if not machine.fused_expert_flops:
            return self.experts(load, hidden, inner)
        rate = tuned * of_format(machine.fused_expert_flops, self.formats.weights)
        share = {ANY: rate / large_product_rate(machine, self.product_format)}
        overlap = machine.fused_expert_overlap
        machine = replace(machine, expert_efficiency=share, memory_overlap=overlap)
        return self._replace(machine=machine).experts(load, hidden, inner)

    def cut_experts(self, hidden: int, inner: int, mean_pairs: float, own: int) -> "CutExperts":
        """How `pallas_kernels` cut the products of a device's experts, with so many pairs each."""
        stored, units = FORMATS[self.formats.weights], self.machine.compute_units
        size = stored.dtype.itemsize / (2 if stored.is_packed else 1)
        products = products_of(inner, hidden, size)
        return CutExperts(products, count_parts(products, mean_pairs, own, units), units)

    def _product(
        self,
        product: "Product",
        stored: str,
        fmt: str,
        share: float = 1.0,
        reading: float = 1.0,
        output: int = 0,
    ) -> float:
        rows, inner, columns, count = product
        computing = matmul_seconds(self.machine, rows, inner, columns, fmt, count) / share
        if self.is_fixed:
            computing = fixed_seconds(self.machine, product, fmt, int(FORMATS[fmt].num_bytes))
        width, output = FORMATS[stored].num_bytes, output or self.formats.activation_bytes
        own = self.formats.activation_bytes if FORMATS[stored].is_packed else width  # of inputs
        num_bytes = inner * columns * width + rows * (inner * own + columns * output)
        fixed = self.machine.product_seconds * self.queueing
        return fixed + self._together(computing, count * num_bytes / self.memory_rate / reading)

    def _together(self, computing: float, reading: float) -> float:
        """Seconds of a kernel that computes and reads, as far as the machine overlaps the two."""
        computing, reading = computing * self.contention, reading * self.queueing
        shorter, longer = sorted((computing, reading))
        return longer + (1 - self.machine.memory_overlap) * shorter

    def attention(
        self,
        query_heads: int,
        head_dim: int,
        cache: CacheSpec,
        value_dim: int | None = None,
        split: Split = NOT_SPLIT,
    ) -> "AttentionCosts":
        """A layer's attention with so many query heads, and such a cache, on the device.

        Values are as wide as keys, `head_dim`, if nothing else is said. Where devices split
        positions, it reads its part of a context for the heads of all. Of latents, which have a
        `value_dim`, groups of heads read the same, which all but the first find in the L2 cache.
        """
        machine, formats = self.machine, self.formats
        width = head_dim + (value_dim or head_dim)
        peak = machine.matmul_flops[formats.activations] * machine.attention_efficiency
        peak *= machine.sustained_efficiency
        kv = ANY if self.full_rate_codes else formats.kv
        rate = machine.memory_bytes_per_second * of_format(machine.kv_efficiency, kv)
        groups = 1 if value_dim is None else groups_of(query_heads * split.ways)
        rate = min(rate, machine.l2_bytes_per_second / groups)
        return AttentionCosts(
            fixed=machine.attention_seconds * self.queueing,
            read=cache.num_bytes(formats) * self.queueing / rate / split.ways,
            pair=2 * query_heads * width * self.queueing / peak,
            token=self.moved(query_heads * width * formats.activation_bytes),
            tile_rows=machine.attention_tile_rows,
            decode_rows=machine.attention_decode_rows if self.mixes_attention else 0,
            round=machine.attention_round_seconds * self.queueing / split.ways,
            round_tokens=machine.attention_round_tokens,
            lanes=machine.attention_lanes,
            split=split,
            state=self.moved(query_heads * (value_dim or head_dim) * ROUND_BYTES),
            whole=2 * machine.attention_tile_rows * width * machine.compute_units / peak
            if self.is_fixed
            else 0.0,
            pieces=cache.numbers / width / machine.compute_units,
        )


class CutExperts(NamedTuple):
    """Into what the two products of a layer's experts are cut: `pallas_kernels.grouped_split`."""

    products: tuple[Items, Items]  # of a tile: gate and up, and down
    parts: tuple[int, int]  # of their contractions
    units: int  # multiprocessors

    @property
    def num_kernels(self) -> int:
        """More than two: what adds up the parts of gate and up."""
        return int(self.parts[0] > 1)

    def readings(self, load: Load) -> tuple[float, ...]:
        """Shares of the memory's rate that the products read at, with a tile of each expert."""
        return tuple(
            reading_share(load.experts * items.columns * parts, self.units)
            for items, parts in zip(self.products, self.parts, strict=True)
        )


class AttentionCosts(NamedTuple):
    """Predicts a layer's attention over contexts on one device; all but counts in seconds."""

    fixed: float
    read: float  # of what a token has in the cache
    pair: float  # of a query and a key
    token: float  # of reading a token's queries and writing their sums
    tile_rows: int
    round: float  # 0: decodes do not advance in rounds
    round_tokens: int
    lanes: int
    decode_rows: int = 0  # of a tile that a decode takes in steps with prompts; 0: none of theirs
    split: Split = NOT_SPLIT
    state: float = 0.0  # of a token's softmax, in a round of what is gathered
    whole: float = 0.0  # of a token that a decode's tile sees; 0: contexts of decodes are cut
    pieces: float = 0.0  # tiles of a decode on a multiprocessor: one for each key of a token

    def seconds(self, work: Work, num_rows: int) -> float:
        """Of decodes and chunks, one after the other: each is bound by reading or computing.

        Where attention advances in rounds, the decodes of a step of `num_rows` rows need as many as
        its lanes cannot do at once. Chunks are computed in tiles, half of one of them masked. A
        decode in a kernel of prompts takes a tile of theirs, as if it had so many queries.
        """
        if not (work.context_tokens or work.attention_pairs):
            return 0.0
        pair = self.pair * max(1, self.decode_rows) if work.attention_pairs else self.pair
        reading = work.context_tokens * max(self.read, pair)
        if self.whole and work.num_decodes:
            mean = work.context_tokens / work.num_decodes
            reading = max(reading, math.ceil(work.num_decodes * self.pieces) * mean * self.whole)
        seconds = self.fixed + reading
        if self.round and work.context_tokens:
            lanes = max(1, min(num_rows, self.lanes))
            seconds += math.ceil(work.context_tokens / (lanes * self.round_tokens)) * self.round
        if not work.attention_pairs:
            return seconds
        tokens = work.num_tokens - work.num_decodes
        pairs = work.attention_pairs + tokens * (self.tile_rows - 1) / 2
        context = work.chunk_context_tokens  # which tiles see whole, also where it is split
        longer = max(pairs * self.pair, context * self.read * self.split.ways)
        return seconds + longer + tokens * self.token + self._gathers(context, tokens)

    def _gathers(self, context: int, tokens: int) -> float:
        """Seconds of gathering contexts in rounds, and of putting these together."""
        if self.split.ways == 1:
            return 0.0
        exchanges = math.ceil(context / self.split.gathered)
        rounds = math.ceil(exchanges / self.split.gathers)
        return exchanges * self.split.gather + (rounds + 1) * tokens * self.state
