"""The setting `gpu_options`: what XLA is told, and what becomes of what it does not know."""

import logging

import aot
import pytest

aot.require()

from shiftjax.device import gpu_options as module  # noqa: E402
from shiftjax.device.gpu_options import ONE_GRAPH, gpu_options, refused_options  # noqa: E402
from shiftjax.options import ConfigError  # noqa: E402


@pytest.fixture
def gpu():
    """A device to compile for."""
    return aot.make_mesh("h200", (1,), ("x",)).devices.flat[0]


def test_this_xla_knows_all_options(gpu):
    assert refused_options(gpu, ONE_GRAPH) == {}
    assert gpu_options(gpu, "auto") == dict(ONE_GRAPH)
    assert gpu_options(gpu, "none") == {}


def test_options_of_ones_own_replace_them(gpu):
    setting = "--xla_gpu_graph_min_graph_size=5 xla_gpu_enable_command_buffer=FUSION,WHILE"
    assert gpu_options(gpu, setting) == {
        "xla_gpu_graph_min_graph_size": "5",
        "xla_gpu_enable_command_buffer": "FUSION,WHILE",
    }


@pytest.mark.parametrize(
    "setting", ["xla_gpu_no_such_thing=1", "xla_gpu_enable_command_buffer=FUSION,NO_SUCH_KIND"]
)
def test_what_was_asked_for_and_is_unknown_is_an_error(gpu, setting):
    with pytest.raises(ConfigError, match=f"gpu_options: {setting}: "):
        gpu_options(gpu, f"xla_gpu_graph_min_graph_size=1 {setting}")


def test_of_the_defaults_an_older_xla_takes_what_it_knows(gpu, monkeypatch, caplog):
    monkeypatch.setattr(module, "ONE_GRAPH", {"xla_gpu_of_next_year": "1", **ONE_GRAPH})
    with caplog.at_level(logging.WARNING):
        assert gpu_options(gpu, "auto") == dict(ONE_GRAPH)
    assert "launched in pieces: xla_gpu_of_next_year=1" in caplog.text
