"""Mutants of what devices hold and compute: sampler, views, exchanges, moves, weights, kernels."""

from mutant import Mutant

SAMPLING = "shiftjax/device/sampling.py"
INPUTS = "shiftjax/device/sampling_inputs.py"
NOISE = "shiftjax/models/noise.py"
LAYOUT = "shiftjax/parallel/layout.py"
VIEWS = "shiftjax/device/views.py"
MODE_WEIGHTS = "shiftjax/device/mode_weights.py"
JOINED = "shiftjax/device/joined.py"
EXCHANGE = "shiftjax/models/exchange.py"
MOVER = "shiftjax/fleet/mover_device.py"
ATTENTION = "shiftjax/models/attention.py"

TEST_SAMPLING = "tests/device/test_sampling.py"
SPLIT = "test_devices_that_split_the_vocabulary_choose_what_one_does"
BITS = "test_the_vocabulary_split_at_any_token_has_its_bits"
TEST_INPUTS = "tests/device/test_sampling_inputs.py"
TEST_LAYOUT = "tests/parallel/test_layout.py"
TEST_VIEWS = "tests/device/test_views.py"
TEST_JOINED = "tests/device/test_joined.py"
TEST_EXCHANGE = "tests/models/test_exchange.py"
TEST_MOVER = "tests/fleet/test_mover_device.py"
SWIFTKV = "tests/models/test_swiftkv.py"
CACHE_SPEC = "tests/device/test_cache_spec.py"
QUANTISED = "tests/weights/test_quantised_checkpoints.py"

