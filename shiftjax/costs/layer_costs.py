"""Seconds of a decoder layer on the device with the most to do, but for attention. No JAX.

`step_costs.py` has the formulas. A layer of experts takes what `expert_part.py` says, by the mode
as which the step uses experts. Which one that is is asked of `expert_modes.py`; where the settings
leave it open, it is the one that makes the layers of a step quickest.
"""

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from shiftjax.arch.config import LayerParts
from shiftjax.costs.attention_part import absorbed_numbers, attention_products
from shiftjax.costs.chosen_modes import ChosenMode
from shiftjax.costs.collectives import Collective, carried_by, parts_collectives
from shiftjax.costs.expert_modes import ExpertModes
from shiftjax.costs.expert_part import ROUTED_KERNELS, ExpertPart, expert_part, in_words
from shiftjax.costs.kernel_costs import KernelCosts
from shiftjax.costs.layer_launches import PLAIN as PLAIN_LAUNCHES
from shiftjax.costs.layer_launches import Widths, moved_bytes
from shiftjax.costs.leaf_part import row_product
from shiftjax.costs.levels import collective_seconds
from shiftjax.costs.lora_part import lora_products
from shiftjax.costs.machine import EngineOverhead
from shiftjax.costs.switch_sums import switch_sums
from shiftjax.parallel.blocks import block_of_width
from shiftjax.parallel.grid import Mode
from shiftjax.parallel.layout import Layout, round_up

if TYPE_CHECKING:
    from shiftjax.costs.routing import Routing

PLAIN = LayerParts()


class StepCost(NamedTuple):
    """Seconds of a step by what they are spent on; `host` may be hidden."""

    matmul: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    collectives: float = 0.0
    launch: float = 0.0
    host: float = 0.0

    @property
    def device(self) -> float:
        """Seconds that the devices are busy."""
        return self.matmul + self.attention + self.elementwise + self.collectives + self.launch


