"""Seconds of a step: closed formulas of its work, its mode, the model and the machine. No JAX.

A step is a chain of kernels on every device, so its time is the sum over kernels, each the larger
of what it computes and what it reads, and a fixed time to start. For `n` tokens of width `d` on
P = SP * TP devices, with t devices sharing a weight (TP in BASE, P in SHIFT) and n' tokens on a
device (n / SP in BASE, n in SHIFT):

matrix product, M x K by K x N (`matmul_seconds`)
    The output is cut into tiles of r x c; U units compute tiles at the same time, each at 1/U of
    the rate F. T = ceil(M/r) ceil(N/c) tiles take max(1, T/U) waves of 2 r c K / (F/U) + s, with s
    the prologue and epilogue of a tile. M below r costs as much as r: that is the efficiency that
    depends on the batch. Reading the weight and the activations from memory is the other bound.
        q, k, v: N = (h + 2 m) D / t, K = d      o: N = d, K = h D / t
        gate, up: N = 2 I / t, K = d             down: N = d, K = I / t
mixture of experts
    E experts of which a token uses k, E / P of them on a device in every mode. The products are
    those of the device with the most to do (`expert_load.py`), of all n tokens: A experts are read,
    and n k / P pairs of tokens and experts, or more, are multiplied with them.
attention (`kernel_costs.py`), per device and layer with h/P query heads, m cached, and a fixed time
    decode  reads the context: per token of it what a layer caches, 2 m D b bytes
    chunk   4 h D FLOP per (query, key) pair; a chunk of c tokens after s has c s + c (c + 1) / 2,
            and half a tile's more of each token, as tiles on the diagonal are half masked; queries
            are read and sums written. Layers with a window see no further back (`Work.within`)
other launches of a layer: how many, and what they read and write (`layer_launches.py`)
collectives (`collectives.py`, over several hosts `levels.py`)
    latency + bytes / rate of the quickest algorithm; the bytes per device are 2 n d for TP
    whatever TP is, and O(n d / SP) for Ulysses: communication per computation grows as TP for TP
    and stays constant for SP
norms, rotary, activation: bytes read and written over the memory's rate, on n' tokens
gathered weights: all of a layer's over SP, while the layer before it computes; what they take
    longer than its products is added, and that of the first layer whole. Virtual devices hide none
positions that devices split: decodes read 1/R of their contexts, for R times the heads; queries go
    to all R neighbours and parts of softmaxes back; what tiles read is gathered once a layer. In
    SHIFT, where that is quicker, q and o are R times as wide, and of decodes normalisers travel
late layers of SwiftKV: layers of SHIFT whose tokens are the logit rows; for all n tokens, one
    product with 2 m D columns for each of these layers, and before it n d gathered over SP
host: added, or hidden behind the devices where the engine overlaps the two
a speculator's guess: products of the sequences' rows with its projection, which every device has,
    and with its share of the head; one embedding summed and five numbers a row gathered over P
pipeline stages: `group_costs.py`, of the model of each
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pallas_kernels.window import Window
from shiftjax.arch.formats import Formats
from shiftjax.costs.buckets import SMALLEST_TOKENS, Bucket
from shiftjax.costs.chosen_modes import ChosenMode
from shiftjax.costs.collectives import (
    context_gathers,
    entry_collectives,
    exchanges_of_rows,
    gather_collectives,
    guess_collectives,
    row_collectives,
    weight_collectives,
)
from shiftjax.costs.expert_modes import ExpertModes
from shiftjax.costs.kernel_costs import KernelCosts, Split
from shiftjax.costs.layer_costs import LayerCosts, StepCost
from shiftjax.costs.machine import EngineOverhead, Machine
from shiftjax.costs.query_modes import QueryModes, Size
from shiftjax.costs.switch_sums import FIRST_LAUNCHES
from shiftjax.costs.work import Work
from shiftjax.parallel.grid import Mode
from shiftjax.parallel.layout import Layout, round_up
from shiftjax.parallel.positions import GATHERED_TOKENS, GATHERED_TOKENS_ON_CPU, GATHERS

if TYPE_CHECKING:
    from shiftjax.costs.routing import Routing


class CostModel:
    """Predicts the steps of one group: a model on the devices of a layout, of a machine.

    With `buckets` (all that are compiled), a step costs what the smallest that holds it costs.
    Virtual devices that share a processor take turns: a matrix product computes on all of its
    cores, so those of P devices take P times as long; all else, and reading the weights, uses one
    core each and takes P / cores times as long. Terms that depend on a count of tokens or rows
    alone are kept: traffic repeats the counts.
    """

    def __init__(
        self,
        layout: Layout,
        machine: Machine,
        engine: EngineOverhead,
        formats: Formats,
        buckets: Sequence[Bucket] = (),
    ):
        model, parts = layout.model, layout.sp * layout.tp
        self.buckets = sorted(buckets)
        self.model, self.machine, self.engine, self.formats = model, machine, engine, formats
        self.layout = layout
        self._by_tokens: dict[tuple[Mode, int, Mode | None], StepCost] = {}
        self._by_rows: dict[tuple[Mode, int, Mode | None], StepCost] = {}
        self.query_modes = QueryModes(layout, self._quickest_queries)
        self._contention = parts if machine.shared_cores else 1
        self._queueing = self._contention / min(self._contention, machine.shared_cores or 1)
        self.kernels = KernelCosts(
            *(machine, formats, self._contention, self._queueing),
            *(engine.full_rate_codes, engine.mixes_attention),
        )
        late = model.num_early_layers
        self.layers = LayerCosts(layout, self.kernels, engine)
        gathered = GATHERED_TOKENS_ON_CPU if machine.shared_cores else GATHERED_TOKENS
        gathers = (context_gathers(each, formats, gathered) for each in layout.shapes)
        self._attention = [
            self.kernels.attention(
                *(each.heads_per_device, each.model.head_dim, each.cache),
                each.model.values_in_keys,
                Split(each.position_ways, self.layers.move(moves), gathered, GATHERS),
            )
            for each, moves in zip(layout.shapes, gathers, strict=True)
        ]
        windows = [kind.window for kind in model.kinds]
        seen = list(zip(windows, (parts.heads for parts in model.parts), strict=True))
        self._late_layers = LayerCosts(layout, self.kernels, replace(engine, sums_by_switch=False))
        self._early_seen, self._late_seen = Counter(seen[:late]), Counter(seen[late:])

    @property
    def expert_modes(self) -> ExpertModes:
        """As in which mode steps use experts: what devices compile."""
        return self.layers.expert_modes

    def _quickest_queries(self, layout: Layout, mode: Mode, size: Size) -> ChosenMode:
        """The mode as which q and o make a step of this size quickest; of equals its own."""
        seconds = {
            used: sum(cost.device for cost in self._costs_as(mode, size, used))
            for used in layout.query_modes(mode)
        }
        best = min(seconds, key=seconds.__getitem__)
        ms = {used == mode: f"{1e3 * each:.2f} ms" for used, each in seconds.items()}
        return ChosenMode(best, f"{ms[False]} a step without attention, with queries {ms[True]}")

    @property
    def stages(self) -> list["CostModel"]:
        """The one stage of a group without pipeline parallelism: this model itself."""
        return [self]

    def price(self, routing: "Routing | None") -> None:
        """From now on let experts take what this routing of the model's layers makes them take."""
        self.layers.routing = routing
        self._by_tokens.clear()
        self._by_rows.clear()

    def seconds(self, mode: Mode, work: Work) -> float:
        """Seconds of a step in a stream of steps, host work included where it does not hide."""
        device, host = self.device_seconds(mode, work), self.host_seconds(work)
        return max(device, host) if self.engine.overlaps else device + host

    def serial_seconds(self, mode: Mode, work: Work) -> float:
        """Seconds of a step alone, from its plan to its results: nothing hides the host."""
        return self.device_seconds(mode, work) + self.host_seconds(work)

    def paced_seconds(
        self, mode: Mode, work: Work, num_batches: int, num_guessing: int = 0, *, is_hidden: bool
    ) -> float:
        """Return `seconds` if the host is hidden, else `serial_seconds`, and those of guesses."""
        seconds = (self.seconds if is_hidden else self.serial_seconds)(mode, work)
        return seconds + (self.guess_seconds(num_guessing) if num_guessing else 0.0)

    def host_seconds(self, work: Work) -> float:
        """Seconds that the host needs to prepare, launch and finish a step."""
        launches = self.engine.eager_seconds(work.num_tokens, self.model.num_layers)
        return launches + self.engine.host(work.num_sequences, self.layout.num_devices)

    def device_seconds(self, mode: Mode, work: Work) -> float:
        """Return the seconds of a step on the devices, without the host."""
        return sum(cost.device for cost in self._terms(mode, work))

    def stage_seconds(self, mode: Mode, work: Work) -> list[float]:
        """`device_seconds` as a list of one stage, which receives no hidden states."""
        return [self.device_seconds(mode, work)]

    def breakdown(self, mode: Mode, work: Work) -> StepCost:
        """Return the seconds of a step by kind of work; the LM head counts as a product."""
        terms = [*self._terms(mode, work), StepCost(host=self.host_seconds(work))]
        return StepCost(*map(sum, zip(*terms, strict=True)))

    def products_seconds(self, mode: Mode, num_tokens: int) -> float:
        """Seconds of the layers' matrix products alone."""
        return self._terms(mode, Work(num_tokens, 0, 0, 0, 0, 0))[0].matmul

    def size_of(self, work: Work) -> tuple[int, int]:
        """(tokens, rows) that the step is padded to; what fits no bucket is not padded."""
        if not self.buckets:
            return work.num_tokens, work.num_rows
        for bucket in self.buckets:
            if bucket.holds(work.num_tokens, work.num_rows, work.num_sequences):
                return bucket.tokens, bucket.rows
        return work.num_tokens, work.num_rows

    def guess_seconds(self, num_sequences: int) -> float:
        """Seconds that the guesses of a speculator for so many sequences add to a step."""
        speculator, layout = self.model.speculator, self.layout
        if speculator is None:
            return 0.0
        rows, inner = round_up(num_sequences, SMALLEST_TOKENS), speculator.inner_dim
        gates = 4 if speculator.method == "lstm" else 1
        head = self.kernels.product(rows, inner, -(-layout.num_draft_ids // layout.num_devices))
        first = self.kernels.product(rows, self.model.hidden_size, gates * inner)
        later = self.kernels.product(rows, inner, gates * inner)
        num = speculator.num_predict
        moves = guess_collectives(layout, rows, self.formats.activation_bytes)
        return num * head + first + (num - 1) * later + self.layers.move(moves)

    def mode_seconds(self, mode: Mode, size: tuple[int, int]) -> float:
        """Device seconds of a step of this size but for attention, which no mode changes."""
        tokens, rows = self._sized_terms(mode, size)
        return tokens.device + rows.device

    def _terms(self, mode: Mode, work: Work) -> tuple[StepCost, StepCost, StepCost]:
        size = self.size_of(work)
        return *self._sized_terms(mode, size), self._attention_cost(work, size[1])

    def _sized_terms(self, mode: Mode, size: tuple[int, int]) -> tuple[StepCost, StepCost]:
        return self._costs_as(mode, size, self.query_modes(mode, size))

    def _costs_as(self, mode: Mode, size: Size, used: Mode) -> tuple[StepCost, StepCost]:
        """Costs by tokens and by rows, with q and o used as in a mode."""
        queries = None if used == mode else used
        tokens, rows = (mode, size[0], queries), (mode, size[1], queries)
        if tokens not in self._by_tokens:
            self._by_tokens[tokens] = self._tokens_cost(*tokens)
        if rows not in self._by_rows:
            self._by_rows[rows] = self._rows_cost(*rows)
        return self._by_tokens[tokens], self._by_rows[rows]

    def _attention_cost(self, work: Work, num_rows: int) -> StepCost:
        """Attention over contexts, of each layer as far back as it sees.

        A late layer reads the context for a prompt's last row alone: as if every chunk had one.
        """
        seconds = self._attention_of(self._early_seen, work, num_rows)
        if self._late_seen:
            context, rows = work.context_tokens + work.chunk_context_tokens, work.num_sequences
            late = work._replace(context_tokens=context, attention_pairs=0, num_decodes=rows)
            seconds += self._attention_of(self._late_seen, late, num_rows)
        return StepCost(attention=seconds)

    def _attention_of(
        self, seen: Mapping[tuple[Window | None, int], int], work: Work, num_rows: int
    ) -> float:
        """Return seconds of attention; `seen` counts layers by window and shape of heads."""
        return sum(
            count * self._attention[heads].seconds(work.within(window), num_rows)
            for (window, heads), count in seen.items()
        )

    def _tokens_cost(self, mode: Mode, num_tokens: int, queries: Mode | None) -> StepCost:
        """The layers that compute all tokens, and the embedding; without attention over contexts.

        Of late layers, their keys and values.
        """
        layout, config, width = self.layout, self.model, self.formats.activation_bytes
        padded, num_kernels, costs = round_up(num_tokens, mode.sp), 0, [StepCost()]
        for parts, count in Counter(config.parts[: config.num_early_layers]).items():
            cost, more = self.layers.cost(mode, padded, count, parts, None, queries)
            costs, num_kernels = [*costs, cost], num_kernels + more
        cost = StepCost(*map(sum, zip(*costs, strict=True)))
        gathers = self._gather_seconds(mode, cost.matmul / max(1, config.num_early_layers))
        num_kernels += self.engine.kernels_per_step
        num_kernels += FIRST_LAUNCHES * (self.layers.switch.shots(mode, padded) > 0)
        moves = entry_collectives(layout, mode, padded, width)
        moves += gather_collectives(layout, mode, padded, width)
        late_kv = config.num_late_layers * layout.cache.numbers
        inputs = config.layer_input_width * config.num_layers
        local, product = padded // mode.sp, self.kernels.product
        of_inputs = product(local, config.hidden_size, inputs) if inputs else 0.0
        cost = cost._replace(
            matmul=cost.matmul
            + of_inputs
            + (self.kernels.product(padded, config.hidden_size, late_kv) if late_kv else 0.0),
            collectives=cost.collectives + self.layers.move(moves) + gathers,
            launch=num_kernels * self.machine.kernel_seconds * self._queueing,
        )
        if num_tokens <= self.engine.graph_tokens:
            return cost
        eager = num_kernels * self.engine.eager_kernel_seconds
        return cost._replace(launch=cost.launch + max(0.0, eager - cost.device))

    def _gather_seconds(self, mode: Mode, products: float) -> float:
        """What layers wait for their weights, each behind the `products` of the one before."""
        moves = weight_collectives(self.layout, mode, self.formats)
        if not moves:
            return 0.0
        count = self.model.num_early_layers
        each = self.layers.move(moves) / count
        hidden = 0.0 if self.machine.shared_cores else products
        return each + (count - 1) * max(0.0, each - hidden)

    def _rows_cost(self, mode: Mode, num_rows: int, queries: Mode | None) -> StepCost:
        """The LM head, split over all devices, what rows and logits move, and late layers."""
        layout, hidden = self.layout, self.model.hidden_size
        exchanges = exchanges_of_rows(
            layout, num_rows, self.formats.activation_bytes, of_all=queries is not None
        )
        exchanged = self.layers.move(exchanges)
        if not num_rows or not self.model.is_last_stage:
            return StepCost(collectives=exchanged)
        rows = round_up(num_rows, layout.num_devices)
        head = self.kernels.head(rows, hidden, layout.vocab_size // layout.num_devices)
        formats = self.formats
        moves = row_collectives(layout, mode, rows, formats.activation_bytes, formats.sums)
        late, _ = self._late_layers.cost(layout.shift, rows, self.model.num_late_layers)
        moved = self.layers.move(moves) + exchanged
        return late._replace(matmul=late.matmul + head, collectives=moved)
