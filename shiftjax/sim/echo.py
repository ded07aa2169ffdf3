"""A runner without a model: tokens are a pure function of a sequence, KV can be audited. No JAX.

Whatever the scheduling, the same sequence gets the same tokens. With `check`, the pool holds in
each slot the token whose KV would be there, and its cache group, so that a step can verify that
every sequence finds exactly its own tokens behind its block tables, and that a token on the device
is looked for in the row of the step that sampled it, the last one of the micro-batch.
"""

from collections.abc import Sequence

import numpy as np

from pallas_kernels.window import Window, first_seen
from shiftjax.core.proposal import ModelGuess
from shiftjax.core.request import ScheduledSequence, SequenceState, StepOutput, StepPlan
from shiftjax.core.results import num_accepted, num_top
from shiftjax.parallel.grid import Mode

NO_TOKEN = -1
NUM_TOP = 20


def echo_token(last_token: int, position: int, seed: int, vocab_size: int) -> int:
    """The token after `last_token` at `position`: made up, deterministic, well spread."""
    mixed = (last_token * 2654435761 + position * 40503 + seed * 97 + 12345) & 0xFFFFFFFF
    return ((mixed >> 15) ^ mixed) % vocab_size


def _may_follow(token: int, item: ScheduledSequence, row: int) -> bool:
    constraint = item.sequence.constraint
    if constraint is not None:
        mask = constraint.mask if item.masks is None else item.masks[row]
        if not mask[token // 32] >> (token % 32) & 1:
            return False
    return not (token in item.sequence.stop_ids and item.bans_stop_ids(row))


class EchoRunner:
    """A `Runner` for tests of everything but the model.

    Honours seeds, `min_tokens`, constraints and log-probabilities (made up: `-token % 7`);
    temperatures, penalties and `allowed_token_ids` have no meaning here.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        num_blocks: int = 0,
        block_size: int = 1,
        host: dict[int, list[np.ndarray]] | None = None,  # extents, of all groups
        check: bool = False,
        windows: Sequence[Window | None] = (),  # of cache groups; none: there is one
    ):
        self.vocab_size = vocab_size
        self.block_size = block_size
        self.check = check
        self.modes: list[Mode] = []
        self._windows = windows or (None,)
        self._pool = np.full((num_blocks, block_size), NO_TOKEN)
        self.host = {} if host is None else host
        self.ahead: dict[int, list[np.ndarray]] = {}  # extents that have been prefetched
        self._last: dict[int, tuple[np.ndarray, list[SequenceState]]] = {}  # of micro-batches

    def run(self, plan: StepPlan, mode: Mode, previous_handle: StepOutput | None) -> StepOutput:
        """Compute at once; the handle is the output."""
        self.modes.append(mode)
        previous = [] if previous_handle is None else previous_handle.token_ids.tolist()
        if self.check:
            self._audit(plan, previous)
            self._check_rows(plan, previous_handle)
        token_ids: list[int] = []
        guesses: list[ModelGuess] = []
        for item in plan.scheduled:
            found = self._tokens(item, previous) if item.num_rows else []
            token_ids += found
            guesses.append(self._guess(item, found, plan.num_guesses))
        tokens = np.array(token_ids, np.int32)
        logprobs = -(tokens % 7).astype(np.float32)
        output = StepOutput(tokens, np.ones(len(tokens), bool), logprobs)
        if plan.num_guesses:
            output = output._replace(guesses=guesses)
        if self.check:
            rows = [item.sequence for item in plan.scheduled for _ in range(item.num_rows)]
            self._last[plan.micro_batch] = tokens, rows
        if max(map(num_top, plan.scheduled), default=0) <= 0:
            return output
        top_ids, top = (
            np.repeat(values[:, None], NUM_TOP, axis=1) for values in (tokens, logprobs)
        )
        return output._replace(top_ids=top_ids, top_logprobs=top)

    def is_ready(self, handle: StepOutput) -> bool:
        """At once."""
        return True

    def fetch(self, handle: StepOutput) -> StepOutput:
        """What `run` computed."""
        return handle

    def reset(self) -> None:
        """Empty the pool."""
        self._pool.fill(NO_TOKEN)
        self._last.clear()
        self.ahead.clear()

    def _tokens(self, item: ScheduledSequence, previous: list[int]) -> list[int]:
        """The next tokens for the rows of one sequence."""
        sequence, end = item.sequence, item.start + item.num_tokens
        known = sequence.token_ids[end - item.num_rows + 1 : end + 1]
        if len(known) == item.num_rows:  # inside a prompt: every next token is given
            return known
        last = previous[item.previous_row] if item.previous_row >= 0 else sequence.token_ids[-1]
        found = [*known]
        for row, before in enumerate([last, *item.proposed_ids], start=len(known)):
            position = end - item.num_rows + row
            token = echo_token(before, position, sequence.seed, self.vocab_size)
            while not _may_follow(token, item, row):
                token = (token + 1) % self.vocab_size
            found.append(token)
        return found

    def _guess(self, item: ScheduledSequence, sampled: list[int], num: int) -> ModelGuess:
        """The tokens after the last one that counts, as if a drafting model were always right."""
        if not sampled or not num:
            return ModelGuess([], [])
        accepted = num_accepted(item, sampled) if item.proposal else len(sampled) - 1
        last, tokens = sampled[accepted], []
        position = item.start + item.num_tokens - (len(sampled) - accepted) + 1
        for place in range(position, position + num):
            last = echo_token(last, place, item.sequence.seed, self.vocab_size)
            tokens.append(last)
        return ModelGuess(tokens, [0.9] * num)

    def _audit(self, plan: StepPlan, previous: list[int]) -> None:
        """Move and write what the plan says, then look at what every sequence would attend to."""
        while plan.dropped:
            self.host.pop(plan.dropped.pop(), None)
        for extent, blocks in plan.offloads:
            assert extent not in self.host, "an extent is written once"
            self.host[extent] = [self.block(block) for block in blocks]
        for extent, blocks in plan.restores:
            found = self.ahead.pop(extent, None) or self.host[extent]
            for block, contents in zip(blocks, found, strict=True):
                if block:
                    self.put_block(block, contents)
        for units, blocks, size in plan.unit_restores:
            tokens = [self.unit(number, unit, size) for number, unit in units]
            lacks = len(blocks) * self.block_size - len(tokens) * size
            tokens += [np.full_like(tokens[0], NO_TOKEN)] * (lacks // size)
            joined = np.concatenate(tokens, axis=-1)
            for number, block in enumerate(blocks):
                start = number * self.block_size
                self.put_block(block, joined[..., start : start + self.block_size])
        self.ahead = {extent: self.host[extent] for extent in plan.prefetches}
        contexts = [self._context(item, previous) for item in plan.scheduled]
        for item, context in zip(plan.scheduled, contexts, strict=True):
            self._compare(item, context[: item.start])  # what earlier steps have left behind
        written: set[tuple[int, int]] = set()
        for item, context in zip(plan.scheduled, contexts, strict=True):
            for group, table in enumerate(item.sequence.tables):
                for position in range(item.start, len(context)):
                    block, offset = divmod(position, self.block_size)
                    slot = (table[block], offset)
                    assert slot[0] != 0, "the null block belongs to nobody"
                    assert slot not in written, f"slot {slot} is written twice in one step"
                    written.add(slot)
                    self.write(*slot, context[position] + group * self.vocab_size)
        for item, context in zip(plan.scheduled, contexts, strict=True):
            self._compare(item, context)

    def _check_rows(self, plan: StepPlan, previous: StepOutput | None) -> None:
        """Raise `AssertionError` unless pending tokens are in the last step of the micro-batch."""
        tokens, rows = self._last.get(plan.micro_batch, (None, []))
        for item in plan.scheduled:
            if item.previous_row >= 0:
                assert previous is not None and previous.token_ids is tokens, "not the step before"
                assert rows[item.previous_row] is item.sequence, "another sequence's token"

    def unit(self, extent: int, number: int, size: int) -> np.ndarray:
        """Return some of the tokens of an extent, `size` that begin a multiple of it."""
        blocks = self.host[extent]
        block, start = divmod(number * size, blocks[0].shape[-1])
        return blocks[block][..., start : start + size]

    def write(self, block: int, offset: int, token: int) -> None:
        """Keep what would be the keys and values of a token."""
        self._pool[block, offset] = token

    def read(self, blocks: list[int], num_tokens: int) -> list[int]:
        """The first tokens whose keys and values these blocks hold."""
        return self._pool[blocks].reshape(-1)[:num_tokens].tolist()

    def block(self, number: int) -> np.ndarray:
        """A copy of what is in a block."""
        return self._pool[number].copy()

    def put_block(self, number: int, contents: np.ndarray) -> None:
        """Overwrite a block."""
        self._pool[number] = contents

    def _compare(self, item: ScheduledSequence, context: list[int]) -> None:
        """Raise `AssertionError` unless block tables lead to what is seen of this context."""
        for group, (table, window) in enumerate(
            zip(item.sequence.tables, self._windows, strict=True)
        ):
            first = max(0, first_seen(item.start, window))
            seen = self.read(table, len(context))[first:]
            own = [token + group * self.vocab_size for token in context[first:]]
            assert seen == own, f"{item.sequence.order}: {group} finds {seen}, computes {own}"

    def _context(self, item: ScheduledSequence, previous: list[int]) -> list[int]:
        """The tokens that a sequence attends to in this step."""
        context = item.sequence.token_ids[: item.start + item.num_tokens]
        if item.previous_row >= 0:
            context.append(previous[item.previous_row])
        context += item.proposed_ids
        assert len(context) == item.start + item.num_tokens, "a pending token has no row"
        return context
