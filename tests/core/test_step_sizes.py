"""The seam for sizes of steps: who may pass whom, and what a chooser is told."""

import random

import pytest
from echo_kit import Listener, generate, make_engine, make_request, run_to_end, runner_of

from shiftjax.core.step_sizes import Demand, StepSizes, Turn, due_seconds
from shiftjax.parallel.grid import Mode

PATIENCE = 0.5  # seconds for each prompt token


class Told(StepSizes):
    """Steps of a size that a test says; remembers what it was told."""

    chooses = True

    def __init__(self, size: int):
        self.size = size
        self.demands: list[Demand] = []
        self.came: list[tuple[float, int]] = []
        self.answers: list[int] = []

    def choose(self, demand):
        self.demands.append(demand)
        return self.size

    def arrived(self, seconds, num_tokens):
        self.came.append((seconds, num_tokens))

    def ended(self, num_output_tokens):
        self.answers.append(num_output_tokens)


def engine_with(size: int | None = None, patience: float = PATIENCE, **options):
    engine = make_engine(**options)
    engine.patience = patience
    for lane in engine.lanes:
        if size is not None:
            lane.scheduler.sizes = Told(size)
    return engine


def first_steps(engine) -> list[str]:
    """The requests in the order in which they first are in a step."""
    plans = runner_of(engine).plans
    names = [s.sequence.request.request_id for plan in plans for s in plan.scheduled]
    return list(dict.fromkeys(names))


# ------------------------------------------------------------------ the order


def test_a_shorter_prompt_passes_a_longer_one_unless_that_has_waited():
    engine = engine_with(max_num_batched_tokens=8)
    for name, length, arrival in (("a", 8, 0.0), ("long", 30, 0.0), ("b", 4, 2.0), ("c", 4, 14.0)):
        engine.add_request(make_request(name, [1] * length, arrival, max_tokens=1))
    # Due at 4, 15, 4 and 16: b comes before the long one, and c, which came 14 s after, does not.
    assert [name for name, _ in engine.waiting()] == ["a", "b", "long", "c"]
    run_to_end(engine, Listener())
    assert first_steps(engine) == ["a", "b", "long", "c"]


@pytest.mark.parametrize("seed", range(30))
def test_a_prompt_is_passed_only_by_what_comes_within_its_patience(seed):
    rng = random.Random(seed)
    engine = engine_with(max_num_batched_tokens=8, num_blocks=20, prefix_caching=False)
    now, requests = 0.0, {}
    for number in range(30):
        now += rng.expovariate(0.5)
        name = str(number)
        prompt = [rng.randrange(13) for _ in range(rng.randrange(1, 30))]
        requests[name] = make_request(name, prompt, now, max_tokens=rng.randrange(1, 6))
        engine.add_request(requests[name])
        engine.step(now)
    run_to_end(engine, Listener())
    place = {name: at for at, name in enumerate(first_steps(engine))}
    num_passed = 0
    for first in requests.values():
        for later in requests.values():
            waited = later.arrival_seconds - first.arrival_seconds
            if waited > 0 and place[later.request_id] < place[first.request_id]:
                num_passed += 1
                assert waited < PATIENCE * len(first.prompt_token_ids)
    assert num_passed


def test_priority_comes_before_length():
    engine = engine_with()
    engine.add_request(make_request("short", [1], priority=1))
    engine.add_request(make_request("long", [1] * 30, priority=0))
    assert [name for name, _ in engine.waiting()] == ["long", "short"]


def test_without_patience_requests_run_in_order_of_arrival():
    engine = engine_with(patience=0.0)
    for number, length in enumerate((30, 3, 20)):
        engine.add_request(make_request(str(number), [1] * length, float(number)))
    assert [name for name, _ in engine.waiting()] == ["0", "1", "2"]
    assert due_seconds(make_request("a", [1] * 9, 3.0), 0, 0.0) == 3.0


def test_what_a_cache_has_counts_as_nothing_to_compute():
    """Of 40 tokens 36 are known, of which a prompt of 20 others knows none."""
    engine = engine_with()
    shared = [n % 13 for n in range(40)]
    generate(engine, make_request("before", shared, max_tokens=2))
    engine.add_request(make_request("new", [7] * 20, 1.0, max_tokens=1))
    engine.add_request(make_request("known", shared, 1.5, max_tokens=1))
    engine.add_request(make_request("secret", shared, 1.6, max_tokens=1, cache_salt="x"))
    assert [name for name, _ in engine.waiting()] == ["known", "new", "secret"]
    by_name = {entry[-1].request_id: entry[1] for entry in engine._queue}
    assert by_name == {"known": 1.5 + 2.0, "new": 1.0 + 10.0, "secret": 1.6 + 20.0}


