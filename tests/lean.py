"""A small sampler, for tests of what is around it: it is compiled in a fifth of the time.

Half of what a step of a tiny model takes to compile for CPUs is the sampler, and two thirds of what
a step takes for GPUs. Most engines of tests have greedy rows alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax.numpy as jnp
import pytest
from jax import lax

from shiftjax.device import groups, sampling
from shiftjax.device.sampling import SampleOutput
from shiftjax.device.sampling_inputs import SamplingInputs
from shiftjax.device.step import StepDef
from shiftjax.models.argmax import argmax


def greedy(logits: Any, inputs: SamplingInputs, key: Any, *, vocab_size: int) -> SampleOutput:
    """The best token of every row, or its target, and the log-probability of that.

    A row that asks for more is not finite, so that its request fails.
    """
    inputs, _ = lax.optimization_barrier((inputs, key))  # all of them stay arguments of the step
    logits = logits[:, :vocab_size]
    best, largest = argmax(logits)
    asks_more = sampling._edited_rows(inputs) | sampling._sampled_rows(inputs)
    is_finite = (jnp.sum(logits * 0.0, axis=-1) == 0.0) & ~asks_more & (inputs.num_logprobs <= 0)
    tokens = jnp.where(inputs.target_ids >= 0, inputs.target_ids, best)
    tokens = jnp.where(is_finite, tokens, 0)
    total = jnp.sum(jnp.exp(logits - largest[:, None]), axis=-1)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1, mode="clip")[:, 0]
    best_first = jnp.arange(min(sampling.MAX_LOGPROBS, vocab_size), dtype=jnp.int32)[None]
    return SampleOutput(
        token_ids=tokens,
        logprobs=jnp.where(is_finite, chosen - largest - jnp.log(total), 0.0),
        # Nobody asks for these; they are no constants, so that they travel as the real ones do.
        top_ids=tokens[:, None] + best_first,
        top_logprobs=chosen[:, None] - best_first.astype(jnp.float32),
        is_finite=is_finite,
    )


@contextmanager
def greedy_steps() -> Iterator[None]:
    """Engines that are built meanwhile sample so."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "StepDef", partial(StepDef, sampler=greedy))
        yield
