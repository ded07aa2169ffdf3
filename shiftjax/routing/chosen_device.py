"""Brings the experts that each token of a step chose to the host: no wait, and no collective.

A device tells of the tokens that it has anyhow, so the tokens of the array are split as those of
the step are. What an array says, and of which sequences, is the host's to know (`chosen.py`).
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt

from shiftjax.models.experts import Counted
from shiftjax.routing.chosen import type_of


def chosen_of_step(
    counted: Sequence[Counted], num_experts: int
) -> UInt[Array, "tokens_own layers k"]:
    """Return the experts of this device's tokens in every layer that has some, in `shard_map`."""
    chosen = [each.chosen for each in counted if each.chosen is not None]
    return jnp.stack(chosen, axis=1).astype(type_of(num_experts))


def send_to_host(of_stages: Sequence[jax.Array]) -> None:
    """Have what the stages of a dispatched step tell copied, as soon as it is there."""
    for each in of_stages:
        copied: Any = each
        copied.copy_to_host_async()


def on_host(of_stages: Sequence[jax.Array], num_tokens: int) -> np.ndarray | None:
    """Return what was told of so many tokens, `[tokens, layers, k]`; None: nothing. Waits."""
    if not of_stages:
        return None
    return np.concatenate([np.asarray(each)[:num_tokens] for each in of_stages], axis=1)
