"""Machine and engine files: all that come with the package, and what is refused."""

from dataclasses import fields, replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import shiftjax.costs.machine_files
from shiftjax.costs.machine import of_format
from shiftjax.costs.machine_files import (
    MACHINE_OF_DEVICE,
    dump_machine,
    engine_names,
    load_engine,
    load_machine,
    machine_names,
    machine_of,
    renewed,
)
from shiftjax.options import ConfigError

MACHINES = Path(shiftjax.costs.machine_files.__file__).parent / "machines"
WAYS = (
    "all_reduce",
    "all_to_all",
    "all_gather",
    "point_to_point",
    "to_host",
    "from_host",
    "network",
)
PUBLISHED = {"mi300x8", "mi355x8"}
BLACKWELL = {"b200x8", "b300x8", "gb200x4", "rtxpro6000x8"}
GPUS = (
    {"h200x8", "h100x8", "a100x8", "a100x8-pcie", "a10x8", "l4x8", "l40sx8"} | BLACKWELL | PUBLISHED
)


def test_every_machine_and_engine_loads():
    assert set(machine_names()) == GPUS | {"cpu"}
    assert set(engine_names()) == {
        *("shiftjax", "sglang", "tensorrt_llm", "nim", "vllm", "vllm-sort", "vllm-v0", "vllm-v0.5")
    }
    for name in machine_names():
        machine = load_machine(name)
        assert machine.name == name
        assert 0 < machine.memory_efficiency <= 1 or machine.shared_cores
        assert "bfloat16" in machine.matmul_flops
    for name in engine_names():
        assert load_engine(name).name == name


def test_an_engine_that_is_like_another_has_its_constants():
    alike, own = load_engine("nim"), load_engine("tensorrt_llm")
    assert alike.stream_seconds > own.stream_seconds == 0
    assert replace(alike, name=own.name, stream_seconds=0.0) == own
    old, new = load_engine("vllm-v0.5"), load_engine("vllm-v0")
    assert old.host_seconds_per_sequence == pytest.approx(3.4e-3 / 32, rel=0.01)
    changed = {"host_seconds_per_sequence": 1.2e-5, "reserved_bytes": new.reserved_bytes}
    assert replace(old, name=new.name, **changed) == new
    sorts, samples = load_engine("vllm-sort"), load_engine("vllm")
    assert replace(sorts, name=samples.name, sampling_bytes=samples.sampling_bytes) == samples


def test_an_engine_lists_launches_by_name_or_says_how_many(tmp_path):
    ours, path = load_engine("shiftjax"), tmp_path / "engine.yaml"
    assert ours.num_layer_launches("bfloat16") == len(ours.launches_of("bfloat16")) > 0
    assert ours.launches_of("float32") == ours.launches_of("bfloat16") != ours.launches_of("fp8")
    for exchanges in (False, True):  # what XLA multiplies is activated by a launch of its own
        few, many, packed = (
            ours.launches_of(*own, exchanges=exchanges)
            for own in (("bfloat16", 64), ("bfloat16", 65), ("int4", 64))
        )
        assert (
            many
            == (*few, "activation")
            == packed
            == ours.launches_of("int4", 65, exchanges=exchanges)
        )
        codes = {ours.launches_of("fp8", rows, exchanges=exchanges) for rows in (64, 65)}
        assert len(codes) == 1 and "activation" not in codes.pop()
    listed = {"value": ["add", "norm"], "unit": "1", "source": "counted"}

    def said(**constants):
        path.write_text(yaml.safe_dump({"like": "shiftjax", "name": "own"} | constants))
        return load_engine(str(path))

    own = said(layer_launches={"bfloat16": listed})
    assert own.launches_of("fp8") == ("add", "norm")
    number = {"value": 6, "unit": "1", "source": "counted"}
    assert said(kernels_per_layer=number).num_layer_launches("fp8") == 6
    for wrong in ({"bfloat16": listed | {"value": ["ad"]}}, {"fp8": listed}, {"fp9": listed}):
        with pytest.raises(ConfigError, match=r"layer_launches must be launches \(add; norm;"):
            said(layer_launches=wrong)
    constants = yaml.safe_load((MACHINES.parent / "engines" / "vllm.yaml").read_text())
    del constants["kernels_per_layer"]
    path.write_text(yaml.safe_dump(constants))
    with pytest.raises(ConfigError, match="kernels_per_layer is missing, or layer_launches"):
        load_engine(str(path))


