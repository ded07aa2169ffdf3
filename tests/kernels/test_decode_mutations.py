"""The checks of the decode kernel can fail: every fault below, put into it, is found."""

import numpy as np
import pytest
from attention_cases import FP8, decodes, make_step, run_parts, with_latents, worst_parts
from attention_cases import run_decode as run
from attention_cases import worst_decode as worst
from mutations import fit, load
from spent import mutants

PARTS = ("terms", "memory", "compute", "kernel", "combine")  # each may import those before it
MODULES = (*(f"decode_{part}" for part in PARTS), "latent_decode", "decode")
TWO_HEADS = decodes(kv_heads=2, num_blocks=4)
FAULTS = {
    "the last token is dropped": (
        "decode_compute", "positions < part.length", "positions < part.length - 1", decodes()
    ),
    "one token too many is seen": (
        "decode_compute", "positions < part.length", "positions <= part.length", decodes()
    ),
    "the window is one token short": (
        "decode_compute", "positions >= part.low", "positions > part.low",
        decodes(window=50),
    ),
    "the scale is 5% off": (
        "decode_compute", "(options.scale * LOG2_E))", "(1.05 * options.scale * LOG2_E))", decodes()
    ),
    "the scale of values is forgotten": (
        "decode_compute", "v_scale / total", "1 / total",
        decodes(kv_dtype=FP8, kv_scales=(1.0, 1.1)),
    ),
    "the wrong KV head": (
        "decode_memory", "column], head, tokens", "column], 0, tokens", TWO_HEADS
    ),
    "the block before": (
        "decode_memory", "tables[seq, column]",
        "tables[seq, jnp.maximum(column - 1, 0)]", decodes(),
    ),
    "the block table of the row's number": (
        "decode_terms", "inputs.row_seq[row], inputs", "row, inputs",
        decodes((40, 20), drafts=1, padding=2),
    ),
    "rows of a sequence see the same": (
        "decode_terms", "inputs.row_length[row]", "inputs.row_length[lax.div(row, 2)]",
        decodes((40, 20), drafts=1),
    ),
    "old values are not scaled down": (
        "decode_compute", "tuple(old * down_rows(decay, old.shape) + more",
        "tuple(old + more", decodes()
    ),
    "values without weight are not cleared": (
        "decode_compute", "    _clear_unseen(shape, part, v)\n", "", decodes()
    ),
    "K is not waited for": (
        "decode_compute", "    plgpu.barrier_wait(buffers.k_full.at[slot])\n", "", decodes()
    ),
    "a tile is overwritten while it is read": (
        "decode_memory", "pl.when(count >= shape.stages)", "pl.when(count > shape.stages)",
        decodes(),
    ),
    "the place of an fp8 tile is free too early": (
        "decode_compute", "    plgpu.commit_smem()  # before the next", "    # before the next",
        decodes(kv_dtype=FP8),
    ),
    "one job is forgotten": (
        "decode_combine", "(place < count)", "((place < count) & (place != 1))", decodes()
    ),
    "shares of warpgroups are not waited for": (
        "decode_combine", "            plgpu.barrier_wait(scratch.done)\n", "",
        decodes((1300,), num_blocks=21),
    ),
    "all of head_dim is its first part": (
        "decode_combine", "parts.outputs.at[head, :, columns]",
        "parts.outputs.at[head, :, pl.ds(0, COLUMNS)]", decodes(head_dim=128),
    ),
    "the last columns are those before": (
        "decode_terms", "(self.width - COLUMNS, COLUMNS)", "(0, COLUMNS)", decodes(head_dim=96)
    ),
    "columns that two blocks have are written for the last": (
        "decode_combine", "jnp.minimum(block * COLUMNS, head_dim - COLUMNS)",
        "jnp.minimum(block * COLUMNS, 0)", decodes(head_dim=96),
    ),
    "sinks of the first KV head": (
        "decode_combine", "parts.sinks.at[head]", "parts.sinks.at[0]",
        TWO_HEADS._replace(sinks=(0, 4)),
    ),
    "sinks are to another base": (
        "decode_combine", ".astype(jnp.float32) * LOG2_E", ".astype(jnp.float32)",
        decodes(sinks=(0, 4)),
    ),
    "rows of padding are not written": (
        "decode_combine", "combine() if kept is None else pl.when(count > 0)(combine)",
        "pl.when(count > 0)(combine)", decodes(padding=2),
    ),
}  # fmt: skip


FAULTS_OF_PARTS = {
    "parts are not divided by their sums": (
        "decode_combine", "weighted * _repeated(1 / total, weighted.shape, axis)", "weighted",
        decodes()
    ),
    "logarithms are those of the largest weight": (
        "decode_combine", "top + jnp.log2(total))", "top)", decodes()
    ),
    "logarithms of one head alone": (
        "decode_combine", "result.lse.at[row, head], top", "result.lse.at[row, 0], top",
        decodes(kv_heads=2),
    ),
    "shares of warpgroups are not waited for": (
        "decode_combine", "        plgpu.barrier_wait(scratch.done)\n        weighted, total, top",
        "        weighted, total, top", decodes((1300,), num_blocks=21),
    ),
    "what rows say of their windows is not heard": (
        "decode_terms", "if inputs.row_low is None else inputs.row_low[row]", "",
        decodes(window=50),
    ),
    "the last of the products is all new": (
        "decode", "values[..., -rest:]", "values[..., whole : whole + rest]", decodes(head_dim=96)
    ),
}  # fmt: skip


