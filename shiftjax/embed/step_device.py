"""The step that embeds: rows of packed texts in, an embedding, or scores, of each text out.

    step(weights, packed) -> embeddings

`packed` is int32 `[3, rows, width]`: token ids, positions and owners (`models/bert.py`); where
pairs of texts are scored, types of tokens come fourth. Rows are split over all devices, each of
which holds the whole model; nothing is exchanged.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from shiftjax.arch.pooling import Pooling
from shiftjax.device.mesh import embeddings_spec, named, packed_spec, replicated_spec
from shiftjax.device.place import ModelDef, Progress
from shiftjax.device.programs import COMPILE_THREADS
from shiftjax.device.step import COMPILER_OPTIONS
from shiftjax.embed.embed_engine import EmbedPlan, EmbedShape, slots_of
from shiftjax.models.bert import normalize, pool
from shiftjax.models.llama import Llama
from shiftjax.models.packed_rows import decode_rows, scores_of_last


@dataclass(frozen=True)
class EmbedStep:
    """All that is static in a step, and the function that traces and compiles it."""

    model: ModelDef
    mesh: Mesh
    pooling: Pooling

    @property
    def planes(self) -> int:
        """The numbers of a token that the step reads."""
        return 4 if self.pooling.scores else 3

    def __call__(
        self, leaves: tuple[Array, ...], packed: Int[Array, "planes rows width"]
    ) -> Float[Array, "rows slots dim"]:
        """Embed every text of every row, float32; what slots without a text hold has no meaning."""
        embed = jax.shard_map(
            self._local,
            mesh=self.mesh,
            in_specs=(replicated_spec(), packed_spec()),
            out_specs=embeddings_spec(),
        )
        return embed(leaves, packed)

    def _local(
        self, leaves: tuple[Array, ...], packed: Int[Array, "planes rows width"]
    ) -> Float[Array, "rows slots dim"]:
        """One device's rows."""
        token_ids, positions, owners, *types = packed
        model = self.model.merge(leaves)
        slots = slots_of(packed.shape[2])
        if isinstance(model, Llama):
            hidden = decode_rows(model, token_ids, positions, owners)
            if model.config.num_labels:
                return scores_of_last(model, pool(hidden, positions, owners, slots, "last"))
        else:
            hidden = model(token_ids, positions, owners, *types)[-1]
            if model.head is not None:
                return model.head(pool(hidden, positions, owners, slots, "cls"))
        pooled = pool(hidden, positions, owners, slots, self.pooling.kind)
        return normalize(pooled) if self.pooling.normalize else pooled

    def compile(self, rows: int, width: int) -> jax.stages.Compiled:
        """Compile the step for one size ahead of time."""
        whole = named(self.mesh, replicated_spec())
        leaves = tuple(
            jax.ShapeDtypeStruct(weight.shape, self.model.dtype, sharding=whole)
            for weight in self.model.declared
        )
        spread = named(self.mesh, packed_spec())
        shape = self.planes, rows, width
        packed = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=spread)
        step = jax.jit(self, out_shardings=named(self.mesh, embeddings_spec()))
        options = COMPILER_OPTIONS[self.mesh.devices.flat[0].platform]
        return step.lower(leaves, packed).compile(options)


class EmbedHandle(NamedTuple):
    """A step in flight."""

    embeddings: jax.Array  # [rows, slots, dim]
    places: tuple[np.ndarray, np.ndarray]  # row and slot of every text


class EmbedDeviceRunner:
    """Runs steps on all devices; see `embed.embed_engine.EmbedRunner`. Holds no state but weights.

    Several threads may share one.
    """

    def __init__(
        self, step: EmbedStep, leaves: Sequence[jax.Array], shape: EmbedShape, progress: Progress
    ):
        self.shape = shape
        self.num_devices = step.mesh.size
        self.num_programs = sum(map(len, shape.rows))
        self._planes = step.planes
        self._leaves = tuple(leaves)
        self._spread = named(step.mesh, packed_spec())
        sizes = [
            (n, width) for width, rows in zip(shape.widths, shape.rows, strict=True) for n in rows
        ]
        progress("compile", 0, len(sizes))
        with ThreadPoolExecutor(COMPILE_THREADS) as threads:
            jobs = {size: threads.submit(step.compile, *size) for size in sizes}
            self._steps = {}
            for size, job in jobs.items():
                self._steps[size] = job.result()
                progress("compile", len(self._steps), len(sizes))

    def run(self, plan: EmbedPlan) -> EmbedHandle:
        """Dispatch a step; nothing is awaited."""
        rows = self.shape.num_rows(plan.width, len(plan.rows))
        packed, places = pack(plan, rows, self._planes)
        embeddings = self._steps[rows, plan.width](
            self._leaves, jax.device_put(packed, self._spread)
        )
        embeddings.copy_to_host_async()
        return EmbedHandle(embeddings, places)

    def fetch(self, handle: EmbedHandle) -> np.ndarray:
        """Wait for a step: float32 `[texts, dim]` in the order of the plan's texts."""
        return np.asarray(handle.embeddings)[handle.places]


def pack(
    plan: EmbedPlan, rows: int, planes: int = 3
) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """Return the packed texts `[planes, rows, width]` int32, and each text's row and slot."""
    packed = np.zeros((planes, rows, plan.width), np.int32)
    packed[2] = slots_of(plan.width)  # nobody's
    places: list[Any] = []
    for r, texts in enumerate(plan.rows):
        start = 0
        for slot, text in enumerate(texts):
            stop = start + len(text.token_ids)
            packed[0, r, start:stop] = text.token_ids
            packed[1, r, start:stop] = np.arange(stop - start)
            packed[2, r, start:stop] = slot
            if text.second_from is not None:
                packed[3, r, start + text.second_from : stop] = 1
            places.append((r, slot))
            start = stop
    row, slot = np.array(places, np.int64).T
    return packed, (row, slot)
