"""How far a batch has come, in lines, prompts and outputs, and when more may begin. No JAX.

Of lines that have not begun nothing is known but their number; they are taken to be like those
that have. Of outputs that have not ended the most that they may have is expected.
"""

import asyncio
from collections.abc import Callable, Sequence

from serving.server.engine_thread import Turn
from serving.server.errors import ServeError
from serving.server.handle import RequestHandle
from shiftjax.phases.resharding import ReshardingState

MAX_STARTING = 16  # lines beyond `most_lines` whose prompts are being tokenized


class Tally:
    """Counts of one run, from its lines and, as an observer, from its engine.

    A line may begin while fewer than `most_lines` are in the engine, or fewer than `most_tokens`
    of their prompts; and while no more than three times `most_lines` wait to be written, because a
    line before them has not ended.
    """

    def __init__(self, num_lines: int, most_lines: int, most_tokens: int = 0):
        self.num_lines, self.most_lines, self.most_tokens = num_lines, most_lines, most_tokens
        self.num_begun = self.num_tokenized = self.num_ended = self.num_written = 0
        self.num_prompt_tokens = 0  # of lines that are tokenized
        self.num_left_tokens = 0  # those of lines that have ended
        self.num_computed_tokens = 0  # of prompts whose first token has come
        self.num_expected_tokens = 0  # of outputs of lines that are tokenized
        self.num_generated_tokens = 0
        self.num_decoded_tokens = 0  # the same, in the phase of decodes
        self.resharding: ReshardingState | None = None  # None: there are no phases
        self.seconds: dict[str, float] = {"": 0.0, "prefill": 0.0, "decode": 0.0}  # by phase
        self.on_change: Callable[[], None] = lambda: None
        self._last_at: float | None = None
        self._changed = asyncio.Event()

    # ------------------------------------------------------------------ of lines

    async def room(self) -> None:
        """Wait until one more line may begin, and count it."""
        while not self._has_room():
            self._changed.clear()
            await self._changed.wait()
        self.num_begun += 1

    def _has_room(self) -> bool:
        has_few = self.num_begun - self.num_ended < self.most_lines
        has_few_tokens = self.num_prompt_tokens - self.num_left_tokens < self.most_tokens
        takes_more = has_few_tokens and self.num_begun - self.num_tokenized < MAX_STARTING
        is_written = self.num_ended - self.num_written <= 3 * self.most_lines
        return (has_few or takes_more) and is_written

    def tokenized(self, handles: Sequence[RequestHandle]) -> None:
        """The requests of a line are known; none if it cannot be run."""
        self.num_tokenized += 1
        self.num_prompt_tokens += sum(map(_prompt_tokens, handles))
        self.num_expected_tokens += sum(map(_most_tokens, handles))
        self._changed.set()

    def ended(self, handle: RequestHandle, now: float) -> None:
        """Of a request, what had been expected was its output."""
        self.num_expected_tokens += handle.num_output_tokens - _most_tokens(handle)
        if not handle.num_output_tokens:
            self.num_computed_tokens += _prompt_tokens(handle)

    def line_ended(self, handles: Sequence[RequestHandle]) -> None:
        """A line has left the engine."""
        self.num_ended += 1
        self.num_left_tokens += sum(map(_prompt_tokens, handles))
        self._changed.set()

    def written(self) -> None:
        """The next record is in the file."""
        self.num_written += 1
        self._changed.set()
        self.on_change()

    # ------------------------------------------------------------------ of the engine

    def tokens(self, handle: RequestHandle, index: int, num: int, now: float) -> None:
        """One step brought `num` tokens of a continuation."""
        self.num_generated_tokens += num
        self.num_decoded_tokens += num * (self.phase == "decode")
        if handle.num_output_tokens == num:
            self.num_computed_tokens += _prompt_tokens(handle)

    def stepped(self, turn: Turn) -> None:
        """The engine has finished a turn."""
        self.resharding = turn.stats.find(ReshardingState)
        last_at = turn.at if self._last_at is None else self._last_at
        self.seconds[self.phase] += turn.at - last_at
        self._last_at = turn.at
        self.on_change()

    def rejected(self, error: ServeError) -> None:
        """A request was refused: its line says so."""

    @property
    def phase(self) -> str:
        """prefill, decode, or "" where there are no phases."""
        return "" if self.resharding is None else self.resharding.phase

    # ------------------------------------------------------------------ of the whole

    @property
    def prompt_tokens(self) -> int:
        """Of all lines, as far as is known."""
        return self._of_all(self.num_prompt_tokens)

    @property
    def output_tokens(self) -> int:
        """The same, of outputs."""
        return self._of_all(self.num_expected_tokens)

    def _of_all(self, num_tokens: int) -> int:
        return round(num_tokens * self.num_lines / max(1, self.num_tokenized))

    def seconds_left(self) -> float | None:
        """What the rest takes at the rates so far; None: there is no rate yet.

        In phases, prompts and outputs take turns and have a rate each. Without, they are computed
        together, and half of the work is that of either.
        """
        if self.num_written == self.num_lines:
            return 0.0
        done = [self.num_computed_tokens, self.num_generated_tokens]
        totals = [max(1, self.prompt_tokens), max(1, self.output_tokens)]
        shares = [min(1.0, d / total) for d, total in zip(done, totals, strict=True)]
        if self.resharding is None:
            share = sum(shares) / 2
            return self.seconds[""] * (1 - share) / share if share else None
        of_decodes = self.num_decoded_tokens / totals[1]
        rests = [
            _rest(self.seconds["prefill"], shares[0], 1 - shares[0]),
            _rest(self.seconds["decode"], of_decodes, 1 - shares[1]),
        ]
        known = [each for each in rests if each is not None]
        return sum(known) if len(known) == len(rests) else None

    def words(self) -> str:
        """Where it stands, for a line of a log."""
        seconds, left = sum(self.seconds.values()), self.seconds_left()
        then = f", about {left:.0f} s left" if left is not None else ""
        return (
            f"{self.where()}: {self.num_written:,} of {self.num_lines:,} lines, "
            f"{self.num_computed_tokens:,} of {self.prompt_tokens:,} prompt tokens, "
            f"{self.num_generated_tokens:,} of {self.output_tokens:,} output tokens, "
            f"{seconds:.0f} s so far{then}"
        )

    def where(self) -> str:
        """The phase, and how much of the host memory for parked prompts is taken."""
        state = self.resharding
        if state is None:
            return "generating"
        return f"{state.phase}, host memory {state.num_held_bytes / state.num_bytes:.0%} full"


def _prompt_tokens(handle: RequestHandle) -> int:
    return len(handle.request.prompt_token_ids)


def _most_tokens(handle: RequestHandle) -> int:
    """0 where there is no limit but the context."""
    return handle.request.sampling.n * (handle.request.sampling.max_tokens or 0)


def _rest(seconds: float, done: float, left: float) -> float | None:
    """Seconds of what is left if what is done took so many; None: nothing is done yet."""
    if not left:
        return 0.0
    return seconds * left / done if done else None
