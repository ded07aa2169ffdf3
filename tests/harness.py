"""Run the model's forward pass directly, without the engine: one prompt, one prefill."""

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from shiftjax.arch.config import ModelConfig
from shiftjax.arch.formats import FORMATS, Formats, formats_of
from shiftjax.arch.presets import PRESETS
from shiftjax.core.request import (
    Request,
    SamplingParams,
    ScheduledSequence,
    SequenceState,
    StepPlan,
)
from shiftjax.costs.buckets import Bucket
from shiftjax.device.mesh import make_mesh, mesh_of, pool_spec, vocab_spec
from shiftjax.device.mode_weights import ModeWeights
from shiftjax.device.pack import step_inputs
from shiftjax.device.place import define, load
from shiftjax.device.pool import PoolOptions, as_stored, in_shape, make_pools
from shiftjax.models.attention_backend import loops_of
from shiftjax.models.entry_backend import Entry
from shiftjax.models.exchange import Parallel
from shiftjax.models.layers import Context, LogitRows, ropes_of_step
from shiftjax.parallel.grid import TOKEN_AXES, Mode, Use
from shiftjax.parallel.layout import Layout, round_up
from shiftjax.weights.huggingface import HuggingFaceSource

BLOCK_SIZE = 8
# SmolLM2's 9 query and 3 KV heads, and sizes that no number of devices divides.
ODD = replace(PRESETS["tiny"], num_heads=9, num_kv_heads=3, intermediate_size=101, vocab_size=331)
TIED = replace(ODD, tie_word_embeddings=True)
BIASED = replace(TIED, attention_bias=True, output_bias=True, mlp_bias=True, qk_norm=True)
SWIFTKV = replace(BIASED, architecture="llama_swiftkv", num_kv_layers=1, qk_norm=False)

FACTORISATIONS = [
    (sp, tp) for sp in range(1, 10) for tp in range(1, 10) if sp * tp in (1, 2, 3, 4, 6, 8, 9)
]


def layout(sp: int, tp: int, num_heads: int, num_kv_heads: int) -> Layout:
    config = ModelConfig(
        name="test",
        architecture="llama",
        vocab_size=101,
        hidden_size=32,
        intermediate_size=50,
        num_layers=1,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=8,
        max_position_embeddings=64,
    )
    return Layout(config, sp, tp)


def silent(_task: str, _done: int, _total: int) -> None:
    """A progress callback that shows nothing."""


def prefill_plan(token_ids: list[int], num_rows: int, block_size: int = BLOCK_SIZE) -> StepPlan:
    """A plan that computes one prompt in one step, with its last rows, in blocks 1, 2, 3 ..."""
    blocks = list(range(1, 2 + len(token_ids) // block_size))
    sequence = SequenceState(
        request=Request("r", token_ids, SamplingParams()),
        index=0,
        seed=0,
        order=(0, 0.0, 0, 0),
        token_ids=list(token_ids),
        num_prompt_tokens=len(token_ids),
        max_length=len(token_ids) + 1,
        stop_ids=frozenset(),
        siblings=[],
        block_table=blocks,
    )
    n = len(token_ids)
    item = ScheduledSequence(sequence, 0, n, num_rows, -1)
    return StepPlan([item], n, num_rows, 0, [], [], step_id=0)


def forward(
    directory: Path,
    token_ids: list[int],
    sp: int,
    tp: int,
    mode: Mode,
    strategy: str,
    num_rows: int | None = None,
    formats: Formats | None = None,
    experts: tuple[int, int] = (1, 1),
):
    """Return (hidden states after embedding and each layer, logits of all tokens), NumPy.

    With `num_rows`, logits are those of so many last tokens, and then of the first one. `experts`
    are stored as in the mode that splits tokens so many ways, and used as in another.
    """
    (found,) = forwards(directory, [token_ids], sp, tp, mode, strategy, num_rows, formats, experts)
    return found


def forwards(
    directory: Path,
    prompts: list[list[int]],
    sp: int,
    tp: int,
    mode: Mode,
    strategy: str,
    num_rows: int | None = None,
    formats: Formats | None = None,
    experts: tuple[int, int] = (1, 1),
    enter: Entry | None = None,
):
    """Yield what `forward` returns of each prompt: all are padded to one size, of one program.

    With `enter`, that takes heads from their product to attention.
    """
    source = HuggingFaceSource(directory)
    layout = Layout(source.config, sp, tp, experts_sp=experts[0])
    used = Use(Mode(sp, experts[1]))
    mesh = make_mesh(jax.devices()[: sp * tp], sp, tp)
    model = define(layout, formats or formats_of("float32"))
    weights = ModeWeights(model, layout, strategy)
    stored = weights.with_head(load(model, layout, mesh, source, silent))
    params = weights.of(mode, stored, used)
    size = max(map(len, prompts))
    tokens = round_up(size, sp * tp)
    attention = loops_of(source.config, BLOCK_SIZE)._replace(enter=enter)
    kv = FORMATS[model.formats.kv].dtype
    pool = PoolOptions(2 + size // BLOCK_SIZE, BLOCK_SIZE, tokens, kv)
    bucket, no_key = Bucket(tokens, tokens), np.zeros(2, np.uint32)
    parallel = Parallel(layout, mode, used)

    def run(params, pools, inputs):
        pools = in_shape(pools, layout, BLOCK_SIZE)
        llama = model.merge(weights.local(mode, params, used))
        of_all = inputs.positions, source.config, parallel
        ropes, whole = ropes_of_step(*of_all, enters=enter is not None)
        context = Context(ropes, inputs.attention, attention, parallel, whole_ropes=whole)
        streams, pools = llama(inputs.token_ids, pools, context)
        hidden = [llama.hidden_states(each, parallel) for each in streams]
        rows = LogitRows(inputs.sample_rows, inputs.positions, inputs.late)
        last, pools = llama.take_rows(hidden[-1], rows, pools, context)
        logits = llama.logits(llama.normed(last))
        return hidden, logits, as_stored(pools)

    split = P(TOKEN_AXES) if parallel.splits_tokens else P()
    mapped = jax.shard_map(
        run,
        mesh=mesh_of(mesh, mode, used.experts),
        in_specs=(weights.specs(), pool_spec(), P()),
        out_specs=(split, vocab_spec(), pool_spec()),
        check_vma=False,
    )
    step, vocab = jax.jit(mapped), source.config.vocab_size
    for token_ids in prompts:
        n = len(token_ids)
        plan = prefill_plan(token_ids, n if num_rows is None else num_rows)
        inputs = step_inputs(plan, bucket, pool, attention, {}, no_key, model=source.config)
        pools = make_pools(mesh, layout, pool.num_blocks, BLOCK_SIZE, pool.dtype)
        hidden, logits, pools = step(params, pools, inputs)
        yield [np.asarray(h)[:n] for h in hidden], np.asarray(logits)[:n, :vocab], pools


def held_bytes(arrays: list[jax.Array]) -> dict[jax.Device, int]:
    """Memory of the arrays on each device; what several of them share counts once."""
    ranges: dict[jax.Device, list[tuple[int, int]]] = {}
    for shard in (shard for array in arrays for shard in array.addressable_shards):
        start = shard.data.unsafe_buffer_pointer()
        ranges.setdefault(shard.device, []).append((start, start + shard.data.nbytes))
    return {device: covered(spans) for device, spans in ranges.items()}


def covered(spans: list[tuple[int, int]]) -> int:
    """The length of a union of intervals."""
    total = end = 0
    for start, stop in sorted(spans):
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total
