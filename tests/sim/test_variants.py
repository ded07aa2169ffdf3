"""Changes of servers that miss the limits by little."""

from dataclasses import replace

import pytest
from test_servers import LOAD, field_of, target

from shiftjax.options import ConfigError
from shiftjax.sim.load import Limits
from shiftjax.sim.trials import Measured, Trial
from shiftjax.sim.variants import FAR, NEAR, VARIANTS, Changes
from shiftjax.targets import NO_TARGETS

LIMITS = Limits(1.0, 0.05)
SERVERS = {s.deployment.name: s for s in field_of(target("h100x8", num_devices=8)).servers}


def trial(name: str = "sp4", ttft=0.5, tpot=0.04, running=40, num=4, server=None) -> Trial:
    measured = Measured(ttft, tpot, 0.5, 1.0, running, 0)
    return Trial(server or SERVERS[name], num, 1.0, (measured,), False)


def wanted(one: Trial) -> dict[str, list]:
    """What the table would change, by setting."""
    found: dict[str, list] = {}
    for variant in VARIANTS:
        settings = variant.settings(one, LIMITS)
        if settings is not None and variant.helps(one, LIMITS):
            for setting, value in settings.items():
                found.setdefault(setting, []).append(value)
    return found


def test_tokens_that_are_late_want_smaller_steps_and_fewer_sequences():
    assert wanted(trial(tpot=0.052, num=1)) == {
        "target_ttft": [1.0],
        "target_tpot": [0.05],
        "max_num_batched_tokens": [4096],
        "max_num_seqs": [32],
        "fleet": [True],
    }
    assert "max_num_batched_tokens" not in wanted(trial(ttft=1.05, tpot=0.052))
    assert wanted(trial(tpot=0.05 * NEAR * 1.01, num=1)) == {}


def test_an_engine_without_sizes_of_steps_gains_more_from_their_bound():
    one = SERVERS["sp4"]
    other = replace(one.target, engine=replace(one.target.engine, sizes_steps=False))
    late = trial(tpot=0.05 * NEAR * 1.1, server=one._replace(target=other))
    assert wanted(late)["max_num_batched_tokens"] == [4096]
    assert not {"fleet", "target_tpot"} & wanted(late).keys()
    assert "max_num_batched_tokens" not in wanted(trial(tpot=0.051 * FAR, server=late.server))


def test_a_full_house_wants_more_places():
    full = trial(ttft=3.0, running=256)
    assert wanted(full) == {"max_num_seqs": [512]}
    assert wanted(trial(ttft=3.0, running=200)) == {}


def test_servers_that_a_machine_has_devices_for_may_be_one_engine():
    assert wanted(trial("sp4", tpot=0.052, num=6))["dp"] == [2]
    assert wanted(trial("tp1", tpot=0.052, num=12))["dp"] == [4]
    assert wanted(trial("tp1", tpot=0.052, num=16))["dp"] == [8]
    assert "dp" not in wanted(trial("sp4", tpot=0.052, num=5))
    assert "dp" not in wanted(trial("sp8", tpot=0.052, num=4))


class Scripted:
    """Trials whose outcome is known, by tokens of a step; targets save a part."""

    aimed = 0.0

    def __init__(self, tpots: dict[int, float]):
        self.limits, self.margin, self.is_over, self.asked = LIMITS, 0.0, False, []
        self._tpots = tpots

    def first(self, server, num, rate, words):
        tokens = server.deployment.max_num_batched_tokens
        self.asked.append((tokens, server.deployment.max_num_seqs, words))
        tpot = self._tpots.get(tokens, 1.0)
        tpot -= self.aimed if server.deployment.targets != NO_TARGETS else 0.0
        found = trial(tpot=tpot, num=num, server=server)
        return found._replace(meets=tpot <= LIMITS.tpot, changed=words)

    def confirmed(self, found, rate):
        return found


def test_a_change_that_helps_is_made_once_more():
    trials = Scripted({4096: 0.051, 2048: 0.049})
    found = Changes(trials, {}).kept(trial(tpot=0.052, num=1), 1.0)  # type: ignore[arg-type]
    assert found is not None and found.deployment.max_num_batched_tokens == 2048
    assert found.changed == "steps of up to 4,096 tokens, steps of up to 2,048 tokens"
    worse = Scripted({4096: 0.053, 2048: 0.049})
    assert Changes(worse, {}).kept(trial(tpot=0.052, num=1), 1.0) is None  # type: ignore[arg-type]
    assert 2048 not in {tokens for tokens, *_ in worse.asked}


def test_changes_add_up():
    trials = Scripted({8192: 0.056, 4096: 0.051})
    trials.aimed = 0.003
    found = Changes(trials, {}).kept(trial(tpot=0.056, num=1), 1.0)  # type: ignore[arg-type]
    assert found is not None and found.tpot == pytest.approx(0.048)
    assert found.changed == "targets of 1 s and 0.05 s, steps of up to 4,096 tokens"
    assert [words for *_, words in trials.asked] == ["targets of 1 s and 0.05 s", found.changed]


@pytest.mark.parametrize(
    "given", ["max_num_batched_tokens", "max_num_seqs", "fleet", "target_ttft"]
)
def test_settings_that_users_give_stay(given):
    def tried(budgets):
        trials = Scripted({})
        Changes(trials, budgets).kept(trial(tpot=0.052, num=1), 1.0)  # type: ignore[arg-type]
        return len(trials.asked)

    assert tried({given: 256}) == tried({}) - 1


def test_what_has_no_room_for_a_request_is_not_changed():
    one = trial(tpot=0.052, num=1)
    refused = one._replace(measured=(one.measured[0]._replace(refused=1),))
    trials = Scripted({4096: 0.04})
    assert Changes(trials, {}).kept(refused, 1.0) is None  # type: ignore[arg-type]
    assert LOAD.mean.num_prompt_tokens == 500 and not trials.asked


class NoRoom(Scripted):
    """Widths of a fleet leave no memory beside the weights that they share."""

    def first(self, server, num, rate, words):
        if server.deployment.widths:
            raise ConfigError([f"{words}: no memory for KV blocks"])
        return super().first(server, num, rate, words)


def test_a_change_without_room_is_none():
    one = trial(tpot=0.052, num=1)
    plain, none = Scripted({}), NoRoom({})
    for trials in (plain, none):
        assert Changes(trials, {}).kept(one, 1.0) is None  # type: ignore[arg-type]
    words = [words for *_, words in plain.asked]
    assert "as a fleet" in words[-1] and [each[-1] for each in none.asked] == words[:-1]