def test_what_half_of_the_groups_know_counts_half():
    engine = engine_with(dp=2)
    shared = [n % 13 for n in range(41)]
    generate(engine, make_request("before", shared, max_tokens=2))
    engine.add_request(make_request("known", shared, 1.0, max_tokens=1))
    assert engine._queue[0][1] == 1.0 + PATIENCE * (41 - 40 / 2)


def test_a_look_up_changes_nothing_and_is_right():
    """It says what an admission finds, for prompts that end at blocks and between them."""
    engine = engine_with()
    shared = [n % 13 for n in range(40)]
    generate(engine, make_request("before", shared, max_tokens=2))
    tables = engine.lanes[0].scheduler.tables
    for number, length in enumerate((1, 4, 5, 17, 39, 40)):
        request = make_request(str(number), shared[:length], max_tokens=1)
        before = tables.num_prefix_query_tokens
        known = tables.num_known_tokens(request, [])
        assert tables.num_prefix_query_tokens == before
        (outcome,) = generate(engine, request).values()
        assert outcome.last.metrics.num_cached_tokens == known == (length - 1) // 4 * 4


def test_who_is_preempted_keeps_its_place():
    engine = engine_with(num_blocks=12, max_num_batched_tokens=16, watermark=0.0)
    requests = [make_request(str(n), [1] * (3 + 4 * n), max_tokens=20) for n in range(4)]
    generate(engine, *requests)
    assert sum(engine.lanes[0].scheduler.num_preemptions.values())
    for plan in runner_of(engine).plans:
        for item in plan.scheduled:
            request = item.sequence.request
            number = int(request.request_id)
            due = due_seconds(request, 0, PATIENCE)
            assert item.sequence.order == (0, due, number, 0)


# ------------------------------------------------------------------ the size


def test_a_step_has_no_more_tokens_than_is_said_and_all_of_its_decodes():
    engine = engine_with(size=5)
    generate(engine, *(make_request(str(n), [n] * 9, max_tokens=12) for n in range(3)))
    plans = runner_of(engine).plans
    with_chunks = [plan for plan in plans if plan.chunks]
    assert max(plan.num_tokens for plan in with_chunks) == 5
    assert len(with_chunks) > 5
    assert max(plan.num_decodes for plan in plans) == 3


def test_a_size_that_the_decodes_fill_lets_one_prompt_token_through():
    """Whoever says nonsense does not stop prompts."""
    engine = engine_with(size=0)
    requests = [make_request(str(n), [1] * 9, max_tokens=3) for n in range(2)]
    outcomes = generate(engine, *requests).values()
    assert [each.last.finish_reason for each in outcomes] == ["length"] * 2


def test_what_a_chooser_is_told():
    engine = engine_with(size=5, max_num_seqs=4)
    sizes = engine.lanes[0].scheduler.sizes
    shared = [5, 6, 7, 8, 9, 10, 11, 12]
    generate(engine, make_request("a", shared, max_tokens=2, ignore_eos=True))
    assert sizes.answers == [2] and sizes.came == [(0.0, 8)]
    sizes.demands.clear()
    for number, prompt in enumerate(([1] * 4, [2] * 12, [*shared, 1], [3] * 3, [4] * 3, [5] * 3)):
        engine.add_request(make_request(str(number), prompt, 0.5, max_tokens=9, ignore_eos=True))
    engine.step(1.0)
    engine.step(2.0)
    first, second = sizes.demands
    # By what has to be computed: 1 of nine; 3, 3 and 3; 4 of 4; 12. Two have no place.
    assert first.prompts == [(1, 8), (3, 0), (3, 0), (3, 0)]
    assert (first.num_decodes, first.context, first.most) == (0, 0, 32)
    assert (first.num_begun, first.num_more, first.num_waiting) == (0, 0, 6)
    assert first.turn == Turn(1.0, 2, Mode(2, 1), True)
    assert sizes.came[1:] == [(0.5, n) for n in (1, 3, 3, 3)]  # the others wait in front
    # Five tokens: two of the third are left. The blocks of all hold 20, of which it has three.
    assert second.prompts == [(2, 1), (3, 0)]
    assert (second.num_decodes, second.context, second.most) == (2, 17, 32)
    assert (second.num_begun, second.num_more, second.num_waiting) == (1, 0, 3)


def test_continuations_share_the_prompt_that_the_first_computes():
    engine = engine_with(size=32)
    engine.add_request(make_request("a", [1] * 9, n=3, seed=1))
    engine.step(0.0)
    (demand,) = engine.lanes[0].scheduler.sizes.demands
    assert demand.prompts == [(9, 0), (1, 8), (1, 8)]


def test_a_chooser_is_not_asked_where_only_decodes_run():
    engine = engine_with(size=10)
    sizes = engine.lanes[0].scheduler.sizes
    generate(engine, make_request("a", [1] * 8, max_tokens=20, ignore_eos=True))
    assert len(sizes.demands) == 1
