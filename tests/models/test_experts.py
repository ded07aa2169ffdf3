"""Layers of experts: a float64 oracle token by token, in every mode of every mesh."""

from dataclasses import replace
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from harness import forward, silent
from jax.sharding import PartitionSpec as P
from oracle import numpy_experts, numpy_llama

from pallas_kernels.grouped_work import sort_pairs
from shiftjax.arch.config import Experts
from shiftjax.arch.formats import formats_of
from shiftjax.arch.presets import PRESETS
from shiftjax.costs.expert_load import room_of_exchange
from shiftjax.device.mesh import make_mesh, mesh_of
from shiftjax.device.place import define, load
from shiftjax.models.attention import AttentionMetadata
from shiftjax.models.attention_backend import xla_attention
from shiftjax.models.exchange import Parallel
from shiftjax.models.experts import route
from shiftjax.models.layers import Context, Rope
from shiftjax.models.mlp import MoE
from shiftjax.parallel.grid import EXPERT_AXES, TOKEN_AXES, WEIGHT_AXES, Mode, Use
from shiftjax.parallel.layout import Layout
from shiftjax.weights.random import RandomSource

TOKENS, REAL = 48, 43  # the rest is padding
MESHES = [(8, 1), (4, 2), (2, 4), (1, 8)]
CONFIGS = {  # by experts of a token: of 4, modes that split tokens gather, of 1 they exchange
    k: replace(PRESETS["tiny-qwen2-moe"], hidden_size=32, experts=Experts(16, k, 24, 40))
    for k in (1, 4)
}
NUM, WIDTH, HIDDEN, SHARED = 16, 24, 32, 40
HF = {"model_type": "qwen3_moe", "norm_topk_prob": True}
TOLERANCE = 2e-5


class Case(NamedTuple):
    """Tokens, and the weights of a layer."""

    x: np.ndarray
    router: np.ndarray
    gate: np.ndarray
    up: np.ndarray
    down: np.ndarray
    shared: tuple[np.ndarray, ...]  # gate, up, and down the other way round


@cache
def case(routing: str) -> Case:
    """`one device`: all tokens go to its experts; `one expert`: one has nearly all weight."""
    rng = np.random.default_rng(5)
    sizes = (TOKENS, HIDDEN), (NUM, HIDDEN), (NUM, WIDTH, HIDDEN), (NUM, WIDTH, HIDDEN)
    sizes = *sizes, (NUM, HIDDEN, WIDTH), *[(SHARED, HIDDEN)] * 3
    drawn = [(rng.standard_normal(n) / n[-1] ** 0.5).astype(np.float32) for n in sizes]
    x, router, gate, up, down, *shared = drawn
    found = Case(x, router, gate, up, down, tuple(shared))
    found.x[:, 0] = 1
    if routing == "one device":
        found.router[:] = 0  # of equal logits the first are chosen
    elif routing == "one expert":
        found.router[:, 0] = np.where(np.arange(NUM) == 11, 30, 0)
    return found


def expected(one: Case, k: int = 4) -> np.ndarray:
    """What the oracle makes of the real tokens."""
    tensors = {"layer.mlp.gate.weight": one.router.astype(np.float64)}
    for e in range(NUM):
        for part in ("gate", "up", "down"):
            name = f"layer.mlp.experts.{e}.{part}_proj.weight"
            tensors[name] = getattr(one, part)[e].astype(np.float64)
    config, x = HF | {"num_experts_per_tok": k}, one.x[:REAL].astype(np.float64)
    return numpy_experts.feed_forward(x, config, tensors, "layer") + of_shared(one)[:REAL]


def of_shared(one: Case) -> np.ndarray:
    """What the shared expert alone makes of all tokens."""
    gate, up, down = (matrix.astype(np.float64) for matrix in one.shared)
    parts = {"gate": gate, "up": up, "down": down.T}
    tensors = {f"shared.{name}_proj.weight": part for name, part in parts.items()}
    return numpy_llama.mlp(one.x.astype(np.float64), tensors, "shared")