FEW = decodes((300, 33), q_per_kv=16, head_dim=128), 64
MANY = decodes((300, 33), q_per_kv=20, head_dim=128), 128
CODES = MANY[0]._replace(kv_dtype=FP8, kv_scales=(0.5, 3.0)), 128
FAULTS_OF_LATENTS = {
    "a tile is free before its values are read": (
        "decode_compute", "if buffers.wide_k is None and buffers.v is not None:",
        "if buffers.wide_k is None:", FEW
    ),
    "old values are not scaled down": (
        "decode_compute", "tuple(old * down_rows(decay, old.shape) for old in weighted)",
        "tuple(weighted)", FEW
    ),
    "groups of heads are KV heads of the pool": (
        "decode_memory",
        'lax.axis_index("kv_head") if shape.options.values_in_keys is None else jnp.int32(0)',
        'lax.axis_index("kv_head")', (decodes((70,), q_per_kv=72, head_dim=128), 128)
    ),
    "old values of many heads are not scaled down": (
        "latent_decode", "decayed = old * _across(decay, old)", "decayed = old", MANY
    ),
    "one token too many is seen": (
        "latent_decode", "positions < job.length", "positions <= job.length", MANY
    ),
    "the window is one token short": (
        "latent_decode", "positions >= job.low", "positions > job.low",
        (decodes((300, 33), q_per_kv=20, head_dim=128, window=50), 128)
    ),
    "values without weight are not cleared": (
        "latent_decode", "            _clear_unseen(shape, job, nth * shape.kv_tile, values)\n", "",
        MANY
    ),
    "both halves of a value are the first": (
        "latent_decode",
        "    half = pl.ds(shape.width // 2, shape.width // 2)\n    rest",
        "    half = pl.ds(0, shape.width // 2)\n    rest", MANY
    ),
    "weights are written before they have been read": (
        "latent_decode",
        "    plgpu.barrier_wait(buffers.p_free)\n    buffers.p[...]", "    buffers.p[...]", MANY
    ),
    "weights are read before they are written": (
        "latent_decode", "        plgpu.barrier_wait(buffers.p_full)\n", "", MANY
    ),
    "a tile is free when one of two has read it": (
        "latent_decode",
        "        decay = gain_of_turn(lambda: None)\n",
        "        decay = gain_of_turn(lambda: None)\n"
        "            plgpu.barrier_arrive(buffers.k_free.at[slot])\n", MANY
    ),
    "totals do not decay": (
        "latent_decode", "softmax.total * decay + p.sum", "softmax.total + p.sum", MANY
    ),
    "codes are widened before they have come": (
        "latent_decode", "            plgpu.barrier_wait(buffers.k_full.at[slot])\n", "", CODES
    ),
    "codes of the follower are not waited for": (
        "latent_decode", "        plgpu.barrier_wait(buffers.wide_full)\n", "        pass\n", CODES
    ),
    "scores are in units of codes": (
        "latent_decode", "(k_scale * (options.scale * LOG2_E))", "(options.scale * LOG2_E)", CODES
    ),
    "values are in units of codes": (
        "latent_decode", "gain = v_scale / total", "gain = 1 / total", CODES
    ),
    "heads come last in what is put together": (
        "decode", "config, options, heads_first=is_long)", "config, options)", MANY
    ),
}  # fmt: skip


def test_every_fault_fits_its_source():
    fit((*FAULTS.values(), *FAULTS_OF_PARTS.values(), *FAULTS_OF_LATENTS.values()))


@pytest.mark.parametrize("fault", mutants(*FAULTS_OF_LATENTS))
def test_a_fault_of_latents_is_found(fault):
    *change, (case, width) = FAULTS_OF_LATENTS[fault]
    module = load(MODULES, *change)
    step = with_latents(make_step(case), width)
    try:
        error = worst_parts(case, step, run_parts(case, step, module, width))
    except Exception as problem:  # the interpreter's own: a race, a barrier left half-way
        error = problem
    assert isinstance(error, Exception) or not error <= 1


@pytest.mark.parametrize("fault", mutants(*FAULTS_OF_PARTS))
def test_a_fault_of_parts_is_found(fault):
    *change, case = FAULTS_OF_PARTS[fault]
    module = load(MODULES, *change)
    step = make_step(case)
    try:
        error = worst_parts(case, step, run_parts(case, step, module))
    except Exception as problem:  # the interpreter's own: a race, a barrier left half-way
        error = problem
    assert isinstance(error, Exception) or not error <= 1


@pytest.mark.parametrize("fault", mutants(*FAULTS))
def test_a_fault_is_found(fault):
    *change, case = FAULTS[fault]
    module = load(MODULES, *change)
    step = make_step(case)
    try:
        out = run(case, step, module)
        error = np.inf if out[case.num_rows :].any() else worst(case, step, out)
    except Exception as problem:  # the interpreter's own: a race, a barrier left half-way
        error = problem
    assert isinstance(error, Exception) or error > 1


@pytest.mark.thorough
def test_without_a_fault_nothing_is_found():
    case = decodes(kv_heads=2, num_blocks=4)
    step = make_step(case)
    assert worst(case, step, run(case, step, load(MODULES))) <= 1