class LayerCosts:
    """Predicts the layers of the model of a layout, in steps of an engine."""

    def __init__(self, layout: Layout, kernels: KernelCosts, engine: EngineOverhead):
        self.layout, self.model = layout, layout.model
        self.kernels, self.engine, self.machine = kernels, engine, kernels.machine
        self.expert_modes = ExpertModes(layout, self._quickest)
        self.switch = switch_sums(layout, self.machine, engine, kernels.formats)
        own = carried_by(kernels.formats)
        self.carried = own if engine.layer_launches else own._replace(codes=False)
        self.routing: Routing | None = None  # as it was counted; None: as the engine's file says

    def _quickest(self, layout: Layout, mode: Mode, num_tokens: int) -> ChosenMode:
        """The mode as which experts make a step's layers quickest, whatever routing was counted.

        Of equals the one that splits them least, which moves least.
        """
        seconds = {
            used: self._experts_seconds(mode, num_tokens, used)
            for used in layout.expert_modes(mode)
        }
        best = min(seconds, key=seconds.__getitem__)
        return ChosenMode(best, in_words(layout, best, seconds))

    def _experts_seconds(self, mode: Mode, num_tokens: int, used: Mode) -> float:
        """Seconds of all layers with experts, used as in another mode."""
        layers = Counter(self.model.parts[: self.model.num_early_layers]).items()
        return sum(
            self.cost(mode, num_tokens, count, parts, used)[0].device
            for parts, count in layers
            if parts.has_experts
        )

    def cost(
        self,
        mode: Mode,
        num_tokens: int,
        count: int,
        parts: LayerParts = PLAIN,
        used: Mode | None = None,
        queries: Mode | None = None,
    ) -> tuple[StepCost, int]:
        """(cost, kernels) of `count` layers, without attention; tokens are a multiple of sp.

        `used` is the mode as which experts are used; None: the quickest. `queries` is that of q and
        o; None: `mode`.
        """
        if not count:
            return StepCost(), 0
        layout, formats = self.layout.shapes[parts.heads], self.kernels.formats
        part = None
        if parts.has_experts and num_tokens:
            routing = self.routing if used is None else None  # it changes no program
            used = used or self.expert_modes(mode, num_tokens)
            of_experts = layout, (mode, used), num_tokens, routing
            part = expert_part(self.kernels, self.engine, *of_experts)
        own = mode, num_tokens // mode.sp, parts, part, queries
        products, num_products = self._layer_products(*own)
        added, num_added = lora_products(self.kernels, layout, *own[:3])
        products, num_products = products + added, num_products + num_added
        moves = parts_collectives(self.layout, mode, num_tokens, parts, self.carried, used)
        moves, switched = self.switch.split(mode, num_tokens, parts, moves)
        engine, own = self.engine, (formats.dense, num_tokens // mode.sp)
        exchanges = mode.sp > 1
        kernels = num_products + 1 + engine.num_layer_launches(*own, exchanges=exchanges)
        if part is not None:  # whose own kernels have it
            kernels -= engine.launches_of(*own, exchanges=exchanges).count("activation")
        kernels -= sum(move.num_times for move in switched)  # of norms
        kernels += engine.kernels_per_exchange * sum(m.kind == "all-to-all" for m in moves)
        beside = self._elementwise_seconds(mode, num_tokens, parts, part, queries)
        moving = self.move(moves) + self.switch.seconds(mode, num_tokens, switched)
        cost = StepCost(
            matmul=count * products,
            elementwise=count * beside,
            collectives=count * moving,
            launch=count * kernels * self.machine.kernel_seconds * self.kernels.queueing,
        )
        return cost, count * kernels

    def num_launches(self, mode: Mode, num_tokens: int) -> int:
        """Launches of a layer in the middle, in a step of so many tokens; exchanges included."""
        parts = self.model.parts[self.model.num_layers // 2]
        used = self.expert_modes(mode, num_tokens) if parts.has_experts else None
        moves = parts_collectives(self.layout, mode, num_tokens, parts, self.carried, used)
        return self.cost(mode, num_tokens, 1, parts, used)[1] + sum(m.num_times for m in moves)

    def _layer_products(
        self,
        mode: Mode,
        rows: int,
        parts: LayerParts,
        part: ExpertPart | None,
        queries: Mode | None,
    ) -> tuple[float, int]:
        """(seconds, kernels) of a layer's matrix products with `rows` tokens on the device.

        Of an MLP, or with what its experts take.
        """
        layout, config = self.layout.shapes[parts.heads], self.model
        t, hidden = layout.ways(mode), config.hidden_size
        seconds, num_kernels = attention_products(
            *(self.kernels, layout, mode, rows, parts, queries)
        )
        if own := config.layer_input_width:  # every device has these matrices whole
            seconds += self.kernels.product(rows, hidden, own)
            seconds += self.kernels.product(rows, own, hidden)
        if part is None or config.experts is None:
            mlp, num_mlp = self._mlp(mode, rows, self._mlp_width(parts, t))
            return seconds + mlp, num_kernels + num_mlp
        seconds += part.products
        num_kernels += ROUTED_KERNELS + part.num_kernels
        beside = layout.intermediate_size if config.experts.beside_mlp else 0
        for inner in (beside, layout.shared_intermediate_size):
            if inner:
                mlp, num_mlp = self._mlp(mode, rows, inner // t)
                seconds += mlp
                num_kernels += num_mlp
        return seconds, num_kernels

    def _mlp_width(self, parts: LayerParts, ways: int) -> int:
        """The device's part of an MLP's width; in our codes, of whole blocks (`blocks.py`)."""
        width = self.model.intermediate_size * (2 if parts.is_wide else 1)
        has_blocks = self.engine.layer_launches and self.kernels.formats.has_codes_of_inputs
        whole = block_of_width(width) if has_blocks else 1
        return round_up(width, whole * self.layout.padded_for) // ways

    def _mlp(self, mode: Mode, rows: float, intermediate: int) -> tuple[float, int]:
        first = self.kernels.product(rows, self.model.hidden_size, 2 * intermediate)
        down, num_down = row_product(self.kernels, self.layout, mode, rows, intermediate)
        return first + down, 1 + num_down

    def _elementwise_seconds(
        self,
        mode: Mode,
        num_tokens: int,
        parts: LayerParts,
        part: ExpertPart | None,
        queries_as: Mode | None,
    ) -> float:
        """What norms, rotary and cache write, activation and codes read and write."""
        layout, config = self.layout.shapes[parts.heads], self.model
        t, local, formats = layout.ways(mode), num_tokens // mode.sp, self.kernels.formats
        queries = layout.heads_per_device * layout.model.query_dim
        queries *= layout.position_ways if queries_as else 1
        cached = layout.cache.numbers if parts.num_kv else 0
        inner = self._mlp_width(parts, t) if part is None else 0
        widths = Widths(config.hidden_size, layout.attention_columns(mode, 0, queries_as)[0], inner)
        names = self.engine.launches_of(formats.dense, local, exchanges=mode.sp > 1)
        names = names or PLAIN_LAUNCHES
        num_bytes = local * moved_bytes(names, widths, formats.activation_bytes)
        if self.switch.shots(mode, num_tokens) == 2:  # a device norms its own rows
            norms = [name for name in names if "norm" in name]
            of_all = local * moved_bytes(norms, widths, formats.activation_bytes)
            num_bytes -= of_all - of_all // layout.num_devices
        numbers = num_tokens * (2 * (queries + cached) + absorbed_numbers(layout))
        if part is not None:
            numbers += part.numbers + local * 3 * layout.shared_intermediate_size // t
        if mode.sp > 1:  # packed before and unpacked after both exchanges
            # Kernels of listed launches read what the first gives, and send what attention gives.
            times = 2 if self.engine.exchanged_launches else 4
            numbers += times * num_tokens * (2 * queries + cached)
        return self.kernels.moved(num_bytes + numbers * formats.activation_bytes)

    def move(self, moves: list[Collective]) -> float:
        """Return the summed seconds of collectives that run one after the other."""
        # On virtual devices the participants of a collective come one after the other.
        return sum(
            move.num_times
            * collective_seconds(self.machine, move)
            * (move.num_devices if self.machine.shared_cores else 1)
            for move in moves
        )
