"""Random traffic for engines over audited echo runners, and what must come of it."""

from collections.abc import Iterable
from dataclasses import dataclass

from echo_kit import (
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    Listener,
    assert_quiescent,
    make_engine,
    make_request,
    reference,
    runner_of,
)
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from pallas_kernels.window import Chunk
from shiftjax.core.engine import Engine
from shiftjax.core.request import Request
from shiftjax.core.stats import EngineStats

FAST = settings(
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
tokens = st.integers(0, VOCAB_SIZE - 1)
# Prompts with common beginnings, so that the prefix cache has something to find.
STEMS = [[1] * 24, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12] * 2, [7, 7, 3, 3] * 6]


# Of cache groups: what the layers of a model see.
WINDOWS = (
    (None, 3),
    (None, 9, 9),
    (None, Chunk(8), Chunk(8), Chunk(8)),
    (None, Chunk(5)),
    (6,),
    (Chunk(8),),
    (12, 2),
)


@st.composite
def prompts(draw):
    stem = draw(st.sampled_from(STEMS))[: draw(st.integers(0, 24))]
    return stem + draw(st.lists(tokens, min_size=not stem, max_size=6))


@st.composite
def engines(draw, tightness=4, least_seqs=1, stages=(1,), windows=((),)):
    """`tightness`: the pool holds at most that many halves of the longest sequence."""
    groups = draw(st.sampled_from(windows))
    block_size = draw(st.sampled_from([1, 2, 4]))
    longest = -(-MAX_MODEL_LEN // block_size)
    max_num_seqs = draw(st.integers(least_seqs, 6))
    preemption = draw(st.sampled_from(["recompute", "swap"]))
    return make_engine(
        dp=draw(st.integers(1, 3)),
        overlap=draw(st.booleans()),
        block_size=block_size,
        num_blocks=1
        + max(1, len(groups)) * draw(st.integers(longest // 2, tightness * longest // 2)),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=draw(st.integers(max_num_seqs, 40)),
        eos_token_ids=draw(st.sampled_from([(), (0,)])),
        prefix_caching=draw(st.booleans()),
        preemption=preemption,
        num_host_blocks=draw(st.integers(2, longest)) if preemption == "swap" else 0,
        watermark=draw(st.sampled_from([0.0, 0.1])),
        max_preemptions=draw(st.integers(0, 3)),
        max_proposed_rows=draw(st.sampled_from([0, 12])),  # of engines that draft
        num_micro_batches=draw(st.sampled_from(stages)),
        windows=groups,
    )


@st.composite
def sampling_fields(draw):
    scoring = draw(st.integers(0, 9)) == 0
    max_tokens = 0 if scoring else draw(st.sampled_from([None, 1, 2, 5, 17]))
    most = 3 if max_tokens is None else max_tokens
    return {
        "n": 1 if scoring else draw(st.sampled_from([1, 1, 1, 2, 4])),
        "max_tokens": max_tokens,
        "min_tokens": draw(st.integers(0, most)),
        "seed": draw(st.none() | st.integers(0, 3)),
        "stop_token_ids": draw(st.lists(tokens, max_size=1)),
        "ignore_eos": draw(st.booleans()),
        "logprobs": draw(st.sampled_from([None, 0, 2])),
        "prompt_logprobs": 1 if scoring else draw(st.sampled_from([None, None, None, 0, 2])),
        "priority": draw(st.sampled_from([0, 0, 0, 1, -1])),
        "cache_salt": draw(st.sampled_from([None, None, "s"])),
    }


@dataclass
class Client:
    """A request, the step in which it arrives, and the one in which it is cancelled (or none)."""

    request: Request
    arrival_step: int
    cancel_step: int | None


@st.composite
def traffic(draw, least=1, most=10):
    clients = []
    for number in range(draw(st.integers(least, most))):
        fields = draw(sampling_fields())
        prompt = draw(prompts())
        longest = MAX_MODEL_LEN // 2 if fields["max_tokens"] is None else 30
        prompt = prompt[:longest]
        arrival = draw(st.integers(0, 20))
        request = make_request(f"r{number}", prompt, float(arrival), **fields)
        cancel = arrival + draw(st.integers(0, 25)) if draw(st.integers(0, 4)) == 0 else None
        clients.append(Client(request, arrival, cancel))
    return sorted(clients, key=lambda client: client.arrival_step)


def play(engine: Engine, clients: list[Client], extra_steps: int = 0):
    """Serve the traffic, checking conservation after every step; returns accepted and events."""
    listener, accepted = Listener(), []
    work = sum(_work(engine, client) for client in clients)
    # Every step with work does some: nothing starves. One of a pipeline that is not full launches
    # and commits nothing yet, so a lone sequence takes two for a token.
    turns = 2 if engine.lanes[0].scheduler.config.num_micro_batches > 1 else 1
    last_step = 21 + 26 + turns * work + extra_steps
    for step in range(last_step + 1):
        for client in clients:
            if client.arrival_step == step and _fits(engine, client.request):
                engine.add_request(client.request)
                accepted.append(client)
            if client.cancel_step == step:
                listener.hear(engine.abort(client.request.request_id))
        listener.hear(engine.step(float(step)))
        engine.check()
        if step > 46 and not engine.has_work():
            break
    assert not engine.has_work(), f"no end after {last_step} steps: {engine.stats()}"
    assert_quiescent(engine)
    assert listener.ended == {client.request.request_id for client in accepted}
    return accepted, listener


def _fits(engine: Engine, request: Request) -> bool:
    """Whether the pool can hold it alone; what cannot be held must be refused (tested below)."""
    max_tokens = request.sampling.max_tokens
    total = len(request.prompt_token_ids) + max((1 if max_tokens is None else max_tokens) - 1, 0)
    return total <= engine.limits.num_kv_tokens


def _work(engine: Engine, client: Client) -> int:
    """Steps that a request can take at worst: one token at a time, again after each preemption."""
    request = client.request
    length = engine.limits.max_length(len(request.prompt_token_ids), request.sampling.max_tokens)
    tries = 1 + engine.lanes[0].scheduler.config.max_preemptions
    return request.sampling.n * (length + 2) * tries


def check_tokens(engine: Engine, accepted: list[Client], listener: Listener, errors: set[str]):
    """Every continuation has the reference's tokens, or those before it was cut off."""
    cap = engine.lanes[0].scheduler.config.max_preemptions
    for number, client in enumerate(accepted):
        request = client.request
        for index in range(request.sampling.n):
            outcome = listener.outcomes[request.request_id, index]
            expected, reason = reference(engine, request, number, index)
            last = outcome.last
            if last.finish_reason == "abort":
                assert client.cancel_step is not None
                assert outcome.token_ids == expected[: len(outcome.token_ids)]
            elif last.finish_reason == "error":
                assert request.request_id in errors and last.error
                assert outcome.token_ids == expected[: len(outcome.token_ids)]
            else:
                assert (outcome.token_ids, last.finish_reason) == (expected, reason)
                check_logprobs(request, index, outcome)
            assert last.metrics.num_output_tokens == len(outcome.token_ids)
            assert last.metrics.num_preemptions <= cap
            assert last.metrics.num_cached_tokens < len(request.prompt_token_ids)


def check_served(engine: Engine, clients: list[Client]) -> EngineStats:
    """Serve the traffic, and find every token right; what the engine has counted."""
    accepted, listener = play(engine, clients)
    check_tokens(engine, accepted, listener, errors=set())
    return engine.stats()


FAULTS = st.dictionaries(st.integers(0, 30), st.sampled_from(["run", "fetch"]), max_size=3)
POISONED = st.sets(st.sampled_from(["r0", "r3"]))


def check_through_faults(
    engine: Engine, clients: list[Client], faults: dict[int, str], poisoned: Iterable[str] = ()
) -> tuple[list[Client], Listener]:
    """Serve the traffic while steps fail, which ends their requests only; accepted and events."""
    runners = [runner_of(engine, group) for group in range(len(engine.lanes))]
    for runner in runners:
        runner.faults, runner.poisoned = dict(faults), set(poisoned)
    lost = sum(client.request.sampling.n * (MAX_MODEL_LEN + 2) for client in clients)
    accepted, listener = play(engine, clients, extra_steps=lost * len(faults) * len(runners))
    failed = set().union(*(runner.failed_requests for runner in runners))
    check_tokens(engine, accepted, listener, errors=failed | set(poisoned))
    assert sum(runner.num_resets for runner in runners) == engine.stats().num_failed_steps
    return accepted, listener


def check_logprobs(request: Request, index: int, outcome) -> None:
    sampling = request.sampling
    asked = sampling.logprobs is not None
    assert [entry.token_id for entry in outcome.logprobs] == outcome.token_ids * asked
    assert all(len(entry.top_ids) == sampling.logprobs for entry in outcome.logprobs)
    given_events = [e.prompt_logprobs for e in outcome.events if e.prompt_logprobs is not None]
    if sampling.prompt_logprobs is None or index:
        assert not given_events
        return
    (entries,) = given_events
    prompt = list(request.prompt_token_ids)
    assert entries[0] is None and [entry.token_id for entry in entries[1:]] == prompt[1:]
    assert [entry.logprob for entry in entries[1:]] == [-(token % 7) for token in prompt[1:]]
    assert all(len(entry.top_ids) == sampling.prompt_logprobs for entry in entries[1:])
