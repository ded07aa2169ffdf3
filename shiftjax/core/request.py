"""The types between the parts of the engine. No JAX."""

import enum
import hashlib
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np

from shiftjax.core.blocks import CachedPrefix
from shiftjax.core.errors import DuplicateRequestError, RequestError
from shiftjax.core.kept_blocks import NO_HINTS, CacheHints
from shiftjax.core.proposal import ModelGuess, Proposal
from shiftjax.core.sampling_params import INT32_MAX, SamplingParams
from shiftjax.core.tier import Offload, Place, Restore, UnitRestore
from shiftjax.parallel.grid import Mode

__all__ = [
    "DuplicateRequestError",
    "Event",
    "FinishReason",
    "Request",
    "RequestError",
    "RequestMetrics",
    "Runner",
    "SamplingParams",
    "ScheduledSequence",
    "SequenceState",
    "Status",
    "StepOutput",
    "StepPlan",
    "TokenConstraint",
    "TokenLogprobs",
    "derive_seed",
]

FinishReason = Literal["stop", "length", "error", "abort"]


class Status(enum.Enum):
    """Where a sequence is. One swapped out waits, with places there, or is parked."""

    WAITING = "waiting"
    RUNNING = "running"
    PARKED = "parked"  # until a group that decodes takes it
    FINISHED = "finished"


