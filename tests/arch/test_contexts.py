"""Contexts of millions of tokens: what is served of them, and numbers of 32 bits that hold them."""

import logging
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.rows import Sequences
from pallas_kernels.step_work import divide_step
from pallas_kernels.window import Chunk, first_seen
from shiftjax.arch.contexts import LONGEST_BY_DEFAULT, say_served
from shiftjax.arch.latent import Latent
from shiftjax.arch.presets import PRESETS
from shiftjax.config import EngineConfig
from shiftjax.deploy.deployment import Devices
from shiftjax.deploy.resolve import resolve
from shiftjax.models.attention_work import divide_attention
from shiftjax.models.layers import rope_tables
from shiftjax.options import ConfigError

SCOUT, MILLIONS = PRESETS["llama-4-scout"], 10_485_760
EIGHT = Devices(8, 141 << 30, 141 << 30)


@pytest.fixture(autouse=True)
def nothing_said():
    say_served.cache_clear()


@pytest.mark.parametrize(
    ("wanted", "served"), [(None, LONGEST_BY_DEFAULT), (MILLIONS, MILLIONS), (8192, 8192)]
)
def test_what_is_served_of_ten_million_positions(caplog, wanted, served):
    more = {"sp": 8, "tp": 1, "num_blocks": 1 << 20, "max_model_len": wanted}
    options = EngineConfig.from_options(**more, max_num_seqs=8, max_num_batched_tokens=1024)
    with caplog.at_level(logging.WARNING):
        assert resolve(options, SCOUT, EIGHT).max_model_len == served
        assert resolve(options, SCOUT, EIGHT).max_model_len == served  # says nothing more
    words = "served up to 262144 tokens of its 10485760: --max-model-len asks for more"
    assert caplog.text.count(words) == (wanted is None)


def test_more_than_the_model_has_is_refused():
    with pytest.raises(ConfigError, match="max_model_len = 10485761 is beyond llama-4-scout's"):
        resolve(EngineConfig.from_options(max_model_len=MILLIONS + 1), SCOUT, EIGHT)


def test_contexts_within_what_an_indexer_chooses_are_served(caplog):
    latent = Latent(512, 64, 128, 128, 1536, index_topk=2048)
    model = replace(PRESETS["deepseek-v3"], name="glm", latent=latent)
    more = {"sp": 1, "tp": 8, "num_blocks": 1 << 10, "max_num_seqs": 8}
    with caplog.at_level(logging.WARNING):
        found = resolve(EngineConfig.from_options(**more), model, EIGHT)
    assert found.max_model_len == 2048
    assert "glm is served up to 2048 tokens of its 163840: beyond, an indexer" in caplog.text
    with pytest.raises(ConfigError, match="max_model_len = 2049: glm attends to 2048 tokens"):
        resolve(EngineConfig.from_options(**more, max_model_len=2049), model, EIGHT)


@pytest.mark.parametrize("window", [None, Chunk(8192)])
def test_work_of_the_last_tokens_of_ten_millions(window):
    """A decode and a chunk of 100 tokens that end there."""
    lens = np.full(2, MILLIONS, np.int32)
    starts = np.array([0, 1, 101], np.int32)
    first = MILLIONS - 8192 if window else 0
    tables = np.zeros((2, MILLIONS // 16), np.int32)
    sequences = Sequences(lens, starts, 1)
    work = divide_attention(tables, sequences, num_tokens=128, block_size=16, window=window)
    jobs = work.rows.job_end > 0
    assert (work.rows.job_begin[jobs].min(), work.rows.job_end.max()) == (first, MILLIONS)
    assert work.tiles.tile_chunk_begin[0] * 128 == first
    assert (work.tiles.tile_chunk_end * 128).max() == MILLIONS
    kernels = divide_step(sequences, num_tokens=128, heads=(5, 1), window=window)
    assert kernels.decode.job_begin[0] * 64 == first
    assert kernels.prefill is not None
    real = kernels.prefill.jobs[: kernels.prefill.counts[0]]
    of_last = real[real[:, 0] == 1]
    assert (of_last[:, 4].min() * 128, of_last[:, 5].max() * 128) == (first, MILLIONS)


def test_positions_of_ten_millions_on_a_device():
    positions = jnp.array([0, 8190, 8191, MILLIONS - 1], jnp.int32)
    assert first_seen(positions, Chunk(8192)).tolist() == [0, 0, 0, MILLIONS - 8192]
    rope, growth = jax.jit(lambda x: rope_tables(x, SCOUT))(positions)
    assert rope.query_gain is None and growth.cos is None
    wanted = [1 + 0.1 * np.log(1 + (p + 1) // 8192) for p in positions.tolist()]
    np.testing.assert_allclose(growth.query_gain, wanted, rtol=1e-6)
    assert wanted[:2] == [1, 1] and wanted[2] > 1
