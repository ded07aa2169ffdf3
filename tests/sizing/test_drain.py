"""The best size of steps: what it promises, and a reference that takes the steps one by one."""

import random
from bisect import bisect_left

import pytest

from shiftjax.sizing.drain import SLACK, WEIGHT, Queue, _sized, best_size

SIZES = [16 * 2**i for i in range(10)]


class Table:
    """Seconds of steps: by size, and by prompt token on top."""

    def __init__(self, rng: random.Random):
        self.fixed, self.each = rng.uniform(1e-3, 2e-2), rng.uniform(1e-6, 1e-4)
        self.slope = rng.choice([0.0, 1e-6, 2e-5])
        self.sizes = SIZES

    def __call__(self, i, num_prompt_tokens):
        return self.fixed + self.each * self.sizes[i] + self.slope * num_prompt_tokens


def ends_of(lengths):
    return [sum(lengths[: i + 1]) for i in range(len(lengths))]


@pytest.mark.parametrize("seed", range(200))
def test_a_size_is_compiled_and_holds_the_decodes(seed):
    rng = random.Random(seed)
    num_decodes, most = rng.randrange(0, 256), rng.choice([1000, 1024, 8192])
    lengths = [rng.randrange(1, 9000) for _ in range(rng.randrange(1, 32))]
    more = rng.randrange(0, 9)
    queue = Queue(num_decodes, ends_of(lengths), more, 700 * more, rng.choice([0, 0.5, 9.0]))
    got = best_size(SIZES, most, queue, Table(rng))
    assert got in (*SIZES, most) and num_decodes < got <= most


class Run:
    """Steps of one size until all prompts are done, one by one."""

    def __init__(self, queue: Queue, lengths, table, size):
        self.queue, self.size = queue, size
        left, clock, steps = list(lengths), 0.0, 0
        first, made_after = 0.0, []  # by prompt: the step that has its first token
        alone = table(bisect_left(SIZES, max(1, queue.num_decodes)), 0)
        delays = []
        while any(left):
            room, ended = size - queue.num_decodes, []
            for j, n in enumerate(left):
                taken = min(n, room)
                room, left[j] = room - taken, n - taken
                ended += [j] if taken and not left[j] else []
            num_new = size - queue.num_decodes - room
            is_last = not any(left)
            bucket = next(b for b in SIZES if b >= queue.num_decodes + num_new)
            padded = min(size, bucket) if is_last else size
            seconds = table(SIZES.index(padded), num_new)
            clock, steps = clock + seconds, steps + 1
            delays.append(seconds - alone)
            first += clock * len(ended)
            made_after += [steps] * len(ended)
        self.drain, self.first = clock, first + queue.rate * clock**2 / 2
        full = table(SIZES.index(size), min(size - queue.num_decodes, sum(lengths))) - alone
        num = queue.num_decodes
        late = num * min(queue.answer, steps - 1) * full
        late += num * delays[-1] if steps <= queue.answer else 0.0
        late += sum(min(queue.answer, steps - step) * full for step in made_after)
        self.cost = WEIGHT * self.first + late


def reference(queue: Queue, lengths, table, most=8192):
    """By size: (what it costs, whether it keeps first tokens)."""
    least = queue.num_decodes + sum(lengths)
    top = next((b for b in SIZES if b >= min(least, most)), SIZES[-1])
    runs = {b: Run(queue, lengths, table, b) for b in SIZES if queue.num_decodes < b <= top}
    bound = 1 + SLACK
    return {
        b: (
            run.cost,
            b == top
            or (run.drain <= bound * runs[top].drain and run.first <= bound * runs[top].first),
        )
        for b, run in runs.items()
    }


def check(queue: Queue, lengths, table):
    found = reference(queue, lengths, table)
    got = best_size(SIZES, 8192, queue, table)
    cost, is_kept = found[got]
    assert is_kept and cost <= min(c for c, kept in found.values() if kept) * (1 + 1e-9)
    return got, found


@pytest.mark.parametrize("seed", range(120))
def test_a_size_costs_least_of_those_that_keep_first_tokens(seed):
    """Where many are to come, all rows that the seed is even for, the arrivals decide."""
    rng = random.Random(seed)
    table, num_decodes = Table(rng), rng.randrange(1, 200)
    lengths = [rng.randrange(1, 3000) for _ in range(rng.randrange(1, 12))]
    rate = rng.uniform(50, 500) if seed % 2 == 0 else rng.uniform(0, 5)
    answer = rng.choice([3.0, 30.0, 300.0])
    check(Queue(num_decodes, ends_of(lengths), rate=rate, answer=answer), lengths, table)


def test_each_part_of_the_rule_decides_somewhere():
    """Else the reference would not see one that is missing."""
    decides = {"arrivals": 0, "bound": 0, "size": 0}
    for seed in range(150):
        rng = random.Random(seed)
        table, rate = Table(rng), (0.0, 5.0, 200.0)[seed % 3]
        lengths = [rng.randrange(1, 3000) for _ in range(rng.randrange(1, 12))]
        queue = Queue(rng.randrange(1, 200), ends_of(lengths), rate=rate, answer=300.0)
        got, found = check(queue, lengths, table)
        decides["arrivals"] += got != best_size(SIZES, 8192, queue._replace(rate=0.0), table)
        decides["bound"] += min(found, key=lambda b: found[b][0]) != got
        decides["size"] += got != max(found)
    assert min(decides.values()) >= 10, decides


def test_prompts_far_behind_are_done_halfway_on_average():
    """Ten more of 100 tokens each behind one of 100, in steps of 128 with 28 decodes, by hand."""
    table = {(1, 100): 1.0, (0, 100): 1.0, (2, 1100): 10.5}
    queue = Queue(28, [100], 10, 1000, 0.0, 4.0)
    small = _sized([64, 128, 2048], 1, queue, lambda i, n: table[i, n], 0.25)
    large = _sized([64, 128, 2048], 2, queue, lambda i, n: table[i, n], 0.25)
    # Eleven steps: the first prompt has its token after one, the others from there to the end.
    assert small == (11.0, 1.0 + 10 * (1 + 11) / 2, 0.75 * (28 * 4 + 4 + 10 * 4))
    assert large == (10.5, 11 * 10.5, 28 * 10.25)
    longer = _sized([64, 128, 2048], 1, queue._replace(answer=12.0), lambda i, n: table[i, n], 0.25)
    assert longer.late == 0.75 * (28 * 10 + 10 + 10 * 5) + 28 * 0.75


def test_with_a_single_size_nothing_changes():
    table = Table(random.Random(0))
    table.sizes = [8192]
    assert best_size([8192], 8192, Queue(64, [100]), table) == 8192


def test_decodes_that_fill_the_largest_size_leave_what_there_is():
    assert best_size(SIZES, 8192, Queue(8192, [100]), Table(random.Random(0))) == 8192
