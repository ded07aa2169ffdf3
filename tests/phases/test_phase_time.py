"""What phases take: how often they change, how full decode steps are, and who waits for what.

Steps and switches are counted, against schedules by hand; a replay that computed every token right
could still take twice as long.
"""

import heapq
import math

import pytest
from echo_kit import HOST_BLOCK_BYTES, generate, runner_of
from phases_kit import exchange_of, make_phases
from time_kit import of_tokens

from shiftjax.phases.resharding import ReshardingState


def requests_of(num: int, *lengths: int):
    """Prompts of nine tokens, which are three blocks, and outputs of these lengths, in turn."""
    return [
        of_tokens(f"r{n}", lengths[n % len(lengths)], float(n), prompt=[n % 13] * 9)
        for n in range(num)
    ]


def watch_switches(engine) -> list[tuple[str, int, int]]:
    """(next phase, sequences that are parked, host blocks that are needed), of each switch."""
    seen, exchange, load = [], exchange_of(engine), exchange_of(engine).load

    def noting(phase):
        state = engine.stats().find(ReshardingState)
        seen.append((phase, state.num_parked, state.num_held_bytes // HOST_BLOCK_BYTES))
        load(phase)

    exchange.load = noting
    return seen


# ------------------------------------------------------------------ switches


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("options", [{"pp": (1, 1)}, {"pp": (4, 1)}, {"dp": (2, 2), "pp": (2, 1)}])
@pytest.mark.parametrize(("num_host_blocks", "cycle"), [(3, 1), (10, 3), (31, 10), (1000, 20)])
def test_phases_change_as_seldom_as_the_host_allows(num_host_blocks, cycle, options, overlap):
    """The transition-minimising schedule: prompts until the host is full, decodes until it is empty

    Each cycle but the last has as many prompts as the host holds, so that there are as few as can
    be, and the devices begin with prompts and end with decodes.
    """
    options = options | {"overlap": overlap, "prefix_caching": False}
    engine = make_phases(num_host_blocks=num_host_blocks, **options)
    seen = watch_switches(engine)
    generate(engine, *requests_of(20, 6))
    num_cycles = math.ceil(20 / cycle)
    parked = [cycle] * (num_cycles - 1) + [20 - cycle * (num_cycles - 1)]
    assert [held for phase, *held in seen if phase == "decode"] == [[n, 3 * n] for n in parked]
    assert [held for phase, *held in seen if phase == "prefill"] == [[0, 0]] * (num_cycles - 1)
    assert engine.stats().find(ReshardingState).num_switches == 2 * num_cycles - 1


def test_prompts_are_computed_in_full_steps():
    """The transition-minimising schedule gains nothing if prompts come one in a step."""
    budgets = {"max_num_batched_tokens": 30, "max_num_seqs": 20, "prefix_caching": False}
    engine = make_phases(pp=(1, 1), num_host_blocks=1000, **budgets)
    generate(engine, *requests_of(20, 6))
    tokens = [plan.num_tokens for plan in runner_of(engine).plans if plan.scheduled]
    assert tokens == [30] * 6  # of 20 prompts of 9


# ------------------------------------------------------------------ occupancy of decodes


def steps_by_hand(lengths: list[int], num_slots: int) -> int:
    """Steps until all are done, if the next begins in the step after one has ended."""
    free_at = [0] * num_slots
    for length in lengths:
        heapq.heappush(free_at, heapq.heappop(free_at) + length)
    return max(free_at)


@pytest.mark.parametrize(
    ("options", "num_slots"),
    [
        ({"max_num_seqs": 4}, 4),
        ({"block_size": 16, "num_blocks": (64, 1 + 4), "watermark": 0.0}, 4),  # one for each
        ({"max_num_seqs": 1}, 1),
    ],
)
def test_decodes_swap_in_what_is_parked_as_slots_come_free(options, num_slots):
    """Continuous batching of decodes: no slot is empty in any step while a sequence is parked."""
    engine = make_phases(pp=(1, 1), num_host_blocks=1000, overlap=False, **options)
    lengths = [2, 7, 3, 6, 2, 4, 7, 2, 5, 3, 6, 7, 2]
    generate(engine, *requests_of(len(lengths), *lengths))
    plans = runner_of(engine, 1).plans
    decoded = [length - 1 for length in lengths]  # the first token comes with the prompt
    assert len(plans) == steps_by_hand(decoded, num_slots)
    begins = {}
    for number, plan in enumerate(plans):
        for item in plan.scheduled:
            begins.setdefault(item.sequence.request.request_id, number)
    assert [*begins] == [f"r{n}" for n in range(len(lengths))]  # in the order of their arrival
    waiting = plans[: max(begins.values())]
    assert {plan.num_decodes for plan in waiting} == {num_slots}


@pytest.mark.parametrize("num_micro_batches", [2, 4])
def test_micro_batches_of_decodes_are_equally_full_while_sequences_are_parked(num_micro_batches):
    """Pipelined decodes: each step takes 1/PP of the sequences that are resident."""
    engine = make_phases(
        pp=(1, num_micro_batches), num_host_blocks=1000, max_num_seqs=8, overlap=False
    )
    generate(engine, *requests_of(40, 6))
    plans = runner_of(engine, 1).plans
    assert {plan.num_decodes for plan in plans} == {8 // num_micro_batches}
    assert len(plans) == 40 * 5 // (8 // num_micro_batches)


@pytest.mark.parametrize("overlap", [True, False])
def test_groups_that_decode_share_what_is_parked(overlap):
    """Data parallel decodes: no group has more than its part to do, so none ends long before."""
    engine = make_phases(dp=(1, 2), pp=(1, 1), num_host_blocks=1000, overlap=overlap)
    generate(engine, *requests_of(16, 6))
    steps = [sum(plan.num_tokens for plan in runner_of(engine, lane).plans) for lane in (1, 2)]
    assert steps == [8 * 5, 8 * 5]