@cache
def compiled(sp: int, tp: int, mode: Mode, k: int = 4, experts_sp: int = 1):
    """The layer of experts in a mode, as a function of global arrays and the number of tokens."""
    layout = Layout(CONFIGS[k], sp, tp, experts_sp=experts_sp)
    parallel = Parallel(layout, mode, Use(Mode(sp, experts_sp)))
    nothing = AttentionMetadata(*[None] * len(AttentionMetadata._fields))

    def run(x, router, gate, up, down, shared, num_tokens):
        def named(*matrices):
            return dict(zip(("gate", "up", "down"), map(nnx.Param, matrices), strict=True))

        parts = {"experts": named(gate, up, down), "shared": named(*shared)}
        layer = MoE(CONFIGS[k], {"router": nnx.Param(router)} | parts)
        metadata = nothing._replace(query_start_loc=num_tokens[None])
        ropes = (Rope(x, x),)
        context = Context(ropes, metadata, xla_attention(16, (None,), 4), parallel)
        return layer(x, context).whole(parallel.sum)

    tokens, experts = P(TOKEN_AXES), P(EXPERT_AXES)
    mesh = mesh_of(make_mesh(jax.devices()[: sp * tp], sp, tp), mode, parallel.as_experts)
    specs = (tokens, P(), experts, experts, experts, P(WEIGHT_AXES), P())
    mapped = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=tokens, check_vma=False)
    return jax.jit(mapped)


MODES = [(sp, tp, mode) for sp, tp in MESHES for mode in Layout(CONFIGS[4], sp, tp).modes]
USES = [
    (sp, tp, mode, experts.sp)
    for sp, tp, mode in MODES
    for experts in Layout(CONFIGS[4], sp, tp, experts_sp=sp).expert_modes(mode)
]
EXCHANGES = [(8, 1, Mode(8, 8)), (4, 2, Mode(4, 4))]
ROUTINGS = ["random", "one device", "one expert"]


@pytest.mark.costs(5)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(("sp", "tp", "mode", "experts_sp"), USES)
def test_every_use_of_experts_gives_what_the_oracle_gives(sp, tp, mode, experts_sp, routing):
    one = case(routing)
    got = np.asarray(compiled(sp, tp, mode, experts_sp=experts_sp)(*one, np.int32(REAL)))
    np.testing.assert_allclose(got[:REAL], expected(one), atol=TOLERANCE)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(("sp", "tp", "mode"), EXCHANGES)
def test_an_exchange_drops_nothing_whatever_the_routing(sp, tp, mode, routing):
    """Of random routing it has room; a step in which all tokens go to one device gathers."""
    one, layout = case(routing), Layout(CONFIGS[1], sp, tp)
    assert 0 < room_of_exchange(layout, mode, TOKENS) < TOKENS // 8 == 6
    text = compiled(sp, tp, mode, 1).lower(*one, np.int32(REAL)).as_text()
    assert "all_to_all" in text and "reduce_scatter" in text
    got = np.asarray(compiled(sp, tp, mode, 1)(*one, np.int32(REAL)))
    np.testing.assert_allclose(got[:REAL], expected(one, 1), atol=TOLERANCE)


@pytest.mark.parametrize("k", [1, 4])
def test_padding_is_sent_to_no_expert(k):
    one, layer = case("random"), compiled(4, 2, Mode(4, 4), k)
    ruined = one._replace(x=one.x.copy())
    ruined.x[REAL:] *= 10
    got = np.asarray(layer(*ruined, np.int32(REAL)))
    np.testing.assert_allclose(got[:REAL], expected(one, k), atol=TOLERANCE)
    alone = of_shared(ruined)
    np.testing.assert_allclose(got[REAL:], alone[REAL:], atol=100 * TOLERANCE)
    got = np.asarray(layer(*ruined, np.int32(0)))
    np.testing.assert_allclose(got, alone, atol=100 * TOLERANCE)


def test_pairs_are_sorted_by_expert_and_each_counts_once():
    expert = jnp.array([[2, 4], [0, 2], [4, 4], [2, 0]])  # 4: somebody else's
    row, sizes = (np.asarray(each) for each in sort_pairs(expert, 4))
    assert sizes.tolist() == [2, 0, 3, 0]
    assert row.tolist() == [2, 7, 0, 3, 6, 1, 4, 5]


@pytest.mark.parametrize("norm_topk", [True, False])
def test_weights_are_parts_of_the_softmax(norm_topk):
    one, experts = case("random"), Experts(NUM, 4, WIDTH, norm_topk=norm_topk)
    gains, chosen = route(jnp.asarray(one.x), jnp.asarray(one.router), experts)
    config = HF | {"norm_topk_prob": norm_topk, "num_experts_per_tok": 4}
    for token in range(TOKENS):
        want = numpy_experts.choose(one.x[token].astype(float), one.router.astype(float), config)
        assert np.asarray(chosen)[token].tolist() == want[0]
        np.testing.assert_allclose(np.asarray(gains)[token], want[1], atol=1e-6)


