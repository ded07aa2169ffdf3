"""What a layer of experts counts: every pair of real tokens once, whoever computes it.

And what it tells: the experts of every token, whichever devices have it.
"""

from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest
from flax import nnx
from oracle import numpy_experts

from shiftjax.arch.config import Experts
from shiftjax.arch.numerics import NUMERICS
from shiftjax.arch.presets import PRESETS
from shiftjax.arch.weights import Weight
from shiftjax.device.mesh import (
    chosen_spec,
    counts_spec,
    make_mesh,
    mesh_of,
    replicated_spec,
    weight_spec,
)
from shiftjax.models.attention import AttentionMetadata
from shiftjax.models.attention_backend import xla_attention
from shiftjax.models.exchange import Parallel
from shiftjax.models.experts import tells_parts
from shiftjax.models.layers import Context, Rope
from shiftjax.models.mlp import MoE
from shiftjax.parallel.grid import Mode, Use
from shiftjax.parallel.layout import Layout
from shiftjax.routing.chosen_device import chosen_of_step
from shiftjax.routing.counts_device import counts_of_step

TOKENS, REAL, HIDDEN, NUM, WIDTH = 48, 43, 16, 16, 8
CONFIGS = {  # by experts of a token: of 4, modes that split tokens gather, of 1 they exchange
    k: replace(PRESETS["tiny-qwen2-moe"], hidden_size=HIDDEN, experts=Experts(NUM, k, WIDTH))
    for k in (1, 4)
}
HF = {"model_type": "qwen3_moe", "norm_topk_prob": True}


@cache
def case(routing: str) -> tuple[np.ndarray, ...]:
    """Tokens, router and experts; `one`: all tokens prefer the twelfth, `most`: the first do."""
    rng = np.random.default_rng(5)
    sizes = (TOKENS, HIDDEN), (NUM, HIDDEN), *[(NUM, WIDTH, HIDDEN)] * 2, (NUM, HIDDEN, WIDTH)
    x, router, *experts = (rng.standard_normal(size).astype(np.float32) for size in sizes)
    x[:, 0] = 1
    if routing == "most":
        x[TOKENS // 2 + 3 :, 0] = 0
    if routing != "random":
        router[:, 0] = np.where(np.arange(NUM) == 11, 60, 0)
    return x, router, *experts


def chosen(routing: str, k: int) -> np.ndarray:
    """The experts of the real tokens, `[tokens, k]`."""
    x, router, *_ = (each.astype(np.float64) for each in case(routing))
    config = HF | {"num_experts_per_tok": k}
    return np.array([numpy_experts.choose(token, router, config)[0] for token in x[:REAL]])


def recounted(routing: str, k: int) -> np.ndarray:
    """How many real tokens choose each expert."""
    return np.bincount(chosen(routing, k).reshape(-1), minlength=NUM)


@cache
def compiled(
    sp: int,
    tp: int,
    use: tuple[Mode, Mode],
    k: int,
    *,
    is_spread: bool = False,
    tells: bool = False,
):
    """The counts of a layer in a mode, with experts as in another; of tokens, so many real.

    Or what it `tells`: the experts of every token.
    """
    mode, experts = use
    layout = Layout(CONFIGS[k], sp, tp, experts_sp=sp)
    parallel = Parallel(layout, mode, Use(experts))
    nothing = AttentionMetadata(*[None] * len(AttentionMetadata._fields))

    def run(x, router, gate, up, down, num_tokens):
        parts = zip(("gate", "up", "down"), map(nnx.Param, (gate, up, down)), strict=True)
        layer = MoE(CONFIGS[k], {"router": nnx.Param(router), "experts": dict(parts)})
        metadata, counted = nothing._replace(query_start_loc=num_tokens[None]), []
        context = Context((Rope(x, x),), metadata, xla_attention(16, (None,), 4), parallel)
        layer(parallel.local_tokens(x), context._replace(counted=counted, tells=tells))
        if tells:
            return chosen_of_step(counted * 2, NUM)
        return counts_of_step(counted * 2, parallel, is_spread=is_spread)

    everywhere = replicated_spec()
    stack = Weight("mlp.experts.gate", (NUM, WIDTH, HIDDEN), ("experts", None, None), "")
    specs = (everywhere, everywhere, *[weight_spec(stack)] * 3, everywhere)
    out = everywhere if is_spread else counts_spec()
    if tells:
        out = chosen_spec(in_parts=tells_parts(parallel, TOKENS))
    mesh = mesh_of(make_mesh(jax.devices()[: sp * tp], sp, tp), mode, experts)
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False))


USES = [
    (sp, tp, (mode, experts))
    for sp, tp in [(1, 1), (2, 2), (4, 2), (1, 8)]
    for mode in Layout(CONFIGS[4], sp, tp).modes
    for experts in Layout(CONFIGS[4], sp, tp, experts_sp=sp).expert_modes(mode)
]


@pytest.mark.costs(15)
@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("routing", ["random", "one"])
@pytest.mark.parametrize(("sp", "tp", "use"), USES)
def test_counts_are_those_of_a_recount_in_every_mode(sp, tp, use, routing, k):
    counts = np.asarray(compiled(sp, tp, use, k)(*case(routing), np.int32(REAL)))
    assert counts.shape == (use[1].sp, 2, NUM), "devices with the same experts, layers, experts"
    expected = recounted(routing, k)
    np.testing.assert_array_equal(counts.sum(axis=0), [expected] * 2)
    assert expected.sum() == REAL * k


@pytest.mark.costs(15)
@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("routing", ["random", "most"])
@pytest.mark.parametrize(("sp", "tp", "use"), USES)
def test_experts_are_told_of_all_tokens_in_their_order(sp, tp, use, routing, k):
    """Where pairs are exchanged, devices tell of parts; `most` has no room there: they gather."""
    told = np.asarray(compiled(sp, tp, use, k, tells=True)(*case(routing), np.int32(REAL)))
    assert told.dtype == np.uint8
    np.testing.assert_array_equal(told[:REAL], np.stack([chosen(routing, k)] * 2, axis=1))


def test_some_modes_tell_of_parts():
    parallels = [
        Parallel(Layout(CONFIGS[1], 4, 2, experts_sp=4), Mode(4, 4), Use(Mode(4, e)))
        for e in (1, 4)
    ]
    assert [tells_parts(each, TOKENS) for each in parallels] == [True, False]
    strict = replace(parallels[0], numerics=NUMERICS["invariant"])
    assert not tells_parts(strict, TOKENS)


def test_devices_of_several_hosts_all_have_the_sum():
    for use in ((Mode(4, 4), Mode(4, 2)), (Mode(4, 1), Mode(4, 4))):
        run = compiled(4, 2, use, 4, is_spread=True)
        counts = run(*case("random"), np.int32(REAL))
        for shard in counts.addressable_shards:
            np.testing.assert_array_equal(shard.data, [[recounted("random", 4)] * 2])


def test_a_step_without_tokens_counts_none():
    run = compiled(4, 2, (Mode(4, 2), Mode(4, 1)), 4)
    assert not np.asarray(run(*case("random"), np.int32(0))).any()
