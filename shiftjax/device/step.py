"""The data plane: one jitted function per (mode, bucket), from packed inputs to sampled tokens.

    step(params, pools, last_tokens, flat, tables) -> (pools, last_tokens, StepResult)

`pools` is donated. Of a pipeline, each stage is a step of its own. All but the first are given
hidden states, too, and all but the last return those instead:

    step(params, pools, last_tokens, flat, tables, hidden) -> (pools, hidden)

What has layers of experts gives back the pairs that it computed, too, behind all else
(`routing/counts_device.py`). Where it is asked for, the experts that each token chose come last
(`routing/chosen_device.py`).

Everything small that changes every step travels as one int32 vector (`flat`),
because each separate transfer to 8 devices costs more than all their bytes; what only some
requests need (`tables`) stays on the device until a request asks for it.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Int, UInt32

from shiftjax.arch.numerics import FAST, Numerics
from shiftjax.costs.expert_modes import ExpertModes
from shiftjax.costs.query_modes import QueryModes
from shiftjax.costs.routing import num_counted
from shiftjax.device.joined import ARGUMENT_ALIGNMENT
from shiftjax.device.mesh import (
    chosen_spec,
    counts_spec,
    hidden_spec,
    is_spread,
    mesh_of,
    named,
    pool_spec,
    replicated_spec,
    vocab_spec,
)
from shiftjax.device.mode_weights import ModeWeights
from shiftjax.device.place import ModelDef
from shiftjax.device.pool import as_stored, in_shape
from shiftjax.device.sampling import SampleOutput, sample
from shiftjax.device.sampling_inputs import RowMasks, SamplingInputs, VocabSplit
from shiftjax.device.strict import strict_options
from shiftjax.models.attention import AttentionMetadata, ModelPools, RowMetadata
from shiftjax.models.attention_backend import AttentionBackend
from shiftjax.models.exchange import Parallel
from shiftjax.models.expert_backend import XLA_EXPERTS, ExpertBackend
from shiftjax.models.experts import tells_parts
from shiftjax.models.layers import Context, LogitRows, ropes_of_step
from shiftjax.models.norm_backend import XLA_NORMS, NormBackend
from shiftjax.models.product_backend import XLA_PRODUCTS, Products
from shiftjax.models.speculator import DraftRows
from shiftjax.models.sum_backend import SUMMED_NORMS, XLA_SUMS, SumBackend
from shiftjax.parallel.grid import Mode, Use
from shiftjax.parallel.layout import Layout, round_up
from shiftjax.routing.chosen_device import chosen_of_step
from shiftjax.routing.counts_device import counts_of_step

# Measured on attention: gathers 15-35% and prefill 15-20% faster (docs/results/cpu.md).
COMPILER_OPTIONS = {
    "cpu": {"xla_backend_optimization_level": "2", "xla_cpu_prefer_vector_width": "512"},
    "gpu": {},  # and those of the setting `gpu_options`
    "tpu": {},
}

# Of `RowMasks`: all devices split what has an entry for each token.
TABLE_SPECS = vocab_spec(), replicated_spec(), replicated_spec(), vocab_spec()


class StepInputs(NamedTuple):
    """What changes every step, all 4-byte elements, replicated; NumPy arrays until packed."""

    token_ids: Int[Any, " tokens"]  # -1 - r: the token in row r of the previous step's output
    positions: Int[Any, " tokens"]
    sample_rows: Int[Any, " rows"]  # which token's hidden state each logit row comes from
    attention: AttentionMetadata
    late: RowMetadata | None  # of models with layers that compute logit rows alone
    guessing: "GuessInputs | None"  # of models with a speculator
    adapters: Int[Any, " tokens"] | None  # slot of each token's adapter; None: no token has one
    sampling: dict[str, Any]  # the per-row scalars of SamplingInputs, less pending_ids
    key: UInt32[Any, " 2"]


class GuessInputs(NamedTuple):
    """What a speculator has to know of a step, besides what its rows sample."""

    row_start_loc: Int[Any, " seqs_plus_1"]  # first logit row of each sequence; padding repeats
    num_guesses: Int[Any, ""]  # tokens to guess for each sequence; 0: none, at no cost


LINE = ARGUMENT_ALIGNMENT // 4  # elements


class StepResult(NamedTuple):
    """What a step gives back; the host fetches `top_*` only where log-probabilities were asked."""

    summary: Int[Array, "rows 3"]  # token id, bits of its float32 log-probability, is_finite
    top_ids: Int[Array, "rows top"]
    top_logprobs: Float[Array, "rows top"]
    guesses: Int[Array, "2 seqs num_predict"] | None  # token ids, bits of their probabilities


@dataclass(frozen=True)
class Packing:
    """How a tree of 4-byte arrays lies in one int32 vector: each where 256 bytes begin.

    Kernels read some of them in place.
    """

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
        return self.starts[-1]

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where each begins, and the end."""
        sizes = [-(-math.prod(shape) // LINE) * LINE for shape in self.shapes]
        return tuple(itertools.accumulate(sizes, initial=0))

    @property
    def size_of_step(self) -> tuple[int, int]:
        """Tokens and rows of the bucket, if what is packed are the inputs of a step."""
        inputs = self.treedef.unflatten(self.shapes)
        return inputs.token_ids[0], inputs.sample_rows[0]

    @property
    def num_tokens(self) -> int:
        """The tokens of it."""
        return self.size_of_step[0]

    def pack(self, tree: Any) -> np.ndarray:
        """Return a new vector (the device may read it in place, so it is never reused)."""
        flat = np.zeros(self.size, np.int32)
        for leaf, start in zip(self.treedef.flatten_up_to(tree), self.starts[:-1], strict=True):
            flat[start : start + leaf.size] = leaf.reshape(-1).view(np.int32)
        return flat

    def unpack(self, flat: Int[Array, " size"]) -> Any:
        """Undo `pack` inside a step, by static slices."""
        leaves = []
        for shape, dtype, start in zip(self.shapes, self.dtypes, self.starts[:-1], strict=True):
            leaf = flat[start : start + math.prod(shape)].reshape(shape)
            if dtype != np.int32:
                leaf = jax.lax.bitcast_convert_type(leaf, dtype)
            leaves.append(leaf)
        return self.treedef.unflatten(leaves)


@dataclass(frozen=True)
class StepDef:
    """All that is static in a step, and the functions that trace and compile it."""

    weights: ModeWeights
    mesh: Mesh  # of the group, in base mode
    max_rows: int
    attention: AttentionBackend
    block_size: int  # tokens of a KV block in this layout
    gpu_options: Mapping[str, str] = field(default_factory=dict)  # beside COMPILER_OPTIONS
    experts: ExpertBackend = XLA_EXPERTS
    expert_modes: ExpertModes | None = None  # None: all devices split experts, in every step
    query_modes: QueryModes | None = None  # None: q and o are used as in the step's own mode
    products: Products = XLA_PRODUCTS
    norms: NormBackend = XLA_NORMS
    sums: SumBackend = XLA_SUMS
    numerics: Numerics = FAST
    routed_experts: bool = False  # steps tell which experts their tokens chose
    sampler: Callable[..., SampleOutput] = sample  # half of what a step takes to compile

    @property
    def model(self) -> ModelDef:
        """The model and its declared weights."""
        return self.weights.model

    @property
    def layout(self) -> Layout:
        """How the model falls on the devices of the group."""
        return self.weights.layout

    @property
    def vocab(self) -> VocabSplit:
        """How the devices split the vocabulary, and the tables by token."""
        size, devices = self.layout.vocab_size, self.layout.num_devices
        return VocabSplit(self.layout.model.vocab_size, size // devices, devices)

    @property
    def table_shardings(self) -> tuple[NamedSharding, ...]:
        """Where the sampler's tables lie, in the order of `RowMasks`."""
        return tuple(named(self.mesh, spec) for spec in TABLE_SPECS)

    @property
    def platform(self) -> str:
        """cpu, gpu or tpu."""
        return self.mesh.devices.flat[0].platform

    @property
    def counts(self) -> bool:
        """Whether steps give back pairs of tokens and experts."""
        return num_counted(self.layout.model) > 0

    @property
    def tells(self) -> bool:
        """Whether steps give back the experts that their tokens chose."""
        return self.routed_experts and self.counts

    def experts_in(self, mode: Mode, num_tokens: int) -> Mode:
        """The mode as which a program uses experts."""
        return self.expert_modes(mode, num_tokens) if self.expert_modes else self.layout.shift

    def use_in(self, mode: Mode, size: tuple[int, int]) -> Use:
        """As in which modes a program of so many tokens and rows uses experts, and q and o."""
        queries = self.query_modes(mode, size) if self.query_modes else mode
        return Use(self.experts_in(mode, size[0]), None if queries == mode else queries)

    def compile(
        self, mode: Mode, pools: Any, packing: Packing, tables: RowMasks
    ) -> jax.stages.Compiled:
        """Compile the step for one mode and bucket ahead of time.

        `pools` and `tables` may be arrays or `jax.ShapeDtypeStruct`s with shardings.
        """
        params = self.weights.abstract(mode, self.mesh, self.use_in(mode, packing.size_of_step))
        replicated = named(self.mesh, replicated_spec())
        last_tokens = jax.ShapeDtypeStruct((self.max_rows,), jnp.int32, sharding=replicated)
        flat = jax.ShapeDtypeStruct((packing.size,), jnp.int32, sharding=replicated)
        hidden = self.hidden(mode, packing.num_tokens)
        step = jax.jit(self.function(mode, packing), donate_argnums=1)
        lowered = step.lower(params, pools, last_tokens, flat, tables, *hidden)
        options: dict[str, str | int] = {**COMPILER_OPTIONS[self.platform], **self.gpu_options}
        if self.numerics.is_strict:
            options |= strict_options(self.platform, self.layout, self.model.formats)
        return lowered.compile(compiler_options=options)

    def hidden(self, mode: Mode, num_tokens: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The hidden states of so many tokens that a stage is given: none if it is the first."""
        model = self.layout.model
        if model.is_first_stage:
            return ()
        shape = num_tokens, round_up(model.hidden_size, self.layout.ways(mode))
        return (jax.ShapeDtypeStruct(shape, self.model.dtype, sharding=self.entry(mode)),)

    def entry(self, mode: Mode) -> NamedSharding:
        """Where the hidden states lie that a stage is given."""
        return named(mesh_of(self.mesh, mode), hidden_spec())

    def function(self, mode: Mode, packing: Packing):
        """Return the step of one mode as a function of global arrays."""
        everywhere, tables, model = replicated_spec(), RowMasks(*TABLE_SPECS), self.layout.model
        guesses = everywhere if model.speculator is not None else None
        result = StepResult._make((everywhere, everywhere, everywhere, guesses))
        given = () if model.is_first_stage else (hidden_spec(),)
        given_back = (everywhere, result) if model.is_last_stage else (hidden_spec(),)
        if self.counts:
            given_back = *given_back, everywhere if is_spread(self.mesh) else counts_spec()
        use = self.use_in(mode, packing.size_of_step)
        parallel = Parallel(self.layout, mode, use, self.numerics)
        if self.tells:
            in_parts = tells_parts(parallel, packing.num_tokens)
            given_back = *given_back, chosen_spec(in_parts=in_parts)

        def step(params, pools, last_tokens, flat, tables, *hidden):
            if self.platform == "gpu":
                flat = _at_a_fixed_address(flat, last_tokens)
            inputs, pools = packing.unpack(flat), in_shape(pools, self.layout, self.block_size)
            pools, *results = self._local_step(
                parallel, inputs, params, pools, last_tokens, tables, *hidden
            )
            return as_stored(pools), *results

        return jax.shard_map(
            step,
            mesh=self.sums.mesh(mesh_of(self.mesh, mode, parallel.as_experts)),
            in_specs=(self.weights.specs(), pool_spec(), everywhere, everywhere, tables, *given),
            out_specs=(pool_spec(), *given_back),
            # Replication is by construction (the same inputs, psum, all_gather); the checker
            # knows no ragged attention and would reject its loops.
            check_vma=False,
        )

    def _local_step(
        self,
        parallel: Parallel,
        inputs: StepInputs,
        params: tuple[jax.Array, ...],
        pools: ModelPools,
        last_tokens: Int[Array, " max_rows"],
        tables: RowMasks,
        *given: Float[Array, "tokens_sp hidden_tp"],
    ) -> tuple[Any, ...]:
        """One device's part of the step; `given` by the stage before, if there is one."""
        weights = self.weights.local(parallel.mode, params, parallel.use)
        model = self.model.merge(weights)
        if self.attention.localise is not None:
            inputs = self.attention.localise(inputs)
        ids = inputs.token_ids
        ids = jnp.where(ids < 0, last_tokens[jnp.maximum(-1 - ids, 0)], ids)
        enters = self.attention.enter is not None
        ropes, whole = ropes_of_step(inputs.positions, self.layout.model, parallel, enters=enters)
        context = Context(ropes, inputs.attention, self.attention, parallel, self.experts)
        counted = [] if self.counts else None
        context = context._replace(token_ids=ids, counted=counted, tells=self.tells)
        if inputs.adapters is not None:
            own = parallel.local_tokens(inputs.adapters)
            context = context._replace(slot=own, all_slots=inputs.adapters)
        context = context._replace(products=self.products, norms=self.norms, whole_ropes=whole)
        x = parallel.from_stage_before(*given) if given else model.embed_tokens(ids, parallel)
        norms = self.weights.whole_arrays(params, SUMMED_NORMS)
        context = context._replace(sums=self.sums.open(parallel, x, norms))
        streams, pools = model.run_layers(x, pools, context)
        last, sums = streams[-1], context.sums
        last = last if sums is None else sums.closed(last, self.layout.model)
        hidden = model.hidden_states(last, parallel)
        own = ()
        if counted:
            own = (counts_of_step(counted, parallel, is_spread=is_spread(self.mesh)),)
        if counted and self.tells:
            assert self.layout.model.experts is not None
            own = *own, chosen_of_step(counted, self.layout.model.experts.num)
        if not self.layout.model.is_last_stage:
            return pools, parallel.to_next_stage(hidden), *own
        return *self._sampled(model, inputs, ids, hidden, pools, tables, context), *own

    def _sampled(
        self,
        model: Any,
        inputs: StepInputs,
        ids: Int[Array, " tokens"],
        hidden: Float[Array, "tokens_sp hidden"],
        pools: ModelPools,
        tables: RowMasks,
        context: Context,
    ) -> tuple[ModelPools, Int[Array, " max_rows"], StepResult]:
        """What the last layer's hidden states come to: pools, sampled tokens, results."""
        parallel = context.parallel
        rows = LogitRows(inputs.sample_rows, inputs.positions, inputs.late)
        last, pools = model.take_rows(hidden, rows, pools, context)
        last = model.normed(last)
        logits = model.logits(last)
        sampled = inputs.sample_rows
        pending = jnp.where(inputs.token_ids[sampled] < 0, ids[sampled], -1)
        sampling = SamplingInputs(**inputs.sampling, pending_ids=pending, **tables._asdict())
        key = jax.random.wrap_key_data(inputs.key, impl="threefry2x32")
        vocab_size = self.layout.model.vocab_size
        out = self.sampler(logits, sampling, key, parallel, vocab_size=vocab_size)
        logprob_bits = jax.lax.bitcast_convert_type(out.logprobs, jnp.int32)
        summary = jnp.stack([out.token_ids, logprob_bits, out.is_finite.astype(jnp.int32)], axis=1)
        tokens = jnp.pad(summary[:, 0], (0, self.max_rows - summary.shape[0]))
        guesses = None
        if inputs.guessing is not None:
            rows = _draft_rows(inputs, ids, last, summary[:, 0])
            drafts = model.speculator(rows, key, inputs.guessing.num_guesses, parallel)
            token_ids, probabilities = drafts
            bits = jax.lax.bitcast_convert_type(probabilities, jnp.int32)
            guesses = jnp.stack([token_ids, bits])
        return pools, tokens, StepResult(summary, out.top_ids, out.top_logprobs, guesses)


def _draft_rows(
    inputs: StepInputs,
    ids: Int[Array, " tokens"],
    hidden: Float[Array, "rows hidden"],
    sampled: Int[Array, " rows"],
) -> DraftRows:
    """What guesses of every sequence begin with: its last row that counts.

    That is the first of its rows which does not sample the token that comes next in the step, a
    draft's or a prompt's, or the last; as the host sees it (`core.results.num_accepted`).
    """
    assert inputs.guessing is not None
    starts, sampling = inputs.guessing.row_start_loc, inputs.sampling
    following = ids[jnp.minimum(inputs.sample_rows + 1, ids.shape[0] - 1)]
    row = jnp.arange(sampled.shape[0], dtype=jnp.int32)[None]
    first, last = starts[:-1, None], jnp.maximum(starts[1:, None] - 1, 0)
    ends = (row >= first) & (row < last) & (sampled != following)[None]
    row = jnp.min(jnp.where(ends, row, last), axis=1)
    temperature = jnp.where(sampling["top_k"] == 1, 0.0, sampling["temperature"])
    return DraftRows(
        hidden[row],
        sampled[row],
        sampling["positions"][row] + 1,
        sampling["seeds"][row],
        temperature[row],
    )


def _at_a_fixed_address(
    flat: Int[Array, " size"], last_tokens: Int[Array, " max_rows"]
) -> Int[Array, " size"]:
    """Return the same vector in memory of the program's own, for kernels in a CUDA graph.

    Every step brings a new buffer, and a graph whose kernels read that has to be changed before
    each launch, kernel by kernel: three a layer. XLA removes a copy that changes nothing, so this
    one seems to: no token is less than 0.
    """
    flat = jnp.where(last_tokens[0] < 0, 0, flat)
    return jax.lax.optimization_barrier(flat)