def test_every_constant_has_a_unit_that_fits_its_name():
    ends = {
        "_bytes": {"GB", "GiB", "B"},
        "bytes_per_second": {"GB/s", "B/s"},
        "_seconds": {"us", "s"},
    }
    for name in GPUS | {"cpu"}:
        data = yaml.safe_load((MACHINES / f"{name}.yaml").read_text())
        ways = [way for kind in WAYS for way in data.get(kind, ())]
        for key, node in [*data.items(), *(pair for way in ways for pair in way.items())]:
            for end, units in ends.items():
                assert not key.endswith(end) or node["unit"] in units, (name, key)
        assert {node["unit"] for node in data["matmul_flops"].values()} <= {"TFLOP/s", "FLOP/s"}


def test_what_nobody_has_measured_is_said_and_is_that_of_h100():
    h100 = load_machine("h100x8")
    for name in machine_names():
        machine = load_machine(name)
        assert machine.published == (name in PUBLISHED)
        if machine.published:
            shares = {field.name for field in fields(machine) if "efficiency" in field.name}
            shares -= {"sustained_efficiency"}  # of power and clocks, not of kernels
            assert len(shares) == 5
            if name == "mi300x8":  # AMD has published what these come to
                shares -= {"memory_efficiency", "kv_efficiency", "matmul_efficiency"}
            for share in (*shares, "attention_seconds", "tile_seconds", "product_seconds"):
                assert getattr(machine, share) == getattr(h100, share), (name, share)
            text = (MACHINES / f"{name}.yaml").read_text()
            assert text.startswith("# Published figures alone") and "measured:" not in text


def test_links_are_no_quicker_than_their_data_sheets():
    """GB/s of a device in one direction, of all its links together."""
    limits = {"b200x8": 900, "b300x8": 900, "gb200x4": 900, "mi300x8": 448, "mi355x8": 538}
    limits |= {"rtxpro6000x8": 63, "l40sx8": 31.5, "h100x8": 450, "h200x8": 477}
    for name, limit in limits.items():
        machine = load_machine(name)
        links = (machine.all_reduce, machine.all_to_all, machine.all_gather)
        links += (machine.point_to_point, machine.switch_sum)
        for way in (way for ways in links for way in ways):
            assert way.bytes_per_second <= limit * 1e9, name


def test_a_rack_has_so_many_hosts_and_no_more(tmp_path):
    rack = load_machine("gb200x4", 18)
    assert (rack.num_devices, rack.num_hosts, rack.one_host.num_devices) == (72, 18, 4)
    with pytest.raises(ConfigError, match="at most 18 hosts, which are 72 devices"):
        load_machine("gb200x4", 19)
    path = tmp_path / "rack.yaml"
    path.write_text(dump_machine(load_machine("gb200x4"), "a test"))
    assert load_machine(str(path), 18) == rack


def test_units_become_si():
    machine = load_machine("h200x8")
    assert machine.memory_bytes == pytest.approx(143_771 * 2**20, rel=1e-5)
    assert machine.memory_bytes_per_second == 4.8e12
    assert machine.matmul_flops["fp8"] == 1979e12
    assert machine.all_reduce[0].latency_seconds == pytest.approx(4.73e-6)
    assert machine.kv_efficiency["fp8"] == 0.526


def test_a_machine_survives_a_file(tmp_path):
    machine = load_machine("a10x8")
    path = tmp_path / "copy.yaml"
    path.write_text(dump_machine(machine, "a test"))
    assert load_machine(str(path)) == machine
    data = yaml.safe_load(path.read_text())
    assert data["memory_bytes"] == {"value": 24.147e9, "unit": "B", "source": "a test"}
    assert data["memory_bytes_per_second"]["unit"] == "B/s"
    assert data["matmul_flops"]["bfloat16"]["unit"] == "FLOP/s"
    assert data["all_reduce"][0]["latency_seconds"]["unit"] == "s"
    assert data["tile_rows"]["unit"] == data["kv_efficiency"]["bfloat16"]["unit"] == "1"


def test_a_file_of_before_has_one_number_for_all_formats_and_nothing_fixed(tmp_path):
    data = yaml.safe_load((MACHINES / "h200x8.yaml").read_text())
    for name in ("reserved_bytes", "attention_seconds", "product_seconds", "expert_efficiency"):
        del data[name]
    data["kv_efficiency"] = {"value": 0.75, "unit": "1", "source": "a test"}
    path = tmp_path / "before.yaml"
    path.write_text(yaml.safe_dump(data))
    machine = load_machine(str(path))
    assert of_format(machine.kv_efficiency, "fp8") == 0.75
    assert of_format(machine.expert_efficiency, "bfloat16") == 1.0
    assert machine.reserved_bytes == machine.attention_seconds == machine.product_seconds == 0.0