class TokenConstraint(Protocol):
    """What the next token of one continuation may be, say by a grammar. Has a state of its own."""

    mask: np.ndarray  # [ceil(vocab / 32)] uint32; bit t % 32 of word t // 32: token t is allowed
    decides_end: bool  # an output ends where this allows it: no parameter may forbid an end

    def accept(self, token_id: int) -> bool:
        """Move on by a sampled token and renew `mask`; False if no token can follow."""
        ...

    def masks_along(self, tokens: list[int]) -> list[np.ndarray]:
        """`mask` after none, one, two ... of these tokens, as far as they are allowed.

        At least one mask, `mask` itself; the state stays what it was.
        """
        ...

    def forced_tokens(self, most: int) -> list[int]:
        """The usual tokens, `most` at most, of text that must come next; often none."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One prompt and what to do with it.

    A lower `priority` runs earlier (as in vLLM), then the earlier arrival; where steps have sizes
    by their costs, a shorter prompt may pass a longer one (`step_sizes.due_seconds`). Requests
    that differ in `adapter` or `cache_salt` never share KV blocks. `constraints` are none, or one
    each. A group of at least `min_width` units serves it, or of as many as there are. With
    `wants_notes` the last event of each continuation has what is kept of its tokens (`Notes`).
    """

    request_id: str
    prompt_token_ids: Collection[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    arrival_seconds: float = 0.0
    priority: int = 0
    adapter: str | None = None
    cache_salt: str | None = None
    constraints: tuple[TokenConstraint, ...] = ()
    prediction: tuple[int, ...] | None = None  # the output that the client expects
    min_width: int = 1
    wants_notes: bool = False
    hints: CacheHints = NO_HINTS


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position: the token that is there, and the most likely ones."""

    token_id: int
    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


@dataclass(slots=True)
class RequestMetrics:
    """Times (seconds) and counts of one continuation.

    `queue_seconds` arrival to first scheduled, `ttft_seconds` arrival to first token,
    `tpot_seconds` mean time per token after the first. None: it never got so far.
    """

    queue_seconds: float | None
    ttft_seconds: float | None
    tpot_seconds: float | None
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    steps_by_mode: dict[str, int]
    num_proposed_tokens: int = 0  # guessed ahead of sampling
    num_accepted_tokens: int = 0  # of them, those that sampling then took
    num_prediction_tokens: int = 0  # of the guessed ones, those copied from `Request.prediction`
    num_accepted_prediction_tokens: int = 0


@dataclass(slots=True, eq=False)
class SequenceState:
    """One continuation of a request (`n` of them). Written by the scheduler only.

    Who owns which tokens, between two steps::

        token_ids      [ prompt ............ | committed output ]( pending )
        KV computed    [ 0 .. num_computed_tokens )
        known finite   [ 0 .. num_verified_tokens )       after a commit with a finite row
        in the index   [ 0 .. num_registered_blocks * block_size )

    `num_computed_tokens` moves when a step is scheduled: the device runs steps in order, so a
    later step may rely on an earlier one that is still in flight.
    """

    request: Request
    index: int
    seed: int  # in [0, 2**31), from the request's seed and the index
    order: tuple[int, float, int, int]  # priority, due, number of the request, index: unique
    token_ids: list[int]  # prompt and committed output
    num_prompt_tokens: int
    max_length: int  # prompt and output together; reaching it ends with "length"
    stop_ids: frozenset[int]  # end-of-sequence (unless ignored) and stop token ids
    siblings: list["SequenceState"]  # all continuations of the request, this one included
    constraint: TokenConstraint | None = None
    status: Status = Status.WAITING
    block_table: list[int] = field(default_factory=list)  # of the first cache group
    window_tables: list[list[int]] = field(default_factory=list)  # of the others
    first_blocks: list[int] = field(default_factory=list)  # that no table lacks, by group
    retired: list[tuple[int, int, CachedPrefix]] = field(default_factory=list)  # not yet proven
    places: list[Place] = field(default_factory=list)  # not empty: swapped out
    num_computed_tokens: int = 0
    num_known_tokens: int = 0  # of the prompt, that a prefix cache had when it came
    num_cached_tokens: int = 0  # prefix hit at the first admission
    num_verified_tokens: int = 0
    micro_batch: int = 0  # the steps that it takes part in; set by an admission
    num_pending_tokens: int = 0  # sampled in flight, not yet known here; 2 while two steps fly
    pending_row: int = -1  # the row of the in-flight step that samples the last of them
    block_hashes: list[bytes] = field(default_factory=list)  # chain over full blocks, each once
    num_registered_blocks: int = 0
    version: int = 0  # of the weights that its first KV is computed with
    num_preemptions: int = 0
    num_proposed_tokens: int = 0
    num_accepted_tokens: int = 0
    num_prediction_tokens: int = 0
    num_accepted_prediction_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # None: not asked for
    notes: Any = None  # what is kept of its tokens, by whoever keeps it (`Notes`)
    first_scheduled_seconds: float | None = None
    first_token_seconds: float | None = None
    last_token_seconds: float = 0.0
    steps_by_mode: dict[str, int] = field(default_factory=dict)  # by label

    @property
    def tables(self) -> list[list[int]]:
        """The block table of each cache group; those with a window begin with lost blocks, 0."""
        return [self.block_table, *self.window_tables]

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled and committed."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether rows of prompt tokens are still to be collected."""
        collected = self.prompt_logprobs
        return collected is not None and len(collected) < self.num_prompt_tokens

    def metrics(self) -> RequestMetrics:
        """The metrics up to now."""
        arrival, first = self.request.arrival_seconds, self.first_token_seconds
        queued = self.first_scheduled_seconds
        later = self.num_output_tokens - 1
        spread = 0.0 if first is None else self.last_token_seconds - first
        return RequestMetrics(
            queue_seconds=None if queued is None else queued - arrival,
            ttft_seconds=None if first is None else first - arrival,
            tpot_seconds=spread / later if later > 0 else None,
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=self.num_output_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_preemptions=self.num_preemptions,
            steps_by_mode=dict(self.steps_by_mode),
            num_proposed_tokens=self.num_proposed_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            num_prediction_tokens=self.num_prediction_tokens,
            num_accepted_prediction_tokens=self.num_accepted_prediction_tokens,
        )


@dataclass(slots=True, eq=False)
class ScheduledSequence:
    """Tokens `[start, start + num_tokens)` of a sequence, computed in this step.

    `num_rows` logit rows belong to the last `num_rows` of these tokens. `previous_row` >= 0: the
    last of these tokens is still on the device, in that row of the output of the step before of the
    same micro-batch.

    With a `proposal` these tokens are the last committed one and the proposed ones, and every row
    samples: row i the token after i proposed tokens, which counts if the step samples those i
    itself. `masks` are then what a constraint allows in each row.
    """

    sequence: SequenceState
    start: int
    num_tokens: int
    num_rows: int
    previous_row: int
    proposal: Proposal | None = None
    masks: list[np.ndarray] | None = None

    @property
    def proposed_ids(self) -> list[int]:
        """The proposed tokens; none in an ordinary item."""
        return self.proposal.tokens if self.proposal else []

    def bans_stop_ids(self, row: int) -> bool:
        """Whether `min_tokens` forbids `sequence.stop_ids` to the token that a row samples."""
        sequence = self.sequence
        length = self.start + self.num_tokens - self.num_rows + row + 1
        return length - sequence.num_prompt_tokens < sequence.request.sampling.min_tokens


@dataclass(slots=True, eq=False)
class StepPlan:
    """What one step computes: `num_decodes` sequences of one token and one row, proposals, chunks.

    All are of one micro-batch; a group that is no pipeline has no other. A plan that schedules
    nothing has offloads: no program is run, and its step ends when they are made.

    The runner first forgets the extents `dropped` in the second tier and empties that list, copies
    `offloads` there and then `restores` and `unit_restores` to the device, then computes. Beside
    that the extents `prefetches`, and no others, travel to the devices, for restores of plans to
    come.
    """

    scheduled: list[ScheduledSequence]
    num_tokens: int
    num_rows: int
    num_decodes: int
    offloads: list[Offload]
    restores: list[Restore]
    step_id: int
    num_proposals: int = 0  # items with proposals; they come after the decodes
    num_guesses: int = 0  # tokens that a model adds for each sequence after the step
    proposing_seconds: float = 0.0  # in making this plan
    micro_batch: int = 0
    dropped: list[int] = field(default_factory=list)
    prefetches: list[int] = field(default_factory=list)
    unit_restores: list[UnitRestore] = field(default_factory=list)

    @property
    def read_extents(self) -> list[int]:
        """The numbers of the extents that are read, some of them more than once."""
        units = (number for each in self.unit_restores for number, _ in each.units)
        return [*(extent for extent, _ in self.restores), *units]

    @property
    def num_rowwise(self) -> int:
        """How many items come before the chunks: their tokens attend one by one."""
        return self.num_decodes + self.num_proposals

    @property
    def chunks(self) -> list[ScheduledSequence]:
        """Parts of prompts: what comes after the sequences that sample every step."""
        return self.scheduled[self.num_rowwise :]


class StepOutput(NamedTuple):
    """One entry per logit row in the order of the plan; NumPy arrays.

    A row inside a prompt (requests with `prompt_logprobs`) reports the prompt's next token as
    `token_ids` and that token's log-probability; every other row the sampled token. `logprobs`
    may be None when no sequence of the plan asks for any, the `top_` arrays when none asks for
    more than its own token's. `guesses` are one for each sequence of a plan that wants them, of
    what follows the last of its rows that counts. `notes` are told of each token, not row.
    """

    token_ids: np.ndarray  # [rows] int
    is_finite: np.ndarray  # [rows] bool
    logprobs: np.ndarray | None = None  # [rows] float, of `token_ids`
    top_ids: np.ndarray | None = None  # [rows, k] int, most likely first
    top_logprobs: np.ndarray | None = None  # [rows, k] float
    guesses: list[ModelGuess] | None = None
    notes: np.ndarray | None = None  # [tokens, ...], in the order of the plan


@runtime_checkable
class Runner(Protocol):
    """Computes steps, in the order in which they are given."""

    def run(self, plan: StepPlan, mode: Mode, previous_handle: Any) -> Any:
        """Start a step and return its handle without waiting.

        `previous_handle` is that of the step before of the same micro-batch, or None where none is
        in flight.
        """
        ...

    def is_ready(self, handle: Any) -> bool:
        """Whether `fetch` would return, or raise, without waiting."""
        ...

    def fetch(self, handle: Any) -> StepOutput:
        """Wait for a step. Raises whatever made it fail."""
        ...

    def reset(self) -> None:
        """Rebuild the KV pool after a failed step; what was in it is lost."""
        ...


@dataclass(slots=True)
class Event:
    """Something that happened to one continuation; text is made of it elsewhere.

    `finish_reason` is set exactly once per index, `is_last` on exactly one event per request, its
    terminal one. A stop id ends `token_ids` and stands in `stop_token_id`.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...] = ()  # several where a proposal was right
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each, where asked for
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: str | None = None
    error_code: str | None = None  # constraint_failed, non_finite, device_oom or step_failed
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # once, with the first token
    metrics: RequestMetrics | None = None  # with finish_reason
    is_last: bool = False
    mode: str = ""  # of the step that sampled `token_ids`; empty where none did
    version: int = 0  # of the weights that it was computed with
    notes: Any = None  # with finish_reason, where asked for: what is kept of the tokens


def derive_seed(seed: int, index: int) -> int:
    """The 31-bit seed of continuation `index`: the same for the same pair, anywhere."""
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") & INT32_MAX
