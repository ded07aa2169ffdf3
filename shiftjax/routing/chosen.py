"""Which experts each token of a sequence chose, kept for it and for cached prefixes. No JAX.

    steps tell     [tokens of the plan, layers, k]     in the order of the plan
    a sequence     [tokens from 0 on, layers, k]       each token once, when it was computed first
    a prefix       [hash_size, layers, k]              by the hash of what it ends with

A token that is computed again, after a preemption, keeps the experts that the next token was
sampled by. A prefix is known by the hash that finds its KV, whichever group has computed it; of as
many tokens as all pools hold, the last used ones are kept. A request that wants to know its experts
takes from prefix caches what they are known of, and computes the rest, so that none is missing.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from shiftjax.core.notes import Notes
from shiftjax.core.request import SequenceState, Status, StepOutput, StepPlan
from shiftjax.core.results import num_accepted
from shiftjax.costs.routing import num_counted
from shiftjax.deploy.deployment import Deployment

NOT_TOLD = (
    "return_routed_experts: this engine does not tell experts; it does if it is started with "
    "routed_experts (--enable-return-routed-experts)."
)
LEAST_ROOM = 64  # tokens of a sequence; then twice as many


def type_of(num_experts: int) -> type[np.unsignedinteger[Any]]:
    """Return the type of an expert's number, the least that holds all."""
    return np.uint8 if num_experts <= 1 << 8 else np.uint16


class ChosenOf:
    """The experts of tokens `[first, end)` of one sequence, `[tokens, layers, k]`."""

    __slots__ = ("_rows", "end", "first")

    def __init__(self) -> None:
        self.first = self.end = 0
        self._rows: np.ndarray | None = None  # from token 0 on; those before `first` mean nothing

    def add(self, start: int, rows: np.ndarray) -> None:
        """Take the experts of tokens from `start` on; those that are known stay what they are."""
        if not self.first <= start <= self.end:
            self.first = self.end = start
        new = rows[self.end - start :]
        if not len(new):
            return
        end = self.end + len(new)
        room = 0 if self._rows is None else len(self._rows)
        if self._rows is None or end > room:
            grown = np.zeros((max(LEAST_ROOM, 2 * room, end), *rows.shape[1:]), rows.dtype)
            if self._rows is not None:
                grown[: self.end] = self._rows[: self.end]
            self._rows = grown
        self._rows[self.end : end] = new
        self.end = end

    def of(self, start: int, end: int) -> np.ndarray | None:
        """Return the experts of tokens `[start, end)`; None: not all are known."""
        is_known = self.first <= start <= end <= self.end
        return None if self._rows is None or not is_known else self._rows[start:end]


class Chosen(Notes):
    """The experts that tokens of one engine chose; see above.

    `size` tokens have a hash, and those of `most` tokens are kept by it. `shape` is
    `[layers, k]`.
    """

    def __init__(self, size: int, most: int, shape: tuple[int, int], num_experts: int):
        self._size, self._most = size, most // size
        self._nothing = np.zeros((0, *shape), type_of(num_experts))
        self._by_hash: OrderedDict[bytes, np.ndarray] = OrderedDict()  # least recently used first

    def enter(self, plan: StepPlan, output: StepOutput) -> None:
        """Take what a step told; of guesses that are wrong nothing."""
        if not plan.scheduled:
            return
        if output.notes is None or len(output.notes) != plan.num_tokens:
            raise ValueError("The runner did not tell which experts the tokens of a step chose.")
        token = row = 0
        for item in plan.scheduled:
            first_row, row = row, row + item.num_rows
            rows = output.notes[token : token + item.num_tokens]
            token += item.num_tokens
            if item.sequence.status is Status.FINISHED:
                continue
            if item.proposal is not None:
                sampled = output.token_ids[first_row:row].tolist()
                rows = rows[: 1 + num_accepted(item, sampled)]
            _chosen_of(item.sequence).add(item.start, rows)

    def begin(self, sequence: SequenceState) -> None:
        """Take from siblings and from prefixes what a sequence finds computed."""
        own, end = _chosen_of(sequence), sequence.num_computed_tokens
        for sibling in sequence.siblings:
            if own.end >= end:
                return
            rows = None if sibling.notes is None else sibling.notes.of(own.end, end)
            if rows is not None and end <= sequence.num_prompt_tokens:
                own.add(own.end, rows)
        hashes = sequence.block_hashes
        for number in range(own.end // self._size, min(len(hashes), end // self._size)):
            rows = self._by_hash.get(hashes[number])
            if rows is not None:
                self._by_hash.move_to_end(hashes[number])
                own.add(number * self._size, rows)

    def register(self, sequence: SequenceState, first: int, end: int) -> None:
        """Keep the experts of blocks that are found by these hashes from now on."""
        size, own = self._size, _chosen_of(sequence)
        for number in range(first, end):
            rows = own.of(number * size, (number + 1) * size)
            if rows is None:
                continue
            self._by_hash[sequence.block_hashes[number]] = rows.copy()
            self._by_hash.move_to_end(sequence.block_hashes[number])
            if len(self._by_hash) > self._most:
                self._by_hash.popitem(last=False)

    def num_known(self, hashes: Sequence[bytes]) -> int:
        """Return of how many of these hashes, the first ones, the experts are known."""
        missing = (n for n, each in enumerate(hashes) if each not in self._by_hash)
        return next(missing, len(hashes))

    def of(self, sequence: SequenceState) -> np.ndarray:
        """Return the experts of all tokens but the last; of an early end, of those computed."""
        own = _chosen_of(sequence)
        rows = own.of(0, max(0, min(own.end, len(sequence.token_ids) - 1)))
        return self._nothing if rows is None else rows


def _chosen_of(sequence: SequenceState) -> ChosenOf:
    if sequence.notes is None:
        sequence.notes = ChosenOf()
    return sequence.notes


def notes_of(deployments: Sequence[Deployment]) -> Chosen | None:
    """Return what keeps the experts of an engine with these deployments; None: it tells none."""
    first = deployments[0]
    experts = first.layout.model.experts
    if not first.routed_experts or experts is None:
        return None
    size = first.hash_size or first.block_size
    most = sum(each.dp * each.num_blocks * each.block_size for each in deployments)
    most += sum(each.host_bytes // each.host_block_bytes * each.block_size for each in deployments)
    shape = num_counted(first.layout.model), experts.per_token
    return Chosen(size, most, shape, experts.num)
