"""The setting `gpu_options`: what XLA is told, and what becomes of what it does not know."""

import logging

import aot
import pytest

aot.require()

from shiftjax.device import gpu_options as module  # noqa: E402
from shiftjax.device.gpu_options import (  # noqa: E402
    KERNEL_SUMS,
    KINDS_IN_GRAPHS,
    ONE_GRAPH,
    gpu_options,
    refusal,
)
from shiftjax.options import ConfigError  # noqa: E402


@pytest.fixture
def gpu():
    """A device to compile for."""
    return aot.make_mesh("h200", (1,), ("x",)).devices.flat[0]


def test_this_xla_knows_all_options(gpu):
    assert [refusal(gpu, name, value) for name, value in ONE_GRAPH.items()] == [None] * 4
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
    """Of a list, too; the order of what is left does not change."""
    kinds = f"NEXT_YEARS,{ONE_GRAPH[KINDS_IN_GRAPHS]},AND_THE_YEAR_AFTERS"
    wanted = {"xla_gpu_of_next_year": "1", **ONE_GRAPH, KINDS_IN_GRAPHS: kinds}
    monkeypatch.setattr(module, "ONE_GRAPH", wanted)
    with caplog.at_level(logging.WARNING):
        assert gpu_options(gpu, "auto") == dict(ONE_GRAPH)
    assert [line.split(": ")[1] for line in caplog.messages] == [
        "xla_gpu_of_next_year=1",
        f"{KINDS_IN_GRAPHS}=NEXT_YEARS",
        f"{KINDS_IN_GRAPHS}=AND_THE_YEAR_AFTERS",
    ]


def test_sums_that_no_graph_can_hold_are_left_to_nccl(gpu, monkeypatch):
    """As with jax 0.11, whose steps `test_one_graph.py` compiles."""
    monkeypatch.setattr(module, "KERNEL_SUMS_IN_GRAPHS", "NEXT_YEARS_KERNELS")
    assert gpu_options(gpu, "auto") == ONE_GRAPH | {KERNEL_SUMS: ""}
