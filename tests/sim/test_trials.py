"""Trials: what counts as keeping the limits, and what is remembered."""

import pytest
from test_servers import LIMITS, LOAD, field_of, target

from shiftjax.sim.load import SEEDS, Limits
from shiftjax.sim.trials import Measured, Trials

SERVER = next(s for s in field_of(target("l4x8")).servers if s.deployment.name == "sp4")


class Known(Trials):
    """Replays whose outcome is known, by seed."""

    tpots: tuple[float, ...] = ()
    refused = 0

    def _measured(self, server, num_servers, rate, seed):
        self.num_replays += 1
        return Measured(0.1, self.tpots[seed], 1.0, 1.0, 1, self.refused)


def known(*tpots: float, margin: float = 0.05) -> Known:
    trials = Known(LOAD, Limits(1.0, 1.0), margin, 99)
    trials.tpots = tpots
    return trials


@pytest.mark.parametrize(
    ("tpots", "num", "meets"),
    [
        ((0.9,) * 5, 5, True),
        ((0.9, 0.98, 0.9, 0.9, 0.9), 5, True),  # the mean has the margin to spare
        ((0.9, 1.01, 0.9, 0.9, 0.9), 2, False),  # none may miss the limits
        ((0.96,) * 5, 5, False),
        ((1.01,), 1, False),
    ],
)
def test_every_replay_keeps_the_limits_and_the_mean_the_margin(tpots, num, meets):
    trials = known(*tpots)
    trial = trials.confirmed(trials.first(SERVER, 1, 1.0), 1.0)
    assert (len(trial.measured), trial.meets) == (num, meets)
    assert trials.all == [trial] and trials.num_replays == num
    assert trial.tpot == pytest.approx(sum(tpots[:num]) / num)


def test_without_a_margin_the_limits_are_enough():
    trials = known(*(0.99,) * 5, margin=0.0)
    assert trials.confirmed(trials.first(SERVER, 1, 1.0), 1.0).meets


def test_a_request_without_room_is_a_miss():
    trials = known(*(0.5,) * 5)
    trials.refused = 1
    assert not trials.first(SERVER, 1, 1.0).meets


def test_a_replay_is_of_a_share_of_the_load():
    """Four servers at four times the rate are as busy as one, and their gaps are more regular."""
    trials = Trials(LOAD, LIMITS, 0.0, 9)
    alone, shared = trials.first(SERVER, 1, 6.0), trials.first(SERVER, 4, 24.0)
    assert alone.rate == shared.rate == 6.0
    assert shared.measured[0].ttft < alone.measured[0].ttft
    assert 0.9 < alone.inside <= 1.0 and alone.measured[0].running > 1
    assert trials.confirmed(alone, 6.0).measured[1] != alone.measured[0] and SEEDS == 5
