"""How many groups compute prompts alone, by predicted seconds. No JAX."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shiftjax.fleet.step_prices import Coming, StepPrices
from shiftjax.sim.roles import Role, RoleView
from shiftjax.targets import Target

MEMORY_SECONDS = 5.0  # for which what has come tells of what will come
LEAST_SPAN_SECONDS = 1.0  # that a rate is taken over
MARGIN = 0.05  # of the predicted seconds, which a change must save at least
HOLD_SECONDS = 1.0  # between changes, at least
BUSY = 0.95  # of the time of groups that compute prompts: what is beyond queues up
HORIZON_SECONDS = 10.0  # for which it does
MISSED_SECONDS = 10.0  # that a request inside its target is worth (`sizing/target_sizes.py`)
MIXED_SPREAD = 1.4  # of a late answer's tokens over the mean, where prompts come in between
DOUBT = 0.4  # of a target, around it: as far may a prediction be off
ANSWER = 128.0  # tokens, that a request is taken to wait for
KEPT_FREE = 0.05  # of a group's KV


@dataclass
class CostRoles:
    """The split of equal groups with the least predicted seconds of a request.

    With p of G groups for prompts alone these are busy for a share b of the time, in full steps at
    the rate at which requests come. A request waits for what is there, for its own prompt of S
    seconds, and b / (1 - b) S / 2p for others (M/D/1, with p servers as one quicker one). Its
    answer takes as many steps of decodes as it has tokens. With p = 0 groups are mixed: steps with
    prompts are among those of decodes, as a fleet prices them (`StepPrices.token_seconds`). A
    request that is predicted to pass its target costs `MISSED_SECONDS` more.
    """

    num_groups: int
    steps: StepPrices  # of one group, by the width `width`
    width: int
    num_kv_tokens: int  # of a group
    max_num_seqs: int  # of a group
    target: Target
    _rate: float = 0.0
    _came: float = 0.0
    _span: float = 0.0
    _seen_at: float = 0.0
    _num_seen: int = 0
    _prompt: float = 0.0  # tokens that were computed of one, a moving mean
    _held_until: float = 0.0

    def first(self) -> Sequence[Role]:
        """Return that all are mixed."""
        return ("mixed",) * self.num_groups

    def arrange(self, view: RoleView) -> Sequence[Role] | None:
        """Return the roles that are predicted to be quickest, if they are by far enough."""
        self._see(view)
        if view.now < self._held_until or not self._prompt:
            return None
        now = sum(role == "prefill" for role in view.roles)
        seconds = [self._seconds(view, p) for p in range(self.num_groups)]
        best = min(range(self.num_groups), key=seconds.__getitem__)
        if best == now or seconds[best] > (1 - MARGIN) * seconds[now]:
            return None
        self._held_until = view.now + HOLD_SECONDS
        return roles_of(view, best)

    def _see(self, view: RoleView) -> None:
        since = view.now - self._seen_at
        kept = math.exp(-since / MEMORY_SECONDS)
        self._came = self._came * kept + view.num_seen - self._num_seen
        self._span = self._span * kept + since
        self._seen_at, self._num_seen = view.now, view.num_seen
        self._rate = self._came / max(self._span, LEAST_SPAN_SECONDS)
        num = sum(view.num_prompts) + view.num_queued
        if num:
            mean = (sum(view.num_prompt_tokens) + view.num_queued_tokens) / num
            self._prompt += (0.1 if self._prompt else 1.0) * (mean - self._prompt)

    def _seconds(self, view: RoleView, p: int) -> float:
        """Predicted seconds of a request that comes now."""
        running = sum(view.num_running)
        waiting = sum(view.num_prompts) + view.num_queued
        tokens = sum(view.num_prompt_tokens) + view.num_queued_tokens
        held = sum(view.num_held_tokens)
        context = (held + tokens) / max(1, running + waiting)
        predict = self._split if p else self._mixed
        first, token = predict(p, running, waiting, tokens, context)
        groups = self.num_groups - p
        of_group = min(self.num_kv_tokens, self.max_num_seqs * max(1.0, context))
        room = (1 - KEPT_FREE) * groups * of_group
        if held + tokens > room:  # who finds no place waits for others to end
            first += (held + tokens - room) / room * ANSWER * token
        spread = 1.0 if p else MIXED_SPREAD
        missed = _missed(first, self.target.ttft) + _missed(spread * token, self.target.tpot)
        return first + ANSWER * token + MISSED_SECONDS * min(1.0, missed)

    def _split(
        self, p: int, running: int, waiting: int, tokens: float, context: float
    ) -> tuple[float, float]:
        alone = self.steps.prompt_seconds(self.width, 0, self._prompt, self._prompt)
        rate = p * self.steps.prefill_rate(self.width)
        backlog, busy = tokens / rate, self._rate * self._prompt / rate
        share = min(busy, BUSY)
        queue = share / (1 - share) * alone / 2 / p + max(0.0, busy - BUSY) * HORIZON_SECONDS
        num = (running + waiting) / (self.num_groups - p)
        token = self.steps.decode_seconds(self.width, math.ceil(num), round(context))
        return backlog + queue + alone, token

    def _mixed(
        self, p: int, running: int, waiting: int, tokens: float, context: float
    ) -> tuple[float, float]:
        part = 1 / self.num_groups
        num = (running + waiting) * part
        slots = max(1.0, self.max_num_seqs / ANSWER)
        coming = Coming(self._rate, self._prompt, part, slots)
        token = self.steps.token_seconds(self.width, num, context, coming)
        prices, each = self.steps.prompt_seconds, self._prompt
        alone = prices(self.width, num, each, each)
        busy = self._rate * part * alone
        share = min(busy, BUSY)
        queue = share / (1 - share) * alone / 2 + max(0.0, busy - BUSY) * HORIZON_SECONDS
        backlog = tokens * part / each * alone
        return backlog + queue + alone, token


def _missed(seconds: float, limit: float) -> float:
    """The chance that what is predicted to take so long passes a limit."""
    if not math.isfinite(limit):
        return 0.0
    return min(1.0, max(0.0, (seconds / limit - 1) / DOUBT + 0.5))


def roles_of(view: RoleView, num_prefill: int) -> tuple[Role, ...]:
    """Return roles with so many groups for prompts, changing those with least to do.

    Groups that compute prompts stay; then those with the fewest held tokens become such.
    """
    order = sorted(
        range(len(view.roles)),
        key=lambda n: (view.roles[n] != "prefill", view.num_held_tokens[n]),
    )
    others: Role = "decode" if num_prefill else "mixed"
    found: list[Role] = [others] * len(view.roles)
    for n in order[:num_prefill]:
        found[n] = "prefill"
    return tuple(found)
