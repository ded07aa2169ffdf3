"""The threshold between modes: which side it belongs to, where it lies, what is compiled for it."""

from types import SimpleNamespace

import pytest

from shiftjax.core.policies import make_policy
from shiftjax.core.policy import wanted_modes
from shiftjax.core.request import StepPlan
from shiftjax.costs.buckets import Bucket
from shiftjax.costs.crossing import shift_threshold
from shiftjax.costs.work import Work
from shiftjax.parallel.grid import Mode

MODES = BASE, SHIFT = Mode(2, 2), Mode(2, 1)


@pytest.mark.parametrize(("num_tokens", "mode"), [(1, SHIFT), (64, SHIFT), (65, BASE)])
def test_steps_up_to_the_threshold_are_shifts(num_tokens, mode):
    policy = make_policy("threshold", 64)
    plan = StepPlan([], num_tokens, 0, 0, [], [], 0)
    assert policy.choose(plan, MODES, 0, None) == mode
    assert policy.mode_of(Work.prefill(num_tokens), MODES, 0, None) == mode


@pytest.mark.parametrize(
    ("threshold", "both"), [(15, 16), (16, None), (17, 64), (64, None), (127, 128), (128, None)]
)
def test_only_the_bucket_that_the_threshold_lies_in_has_both_modes(threshold, both):
    buckets = [Bucket(tokens, 8) for tokens in (16, 64, 128)]
    wanted = wanted_modes(make_policy("threshold", threshold), buckets, MODES)
    for bucket, modes in wanted.items():
        one = SHIFT if bucket.tokens <= threshold else BASE
        assert set(modes) == (set(MODES) if bucket.tokens == both else {one})


@pytest.mark.parametrize(("fixed", "threshold"), [(-1.0, 0), (10.0, 19), (1e9, 1 << 16)])
def test_a_threshold_that_follows_from_costs_is_the_largest_step_that_shift_wins(fixed, threshold):
    def device_seconds(mode, work):
        return float(work.num_tokens) if mode == SHIFT else fixed + work.num_tokens / 2

    costs = SimpleNamespace(
        layout=SimpleNamespace(base=BASE, shift=SHIFT), device_seconds=device_seconds
    )
    assert shift_threshold(costs) == threshold  # pyright: ignore
