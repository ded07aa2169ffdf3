"""Which deployments models can have whose layers have KV heads of several shapes."""

from dataclasses import replace

from shiftjax.arch.config import LayerKind, stages_of
from shiftjax.arch.formats import formats_of
from shiftjax.arch.presets import PRESETS
from shiftjax.costs.memory import kv_token_bytes
from shiftjax.deploy.resolve import stage_problems, widths_problems
from shiftjax.parallel.layout import Layout

NEAR, FAR = LayerKind(8), LayerKind(heads=(2, 16), keys_are_values=True)
MODEL = replace(
    PRESETS["tiny"],
    num_layers=5,
    num_heads=8,
    num_kv_heads=8,
    head_dim=8,
    layer_kinds=(NEAR, NEAR, FAR, NEAR, FAR),
)


def test_bytes_of_a_token_are_summed_over_the_shapes():
    formats = formats_of("bfloat16")

    def found(sp: int, tp: int) -> int:
        return kv_token_bytes(Layout(MODEL, sp, tp), formats)

    assert found(1, 1) == 2 * 2 * (3 * 8 * 8 + 2 * 2 * 16)
    assert found(2, 1) == 2 * 2 * (3 * 4 * 8 + 2 * 1 * 16)
    assert found(2, 4) == 2 * 2 * (3 * 1 * 8 + 2 * 1 * 16)  # heads of the second shape are copied


def test_groups_of_a_fleet_are_as_wide_as_blocks_stretch_alike():
    widths = 1, 2, 4
    problems = widths_problems(Layout(MODEL, 1, 1, 4), widths)
    assert [problem.split(" have ")[0] for problem in problems] == [
        "fleet_widths: a block of a group of 4 units would"
    ]
    assert not widths_problems(Layout(MODEL, 1, 1, 2), (1, 2))
    layout = Layout(MODEL, 1, 1, 2)
    assert layout.of_width(2).block_tokens(4) == 8


def test_stages_have_the_caches_of_their_layers():
    first, second = stages_of(MODEL, 2)
    assert [(c.heads, c.layers, c.first) for c in first.caches] == [(0, (0, 1), 0), (1, (2,), 0)]
    assert [(c.heads, c.layers, c.first) for c in second.caches] == [(0, (0,), 2), (1, (1,), 1)]
    sharing = replace(MODEL, num_shared_kv_layers=2)
    assert sharing.cached_by == (0, 1, 2, 1, 2)
    assert [cache.layers for cache in sharing.caches] == [(0, 1), (2,)]
    assert stage_problems(2, MODEL) == [] != stage_problems(2, sharing)