def spoiled(tmp_path, change) -> str:
    data = yaml.safe_load(dump_machine(load_machine("l4x8"), "a test"))
    change(data)
    path = tmp_path / "spoiled.yaml"
    path.write_text(yaml.safe_dump(data))
    return str(path)


@pytest.mark.parametrize(
    ("change", "fragment"),
    [
        (lambda d: d["memory_bytes"].pop("source"), "a value, a unit and a source"),
        (lambda d: d["memory_bytes"].update(source=" "), "a value, a unit and a source"),
        (lambda d: d["memory_bytes"].update(unit="furlong"), "unknown unit 'furlong'"),
        (lambda d: d["memory_bytes"].update(value=-1), "no number of at least 0"),
        (lambda d: d.update(memory_bytes=5), "a bare number"),
        (lambda d: d.pop("kernel_seconds"), "kernel_seconds is missing"),
        (lambda d: d.update(wheels="4"), "unknown constant 'wheels'"),
        (lambda d: d.pop("all_reduce"), "all_reduce is missing"),
        (lambda d: d.update(all_reduce=[]), "all_reduce: must be a list of at least one way"),
        (lambda d: d.update(all_to_all="fast"), "all_to_all: must be a list of at least one way"),
        (lambda d: d.update(all_gather=["a"]), "all_gather: must be a list of at least one way"),
        (
            lambda d: d["all_reduce"][0].update(volume="tree"),
            "volume must be one of ring, one_shot",
        ),
        (
            lambda d: d["all_reduce"][0]["bytes_per_second"].update(value=0),
            "must be a number above 0",
        ),
        (lambda d: d["memory_bytes_per_second"].update(value=0), "must be a number above 0"),
        (lambda d: d["memory_bytes"].update(value=float("nan")), "no number of at least 0"),
        (lambda d: d["memory_bytes"].update(value=float("inf")), "no number of at least 0"),
        (lambda d: d["memory_bytes"].update(unit="us"), "is in B, which us does not measure"),
        (lambda d: d["memory_bytes"].update(unit="B/s"), "is in B, which B/s does not measure"),
        (lambda d: d["tile_columns"].update(value=0), "a whole number of at least 1, got 0"),
        (lambda d: d["tile_rows"].update(value=[]), "a list of whole numbers"),
        (lambda d: d["num_devices"].update(value=8.5), "a whole number of at least 1, got 8.5"),
        (
            lambda d: d["matmul_flops"].update(int3=d["matmul_flops"]["bfloat16"]),
            "a rate above 0 for bfloat16",
        ),
        (lambda d: d["matmul_flops"].pop("bfloat16"), "a rate above 0 for bfloat16"),
        (lambda d: d.update(name=["l4"]), "name must be text"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path, change, fragment):
    with pytest.raises(ConfigError, match=fragment):
        load_machine(spoiled(tmp_path, change))


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(sorted(yaml.safe_load(dump_machine(load_machine("l4x8"), "a test")))),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["value", "unit", "source", "fp8"]), inner)
        ),
        max_leaves=6,
    ),
)
def test_a_machine_with_a_constant_of_nonsense_loads_or_is_refused(tmp_path_factory, name, node):
    file = spoiled(tmp_path_factory.mktemp("machine"), lambda data: data.update({name: node}))
    try:
        machine = load_machine(file)
    except ConfigError as error:
        assert all(name in problem and "\n" not in problem for problem in error.problems)
    else:
        Path(file).write_text(dump_machine(machine, "a test"))
        assert load_machine(file) == machine


def test_who_measures_a_machine_has_more_than_published_figures(tmp_path):
    path = tmp_path / "measured.yaml"
    path.write_text(renewed("b200x8", {"matmul_efficiency": 0.7}, "a test", "a test, today"))
    machine = load_machine(str(path))
    assert (machine.published, machine.measured) == (False, "a test, today")
    assert machine.matmul_efficiency == 0.7


def test_unknown_names_are_refused_with_the_near_ones():
    with pytest.raises(ConfigError, match="did you mean h200x8"):
        load_machine("h200x")
    with pytest.raises(ConfigError, match="set machine to one of"):
        machine_of("Abacus")
    assert set(MACHINE_OF_DEVICE.values()) == set(machine_names())
