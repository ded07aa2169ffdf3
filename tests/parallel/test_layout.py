"""Head maps, padding and replication, against the papers' figures and by exhaustion."""

from dataclasses import replace

import numpy as np
import pytest
from harness import FACTORISATIONS, layout

from shiftjax.arch.config import Speculator
from shiftjax.arch.formats import Formats
from shiftjax.arch.presets import PRESETS
from shiftjax.parallel.layout import Layout, pad_heads
from shiftjax.parallel.stored import stored_weights


@pytest.mark.parametrize(
    ("heads", "kv_heads", "devices", "expected"),
    [
        (9, 3, 2, (4, 3)),  # SmolLM2-135M: 12 query and 4 KV heads
        (9, 3, 8, (4, 4)),  # 16 and 4
        (9, 3, 3, (3, 3)),
        (9, 3, 6, (3, 4)),
        (64, 8, 8, (8, 8)),
        (64, 8, 16, (8, 8)),  # two devices share a KV head
        (40, 8, 8, (8, 5)),
        (32, 4, 8, (4, 8)),
    ],
)
def test_padding_of_heads(heads, kv_heads, devices, expected):
    assert pad_heads(heads, kv_heads, devices) == expected


def test_head_order_is_the_papers():
    """Shift Parallelism prints [0,2,4,1,3,5] for (SP=3, TP=2), devices tp-minor."""
    six = layout(3, 2, 6, 6)
    device_of_block = [0] * 6
    for t in range(2):
        for s in range(3):
            (block,) = six.kv_heads_of(t * 3 + s)
            device_of_block[block] = s * 2 + t
    assert device_of_block == [0, 2, 4, 1, 3, 5]


@pytest.mark.parametrize(("sp", "tp"), FACTORISATIONS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (8, 2), (4, 4), (7, 1), (12, 6)])
def test_every_device_gets_the_kv_head_of_its_query_heads(sp, tp, heads, kv_heads):
    it = layout(sp, tp, heads, kv_heads)
    for t in range(tp):
        for s in range(sp):
            j = t * sp + s
            queries = range(j * it.heads_per_device, (j + 1) * it.heads_per_device)
            wanted = sorted({q // it.q_per_kv for q in queries})
            assert it.kv_heads_of(j) == wanted
            m = it.kv_heads_per_device
            for mode in it.modes:
                rank, b = divmod(j, mode.sp)
                order = it.kv_send_order(mode)[rank, b * m : (b + 1) * m]
                assert [it.kv_heads_of_ranks(mode)[rank][i] for i in order] == wanted


@pytest.mark.parametrize(("sp", "tp"), FACTORISATIONS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (8, 2), (4, 4), (7, 1), (12, 6)])
def test_the_kv_heads_of_a_rank_are_those_that_its_devices_store(sp, tp, heads, kv_heads):
    """Of SHIFT's shards, gathered; but for heads that none of them caches, which nobody is sent."""
    it = replace(layout(sp, tp, heads, kv_heads), gathers=True)
    for mode in it.modes:
        order = it.kv_gather_order(mode)
        for rank, wanted in enumerate(it.kv_heads_of_ranks(mode)):
            devices = range(rank * mode.sp, (rank + 1) * mode.sp)
            gathered = [head for j in devices for head in it.kv_heads_of(j)]
            got = [gathered[i] for i in order[rank]]
            for mine, head in zip(got, wanted, strict=True):
                assert mine == head or head not in gathered


@pytest.mark.parametrize(("sp", "tp"), FACTORISATIONS)
@pytest.mark.parametrize("axis", ["heads", "kv_heads", "intermediate", "vocab"])
def test_the_shards_of_every_mode_lie_inside_the_base_shards(sp, tp, axis):
    """The claim behind `weights="alias"`, over checkpoint rows instead of memory."""
    it = layout(sp, tp, 9, 3)
    base = it.source_rows(axis).reshape(tp, -1)
    for mode in it.modes:
        shards = it.source_rows(axis, mode).reshape(it.ways(mode), -1)
        rows = it.shard_rows(axis, mode)
        for j in range(it.num_devices):
            start = it.shard_offset(axis, mode, j)
            assert 0 <= start <= base.shape[1] - rows
            assert (base[j // sp, start : start + rows] == shards[j // mode.sp]).all()


@pytest.mark.parametrize(("sp", "tp"), FACTORISATIONS)
def test_every_real_row_is_stored(sp, tp):
    it = layout(sp, tp, 9, 3)
    sizes = {"heads": 9, "kv_heads": 3, "intermediate": 50, "vocab": 101}
    for axis, size in sizes.items():
        rows = it.source_rows(axis)
        assert set(rows) - {-1} == set(range(size))
        if axis != "kv_heads":  # only KV heads are ever stored twice
            assert np.sum(rows >= 0) == size


@pytest.mark.parametrize(("draft_vocab", "num_ids"), [(None, 101), (30, 30)])
def test_the_ids_that_are_drafted_are_padded_by_themselves(draft_vocab, num_ids):
    plain = layout(2, 2, 9, 3)
    speculator = Speculator("mlp", 3, 8, draft_vocab=draft_vocab)
    it = Layout(replace(plain.model, speculator=speculator), 2, 2)
    rows = it.source_rows("draft_vocab")
    assert rows.tolist() == [*range(num_ids), *[-1] * (-num_ids % 4)]
    assert (plain.num_draft_ids, it.num_draft_ids) == (0, num_ids)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("formats", [Formats("float32", "float32", "float32"), Formats("fp8")])
def test_groups_of_all_widths_store_the_same(formats, tp):
    layouts = (Layout(PRESETS["tiny"], width, tp, widest=4) for width in (1, 2, 4))
    assert len({stored_weights(each, formats) for each in layouts}) == 1
