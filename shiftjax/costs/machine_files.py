"""Machines and engines as data files: every constant with its value, unit and source. No JAX.

A constant is a mapping `{value, unit, source}`; the unit says how to get to SI. A file that lacks
a source, or has a constant too many or too few, is refused.
"""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from shiftjax.costs.machine import EngineOverhead, Machine, Transfer
from shiftjax.options import ConfigError, shown, unknown_name

UNITS = MappingProxyType(
    {
        "s": 1.0,
        "B": 1.0,
        "B/s": 1.0,
        "FLOP/s": 1.0,
        "ms": 1e-3,
        "us": 1e-6,
        "GB": 1e9,
        "GiB": 2.0**30,
        "GB/s": 1e9,
        "TB/s": 1e12,
        "GFLOP/s": 1e9,
        "TFLOP/s": 1e12,
        "1": 1,
    }
)
_SI = (("_flops", "FLOP/s"), ("bytes_per_second", "B/s"), ("_bytes", "B"), ("_seconds", "s"))
MACHINE_OF_DEVICE = MappingProxyType(
    {
        "cpu": "cpu",
        "NVIDIA H200": "h200x8",
        "NVIDIA H100 80GB HBM3": "h100x8",
        "NVIDIA A100-SXM4-80GB": "a100x8",
        "NVIDIA A100 80GB PCIe": "a100x8-pcie",
        "NVIDIA A10": "a10x8",
        "NVIDIA A10G": "a10x8",
        "NVIDIA L4": "l4x8",
    }
)
"""Machines by JAX's `device_kind`."""
LINKS = ("all_reduce", "all_to_all", "all_gather", "point_to_point", "to_host", "from_host")
_HERE = Path(__file__).parent


def machine_names() -> list[str]:
    """The machines that come with the package."""
    return _names("machines")


def engine_names() -> list[str]:
    """The engines whose overhead comes with the package."""
    return _names("engines")


def load_machine(name: str) -> Machine:
    """The machine of this name, or of a file in the same format. Raises ConfigError."""
    values = _read(name, "machines", "machine")
    for kind in LINKS:
        ways = values.get(kind, ())
        values[kind] = tuple(_build(Transfer, way, f"{name}: {kind}") for way in ways)
    values["tile_rows"] = tuple(values["tile_rows"])
    return _build(Machine, values, name)


def load_engine(name: str) -> EngineOverhead:
    """The engine overhead of this name, or of a file in the same format. Raises ConfigError."""
    return _build(EngineOverhead, _read(name, "engines", "engine"), name)


def machine_of(device_kind: str) -> str:
    """The name of the machine that has these devices. Raises ConfigError for an unknown one."""
    if device_kind not in MACHINE_OF_DEVICE:
        known = ", ".join(machine_names())
        message = f"there is no machine file for {device_kind!r}: set machine to one of {known}, "
        raise ConfigError([message + "or to a file from `shiftjax bench steps`"])
    return MACHINE_OF_DEVICE[device_kind]


def _names(folder: str) -> list[str]:
    return sorted(path.stem for path in (_HERE / folder).glob("*.yaml"))


def _read(name: str, folder: str, what: str) -> dict[str, Any]:
    path = Path(name) if name.endswith((".yaml", ".yml")) else _HERE / folder / f"{name}.yaml"
    if not path.is_file():
        known = _names(folder)
        problem = unknown_name(name, known, what)
        raise ConfigError([f"{problem}; there are {', '.join(known)}, or name a .yaml file"])
    import yaml  # here, because the names of machines are asked for every --help

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError([f"{path}: not YAML: {error}"]) from None
    if not isinstance(data, dict):
        raise ConfigError([f"{path}: must map names to constants"])
    return {key: _plain(value, f"{path}: {key}") for key, value in data.items()}


def _plain(node: Any, where: str) -> Any:
    """Constants as SI numbers, whatever they are nested in."""
    if isinstance(node, Mapping) and "value" in node:
        return _constant(node, where)
    if isinstance(node, Mapping):
        return {key: _plain(value, f"{where}: {key}") for key, value in node.items()}
    if isinstance(node, list):
        return [_plain(value, where) for value in node]
    if isinstance(node, (int, float)) and not isinstance(node, bool):
        raise ConfigError([f"{where}: a bare number; write value, unit and source"])
    return node


def _constant(node: Mapping[str, Any], where: str) -> Any:
    if set(node) != {"value", "unit", "source"} or not str(node["source"]).strip():
        raise ConfigError([f"{where}: a constant has exactly a value, a unit and a source"])
    unit, value = str(node["unit"]), node["value"]
    if unit not in UNITS:
        raise ConfigError([f"{where}: {unknown_name(unit, UNITS, 'unit')}"])
    numbers = value if isinstance(value, list) else [value]
    if any(not isinstance(n, (int, float)) or isinstance(n, bool) or n < 0 for n in numbers):
        raise ConfigError([f"{where}: {shown(value)} is no number of at least 0"])
    return value if isinstance(value, list) or unit == "1" else value * UNITS[unit]


def _build(kind: type, values: Mapping[str, Any], where: str) -> Any:
    known = {field.name: field for field in fields(kind)}
    wrong = [f"{where}: {unknown_name(name, known, 'constant')}" for name in values.keys() - known]
    needed = {name for name, field in known.items() if field.default is MISSING}
    wrong += [f"{where}: {name} is missing" for name in sorted(needed - values.keys())]
    if wrong:
        raise ConfigError(wrong)
    return kind(**values)


def renewed(name: str, values: Mapping[str, float], source: str) -> str:
    """The file of the machine `name` with some of its constants (without a unit) measured anew."""
    import yaml

    data = yaml.safe_load((_HERE / "machines" / f"{name}.yaml").read_text(encoding="utf-8"))
    for constant, value in values.items():
        data[constant] = {"value": round(value, 3), "unit": "1", "source": source}
    return yaml.safe_dump(data, sort_keys=False, width=110)


def dump_machine(machine: Machine, source: str) -> str:
    """A machine file whose constants all have one source, say a measurement."""
    import yaml

    def plain(value: Any, name: str) -> Any:
        if isinstance(value, Transfer):
            return {key: plain(one, key) for key, one in vars(value).items()}
        if isinstance(value, tuple) and value and isinstance(value[0], Transfer):
            return [plain(one, name) for one in value]
        if isinstance(value, Mapping):
            return {key: plain(one, name) for key, one in value.items()}
        if isinstance(value, (str, bool)):
            return value
        unit = next((unit for end, unit in _SI if name.endswith(end)), "1")
        numbers = list(value) if isinstance(value, tuple) else value
        return {"value": numbers, "unit": unit, "source": source}

    data = {
        field.name: plain(getattr(machine, field.name), field.name) for field in fields(machine)
    }
    return yaml.safe_dump(data, sort_keys=False, width=110)
