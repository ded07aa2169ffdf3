"""What binds latency now, in a sentence with the setting to change. Pure functions. No JAX."""

from typing import NamedTuple

FULL_KV = 0.9  # share of blocks from which the next prompt is likely to find no room
ROOM_KV = 0.7  # share up to which more sequences are likely to find room
MOSTLY = 0.5  # share of recent tokens that were prompts, from which prompts bind decodes

SMALL_STEP = 2048  # tokens, up to which larger steps are likely to compute prompts faster


class Look(NamedTuple):
    """What is known of a moment; rates and means are of the last seconds, None: nothing was."""

    running: int  # sequences
    waiting: int
    waiting_tokens: int  # of their prompts
    kv: float  # share of blocks in use
    most_running: int | None = None  # max_num_seqs of all groups
    num_groups: int | None = 1
    most_waiting: int | None = None
    most_step_tokens: int | None = None  # max_num_batched_tokens
    step_seconds: float | None = None
    step_tokens: float | None = None
    mode: str = ""
    prompt_rate: float = 0.0  # prompt tokens computed per second
    prompt_share: float = 0.0  # of the tokens of recent steps
    queue_seconds: float | None = None  # mean of those whose first token has come
    prompt_seconds: float | None = None
    num_preempted: int = 0
    peak_running: int = 0  # the most that ran in the last second: in a single step one may be less

    @property
    def most_now(self) -> int:
        """Sequences that run, whatever a single step has."""
        return max(self.running, self.peak_running)


class Bound(NamedTuple):
    """What binds; `seconds` is the wait that it comes to, None: unknown."""

    code: str  # idle, max_num_seqs, kv, prompts, step; stuck
    words: str
    change: str = ""  # what to do about it
    seconds: float | None = None


def bound_of(look: Look) -> Bound:
    """Return what a new request, or the next token, waits for longest."""
    if not look.running + look.waiting:
        return Bound("idle", "nothing runs and nothing waits")
    if not look.waiting:
        return _unqueued(look)
    has_no_blocks = look.kv >= MOSTLY and not look.prompt_rate
    is_full = look.most_running is not None and look.most_now >= look.most_running
    if look.kv >= FULL_KV or look.num_preempted or (has_no_blocks and not is_full):
        return _refusing(look, _by_blocks(look))
    if is_full:
        return _refusing(look, _by_sequences(look))
    return _refusing(look, _by_prompts(look))


def _by_blocks(look: Look) -> Bound:
    preempted = f", {look.num_preempted:,} preempted" if look.num_preempted else ""
    words = f"held back by KV blocks: {look.kv:.0%} in use, {_many(look.waiting, 'sequence')} wait"
    change = "more room: --kv-cache-dtype fp8, a higher --memory-fraction, or more devices"
    return Bound("kv", words + preempted, change, look.queue_seconds)


def _by_sequences(look: Look) -> Bound:
    groups = f" in {look.num_groups} groups" if (look.num_groups or 1) > 1 else ""
    words = (
        f"held back by max_num_seqs: {look.most_now:,} of {look.most_running:,}{groups}, "
        f"KV {look.kv:.0%}, {_many(look.waiting, 'sequence')} wait"
    )
    queue = "" if look.queue_seconds is None else f", {_duration(look.queue_seconds)} in the queue"
    has_room = look.kv <= ROOM_KV
    change = (
        "raise --max-num-seqs: there is KV for more"
        if has_room
        else "more devices or groups: with a higher --max-num-seqs KV blocks would run out next"
    )
    return Bound("max_num_seqs", words + queue, change, look.queue_seconds)


def _by_prompts(look: Look) -> Bound:
    seconds = look.waiting_tokens / look.prompt_rate if look.prompt_rate else None
    wait = "" if seconds is None else f", {_duration(seconds)}"
    words = f"prompts: {look.waiting_tokens:,} tokens wait{wait}"
    return Bound("prompts", words, _for_prompts(look), seconds)


def _for_prompts(look: Look) -> str:
    most, size = look.most_step_tokens, look.step_tokens
    if most is not None and size is not None and size > MOSTLY * most:
        change = "raise --max-num-batched-tokens" if most < SMALL_STEP else "more devices or groups"
        return f"steps are full ({most:,} tokens): {change}"
    return "more devices or groups; a prefix cache helps where prompts begin alike"


def _refusing(look: Look, bound: Bound) -> Bound:
    if look.most_waiting is None or look.waiting < look.most_waiting:
        return bound
    more = f"; the queue of {look.most_waiting:,} is full, more are refused"
    return bound._replace(words=bound.words + more)


def _unqueued(look: Look) -> Bound:
    if look.prompt_share > MOSTLY and look.prompt_seconds is not None:
        took = _duration(look.prompt_seconds)
        words = f"prompts: nothing waits, {look.prompt_share:.0%} of what steps compute is prompts"
        bound = Bound("prompts", f"{words}, {took} each", "", look.prompt_seconds)
        return bound._replace(change=_for_prompts(look))
    if look.step_seconds is None:
        return Bound("step", "nothing waits: the first step runs")
    words = f"nothing waits: a token takes a step, {_duration(look.step_seconds)}"
    where = f" in {look.mode.upper()}" if look.mode else ""
    change = "fewer sequences at once, --speculation or more devices make it shorter"
    return Bound("step", words + where, change, look.step_seconds)


class StepInFlight(NamedTuple):
    """A step that the engine waits for."""

    mode: str
    num_tokens: int
    num_sequences: int
    units: tuple[int, int] | None  # first and last of its group's; None: there is one group


def stuck_bound(step: StepInFlight | None, stalled_seconds: float, watchdog: float) -> Bound:
    """Return which step hangs, since when, and when the watchdog ends the process."""
    left = max(0.0, watchdog - stalled_seconds)
    change = f"the process ends in {_duration(left)} with exit code 75 (--watchdog-timeout)"
    since = f"for {_duration(stalled_seconds)}"
    if step is None:
        words = f"the engine's thread has hung {since}, between steps"
        return Bound("stuck", words, change, left)
    where = "" if step.units is None else f" on units {step.units[0]} to {step.units[1]}"
    what = f"{_many(step.num_tokens, 'token')}, {_many(step.num_sequences, 'sequence')}"
    words = f"a step in {step.mode.upper()}{where} ({what}) has run {since}"
    return Bound("stuck", words, change, left)


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def _duration(seconds: float) -> str:
    """A time for people: 31 ms, 1.3 s, 48 s, 4 min 50 s."""
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 90:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if rest else f"{minutes} min"
