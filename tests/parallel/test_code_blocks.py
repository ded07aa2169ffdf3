"""Which inputs share a scale: of the model alone, and whole on every device."""

from dataclasses import replace

import pytest
from harness import ODD

from shiftjax.arch.config import Codes
from shiftjax.arch.formats import Formats
from shiftjax.arch.presets import PRESETS
from shiftjax.arch.weights import Axis, read_axis
from shiftjax.options import ConfigError
from shiftjax.parallel.blocks import block_of_width, heads_of_block, rows_of_scale
from shiftjax.parallel.layout import Layout
from shiftjax.parallel.stored import stored_weights

FP8 = Formats("fp8", "float32", "float32")


@pytest.mark.parametrize(
    ("num_heads", "q_per_kv", "head_dim", "expected"),
    [
        (64, 8, 128, (128, 1)),
        (4, 1, 256, (128, 1)),
        (8, 2, 192, (64, 1)),
        (32, 4, 64, (128, 2)),  # Llama 3.2 1B
        (14, 7, 64, (64, 1)),  # Qwen2.5 0.5B: 8 devices have 2 each, and 2 have 7
        (9, 3, 64, (64, 1)),  # SmolLM2 135M
        (64, 1, 32, (128, 4)),
        (64, 2, 32, (64, 2)),  # four would belong to two KV heads
        (32, 8, 80, (80, 1)),
    ],
)
def test_a_block_of_o_is_whole_heads(num_heads, q_per_kv, head_dim, expected):
    assert heads_of_block(num_heads, q_per_kv, head_dim) == expected


@pytest.mark.parametrize(
    ("width", "expected"),
    [(28_672, 128), (18_944, 128), (17_920, 128), (1536, 64), (1408, 64), (128, 16), (101, 8)],
)
def test_a_block_of_down_is_what_padding_allows(width, expected):
    assert block_of_width(width) == expected


def test_axes_are_read_as_they_are_written():
    for axis in ("heads", "kv_heads@1", "intermediate:128/64", "heads@2/2"):
        assert str(read_axis(axis)) == axis
    assert read_axis("heads@2/4") == Axis("heads", 2, 1, 4)


def stored(config, sp, tp):
    return {weight.name: weight for weight in stored_weights(Layout(config, sp, tp), FP8)}


def test_only_padding_depends_on_the_devices():
    config = replace(PRESETS["tiny"], intermediate_size=18_944, hidden_size=192)
    one, many = (stored(config, 1, each)["layers.0.mlp.down"] for each in (1, 8))
    assert one.shape == (148, 192, 128) and many.shape == (152, 192, 128)
    assert stored(config, 4, 2)["layers.0.mlp.down"] == stored(config, 8, 1)["layers.0.mlp.down"]
    gate = stored(config, 4, 2)["layers.0.mlp.gate"]
    assert gate.shape == (152 * 128, 192)


@pytest.mark.parametrize(("sp", "tp"), [(1, 1), (3, 1), (4, 2), (1, 8)])
def test_every_shard_of_every_mode_is_whole_blocks(sp, tp):
    layout = Layout(replace(ODD, hidden_size=192), sp, tp)
    for weight in stored_weights(layout, FP8):
        if weight.name.endswith(("down", "o")):
            assert weight.shape[-1] in (8, layout.model.head_dim)
            assert weight.shape[0] % layout.num_devices == 0
        for axis in filter(None, weight.axes[:1]):
            for mode in layout.modes:
                shards = layout.shard_rows(axis, mode) * layout.ways(mode)
                assert shards == weight.shape[0] or read_axis(axis).name == "kv_heads"


def test_what_devices_would_cut_is_refused_by_name():
    config = replace(PRESETS["tiny"], num_heads=16, num_kv_heads=16, head_dim=64)
    assert stored(config, 8, 1)["layers.0.attention.o"].shape == (8, 64, 128)
    with pytest.raises(ConfigError, match=r"attention\.o: 16 devices have 16 heads .* 2 heads"):
        stored(config, 8, 2)


def test_rows_that_share_a_scale_are_as_many_as_all_sizes_allow():
    assert rows_of_scale(PRESETS["llama-3.3-70b"]) == rows_of_scale(PRESETS["qwen3-30b-a3b"]) == 128
    assert rows_of_scale(PRESETS["smollm2-135m"]) == 64


def test_scales_of_square_blocks_are_split_as_their_codes():
    config = replace(PRESETS["tiny"], head_dim=32, hidden_size=192, intermediate_size=512)
    config = replace(config, codes=Codes(rows_of_scale=32))
    weights = stored(config, 4, 2)
    shapes = {
        name: (weights[f"layers.0.{name}"].shape, weights[f"layers.0.{name}_scale"].shape)
        for name in ("attention.q", "attention.o", "mlp.gate", "mlp.down")
    }
    assert shapes == {
        "attention.q": ((8, 32, 192), (8, 1, 2)),
        "attention.o": ((8, 192, 32), (8, 6)),
        "mlp.gate": ((512, 192), (16, 2)),
        "mlp.down": ((8, 192, 64), (8, 6)),
    }