def test_softmax_may_choose_out_of_the_groups_whose_best_is_largest():
    """DeepSeek-V2's router (arXiv 2405.04434, 2.2.2), token by token."""
    one, more = case("random"), {"num_groups": 4, "groups_per_token": 2, "scale": 16.0}
    experts = Experts(NUM, 3, WIDTH, norm_topk=False, **more)
    gains, chosen = route(jnp.asarray(one.x), jnp.asarray(one.router), experts)
    others = 0
    for token, x in enumerate(one.x.astype(float)):
        scores = np.exp(one.router.astype(float) @ x)
        scores /= scores.sum()
        groups = scores.reshape(4, -1)
        best = np.argsort(-groups.max(axis=1))[:2]
        kept = np.where(np.isin(np.arange(4), best)[:, None], groups, 0).reshape(-1)
        want = np.argsort(-kept)[:3]
        others += set(want) != set(np.argsort(-scores)[:3])
        assert np.asarray(chosen)[token].tolist() == want.tolist()
        np.testing.assert_allclose(np.asarray(gains)[token], 16 * scores[want], rtol=1e-5)
    assert others > 0  # groups matter


@pytest.mark.parametrize(("num_groups", "kept"), [(1, 1), (4, 2)])
@pytest.mark.parametrize("norm_topk", [True, False])
def test_a_correction_changes_which_experts_are_chosen_and_not_their_weights(
    norm_topk, num_groups, kept
):
    """DeepSeek-V3's router (arXiv 2412.19437, 2.1.2), token by token."""
    one, rng = case("random"), np.random.default_rng(2)
    sizes = NUM, 3, WIDTH
    more = {"num_groups": num_groups, "groups_per_token": kept, "norm_topk": norm_topk}
    experts = Experts(*sizes, scores="sigmoid", has_correction=True, scale=2.5, **more)
    correction = rng.standard_normal(NUM).astype(np.float32)
    gains, chosen = route(
        jnp.asarray(one.x), jnp.asarray(one.router), experts, correction=jnp.asarray(correction)
    )
    for token, x in enumerate(one.x.astype(float)):
        scores = 1 / (1 + np.exp(-one.router.astype(float) @ x))
        ranked = (scores + correction).reshape(num_groups, -1)
        best = np.argsort(-np.sort(ranked, axis=1)[:, -2:].sum(axis=1))[:kept]
        ranked[[group not in best for group in range(num_groups)]] = -np.inf
        want = np.argsort(-ranked.reshape(-1))[:3]
        assert np.asarray(chosen)[token].tolist() == want.tolist()
        weights = scores[want] / (scores[want].sum() if norm_topk else 1)
        np.testing.assert_allclose(np.asarray(gains)[token], 2.5 * weights, rtol=1e-5)


def test_a_correction_is_float32_on_devices_whatever_the_format():
    config, formats = PRESETS["tiny-glm4-moe"], formats_of("bfloat16")
    layout, mesh = Layout(config, 1, 1), make_mesh(jax.devices()[:1], 1, 1)
    model = define(layout, formats)
    arrays = load(model, layout, mesh, RandomSource(config), silent)
    found = {w.name: a.dtype for w, a in zip(model.declared, arrays, strict=True) if a is not None}
    assert found.pop("layers.1.mlp.router_correction") == np.float32
    assert set(found.values()) == {jnp.dtype(jnp.bfloat16)}


def test_identical_experts_are_the_dense_model(tmp_path):
    """A router of zeros weighs k experts by 1/k, which rounds nothing if k is a power of two."""
    sizes = {"intermediate_size": 32, "num_hidden_layers": 1}
    _, tensors = numpy_llama.random_checkpoint(tmp_path / "dense", 3, **sizes)
    more = {"num_local_experts": 8, "num_experts_per_tok": 4, "model_type": "mixtral"}
    _, mixed = numpy_llama.random_checkpoint(tmp_path / "mixture", 3, **sizes, **more)
    parts = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    for name in mixed:
        if name.endswith("block_sparse_moe.gate.weight"):
            mixed[name] = np.zeros_like(mixed[name])
        elif "experts" in name:
            layer, _, part = name.partition(".block_sparse_moe.experts.")
            mixed[name] = tensors[f"{layer}.mlp.{parts[part.split('.')[1]]}.weight"]
        else:
            mixed[name] = tensors[name]
    numpy_llama.save_file(mixed, tmp_path / "mixture" / "model.safetensors")
    prompt = [5, 17, 99, 3, 42, 7, 7, 121, 64, 30, 11, 150]
    dense, experts = (
        forward(tmp_path / kind, prompt, 1, 1, Mode(1, 1), "alias")[1]
        for kind in ("dense", "mixture")
    )
    np.testing.assert_array_equal(dense, experts)
