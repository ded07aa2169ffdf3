"""Up to which size steps are quicker in SHIFT than in BASE. No JAX."""

from typing import TYPE_CHECKING

from shiftjax.costs.work import Work

if TYPE_CHECKING:
    from shiftjax.costs.group_costs import GroupCosts


def shift_threshold(costs: "GroupCosts", most: int = 1 << 16) -> int:
    """The largest step, in tokens, that is quicker in SHIFT, if all larger ones are in BASE.

    For prompt tokens; a step of decodes moves the crossing little, because attention costs the
    same in both modes. 0 where SHIFT never wins, `most` where it always does.
    """

    base, shift = costs.layout.base, costs.layout.shift

    def shift_wins(num_tokens: int) -> bool:
        work = Work.prefill(num_tokens)
        return costs.device_seconds(shift, work) < costs.device_seconds(base, work)

    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if shift_wins(middle) else (low, middle - 1)
    return low
