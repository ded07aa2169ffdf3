"""Brings the pairs that devices compute with each expert to the host, of some steps: no wait.

A layer sorts its pairs by expert, so every device knows how many each of its experts has. A step
gives them back as one small array, of which a device has its part: every pair that is computed is
counted once, whatever the mode, and padding never. Steps of many modes differ in which devices have
which experts; the array's shape and sharding say so. No collective is made, but over several hosts:
there one sum brings all parts to each.

Of every `EVERY` steps one is brought to the host. What is copied is looked at some steps later.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from shiftjax.costs.routing import num_counted
from shiftjax.deploy.deployment import Deployment
from shiftjax.models.exchange import Parallel
from shiftjax.models.experts import Counted
from shiftjax.routing.history import RoutingHistory

EVERY = 16  # steps, of which one is counted
LATER = 2  # steps after a copy was asked for


def counts_of_step(
    counted: Sequence[Counted], parallel: Parallel, *, is_spread: bool
) -> Int[Array, "one layers experts"]:
    """Return this device's part of the counts of a step, inside `shard_map`.

    Of its own experts; if the devices are `spread` over hosts those of all, on every device.
    """
    own = jnp.stack([each.pairs for each in counted])
    if is_spread:
        ways = parallel.layout.num_devices // parallel.as_experts.sp
        everywhere = jnp.zeros((own.shape[0], ways * own.shape[1]), own.dtype)
        first = parallel.expert_place * own.shape[1]
        own = parallel.total(jax.lax.dynamic_update_slice(everywhere, own, (0, first)))
    return own[None]


class CountedSteps:
    """Counts the steps of one group, or of a stage of it; `add` takes `[layers, experts]`."""

    def __init__(self, num_experts: int, add: Callable[[np.ndarray], None]):
        self._num_experts, self._add = num_experts, add
        self._coming: deque[tuple[int, jax.Array]] = deque()
        self._num_steps = 0

    def see(self, counts: jax.Array) -> None:
        """A step was dispatched: maybe have its counts copied, and add what was copied before."""
        if self._num_steps % EVERY == 0:
            counts.copy_to_host_async()
            self._coming.append((self._num_steps, counts))
        self._num_steps += 1
        while self._coming and self._num_steps > self._coming[0][0] + LATER:
            if not _is_ready(self._coming[0][1]):
                break
            self._take()

    def flush(self) -> None:
        """Add all that was copied; waits for the devices."""
        while self._coming:
            self._take()

    def _take(self) -> None:
        _, counts = self._coming.popleft()
        parts = counts.addressable_data(0) if counts.is_fully_replicated else counts
        self._add(np.asarray(parts).sum(axis=0)[:, : self._num_experts])


def counted_steps(
    deployment: Deployment, stage: int, history: RoutingHistory | None
) -> CountedSteps | None:
    """Return what counts steps of a stage of a deployment; None: it has no experts."""
    layers = [num_counted(each.layout.model) for each in deployment.stages]
    if history is None or not layers[stage]:
        return None
    experts = deployment.layout.model.experts
    assert experts is not None
    return CountedSteps(experts.num, partial(history.add, sum(layers[:stage])))


def _is_ready(counts: jax.Array) -> bool:
    return counts.is_ready()  # pyright: ignore[reportAttributeAccessIssue]
