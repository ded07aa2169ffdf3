"""The data plane: one jitted function per (mode, bucket), from packed inputs to sampled tokens.

    step(params, pools, last_tokens, flat, tables) -> (pools, last_tokens, StepResult)

`pools` is donated. Everything small that changes every step travels as one int32 vector (`flat`),
because each separate transfer to 8 devices costs more than all their bytes; what only some
requests need (`tables`) stays on the device until a request asks for it.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, UInt32

from shiftjax.device.mesh import named, pool_spec, replicated_spec, rows_spec, weight_spec
from shiftjax.device.place import Declared, ModelDef
from shiftjax.device.sampling import sample
from shiftjax.device.sampling_inputs import RowTables, SamplingInputs
from shiftjax.models.attention import AttentionMetadata, LayerPool
from shiftjax.models.attention_backend import AttentionBackend
from shiftjax.models.exchange import Parallel
from shiftjax.parallel.layout import Layout
from shiftjax.parallel.mode import KV_AXES, Mode

# Measured on attention: gathers 15-35% and prefill 15-20% faster (docs/log.md).
COMPILER_OPTIONS = {
    "cpu": {"xla_backend_optimization_level": "2", "xla_cpu_prefer_vector_width": "512"},
    "gpu": {},
    "tpu": {},
}


class StepInputs(NamedTuple):
    """What changes every step, all 4-byte elements, replicated; NumPy arrays until packed."""

    token_ids: Int[Any, " tokens"]  # -1 - r: the token in row r of the previous step's output
    positions: Int[Any, " tokens"]
    sample_rows: Int[Any, " rows"]  # which token's hidden state each logit row comes from
    attention: AttentionMetadata
    sampling: dict[str, Any]  # the per-row scalars of SamplingInputs, less pending_ids
    key: UInt32[Any, " 2"]


class StepResult(NamedTuple):
    """What a step gives back; the host fetches `top_*` only where log-probabilities were asked."""

    summary: Int[Array, "rows 3"]  # token id, bits of its float32 log-probability, is_finite
    top_ids: Int[Array, "rows top"]
    top_logprobs: Float[Array, "rows top"]


@dataclass(frozen=True)
class Packing:
    """How a tree of 4-byte arrays lies in one int32 vector."""

    treedef: Any  # jax.tree_util.PyTreeDef, for which jaxlib ships no stub
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype, ...]

    @classmethod
    def of(cls, example: Any) -> "Packing":
        """Take shapes and types from an example tree of NumPy arrays."""
        leaves, treedef = jax.tree.flatten(example)
        wide = [leaf.dtype for leaf in leaves if leaf.dtype.itemsize != 4]
        if wide:
            raise TypeError(f"only 4-byte elements can be packed, got {wide}")
        return cls(treedef, tuple(x.shape for x in leaves), tuple(x.dtype for x in leaves))

    @property
    def size(self) -> int:
        """Elements of the vector."""
        return sum(int(np.prod(shape)) for shape in self.shapes)

    def pack(self, tree: Any) -> np.ndarray:
        """Return a new vector (the device may read it in place, so it is never reused)."""
        leaves = self.treedef.flatten_up_to(tree)
        return np.concatenate([leaf.reshape(-1).view(np.int32) for leaf in leaves])

    def unpack(self, flat: Int[Array, " size"]) -> Any:
        """Undo `pack` inside a step, by static slices."""
        leaves, start = [], 0
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            stop = start + int(np.prod(shape))
            leaf = flat[start:stop].reshape(shape)
            if dtype != np.int32:
                leaf = jax.lax.bitcast_convert_type(leaf, dtype)
            leaves.append(leaf)
            start = stop
        return self.treedef.unflatten(leaves)


@dataclass(frozen=True)
class StepDef:
    """All that is static in a step, and the functions that trace and compile it."""

    model: ModelDef
    layout: Layout
    mesh: Mesh
    strategy: str  # of the shift weights: alias, slice, replicate
    max_rows: int
    attention: AttentionBackend

    def weight_specs(self, mode: Mode) -> tuple[Any, ...]:
        """Return the spec with which each weight enters the step of a mode."""
        return tuple(
            weight_spec(("vocab", None), Mode.BASE)
            if self._slices_head(weight)
            else weight_spec(weight.axes, Mode.BASE if self.strategy == "slice" else mode)
            for weight in self.model.declared
        )

    def abstract_params(self, mode: Mode) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Return the weights of a mode as shapes: what `compile` needs where there are none."""
        params = []
        for weight, spec in zip(self.model.declared, self.weight_specs(mode), strict=True):
            shape, axis = weight.shape, weight.axes[0]
            has_own_rows = mode is Mode.SHIFT and self.strategy != "slice"
            if has_own_rows and axis not in (None, "lm_vocab"):
                shape = (self.layout.shift_rows(axis) * self.layout.num_devices, *shape[1:])
            sharding = named(self.mesh, spec)
            params.append(jax.ShapeDtypeStruct(shape, weight.dtype, sharding=sharding))
        return tuple(params)

    def compile(
        self, mode: Mode, params: Any, pools: Any, packing: Packing, tables: RowTables
    ) -> jax.stages.Compiled:
        """Compile the step for one mode and bucket ahead of time.

        `params`, `pools` and `tables` may be arrays or `jax.ShapeDtypeStruct`s with shardings.
        """
        replicated = named(self.mesh, replicated_spec())
        last_tokens = jax.ShapeDtypeStruct((self.max_rows,), jnp.int32, sharding=replicated)
        flat = jax.ShapeDtypeStruct((packing.size,), jnp.int32, sharding=replicated)
        step = jax.jit(self.function(mode, packing), donate_argnums=1)
        lowered = step.lower(params, pools, last_tokens, flat, tables)
        return lowered.compile(compiler_options=COMPILER_OPTIONS[_platform(self.mesh)])

    def function(self, mode: Mode, packing: Packing):
        """Return the step of one mode as a function of global arrays."""
        everywhere, rows = replicated_spec(), rows_spec()
        result = StepResult._make((everywhere, rows, rows))

        def step(params, pools, last_tokens, flat, tables):
            return self._local_step(mode, packing.unpack(flat), params, pools, last_tokens, tables)

        return jax.shard_map(
            step,
            mesh=self.mesh,
            in_specs=(self.weight_specs(mode), pool_spec(), everywhere, everywhere, rows),
            out_specs=(pool_spec(), everywhere, result),
            # Replication is by construction (the same inputs, psum, all_gather); the checker
            # knows no ragged attention and would reject its loops.
            check_vma=False,
        )

    def _local_step(
        self,
        mode: Mode,
        inputs: StepInputs,
        params: tuple[jax.Array, ...],
        pools: list[LayerPool],
        last_tokens: Int[Array, " max_rows"],
        tables: RowTables,
    ) -> tuple[list[LayerPool], Int[Array, " max_rows"], StepResult]:
        """One device's part of the step."""
        parallel = Parallel(self.layout, mode)
        model = self.model.merge(self._localise(mode, params))
        ids = inputs.token_ids
        ids = jnp.where(ids < 0, last_tokens[jnp.maximum(-1 - ids, 0)], ids)
        hidden, pools = model(
            parallel.local_tokens(ids),
            parallel.local_tokens(inputs.positions),
            pools,
            inputs.attention,
            self.attention,
            parallel,
        )
        logits = model.logits(hidden[-1], inputs.sample_rows, parallel)
        sampled = inputs.sample_rows
        pending = jnp.where(inputs.token_ids[sampled] < 0, ids[sampled], -1)
        scalars = inputs.sampling | {"pending_ids": pending}
        scalars = {name: self._local_rows(array) for name, array in scalars.items()}
        sampling = SamplingInputs(**scalars, **tables._asdict())
        key = jax.random.wrap_key_data(inputs.key, impl="threefry2x32")
        out = sample(logits, sampling, key, vocab_size=self.layout.model.vocab_size)
        logprob_bits = jax.lax.bitcast_convert_type(out.logprobs, jnp.int32)
        summary = jnp.stack([out.token_ids, logprob_bits, out.is_finite.astype(jnp.int32)], axis=1)
        summary = parallel.all_rows(summary)
        tokens = jnp.pad(summary[:, 0], (0, self.max_rows - summary.shape[0]))
        return pools, tokens, StepResult(summary, out.top_ids, out.top_logprobs)

    def _local_rows(self, per_row: jax.Array) -> jax.Array:
        """Return the rows that this device samples."""
        count = per_row.shape[0] // self.layout.num_devices
        start = jax.lax.axis_index(KV_AXES) * count
        return jax.lax.dynamic_slice_in_dim(per_row, start, count)

    def _slices_head(self, weight: Declared) -> bool:
        tied = self.layout.model.tie_word_embeddings
        return self.strategy == "slice" and tied and weight.axes[0] == "lm_vocab"

    def _localise(self, mode: Mode, params: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Slice the shift shard out of each base shard where the strategy says so."""
        if self.strategy != "slice" or self.layout.sp == 1:
            return params
        axes = (self._sliced_axis(mode, weight) for weight in self.model.declared)
        return tuple(
            array if axis is None else self._shift_slice(axis, array)
            for axis, array in zip(axes, params, strict=True)
        )

    def _sliced_axis(self, mode: Mode, weight: Declared) -> str | None:
        """Return the axis along which a step of this mode slices the base shard, if it does."""
        axis = weight.axes[0]
        if axis == "lm_vocab":
            return axis if self._slices_head(weight) else None
        return axis if mode is Mode.SHIFT else None

    def _shift_slice(self, axis: str, base: jax.Array) -> jax.Array:
        layout = self.layout
        starts = np.array(
            [[layout.shift_offset(axis, s, t) for t in range(layout.tp)] for s in range(layout.sp)],
            np.int32,
        )
        start = jnp.asarray(starts)[jax.lax.axis_index("sp"), jax.lax.axis_index("tp")]
        return jax.lax.dynamic_slice_in_dim(base, start, layout.shift_rows(axis))


def _platform(mesh: Mesh) -> str:
    return mesh.devices.flat[0].platform
