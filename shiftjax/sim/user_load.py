"""A closed loop of users as the load that a plan is made for. No JAX.

Each user waits for the answer, thinks, and asks again, so the load follows the servers: slower ones
are asked less often. Users are shared out evenly, and stay with their server. A replay begins with
all of them asking at once, as no service does; the first answers are left out (`trials.py`).
"""

from collections.abc import Sequence

from shiftjax.sim.closed_loop import ClosedLoop, closed_loop
from shiftjax.sim.estimate import Workload
from shiftjax.sim.load import LEAST_REQUESTS, Load, mean_of, new_share, within, words_of
from shiftjax.sim.trace import TraceRequest, requests_at

ROUNDS = 4  # requests of a user in a replay, the first one included


def even_users(
    each: Workload, think: float, length_cv: float = 0.0, longest: int | None = None
) -> Load:
    """Users whose requests have lengths around these means, of `longest` tokens at most."""

    def of_one(users: float, servers: int, seed: int = 0) -> ClosedLoop:
        own = round(load.each(users, servers))
        num, lengths = num_requests(own), (each.num_prompt_tokens, each.num_output_tokens)
        found = requests_at([0.0] * num, *lengths, length_cv, seed)
        requests = [within(request, longest) for request in found]
        return closed_loop(requests, own, think_seconds=think, seed=seed)

    words = f"{words_of(each, length_cv)}; {_words(think)}"
    load = Load(each, of_one, in_words=words, think=think)
    return load


def users_of(requests: Sequence[TraceRequest], think: float, longest: int | None = None) -> Load:
    """Users who ask the requests of a trace, whenever these came.

    A seed says which of the servers it is. Raises ConfigError where a request has more than
    `longest` tokens.
    """

    def of_one(users: float, servers: int, seed: int = 0) -> ClosedLoop:
        own = round(load.each(users, servers))
        found = requests[seed % servers :: servers][: num_requests(own)]
        return closed_loop(found, own, think_seconds=think, seed=seed)

    words = f"{len(requests):,} requests of a trace; {_words(think)}"
    mean, share = mean_of(requests, longest), new_share(requests)
    load = Load(mean, of_one, in_words=words, new_share=share, think=think)
    return load


def num_requests(users: int) -> int:
    """How many requests a replay has for so many users of one server."""
    return max(LEAST_REQUESTS, ROUNDS * users)


def _words(think: float) -> str:
    return f"users think for {think:g} s on average" if think else "users ask again at once"
