"""The cost model's collectives are those of the engine's own compiled steps, byte for byte."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from engines import checkpoint, make
from hlo import FLOAT32_BYTES, collectives, counted, instructions, product_flops, unordered
from lean import greedy_collectives
from oracle import numpy_speculator
from spent import exhaustive, quick, thorough

from shiftjax.arch.config import ModelConfig
from shiftjax.arch.formats import formats_of
from shiftjax.arch.presets import PRESETS
from shiftjax.arch.weights import Weight, weights_of
from shiftjax.costs.collectives import (
    DIGIT_BITS_ON_CPU,
    context_gathers,
    gather_of_experts,
    guess_collectives,
    sampling_collectives,
    step_collectives,
)
from shiftjax.costs.expert_load import room_to_exchange
from shiftjax.costs.memory import kv_token_bytes
from shiftjax.device.mesh import group_mesh
from shiftjax.device.pool import PoolOptions
from shiftjax.fleet.mover_device import compile_exchange
from shiftjax.parallel.grid import Grid, Group
from shiftjax.parallel.layout import Layout
from shiftjax.parallel.positions import GATHERED_TOKENS_ON_CPU, gathered_tokens

PARITY = Path(__file__).parent.parent / "data" / "parity"
MESHES = [(8, 1), (4, 2), (2, 4), (1, 8)]
HEADS = {  # query and KV heads on 8 devices
    "even": (8, 8),
    "replicated": (16, 2),
    "padded": (9, 3),
}
SWIFTKV = {"model_type": "llama_swiftkv", "num_hidden_layers": 3, "num_key_value_layers": 1}
EXPERTS = {  # in the second layer of two, and one that all tokens use
    "model_type": "qwen2_moe",
    "shared_expert_intermediate_size": 56,
    "num_hidden_layers": 2,
    "decoder_sparse_step": 2,
    "num_experts": 16,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "norm_topk_prob": True,
}
# Odd sizes, so that no two kinds of collective happen to have the same bytes.
ODD = {"hidden_size": 80, "intermediate_size": 272, "vocab_size": 331, "head_dim": 32}


NORMALISERS: dict[str, Any] = {"controls": {"normalisers": True}}

# Heads that fall evenly are the plainest case: one mesh with all three modes will do.
CASES = [(*mesh, heads) for mesh in MESHES for heads in ("replicated", "padded")]


@pytest.mark.costs(10)
@pytest.mark.parametrize(
    ("sp", "tp", "heads"),
    [(4, 2, "even"), *thorough(*CASES)],
)
def test_predicted_collectives_equal_the_compiled_ones(sp, tp, heads):
    num_heads, num_kv_heads = HEADS[heads]
    sizes = ODD | {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads}
    sizes["num_hidden_layers"] = 2 if heads == "padded" else 1
    check(sp, tp, sizes)


@pytest.mark.costs(10)
@pytest.mark.parametrize(
    ("sp", "tp", "sizes", "options"),
    [
        (2, 2, {}, NORMALISERS),  # in SHIFT; base has the others
        *thorough((4, 2, SWIFTKV, NORMALISERS | {"quantization": "fp8"})),
        *exhaustive((1, 8, SWIFTKV, {"kv_cache_dtype": "fp8"})),
        *exhaustive((2, 2, {}, {}), (4, 2, {}, {}), (8, 1, EXPERTS, NORMALISERS)),
    ],
)
def test_neighbours_exchange_queries_parts_and_contexts(sp, tp, sizes, options):
    heads = {"num_attention_heads": 16, "num_key_value_heads": 2}
    texts = check(sp, tp, ODD | heads | sizes, kv_split="position", **options)
    assert not any(map(unordered, texts))


@pytest.mark.thorough
def test_neighbours_exchange_latents():
    texts = check_model(PARITY / "deepseek_v3", 2, 2, kv_split="position")
    assert not any(map(unordered, texts))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("sp", "tp", "heads", "options"),
    [
        (4, 1, "replicated", {"quantization": "fp8"}),
        (2, 2, "padded", {}),
    ],
)
def test_gathered_weights_cross_once_a_layer(sp, tp, heads, options):
    num_heads, num_kv_heads = HEADS[heads]
    sizes = ODD | {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads}
    check(sp, tp, sizes | {"num_hidden_layers": 2}, weights="gather", **options)


@pytest.mark.thorough
@pytest.mark.parametrize(("sp", "tp"), [(4, 2), *exhaustive((1, 8))])
def test_late_layers_gather_once_and_reduce_rows(sp, tp):
    check(sp, tp, ODD | SWIFTKV)


@pytest.mark.thorough
@pytest.mark.parametrize(("sp", "tp"), [(4, 2), *exhaustive((1, 8))])
def test_experts_gather_tokens_and_scatter_their_sums(sp, tp):
    """The sum of what the shared one adds is made with theirs."""
    check(sp, tp, ODD | EXPERTS)


USES = [(sp, tp, e) for sp, tp in MESHES for e in (8, 4, 2) if e <= sp]


@pytest.mark.costs(10)
@pytest.mark.parametrize(("sp", "tp", "experts_as"), quick(USES, (4, 2, 2)))
def test_experts_that_are_split_less_gather_among_neighbours_alone(sp, tp, experts_as):
    """Nothing moves for experts that no weight is split beside."""
    check(sp, tp, ODD | EXPERTS, controls={"experts_as": experts_as})


@pytest.mark.thorough
def test_few_experts_of_a_token_are_exchanged():
    """Beside the exchange, the program has the gather of a step in which somebody lacks room."""
    check(4, 2, ODD | EXPERTS | {"num_experts_per_tok": 1})


@pytest.mark.thorough
@pytest.mark.parametrize(("method", "tie_lstm_embs"), [("sum_rnn", True), ("sum_lstm", False)])
def test_guesses_move_embeddings_and_best_tokens_alone(tmp_path, method, tie_lstm_embs):
    kind = {"sum_rnn": "MLP", "sum_lstm": "LSTM"}[method]
    config = {
        "architectures": [f"Arctic{kind}SpeculatorPreTrainedModel"],
        "method": method,
        "vocab_size": ODD["vocab_size"],
        "n_predict": 3,
        "tie_weights": True,
        "tie_lstm_embs": tie_lstm_embs,
        "scale_input": True,
        "emb_dim": ODD["hidden_size"] if kind == "MLP" else 56,
        "inner_dim": 56,
        "proj_dim": 56,
        "input_hidden_dim": ODD["hidden_size"],
    }
    tensors = numpy_speculator.random_tensors(config, seed=1)
    where = numpy_speculator.save(tmp_path / "speculator", config, tensors)
    check(4, 2, ODD, speculation="model", draft_model=str(where))


@pytest.mark.costs(15)
@pytest.mark.parametrize(
    ("name", "sp", "tp", "options"),
    quick(
        [
            (f"gemma4_{name}", *options)
            for name in ("text", "inputs", "experts")
            for options in ((4, 2, {}), (2, 2, {"weights": "gather"}))
        ],
        ("gemma4_inputs", 4, 2, {}),
    ),
)
def test_layers_whose_heads_differ_bring_their_own(name, sp, tp, options):
    """And those that read the cache of others bring queries alone; inputs are summed once."""
    check_model(PARITY / name, sp, tp, **options)


@pytest.mark.costs(15)
@pytest.mark.parametrize(
    ("name", "sp", "tp"),
    quick(
        [(f"deepseek_{name}", *mesh) for name in ("v2", "v3") for mesh in ((4, 2), (8, 1))],
        ("deepseek_v3", 4, 2),
    ),
)
def test_latents_go_to_all_and_queries_to_their_heads(name, sp, tp):
    check_model(PARITY / name, sp, tp)


def text_of(compiled: Any) -> str:
    text = compiled.as_text()
    assert text is not None
    return text


def check(sp: int, tp: int, sizes: dict, **settings: Any) -> list[str]:
    """Compare the compiled steps of every mode with what is predicted; return their texts."""
    return check_model(checkpoint(**sizes)[0], sp, tp, **settings)


def check_model(directory: Path, sp: int, tp: int, **settings: Any) -> list[str]:
    """The same of a checkpoint."""
    texts = []
    options: dict[str, Any] = {"token_buckets": (24,), "max_num_batched_tokens": 24} | settings
    (runner,) = make(directory, sp, tp, **options).runners
    (program,) = runner.programs
    for mode in runner.step.layout.modes:
        layout, bucket = runner.step.layout, program.bucket
        experts = runner.step.experts_in(mode, bucket.tokens)
        use = runner.step.use_in(mode, bucket[:2])
        moves = step_collectives(layout, mode, *bucket[:2], runner.step.model.formats, use)
        gathered = gathered_tokens(runner.step.block_size, GATHERED_TOKENS_ON_CPU)
        of_layer = context_gathers(layout, runner.step.model.formats, gathered)
        moves += layout.model.num_early_layers * of_layer
        if settings.get("whole"):
            moves += sampling_collectives(layout, bucket.rows, DIGIT_BITS_ON_CPU, 1)
        else:
            moves += greedy_collectives(layout, bucket.rows)
        if room_to_exchange(layout, mode, experts, bucket.tokens):
            size = layout, mode, experts, bucket.tokens, FLOAT32_BYTES
            count = layout.model.num_expert_layers
            moves += [m._replace(num_times=count) for m in gather_of_experts(*size)]
        moves += guess_collectives(layout, bucket.seqs, FLOAT32_BYTES)
        text = text_of(runner.compiled(program, mode))
        assert collectives(text) == counted(moves), mode
        texts.append(text)
    return texts


@pytest.mark.costs(15)
def test_the_sampler_moves_pairs_of_every_device_and_a_sum_for_each_digit():
    check(4, 2, ODD, whole=True)


@pytest.mark.parametrize(
    ("units", "tp", "narrow", "wide", "num_kv_heads"),
    [
        (8, 1, 1, 2, 8),
        (8, 1, 1, 8, 8),
        (8, 1, 2, 8, 16),
        (4, 2, 1, 4, 8),
        (8, 1, 1, 8, 2),  # 2 heads on 8 devices: four keep the same
        (8, 1, 4, 8, 2),  # what one has, two have: nothing is split
        (4, 2, 2, 4, 3),  # 3 heads, padded
    ],
)
def test_a_move_exchanges_the_bytes_of_its_blocks(units, tp, narrow, wide, num_kv_heads):
    """Each way: a part from every narrow group, of which a device's part is one block a block."""
    heads = {"num_heads": 2 * num_kv_heads, "num_kv_heads": num_kv_heads, "num_layers": 3}
    layouts = {
        w: Layout(replace(PRESETS["tiny"], **heads), w, tp, units) for w in (1, narrow, wide)
    }
    pool = PoolOptions(9, layouts[narrow].block_tokens(4), 1, np.dtype(np.float32))
    mesh = group_mesh(jax.devices(), Grid(tp, units), Group(0, wide))
    exchange = compile_exchange(mesh, layouts[narrow], layouts[wide], pool)
    block_bytes = 4 * kv_token_bytes(layouts[1], formats_of("float32"))
    num_bytes = wide // narrow * exchange.per_call * block_bytes
    for step in (exchange.to_wide, exchange.to_narrow):
        assert collectives(text_of(step)) == {("all-to-all", num_bytes): 1}


