"""The toy GRPO of the examples: the reward rises, and both forward passes say the same."""

import re
import sys
from importlib import import_module
from pathlib import Path

import jax
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))


def train(steps: int, **options) -> list[float]:
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        return import_module("grpo").train(steps, cache_dir="none", **options)


@pytest.mark.thorough
def test_with_strict_numerics_scores_have_the_bits_of_the_rollout(capsys):
    train(2, numerics="invariant", dtype="bfloat16")
    train(1, numerics="fast", dtype="bfloat16")
    found = re.findall(r"scored again, (\S+)% have the same bits", capsys.readouterr().out)
    assert found[:2] == ["100.0", "100.0"] and float(found[2]) < 100  # the control


@pytest.mark.thorough
@pytest.mark.costs(40)
def test_the_reward_rises_and_log_probabilities_agree(capsys):
    rewards = train(12)
    assert max(rewards[:3]) < 0.65 and min(rewards[-3:]) > 0.85
    found = re.findall(r"differ by (\S+) in the mean, (\S+) at most", capsys.readouterr().out)
    assert len(found) == 12
    assert max(float(most) for _, most in found) < 1e-4
