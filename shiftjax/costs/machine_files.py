"""Machines and engines as data files: every constant with its value, unit and source. No JAX.

A constant is a mapping `{value, unit, source}`; the unit says how to get to SI. A file that lacks
a source, or has a constant too many or too few, is refused.
"""

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from shiftjax.costs.layer_launches import LAUNCHES
from shiftjax.costs.machine import ANY, EngineOverhead, Machine, Transfer
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
        "NVIDIA L40S": "l40sx8",
        "NVIDIA B200": "b200x8",
        "NVIDIA B300 SXM6 AC": "b300x8",
        "NVIDIA GB200": "gb200x4",
        "NVIDIA RTX PRO 6000 Blackwell Server Edition": "rtxpro6000x8",
        "AMD Instinct MI300X": "mi300x8",
        "AMD Instinct MI355X": "mi355x8",
    }
)
"""Machines by JAX's `device_kind`."""
LINKS = (
    "all_reduce",
    "switch_sum",
    "all_to_all",
    "all_gather",
    "point_to_point",
    "to_host",
    "from_host",
    "network",
)
PER_FORMAT = ("kv_efficiency", "expert_efficiency")  # or one number for all
MOST_HOSTS = 64
MOST = 1e30  # larger numbers are none of a machine
_HERE = Path(__file__).parent


def machine_names() -> list[str]:
    """The machines that come with the package."""
    return _names("machines")


def engine_names() -> list[str]:
    """The engines whose overhead comes with the package."""
    return _names("engines")


def load_machine(name: str, hosts: int | None = None) -> Machine:
    """The machine of this name, or of a file in the same format; as many as `hosts`, if given.

    Raises ConfigError, also where more hosts than one have no network.
    """
    machine = _load_machine(name)
    if hosts is not None and hosts not in range(1, MOST_HOSTS + 1):
        raise ConfigError([f"hosts must be 1 to {MOST_HOSTS}, got {shown(hosts)}"])
    machine = machine if hosts is None else machine.over(int(hosts))
    if machine.num_devices != machine.num_hosts * (machine.devices_per_host or machine.num_devices):
        raise ConfigError([f"{name}: num_devices must be a multiple of devices_per_host"])
    if machine.num_hosts > 1 and not machine.network:
        words = "has no network between hosts: add it to a file of it, or use one host"
        raise ConfigError([f"the machine {name} {words}"])
    if 0 < machine.most_hosts < machine.num_hosts:
        most = machine.over(machine.most_hosts).num_devices
        words = f"has at most {machine.most_hosts} hosts, which are {most} devices"
        raise ConfigError([f"the machine {name} {words}: {machine.num_hosts} hosts are too many"])
    return machine


def _load_machine(name: str) -> Machine:
    values = _read(name, "machines", "machine")
    wrong: list[str] = []
    for kind in LINKS:
        if kind in values:
            values[kind] = tuple(_ways(values[kind], f"{name}: {kind}", wrong))
    for name_of in PER_FORMAT:
        if _is_number(values.get(name_of)):
            values[name_of] = {ANY: values[name_of]}
    if wrong:
        raise ConfigError(wrong)
    return _build(Machine, values, name)


def _ways(ways: Any, where: str, wrong: list[str]) -> Iterator[Transfer]:
    """The ways to run a collective; what is none is added to `wrong`."""
    if not isinstance(ways, list) or not ways or not all(isinstance(way, dict) for way in ways):
        wrong.append(f"{where}: must be a list of at least one way, each with its constants")
        return
    for way in ways:
        try:
            yield _build(Transfer, way, where)
        except ConfigError as error:
            wrong += error.problems


