"""The load that a plan is made for: requests of one of several servers, drawn anew by a seed.

Servers are alike and take requests in turn, as behind a router. Arrivals at all of them together
are independent of each other (Poisson), so at one of n the gaps are sums of n.

Lengths are log-normal around their means. Without a word about their spread it is near that of
public traces: the coefficient of variation of prompts is 0.96 (Azure code 2023) and 1.31 (Mooncake
conversation), of answers 2.15 and 0.73.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from shiftjax.options import ConfigError
from shiftjax.sim.estimate import Workload
from shiftjax.sim.trace import TraceRequest, arrival_times, requests_at, scale_rate

LEAST_REQUESTS = 250  # of a replay, so that a 90th percentile is one of 25
MOST_REQUESTS = 600  # unless a trace has more
LIVES = 3.0  # a replay goes on for so many times what a request takes at the limits
SEEDS = 5
ALMOST = 1e-9  # of a user, by which sums of shares are off


class Limits(NamedTuple):
    """What this share of the requests must get, in seconds."""

    ttft: float
    tpot: float
    percentile: int = 90

    def ratio(self, ttft: float, tpot: float) -> float:
        """The larger of both latencies, each as a share of its limit."""
        return max(ttft / self.ttft, tpot / self.tpot)

    def life(self, num_output_tokens: int) -> float:
        """Seconds that a request takes at the limits."""
        return self.ttft + self.tpot * num_output_tokens


class Load(NamedTuple):
    """Mean lengths, and the requests of one of so many servers under an amount of load, by a seed.

    The amount is of all servers: requests per second, or users of a closed loop (`user_load.py`).
    """

    mean: Workload
    of_one: Callable[[float, int, int], Sequence[TraceRequest]]
    rate: float | None = None  # of all, by itself
    in_words: str = ""
    new_share: float = 1.0  # of prompt tokens: others are known, if nothing is ever forgotten
    think: float | None = None  # seconds between a user's requests; None: there are no users

    @property
    def word(self) -> str:
        """What the amount is, as a name of a column."""
        return "rate" if self.think is None else "users"

    @property
    def unit(self) -> str:
        """What the amount is counted in, for people."""
        return "requests/s" if self.think is None else "users"

    def each(self, amount: float, servers: int) -> float:
        """What one of so many servers gets; of users, who are whole, the one that has most."""
        share = amount / servers
        return share if self.think is None else max(1.0, math.ceil(share - ALMOST))

    def amount(self, rate: float, seconds: float) -> float:
        """What comes to so many requests per second, each of which takes so many seconds."""
        return rate if self.think is None else rate * (self.think + seconds)

    def at_once(self, each: float, seconds: float) -> float:
        """Requests that a server has at once, on average, if each takes so many seconds."""
        return each * seconds if self.think is None else each * seconds / (self.think + seconds)

    def shown(self, amount: float, digits: int = 3) -> str:
        """An amount for people."""
        if self.think is None:
            return f"{amount:.{digits}g} requests/s"
        return f"{amount:,.0f} user{'' if round(amount) == 1 else 's'}"


def even_load(
    each: Workload, limits: Limits, length_cv: float = 0.0, longest: int | None = None
) -> Load:
    """Requests that come independently of each other, with lengths around these means.

    None has more than `longest` tokens. A replay lasts some lives of a request, so that what
    decodes at once is what decodes in the long run.
    """
    life = limits.life(each.num_output_tokens)

    def of_one(rate: float, servers: int, seed: int = 0) -> list[TraceRequest]:
        own, lengths = rate / servers, (each.num_prompt_tokens, each.num_output_tokens)
        num = min(MOST_REQUESTS, max(LEAST_REQUESTS, own * LIVES * life))
        times = arrival_times(own, num / own, cv=servers**-0.5, seed=seed)
        found = requests_at(times, *lengths, length_cv, seed)
        return [within(request, longest) for request in found]

    return Load(each, of_one, in_words=words_of(each, length_cv))


def words_of(each: Workload, length_cv: float) -> str:
    """Lengths for people."""
    spread = f", lengths log-normal with a cv of {length_cv:g}" if length_cv else ", all alike"
    words = f"{each.num_prompt_tokens:,} tokens in and {each.num_output_tokens:,} out on average"
    return words + spread


def within(request: TraceRequest, longest: int | None) -> TraceRequest:
    """The request, cut to what a model takes: a tail has no end, but users' prompts do."""
    if longest is None or request.num_prompt_tokens + request.num_output_tokens <= longest:
        return request
    output = min(request.num_output_tokens, longest // 2)
    prompt = min(request.num_prompt_tokens, longest - output)
    return replace(request, num_prompt_tokens=prompt, num_output_tokens=output)


def load_of(requests: Sequence[TraceRequest], longest: int | None = None) -> Load:
    """The requests of a trace, which servers take in turn; quicker or slower for another rate.

    A seed says which of the servers it is: with fewer servers than seeds some are the same.

    Raises ConfigError where they come at once, so that there is no rate, and where one has more
    than `longest` tokens, which no server can answer.
    """
    span = requests[-1].arrival_seconds
    if span == 0:
        raise ConfigError(["all requests of this trace come at once: there is no rate to plan for"])
    natural = len(requests) / span

    def of_one(rate: float, servers: int, seed: int = 0) -> list[TraceRequest]:
        return scale_rate(requests[seed % servers :: servers], rate / natural)

    words = f"{len(requests):,} requests of a trace"
    return Load(mean_of(requests, longest), of_one, natural, words, new_share(requests))


def mean_of(requests: Sequence[TraceRequest], longest: int | None = None) -> Workload:
    """Mean lengths of a trace. Raises ConfigError where one has more than `longest` tokens."""
    most = max(r.num_prompt_tokens + r.num_output_tokens for r in requests)
    if longest is not None and most > longest:
        too_long = sum(r.num_prompt_tokens + r.num_output_tokens > longest for r in requests)
        words = (
            f"{too_long:,} of {len(requests):,} requests of this trace have more than {longest:,}"
        )
        raise ConfigError([f"{words} tokens, which the model does not take: up to {most:,}"])
    return Workload(
        max(1, round(sum(r.num_prompt_tokens for r in requests) / len(requests))),
        max(1, round(sum(r.num_output_tokens for r in requests) / len(requests))),
    )


def new_share(requests: Sequence[TraceRequest]) -> float:
    """The share of prompt tokens in blocks that no request before has had."""
    seen: set[int] = set()
    known = total = 0
    for request in requests:
        total += request.num_prompt_tokens
        blocks, size = request.prefix_ids, request.prefix_block_tokens
        known += sum(size for block in blocks if block in seen)
        seen.update(blocks)
    return max(0.05, 1 - known / total)