@pytest.mark.thorough
def test_late_layers_multiply_rows_alone():
    """A prefill's products fall to (L' + late * (KV's share + rows / tokens)) / L of all layers."""
    sizes = ODD | {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 3}
    options: dict[str, Any] = {
        "token_buckets": (256,),
        "max_num_batched_tokens": 256,
        "max_model_len": 256,
    }
    flops, layers = [], []
    for changes in (sizes, sizes | SWIFTKV):
        (runner,) = make(checkpoint(**changes)[0], 1, 1, **options).runners
        (program,) = runner.programs
        text = text_of(runner.compiled(program, runner.step.layout.base))
        (tokens, rows), config = program.bucket[:2], runner.step.layout.model
        assert (tokens, rows) == (256, 8)

        matrices = [one for one in weights_of(config) if one.kind == "matrix"]
        head = 2 * rows * config.vocab_size * config.hidden_size
        flops.append(product_flops(text) - head)
        counts = ((rows if is_late(one, config) else tokens, one) for one in matrices)
        assert flops[-1] == sum(2 * count * one.num_elements for count, one in counts)
        layers.append(sum(one.num_elements for one in matrices) // config.num_layers)
        pool = runner.memory.pools[0][0]
        shape = f"f32[{','.join(map(str, pool.shape))}]"
        copies = [one for one in instructions(text) if one.opcode == "copy" and shape in one.shape]
        assert not copies  # the branch reads the pools where they are
    kv_share = 2 * 4 * ODD["head_dim"] * ODD["hidden_size"] / layers[0]
    ratio = (1 + 2 * (kv_share + rows / tokens * (1 - kv_share))) / 3
    assert flops[1] / flops[0] == pytest.approx(ratio, rel=1e-9)


def is_late(weight: Weight, config: ModelConfig) -> bool:
    """Whether a matrix is applied to logit rows alone."""
    found = re.match(r"layers\.(\d+)\.", weight.name)
    return found is not None and int(found[1]) >= config.num_early_layers