def load_engine(name: str) -> EngineOverhead:
    """The engine overhead of this name, or of a file in the same format. Raises ConfigError.

    A file that is `like` another engine has its constants, but for those that it says itself.
    """
    found = _read(name, "engines", "engine")
    if "like" in found:
        found = _read(found.pop("like"), "engines", "engine") | found
    if not found.keys() & {"kernels_per_layer", "layer_launches"}:
        raise ConfigError([f"{name}: kernels_per_layer is missing, or layer_launches"])
    return _build(EngineOverhead, found, name)


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
    if not isinstance(name, str):  # of a file of experiments
        raise ConfigError([f"{what} must be a name, found {name!r}"])
    path = Path(name) if name.endswith((".yaml", ".yml")) else _HERE / folder / f"{name}.yaml"
    if not path.is_file():
        known = _names(folder)
        problem = unknown_name(name, known, what)
        raise ConfigError([f"{problem}; there are {', '.join(known)}, or name a .yaml file"])
    import yaml  # here, because the names of machines are asked for every --help

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: cannot be read: {error}"]) from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        problem = getattr(error, "problem", None) or type(error).__name__
        raise ConfigError([f"{path}: not YAML: {problem}"]) from None
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise ConfigError([f"{path}: must map names to constants"])
    return {key: _plain(value, f"{path}: {key}", _unit_of(key)) for key, value in data.items()}


def _unit_of(name: str) -> str:
    """The SI unit of a constant, by how its name ends."""
    if name.startswith("host_seconds"):
        return "s"
    return next((unit for end, unit in _SI if name.endswith(end)), "1")


def _plain(node: Any, where: str, unit: str) -> Any:
    """Constants as SI numbers, whatever they are nested in."""
    if isinstance(node, dict) and "value" in node:
        return _constant(node, where, unit)
    if isinstance(node, dict):
        named = {str(key): value for key, value in node.items()}
        units = {key: _unit_of(key) if unit == "1" else unit for key in named}
        return {key: _plain(value, f"{where}: {key}", units[key]) for key, value in named.items()}
    if isinstance(node, list):
        return [_plain(value, where, unit) for value in node]
    if isinstance(node, (int, float)) and not isinstance(node, bool):
        raise ConfigError([f"{where}: a bare number; write value, unit and source"])
    return node


def _constant(node: Mapping[str, Any], where: str, si: str) -> Any:
    if set(node) != {"value", "unit", "source"} or not str(node["source"]).strip():
        raise ConfigError([f"{where}: a constant has exactly a value, a unit and a source"])
    unit, value = str(node["unit"]), node["value"]
    if unit not in UNITS:
        raise ConfigError([f"{where}: {unknown_name(unit, UNITS, 'unit')}"])
    if not unit.endswith(si) or ("/" in unit) != ("/" in si):
        raise ConfigError([f"{where}: is in {si}, which {unit} does not measure"])
    numbers = value if isinstance(value, list) else [value]
    of_names = isinstance(value, list) and all(isinstance(name, str) for name in value)
    if not of_names and not all(_is_number(n) for n in numbers):
        raise ConfigError([f"{where}: {shown(value)} is no number of at least 0"])
    return value if isinstance(value, list) or unit == "1" else value * UNITS[unit]


def _is_number(value: Any, above: float = -1) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return 0 <= value < MOST and value > above  # neither NaN nor infinite


def _build(kind: type, values: Mapping[str, Any], where: str) -> Any:
    """Make a dataclass of constants, checked against its annotations. Raises ConfigError."""
    known, hints = {field.name: field for field in fields(kind)}, get_type_hints(kind)
    wrong = [f"{where}: {unknown_name(name, known, 'constant')}" for name in values.keys() - known]
    needed = {n for n, f in known.items() if f.default is MISSING is f.default_factory}
    wrong += [f"{where}: {name} is missing" for name in sorted(needed - values.keys())]
    for name in known.keys() & values.keys() - set(LINKS):
        if problem := _problem(name, hints[name], values[name], known[name].default):
            wrong.append(f"{where}: {name} {problem}")
    if wrong:
        raise ConfigError(sorted(wrong))
    return kind(**{name: _as_tuples(value) for name, value in values.items()})


def _as_tuples(value: Any) -> Any:
    """Lists as tuples, those of a mapping, too."""
    if isinstance(value, dict):
        return {key: _as_tuples(each) for key, each in value.items()}
    return tuple(value) if isinstance(value, list) else value


