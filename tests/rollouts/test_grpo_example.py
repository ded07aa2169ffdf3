"""The toy GRPO of the examples: the reward rises, and both forward passes say the same."""

import re
import sys
from importlib import import_module
from pathlib import Path

import jax
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))


@pytest.mark.thorough
@pytest.mark.costs(40)
def test_the_reward_rises_and_log_probabilities_agree(capsys):
    grpo = import_module("grpo")
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        rewards = grpo.train(12, cache_dir="none")
    assert max(rewards[:3]) < 0.65 and min(rewards[-3:]) > 0.85
    found = re.findall(r"differ by (\S+) in the mean, (\S+) at most", capsys.readouterr().out)
    assert len(found) == 12
    assert max(float(most) for _, most in found) < 1e-4
