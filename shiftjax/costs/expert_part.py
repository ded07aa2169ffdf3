"""What the experts of a layer take on one device, by the mode as which a step uses them. No JAX.

In a step of a mode M, experts are split as a mode E splits weights: `Layout.ways(E)` ways. A device
computes pairs of a token and an expert for the tokens that it sees:

    E splits tokens less   n / E.sp    those of M.sp / E.sp neighbours, brought together
    E splits them as M     n / M.sp    its own, of which each device with the same tokens has a part
    E splits them more     n / M.sp    its own, and E.sp / M.sp devices deal their pairs out

Where E is SHIFT and pairs are sent to their experts, that is as if all tokens were seen.

Other engines (`fuses_experts`) divide each expert over the devices: all have all pairs, and a part
of every expert's width. Nobody waits then, but tiles and sums of rows are not divided.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from shiftjax.costs.expert_load import Load, dealt, most_loaded, skew_of
from shiftjax.costs.kernel_costs import KernelCosts, expert_numbers, fused_numbers
from shiftjax.costs.machine import EngineOverhead
from shiftjax.costs.tuned_experts import tuned_rate
from shiftjax.parallel.grid import Mode
from shiftjax.parallel.layout import Layout

if TYPE_CHECKING:
    from shiftjax.costs.routing import Routing

ROUTED_KERNELS = 3  # of a layer beside attention: the router and two of the experts
NARROW = 4096  # experts of less have few tuned Triton kernels (`tuned_experts`); wider ones all


class ExpertPart(NamedTuple):
    """Of one layer, on the device with the most to do."""

    products: float = 0.0  # seconds, the router's included
    numbers: int = 0  # read and written beside the products
    num_kernels: int = 0


def seen_tokens(mode: Mode, used: Mode, num_tokens: int) -> int:
    """Tokens of a step that a device has experts for; `num_tokens` is a multiple of `mode.sp`."""
    return num_tokens // min(mode.sp, used.sp)


def load_of(
    layout: Layout,
    modes: tuple[Mode, Mode],
    num_tokens: int,
    skew: float = 1.0,
    routing: "Routing | None" = None,
) -> Load:
    """The load of the slowest device in a layer of experts, in a step of so many tokens.

    `modes` are the step's and that of its experts. `skew` is that of as many ways as there are
    devices, and `routing` what was counted, which says more.
    """
    experts, (mode, used) = layout.model.experts, modes
    assert experts is not None
    ways, seen = layout.ways(used), seen_tokens(*modes, num_tokens)
    if routing is None:
        load = most_loaded(experts, ways, seen, skew_of(skew, layout.num_devices, ways))
    else:
        load = routing.most_loaded(ways, seen)
    return dealt(load, max(1, used.sp // mode.sp))


def expert_part(
    kernels: KernelCosts,
    engine: EngineOverhead,
    layout: Layout,
    modes: tuple[Mode, Mode],
    num_tokens: int,
    routing: "Routing | None" = None,
) -> ExpertPart:
    """What a layer takes in a step of so many tokens; see `load_of`."""
    experts, hidden = layout.model.experts, layout.model.hidden_size
    if experts is None or not num_tokens:
        return ExpertPart()
    inner, seen = experts.intermediate_size, seen_tokens(*modes, num_tokens)
    load = load_of(layout, modes, num_tokens, engine.expert_skew, routing)
    num_kernels, cut = engine.expert_kernels, None
    if engine.cuts_experts:
        mean_pairs = seen * experts.per_token / experts.num
        own = -(-experts.num // layout.ways(modes[1]))
        cut = kernels.cut_experts(hidden, inner, mean_pairs, own)
        num_kernels += cut.num_kernels
    router = kernels.product(seen, hidden, experts.num)
    if engine.fuses_experts:
        ways = layout.ways(modes[1])
        load = most_loaded(experts, 1, seen)
        is_narrow, inner = inner < NARROW, -(-inner // ways)
        numbers = fused_numbers(load.pairs, seen, hidden, inner)
        if not is_narrow:
            return ExpertPart(router + kernels.experts(load, hidden, inner), numbers, num_kernels)
        name, fmt = kernels.machine.name, kernels.formats.weights
        tuned = tuned_rate(name, experts.num, inner, fmt)
        seconds = kernels.fused_experts(load, hidden, inner, tuned)
        return ExpertPart(router + seconds, numbers, num_kernels)
    return ExpertPart(
        router + kernels.experts(load, hidden, inner, cut),
        expert_numbers(load.pairs, seen, experts.per_token, hidden, inner),
        num_kernels,
    )


def in_words(layout: Layout, best: Mode, seconds: Mapping[Mode, float]) -> str:
    """Why experts are used as in one mode, by the seconds of all that are possible."""
    others = {used: each for used, each in seconds.items() if used != best}
    second = min(others, key=others.__getitem__)
    more = others[second] / seconds[best] - 1 if seconds[best] else 0.0
    return f"{ways_in_words(layout.ways(second))} would take {more:.0%} longer"


def ways_in_words(ways: int) -> str:
    """How far experts are split, for people."""
    return "whole ones" if ways == 1 else f"{ways} ways"
