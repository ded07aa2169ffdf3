"""Sums of a layer that a switch with multicast does: which they are, and their seconds. No JAX.

Such a sum takes along the norm behind it (`models/sum_backend.py`): a launch does both, and a
collective's latency holds its launch, so that the norm's is one launch less. In two shots a device
norms its own rows alone. Only sums over all devices of one host qualify: those of SHIFT. The last
sum of a model is a collective's, and is priced as the others.
"""

from typing import NamedTuple

from pallas_kernels.sum_sizes import shots
from shiftjax.arch.config import LayerParts, ModelConfig
from shiftjax.arch.formats import Formats
from shiftjax.arch.weights import layer_norms
from shiftjax.costs.collectives import Collective
from shiftjax.costs.levels import transfer_seconds
from shiftjax.costs.machine import EngineOverhead, Machine, Transfer
from shiftjax.parallel.grid import Mode
from shiftjax.parallel.layout import Layout

VOLUMES = "", "one_shot", "two_shot"  # by shots
FIRST_LAUNCHES = 2  # of a program: zeros for counters, and where devices meet first


class SwitchSums(NamedTuple):
    """The sums of a group's layers that a switch does."""

    layout: Layout
    ways: tuple[Transfer, ...] = ()  # (): the switch does none

    def shots(self, mode: Mode, num_tokens: int) -> int:
        """In how many shots it does sums of a step; 0: it does none."""
        if not self.ways or mode != self.layout.shift or not num_tokens:
            return 0
        model = self.layout.model
        own = self.layout.num_devices, model.hidden_size
        return shots(num_tokens, *own, splits_rows=splits_rows(model))

    def split(
        self, mode: Mode, num_tokens: int, parts: LayerParts, moves: list[Collective]
    ) -> tuple[list[Collective], list[Collective]]:
        """Split what a layer moves: what collectives do, and what the switch does."""
        left = of_a_layer(self.layout.model, parts) if self.shots(mode, num_tokens) else 0
        size = sum_bytes(self.layout, num_tokens)
        others, switched = [], []
        for move in moves:
            num = 0
            if move.kind == "all-reduce" and move.num_bytes == size:
                num = min(left, move.num_times)
            left -= num
            if num:
                switched.append(move._replace(num_times=num))
            if num < move.num_times:
                others.append(move._replace(num_times=move.num_times - num))
        return others, switched

    def seconds(self, mode: Mode, num_tokens: int, moves: list[Collective]) -> float:
        """Seconds of sums that the switch does, their norms' launches included."""
        volume = VOLUMES[self.shots(mode, num_tokens)]
        ways = tuple(way for way in self.ways if way.volume == volume)
        return sum(move.num_times * transfer_seconds(ways, move) for move in moves)


def switch_sums(
    layout: Layout, machine: Machine, engine: EngineOverhead, formats: Formats
) -> SwitchSums:
    """Return what a machine's switch does for an engine's steps."""
    devices, model = layout.num_devices, layout.model
    is_on_one_host = devices <= (machine.devices_per_host or machine.num_devices)
    takes_numbers = formats.activations == "bfloat16" and not model.norm_centred
    if not (machine.switch_sum and engine.sums_by_switch and is_on_one_host and takes_numbers):
        return SwitchSums(layout)
    if not all(_has_kernels(each.model) for each in layout.shapes):
        return SwitchSums(layout)
    return SwitchSums(layout, machine.switch_sum)


def _has_kernels(model: ModelConfig) -> bool:
    """Whether attention has kernels: engines that go without have none of these (docs/gpu.md)."""
    return model.latent is None and model.head_dim % 32 == 0 and 64 <= model.head_dim <= 256


def splits_rows(model: ModelConfig) -> bool:
    """Whether devices may have the stream of their own rows alone: norms read all else of it.

    Where each sum goes to a norm, and nothing but sums is added.
    """
    beside_mlp = model.experts is not None and model.experts.beside_mlp
    return not beside_mlp and all(of_a_layer(model, parts) == 2 for parts in set(model.parts))


def of_a_layer(model: ModelConfig, parts: LayerParts) -> int:
    """Return how many of a layer's sums go to a norm as they are.

    One with a bias does not, one that is normed by itself, or one that is scaled.
    """
    norms = layer_norms(model)
    of_mlp = not parts.has_experts and model.mlp_bias
    attention = "mlp_norm" in norms and "attention_out_norm" not in norms
    mlp = "input_norm" in norms and "mlp_out_norm" not in norms
    attention = attention and not (model.parallel_block or model.output_bias)
    mlp = mlp and not (of_mlp or model.layer_input_width or model.layer_scalars)
    return attention + mlp


def sum_bytes(layout: Layout, num_tokens: int) -> int:
    """Bytes of a sum of bfloat16 numbers of so many tokens."""
    return 2 * num_tokens * layout.model.hidden_size
