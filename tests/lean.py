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

from shiftjax.arch.numerics import NumericsName
from shiftjax.costs.collectives import Collective, logprob_collective
from shiftjax.device import groups, sampling
from shiftjax.device.sampling import SampleOutput
from shiftjax.device.sampling_inputs import ALL_ALLOWED, SamplingInputs
from shiftjax.device.step import StepDef
from shiftjax.models.exchange import Parallel
from shiftjax.parallel.layout import Layout


def greedy(
    logits: Any, inputs: SamplingInputs, key: Any, parallel: Parallel, *, vocab_size: int
) -> SampleOutput:
    """The best token of every row, or its target, and the log-probability of that.

    A row that asks for more is not finite, so that its request fails.
    """
    inputs, _ = lax.optimization_barrier((inputs, key))  # all of them stay arguments of the step
    split = sampling._Split(parallel, vocab_size, logits.shape[1])
    is_bad = jnp.sum(split.without_padding(logits, 0.0) * 0.0, axis=-1) != 0.0
    is_masked = jnp.any(inputs.token_bitmask != jnp.uint32(ALL_ALLOWED), axis=-1)
    logits = split.without_padding(logits, -jnp.inf)
    best, largest, flags = split.best(logits, (is_bad | is_masked).astype(jnp.int32))
    asks_more = sampling._edited_rows(inputs) | sampling._sampled_rows(inputs)
    is_finite = ~jnp.any(flags[0], axis=0) & ~asks_more & (inputs.num_logprobs <= 0)
    tokens = jnp.where(inputs.target_ids >= 0, inputs.target_ids, best)
    tokens = jnp.where(is_finite, tokens, 0)
    total, chosen = split.sums_and_chosen(logits, largest, tokens)
    best_first = jnp.arange(min(sampling.MAX_LOGPROBS, vocab_size), dtype=jnp.int32)[None]
    return SampleOutput(
        token_ids=tokens,
        logprobs=jnp.where(is_finite, chosen - largest - jnp.log(total), 0.0),
        # Nobody asks for these; they are no constants, so that they travel as the real ones do.
        top_ids=tokens[:, None] + best_first,
        top_logprobs=chosen[:, None] - best_first.astype(jnp.float32),
        is_finite=is_finite,
    )


def greedy_collectives(
    layout: Layout, num_rows: int, sums: NumericsName = "fast"
) -> list[Collective]:
    """What `greedy` moves beside each device's best tokens: log-probabilities, in every step."""
    is_alone = layout.num_devices == 1 or not layout.model.is_last_stage
    return [] if is_alone else [logprob_collective(layout, num_rows, sums)]


@contextmanager
def greedy_steps() -> Iterator[None]:
    """Engines that are built meanwhile sample so."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "StepDef", partial(StepDef, sampler=greedy))
        yield
