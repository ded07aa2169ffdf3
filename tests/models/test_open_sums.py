"""Streams that devices keep by rows: the engine's tokens, with the sums of two shots.

The switch is not here. In its place stand the collectives of XLA: what a kernel gives is what they
give, so that all else of a step is as on GPUs.
"""

import jax
import numpy as np
import pytest
from engines import MOE, checkpoint, crowd, make, run, tokens
from oracle import numpy_llama

from pallas_kernels import sum_rows
from shiftjax.core.policies import FixedPolicy
from shiftjax.core.request import SamplingParams
from shiftjax.device import groups
from shiftjax.models import sum_backend
from shiftjax.models.layers import rms_norm
from shiftjax.models.sum_backend import SumBackend

LENGTH = 5


def rank_of(axes):
    return jax.lax.axis_index(axes)


def open_rows(axes, x):
    own = x.shape[0] // jax.lax.axis_size(axes)
    group = sum_rows.Group(axes, np.zeros(1, np.int32))
    return group, jax.lax.dynamic_slice_in_dim(x, rank_of(axes) * own, own)


def sum_whole(partial, x, kind, group, interpret=False):
    del interpret
    own = jax.lax.psum_scatter(partial, group.axes, tiled=True)
    return jax.lax.all_gather(x + own * kind.scale, group.axes, tiled=True)


def sum_norm_rows(partial, x, weight, kind, group, interpret=False):
    total = sum_whole(partial, x, kind, group)
    whole, nth = weight
    if nth is not None:
        whole = whole.reshape(-1, x.shape[1])[nth]
    own = jax.lax.dynamic_slice_in_dim(total, rank_of(group.axes) * x.shape[0], x.shape[0])
    return own, rms_norm(total, whole, kind.eps)


@pytest.fixture
def in_two_shots(monkeypatch):
    """Let engines sum so, whatever they have; count the programs that do."""
    opened = []

    def choose(layout, formats, needs):
        return SumBackend("multimem", "a stand-in")

    def counted(axes, x):
        opened.append(x.shape)
        return open_rows(axes, x)

    monkeypatch.setattr(groups, "choose_sums", choose)
    monkeypatch.setattr(sum_backend, "shots", lambda *size, splits_rows: 2)
    monkeypatch.setattr(sum_rows, "open_rows", counted)
    monkeypatch.setattr(sum_rows, "sum_norm_rows", sum_norm_rows)
    monkeypatch.setattr(sum_rows, "sum_whole", sum_whole)
    return opened


@pytest.mark.costs(15)
@pytest.mark.parametrize("name", ["llama", "experts"])
def test_tokens_are_those_of_whole_streams(name, in_two_shots):
    directory, config, tensors = checkpoint(**(MOE if name == "experts" else {}))
    built = make(directory, 2, 2, weights="alias")
    built.engine.policy = FixedPolicy(-1)  # SHIFT
    prompts = crowd(3, 4)
    greedy = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
    events = run(built.engine, prompts, [greedy] * len(prompts))
    assert in_two_shots
    for i, prompt in enumerate(prompts):
        assert tokens(events[i, 0]) == numpy_llama.greedy(config, tensors, prompt, LENGTH)