SAMPLER_ROWS = (
    Mutant(
        "top_p keeps a token too few", "sampler", SAMPLING,
        "jnp.ceil(inputs.top_p * held", "jnp.floor(0.99 * inputs.top_p * held",
        (f"{TEST_SAMPLING}::test_top_p_keeps_what_it_needs_and_no_more",),
        "what is left may have less than top_p",
    ),
    Mutant(
        "top_p is of all tokens, not of what top_k left", "sampler", SAMPLING,
        "kept = jnp.where(weights >= floor[:, None], weights, 0)",
        "kept = jnp.where(weights >= 0 * floor[:, None], weights, 0)",
        (f"{TEST_SAMPLING}::test_top_p_is_of_what_top_k_left",), "both together keep too much",
    ),
    Mutant(
        "noise does not depend on the position", "sampler", NOISE,
        "for data in (seed[0], seed[1], position):", "for data in (seed[0], seed[1]):",
        (f"{TEST_SAMPLING}::test_seed_and_position_change_the_token",),
        "every token of an output is drawn with the same luck",
    ),
    Mutant(
        "half of a seed is ignored", "sampler", NOISE,
        "for data in (seed[0], seed[1], position):", "for data in (seed[0], position):",
        (f"{TEST_SAMPLING}::test_seed_and_position_change_the_token",), "other seeds, same texts",
    ),
    Mutant(
        "continuations have one seed", "sampler", "shiftjax/core/request.py",
        'f"{seed}/{index}".encode()', 'f"{seed}/0".encode()',
        ("tests/core/test_scheduler.py",), "n texts are n times the same",
    ),
    Mutant(
        "the token in flight is not penalised", "sampler", SAMPLING,
        "(counts & 0x7FFF) + is_pending.astype(jnp.int32)",
        "(counts & 0x7FFF) + 0 * is_pending.astype(jnp.int32)",
        (f"{TEST_SAMPLING}::test_pending_tokens_count",), "overlap changes tokens",
    ),
    Mutant(
        "presence counts as often as frequency", "sampler", SAMPLING,
        "inputs.presence_penalty[:, None] * is_generated.astype",
        "inputs.presence_penalty[:, None] * generated.astype",
        (f"{TEST_SAMPLING}::test_each_parameter_alone",), "a penalty is another one",
    ),
    Mutant(
        "tokens of the prompt alone are not penalised", "sampler", SAMPLING,
        "is_generated | (counts >= 0x8000)", "is_generated | (counts > 0x8000)",
        (f"{TEST_SAMPLING}::test_each_parameter_alone",), "repetition_penalty forgets the prompt",
    ),
    Mutant(
        "a bad row is drawn from", "sampler", SAMPLING,
        "is_bad = jnp.sum(split.without_padding(logits, 0.0) * 0.0, axis=-1) != 0.0",
        "is_bad = jnp.max(logits, axis=-1) != jnp.max(logits, axis=-1)",
        (f"{TEST_SAMPLING}::test_a_bad_row_is_reported_and_spoils_no_other",),
        "NaN among logits goes unseen",
    ),
    Mutant(
        "of equal tokens the last device's wins", "sampler", SAMPLING,
        "winner = jnp.argmax(largest, axis=0)[None]",
        "winner = largest.shape[0] - 1 - jnp.argmax(largest[::-1], axis=0)[None]",
        (f"{TEST_SAMPLING}::{SPLIT}",), "greedy tokens depend on the number of devices",
    ),
    Mutant(
        "a device draws with the first one's noise", "sampler", SAMPLING,
        "inputs.positions, split.token_ids())",
        "inputs.positions, split.token_ids() - split.first)",
        (f"{TEST_SAMPLING}::{SPLIT}",), "tokens of all devices win together",
    ),
    Mutant(
        "a threshold is of what one device has", "sampler", SAMPLING,
        "sums = split.parallel.total(jnp.sum(kept, axis=-1))", "sums = jnp.sum(kept, axis=-1)",
        (f"{TEST_SAMPLING}::{SPLIT}",), "devices keep other tokens than each other",
    ),
    Mutant(
        "bits of a device begin with a word", "sampler", SAMPLING,
        "lax.dynamic_slice_in_dim(bits, first, count", "lax.dynamic_slice_in_dim(bits, 0, count",
        (f"{TEST_SAMPLING}::{BITS}",), "forbidden tokens are sampled",
    ),
    Mutant(
        "a device adds the biases of those before it", "sampler", SAMPLING,
        "(inputs.bias_ids < 0) | (bias_ids < 0)", "inputs.bias_ids < 0",
        (f"{TEST_SAMPLING}::{SPLIT}",), "tokens that nobody named get a bias",
    ),
    Mutant(
        "log-probabilities of a prompt are of its own tokens", "sampler", INPUTS,
        "token_ids[end - block.item.num_rows + 1 : end + 1]",
        "token_ids[end - block.item.num_rows : end]",
        (TEST_INPUTS,), "a token is scored by what came after it",
    ),
    Mutant(
        "the prompt counts as generated", "sampler", INPUTS,
        "sequence.token_ids[sequence.num_prompt_tokens :], np.int32",
        "sequence.token_ids, np.int32",
        (TEST_INPUTS,), "frequency_penalty punishes the question",
    ),
    Mutant(
        "a grammar overrides allowed tokens", "sampler", INPUTS,
        "return mask if allowed is None else mask & allowed", "return mask",
        (TEST_INPUTS,), "a forbidden token is sampled",
    ),
    Mutant(
        "rows of a draft count its tokens too late", "sampler", INPUTS,
        "table[row] = table[row - 1]\n", "table[row] = table[first]\n",
        (TEST_INPUTS,), "penalties make drafts change tokens",
    ),
)  # fmt: skip
VIEWS_ROWS = (
    Mutant(
        "KV heads go round by device", "views", LAYOUT,
        "device * self.num_kv_heads // self.num_devices", "device % self.num_kv_heads",
        (TEST_LAYOUT,), "queries meet the keys of other heads",
    ),
    Mutant(
        "slices of SHIFT lie in the opposite order", "views", LAYOUT,
        "(rank - base_rank * (stored // mode.sp)) * self.shard_rows(axis, mode)",
        "((base_rank + 1) * (stored // mode.sp) - 1 - rank) * self.shard_rows(axis, mode)",
        (TEST_LAYOUT,), "SHIFT computes with its neighbour's weights",
    ),
    Mutant(
        "KV heads of a mode are counted from the wrong rank", "views", LAYOUT,
        "return layout.base_kv_heads[base_rank].index(heads[0])",
        "return layout.base_kv_heads[base_rank].index(heads[-1])",
        (TEST_LAYOUT,), "keys of SHIFT are computed with other rows",
    ),
    Mutant(
        "padded query heads get weights", "views", LAYOUT,
        "real = (kv_head < model.num_kv_heads) & (offset < q_per_kv)",
        "real = kv_head < model.num_kv_heads",
        (TEST_LAYOUT,), "heads of the next group are added twice",
    ),
    Mutant(
        "a part of a buffer begins too early", "views", VIEWS,
        "tensor.data += self.start * self.array.nbytes",
        "tensor.data += self.rows * self.array.nbytes",
        (TEST_VIEWS,), "a step reads other rows of its weights",
    ),
    Mutant(
        "a view may be a copy", "views", VIEWS,
        "if view.unsafe_buffer_pointer() != shard.unsafe_buffer_pointer() + offset:",
        "if view.nbytes != rows * shard.nbytes // shard.shape[0]:",
        (TEST_VIEWS,), "weights take twice their memory, without a word",
    ),
    Mutant(
        "layers of a joined array are as far apart as a mode's rows", "views", JOINED,
        "nth * step, nth * step + rows", "nth * rows, nth * rows + rows",
        (TEST_JOINED,), "SHIFT reads its neighbours' rows from the second layer on",
    ),
    Mutant(
        "a weight is put behind its place", "views", JOINED,
        "shard, nth * shard.shape[0], axis=0)", "shard, (nth + 1) * shard.shape[0], axis=0)",
        (TEST_JOINED,), "layers have their neighbours' weights",
    ),
    Mutant(
        "layers of a pool begin at one block", "views", ATTENTION,
        "return self.layer * jnp.int32(self.blocks(pool))", "return self.layer * jnp.int32(1)",
        ("tests/models/test_swiftkv.py", "tests/device/test_joined.py"),
        "layers overwrite each other's keys",
    ),
    Mutant(
        "only the first layer of a pool is moved", "mover", "shiftjax/device/pool.py",
        "* (pool[0].shape[0] // count)", "* 0",
        (TEST_MOVER,), "a request that moves has the keys of one layer",
    ),
    Mutant(
        "late layers are split as the mode is", "views", LAYOUT,
        """        if weight.in_shift:
            return self.shift
        if weight.split == "experts":""", """        if weight.split == "experts":""",
        (SWIFTKV,), "a late layer gets shards of another shape",
    ),
    Mutant(
        "units stand in their natural order", "views", "shiftjax/parallel/grid.py",
        'return [int(f"{place:0{bits}b}"[::-1], 2) if bits else 0 for place in range(width)]',
        "return list(range(width))",
        ("tests/parallel/test_grid.py",), "heads of a narrow group are no part of a wide one's",
    ),
    Mutant(
        "MLPs are padded for the devices alone", "views", "shiftjax/parallel/stored.py",
        "whole=block_of_width(weight.shape[0])", "whole=1",
        (TEST_LAYOUT, "tests/parallel/test_code_blocks.py"), "devices cut blocks of codes",
    ),
)  # fmt: skip
EXCHANGE_ROWS = (
    Mutant(
        "heads come back in the order of devices", "exchange", EXCHANGE,
        "return got.swapaxes(0, 1).reshape(got.shape[1], -1, got.shape[-1])",
        "return got.reshape(got.shape[1], -1, got.shape[-1])",
        (TEST_EXCHANGE,), "a token's output is put together from others'",
    ),
    Mutant(
        "keys and values change places", "exchange", EXCHANGE,
        "return got[:, :h], got[:, h : h + m], got[:, h + m :]",
        "return got[:, :h], got[:, h + m :], got[:, h : h + m]",
        (TEST_EXCHANGE,), "attention is of values, and sums keys",
    ),
    Mutant(
        "rows are taken round by device", "exchange", EXCHANGE,
        "owner, local = rows // count, rows % count",
        "owner, local = rows % self.mode.sp, rows // self.mode.sp",
        (TEST_EXCHANGE,), "logits are of another token",
    ),
    Mutant(
        "replicated heads are not laid out for who wants them", "exchange", LAYOUT,
        "[shard.index(h) for b in range(mode.sp) for h",
        "[shard.index(h) for b in reversed(range(mode.sp)) for h",
        (TEST_LAYOUT,), "devices of a rank get each other's keys",
    ),
    Mutant(
        "SHIFT inside of BASE sums over too few devices", "exchange", EXCHANGE,
        "psum(partial, WEIGHT_AXES if self.splits_tokens else ALL_AXES)",
        "psum(partial, WEIGHT_AXES)",
        (SWIFTKV,), "late layers lose a part of every product",
    ),
    Mutant(
        "every device has the first tokens", "exchange", EXCHANGE,
        "start = jax.lax.axis_index(TOKEN_AXES) * count",
        "start = 0 * jax.lax.axis_index(TOKEN_AXES) * count",
        ("tests/device/test_gathered_weights.py",),
        "tokens of other devices are never computed",
    ),
    Mutant(
        "gathered weights keep the heads of all devices", "exchange", LAYOUT,
        "ranks.append([held.index(head) if head in held else 0 for head in wanted])",
        "ranks.append([0 for head in wanted])",
        (TEST_LAYOUT,), "all heads of a rank are its first",
    ),
)  # fmt: skip
MOVER_ROWS = (
    Mutant(
        "blocks of groups are laid in the order of calls", "mover", MOVER,
        "return got.transpose(2, 0, 3, 1, 4, 5).reshape(num, ways * per_call, -1)",
        "return got.transpose(2, 3, 0, 1, 4, 5).reshape(num, ways * per_call, -1)",
        (TEST_MOVER,), "sequences of two groups change places",
    ),
    Mutant(
        "copies of heads are taken for other heads", "mover", MOVER,
        "got[:: shapes.copies]", "got[: shapes.blocks]",
        (TEST_MOVER,), "a narrow group gets one head several times",
    ),
    Mutant(
        "the last copies are left out", "mover", MOVER,
        "count = np.int32(-(-len(part) // copies.per_call))",
        "count = np.int32(len(part) // copies.per_call)",
        (TEST_MOVER,), "a table points at blocks that were not copied",
    ),
    Mutant(
        "the last call of a move is left out", "mover", MOVER,
        "(np.int32(len(some)), *numbers)", "(np.int32(max(1, len(some) - 1)), *numbers)",
        (TEST_MOVER,), "a running request attends to stale blocks",
    ),
    Mutant(
        "partial blocks are read to their end", "mover", MOVER,
        "many[number, place, nth, : len(blocks)] = blocks",
        "many[number, place, nth, -len(blocks) :] = blocks",
        (TEST_MOVER,), "tokens of a partial block are moved to other places",
    ),
)  # fmt: skip
KERNELS_ROWS = (
    Mutant(
        "the decode kernel drops the last token", "kernels", "pallas_kernels/decode_compute.py",
        "positions < part.length", "positions < part.length - 1",
        ("tests/kernels/test_decode.py",), "a token does not see itself",
    ),
    Mutant(
        "the decode kernel's window is one token short", "kernels",
        "pallas_kernels/decode_compute.py", "positions >= part.low", "positions > part.low",
        ("tests/kernels/test_decode.py",), "layers with windows forget a token",
    ),
    Mutant(
        "sums of many heads do not decay", "kernels", "pallas_kernels/latent_decode.py",
        "decayed = old * _across(decay, old)", "decayed = old",
        ("tests/kernels/test_decode.py",), "wrong tokens of DeepSeek-V3 on GPUs",
    ),
    Mutant(
        "the prefill kernel reads the block before", "kernels", "pallas_kernels/prefill_memory.py",
        "jnp.minimum(place, last_place)", "jnp.maximum(place - 1, 0)",
        ("tests/kernels/test_prefill.py",), "chunks attend to a stale block",
    ),
    Mutant(
        "the prefill kernel sees a token ahead", "kernels", "pallas_kernels/prefill_softmax.py",
        "is_past = key <= ", "is_past = key - 1 <= ",
        ("tests/kernels/test_prefill.py",), "a prompt knows what comes next",
    ),
    Mutant(
        "a part of a product with q, k and v is lost", "kernels", "pallas_kernels/rope_write.py",
        "range(parts.shape[0])", "range(parts.shape[0] - 1)",
        ("tests/kernels/test_rope_write.py",), "heads of small steps are wrong",
    ),
    Mutant(
        "keys are rotated backwards", "kernels", "pallas_kernels/kv_write.py",
        "(b * cos + a * sin).astype(first.dtype)", "(b * cos - a * sin).astype(first.dtype)",
        ("tests/kernels/test_kv_write.py",), "positions of cached keys are wrong",
    ),
    Mutant(
        "rounds before the window's first full one are left out", "kernels",
        "pallas_kernels/decode_work.py",
        "first_round = begins // config.kv_tile", "first_round = -(-begins // config.kv_tile)",
        ("tests/kernels/test_decode_work.py",), "a window loses up to a round",
    ),
    Mutant(
        "the last span of a context is nobody's", "kernels", "pallas_kernels/prefill_work.py",
        "last = -(-np.maximum(position + end - begin, 0) // SPAN)",
        "last = np.maximum(position + end - begin, 0) // SPAN",
        ("tests/kernels/test_prefill_work.py",), "chunks do not see their own tokens",
    ),
    Mutant(
        "tiles of experts are cut for full tiles", "kernels", "pallas_kernels/grouped_work.py",
        "tiles_of = (sizes + (tile - 1)) // tile", "tiles_of = sizes // tile",
        ("tests/kernels/test_grouped_work.py",), "an expert's last tokens get no output",
    ),
    Mutant(
        "the XLA window is a token too wide", "kernels", "shiftjax/models/attention_work.py",
        "begin = np.maximum(first_seen(end - 1, window), 0)",
        "begin = np.maximum(first_seen(end - 2, window), 0)",
        ("tests/models/test_attention.py::test_windows",), "decodes see past their window",
    ),
    Mutant(
        "a chunk begins a token early", "kernels", "pallas_kernels/window.py",
        "return position - rest(position, window.tokens)",
        "return position - rest(position, window.tokens) - 1",
        ("tests/kernels/test_window.py", "tests/models/test_attention.py::test_windows"),
        "the last token of another chunk is seen",
    ),
    Mutant(
        "chunks of prompts are not hidden in tiles", "kernels", "shiftjax/models/attention.py",
        "seen &= key >= first_seen(query, window)", "pass",
        ("tests/models/test_attention.py::test_windows",), "tiles see a round's other chunks",
    ),
    Mutant(
        "the decode kernel sees no chunks", "kernels", "pallas_kernels/decode_terms.py",
        "low = oldest_seen(length - 1, window)",
        "low = jnp.maximum(length - (window if isinstance(window, int) else length), 0)",
        ("tests/kernels/test_decode.py",), "decodes see what prompts do not",
    ),
    Mutant(
        "XLA's decode rows see a slot too many", "kernels", ATTENTION,
        "(position >= begin[:, None]) & (position < end[:, None])",
        "(position >= begin[:, None]) & (position <= end[:, None])",
        ("tests/models/test_attention.py::test_equals_the_definition",),
        "a stale key takes part in every decode",
    ),
    Mutant(
        "codes are written without their scale", "kernels", ATTENTION,
        "        wide = wide / scale[None, :, None]\n", "        wide = wide * 1.0\n",
        ("tests/models/test_fp8_attention.py",), "fp8 caches hold other numbers",
    ),
)  # fmt: skip
WEIGHTS_ROWS = (
    Mutant(
        "words of 4 bits are read from the top", "weights", "shiftjax/weights/packed.py",
        "shifts = np.arange(0, 8, bits, dtype=np.uint8)",
        "shifts = np.arange(0, 8, bits, dtype=np.uint8)[::-1]",
        (QUANTISED,), "neighbouring weights change places",
    ),
    Mutant(
        "GPTQ's zeros are off by one", "weights", "shiftjax/weights/packed.py",
        "return zeros + np.int32(packed.scheme.zero_offset)", "return zeros",
        (QUANTISED,), "every weight is a step too large",
    ),
    Mutant(
        "AWQ's outputs stay interleaved", "weights", "shiftjax/weights/packed.py",
        "[..., np.argsort(_AWQ_ORDER)]", "[..., np.arange(8)]",
        (QUANTISED,), "outputs of a matrix change places",
    ),
    Mutant(
        "llama.cpp's halves stay interleaved", "weights", "shiftjax/weights/gguf.py",
        "return head * head_dim + 2 * pair + half", "return rows",
        ("tests/weights/test_gguf.py",), "rotary embeddings turn other pairs",
    ),
    Mutant(
        "tensors that the index does not name are passed over", "weights",
        "shiftjax/weights/huggingface.py",
        "if weight_map.get(name) != shard:", "if name in weight_map and weight_map[name] != shard:",
        ("tests/weights/test_huggingface.py",), "a damaged download loads",
    ),
    Mutant(
        "stacked keys have as many heads as queries", "weights", "shiftjax/weights/hf_names.py",
        '"v_proj": config.num_kv_heads,', '"v_proj": config.num_heads,',
        ("tests/weights/test_hf_names.py",), "a stack is cut in the wrong places",
    ),
)  # fmt: skip
TIER_ROWS = (
    Mutant(
        "keys come back from the host as values", "host tier",
        "shiftjax/host_tier/copies_device.py",
        "for place in sorted(by_entry)]", "for place in sorted(by_entry)[::-1]]",
        ("tests/host_tier/test_copies_device.py::test_blocks_come_back_to_the_bit_wherever_they_are_put",),
        "a restored prefix is garbage",
    ),
    Mutant(
        "an entry comes back from the host as another", "host tier",
        "shiftjax/host_tier/copies_device.py",
        "self._extents[number] if part.entries == own.alike]", "self._extents[number]]",
        (CACHE_SPEC,), "a restored prefix of latents is garbage",
    ),
    Mutant(
        "units of blocks of another size come from the beginning of a block", "host tier",
        "shiftjax/host_tier/store_device.py",
        "start = (first - begin * several) * unit_tokens", "start = 0",
        ("tests/host_tier/test_store_device.py",), "a prefix that another width wrote is garbage",
    ),
    Mutant(
        "every neighbour has the first run of a block", "host tier",
        "shiftjax/host_tier/copies_device.py",
        "positions.run(device % positions.ways)", "positions.run(0)",
        ("tests/host_tier/test_store_device.py",), "a restored prefix has positions of others",
    ),
    Mutant(
        "a run that is cut is copied from its begin", "host tier",
        "shiftjax/host_tier/store_device.py",
        "slice(begin - second, end - second)", "slice(0, end - begin)",
        ("tests/host_tier/test_store_device.py",), "a restored prefix has positions of others",
    ),
    Mutant(
        "entries that are not split have one row a KV head", "host tier", LAYOUT,
        "range(entry.rows) if entry.axis is None else self.kv_heads_of(device)",
        "self.kv_heads_of(device)",
        (CACHE_SPEC,), "devices keep a part of what each needs whole",
    ),
)  # fmt: skip
ROWS: tuple[Mutant, ...] = (
    *SAMPLER_ROWS,
    *VIEWS_ROWS,
    *EXCHANGE_ROWS,
    *MOVER_ROWS,
    *KERNELS_ROWS,
    *WEIGHTS_ROWS,
    *TIER_ROWS,
)  # fmt: skip