def _problem(name: str, hint: Any, value: Any, default: Any) -> str | None:
    """What is wrong with a constant, as "must be ..."; None: nothing.

    What is divided by must not be 0: rates, shares, and counts that have no default of 0.
    """
    words, is_right = _rule(name, hint, default)
    return None if is_right(value) else f"must be {words}, got {shown(value)}"


def _rule(name: str, hint: Any, default: Any) -> tuple[str, Callable[[Any], bool]]:
    """What a constant must be, in words and as a test."""
    from shiftjax.arch.formats import AUTO, FORMATS  # here for the same reason as yaml

    if get_origin(hint) is Literal:
        return f"one of {', '.join(get_args(hint))}", lambda value: value in get_args(hint)
    if get_origin(hint) is Mapping:
        test, what = (_are_rates, "a rate above 0")
        if hint == Mapping[str, tuple[str, ...]]:
            test, what = (_are_launches, f"launches ({'; '.join(LAUNCHES)})")
        words = f"{what} for {AUTO}, and for others of {', '.join(FORMATS)}"
        return words, functools.partial(test, needed=AUTO, known=FORMATS)
    if hint in (bool, str):
        return {bool: "true or false", str: "text"}[hint], lambda value: isinstance(value, hint)
    if hint is float:
        above = name.endswith(("_per_second", "_efficiency")) or name == "memory_bytes"
        is_right = functools.partial(_is_number, above=0 if above else -1)
        return "a number above 0" if above else "a number", is_right
    least = 0 if default == 0 else 1

    def is_count(value: Any) -> bool:
        return isinstance(value, int) and _is_number(value, above=least - 1)

    if hint is int:
        return f"a whole number of at least {least}", is_count
    words = "a list of whole numbers of at least 1"
    return (
        words,
        lambda value: isinstance(value, list) and value != [] and all(map(is_count, value)),
    )


def _are_rates(value: Any, needed: str, known: Collection[str]) -> bool:
    if not isinstance(value, dict) or needed not in value:
        return False
    return all(name in known and _is_number(rate, above=0) for name, rate in value.items())


def _are_launches(value: Any, needed: str, known: Collection[str]) -> bool:
    if not isinstance(value, dict) or needed not in value or not value.keys() <= set(known):
        return False
    return all(
        isinstance(names, list) and set(names) <= LAUNCHES.keys() for names in value.values()
    )


def renewed(
    name: str, values: Mapping[str, float | Mapping[str, float]], source: str, measured: str
) -> str:
    """The file of a machine with some of its constants measured anew, in the units that it has.

    Values are SI; one by number format renews these formats. `measured`: see `Machine`.
    """
    import yaml

    data = yaml.safe_load(machine_path(name).read_text(encoding="utf-8"))
    for constant, value in values.items():
        old = data.get(constant, {})
        unit = old.get("unit", _unit_of(constant))
        if isinstance(value, Mapping):
            each = {fmt: _renewed(one, unit, source) for fmt, one in value.items()}
            data[constant] = ({ANY: old} if "value" in old else old) | each
        else:
            data[constant] = _renewed(value, unit, source)
    data.pop("published", None)
    return yaml.safe_dump(data | {"measured": measured}, sort_keys=False, width=110)


def _renewed(value: float, unit: str, source: str) -> dict[str, Any]:
    return {"value": float(f"{value / UNITS[unit]:.3g}"), "unit": unit, "source": source}


def machine_path(name: str) -> Path:
    """The file of a machine that comes with the package."""
    return _HERE / "machines" / f"{name}.yaml"


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
        numbers = list(value) if isinstance(value, tuple) else value
        return {"value": numbers, "unit": _unit_of(name), "source": source}

    values = ((field.name, getattr(machine, field.name)) for field in fields(machine))
    data = {name: plain(value, name) for name, value in values if value not in ((), {})}
    return yaml.safe_dump(data, sort_keys=False, width=110)
