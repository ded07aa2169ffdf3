"""Where settings come from: flags, then `SHIFTJAX_*` variables, then a YAML file, then defaults.

The only file that reads environment variables. No JAX.
"""

import logging
import os
import re
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from shiftjax.config import CONTROLS, PARTS, SETTINGS, EngineConfig, rule_problems
from shiftjax.options import (
    ConfigError,
    Setting,
    from_text,
    problem_with,
    settings_of,
    unknown_name,
)
from shiftjax.plugins import ALL, load_plugins

logger = logging.getLogger(__name__)

PREFIX = "SHIFTJAX_"
MAX_FILE_BYTES = 1 << 20

# Read by `fault_of` only.
TEST_VARIABLES = ("TESTING", "FAULT")

DEFAULT_HOSTS_PORT = 50061
# How many hosts there are, which this is, and where the first one is.
_HOST_VARIABLES = (
    ("LWS_GROUP_SIZE", "LWS_WORKER_INDEX", "LWS_LEADER_ADDRESS"),
    ("SLURM_NNODES", "SLURM_NODEID", "SLURM_NODELIST"),
)

# Kubernetes puts these into every container beside a service that is called `shiftjax`.
_SERVICE_LINK = re.compile(r"(^|_)(SERVICE_(HOST|PORT)|PORT)(_\w+)?$")
_LINK_VALUE = re.compile(r"(tcp|udp|sctp)://")


class Given(NamedTuple):
    """A setting that a source holds; `label` says where, for error messages."""

    name: str
    value: Any
    label: str


def resolve(
    flags: Mapping[str, str],
    environ: Mapping[str, str] | None = None,
    yaml_text: str = "",
    yaml_name: str = "config",
) -> EngineConfig:
    """The config that the sources give together; `environ` None means the process's own.

    Raises ConfigError with every problem of every source, also of settings that another source
    overrides: a file that is wrong is wrong.
    """
    return resolve_with({}, flags, environ, yaml_text, yaml_name)[0]


def resolve_with(
    others: Mapping[str, Setting],
    flags: Mapping[str, str],
    environ: Mapping[str, str] | None = None,
    yaml_text: str = "",
    yaml_name: str = "config",
    controls: Mapping[str, Any] | None = None,
) -> tuple[EngineConfig, dict[str, Any]]:
    """Like `resolve`, from sources that also hold `others`, whose values come beside the config.

    `controls` are those of the config.
    """
    settings = {**SETTINGS, **others}
    from_file, problems = read_yaml(yaml_text, yaml_name, settings)
    from_environ, unknown = read_environ(os.environ if environ is None else environ, settings)
    problems += unknown
    given = [*from_file, *from_environ, *read_flags(flags, settings)]
    problems += _plugin_problems([g for g in given if g.name == "plugins"])
    controls = controls or {}
    limits = [Given(name, value, name) for name, value in controls.items()]
    known = {**settings, **CONTROLS}
    wrong = [(g, p) for g in given + limits if (p := problem_with(known[g.name], g.value))]
    problems += [f"{g.label}: {problem}" for g, problem in wrong]
    options = {name: setting.default for name, setting in known.items()}
    options |= {g.name: g.value for g in given + limits}
    if options["hosts"] is None:
        options |= hosts_of(environ, options, problems)
    problems += rule_problems(options, {g.name for g, _ in wrong})
    if problems:
        raise ConfigError(problems)
    rest = {name: options.pop(name) for name in others}
    options = {name: value for name, value in options.items() if name in SETTINGS}
    return EngineConfig.from_options(controls=controls, **options), rest


def load_plugins_of(environ: Mapping[str, str] | None = None) -> None:
    """Load the plugins that the environment says, for what reads no settings else.

    Raises ConfigError.
    """
    name = f"{PREFIX}PLUGINS"
    load_plugins((os.environ if environ is None else environ).get(name, ALL))


def _plugin_problems(given: Sequence[Given]) -> list[str]:
    """Load the plugins of the last that says which, before what they add is looked for."""
    try:
        load_plugins(given[-1].value if given else ALL)
    except ConfigError as error:
        return list(error.problems)
    return []


def read_flags(flags: Mapping[str, str], settings: Mapping[str, Setting] = SETTINGS) -> list[Given]:
    """Settings from the texts of command line flags, by field name."""
    return [_from_text(settings[n], text, "/".join(settings[n].flags)) for n, text in flags.items()]


def read_environ(
    environ: Mapping[str, str], settings: Mapping[str, Setting] = SETTINGS
) -> tuple[list[Given], list[str]]:
    """(settings, problems) of the variables that start with SHIFTJAX_."""
    given, problems = [], []
    known = {name.upper(): setting for name, setting in settings.items()}
    ours = {name: text for name, text in environ.items() if name.startswith(PREFIX)}
    for variable, text in ours.items():
        name = variable.removeprefix(PREFIX)
        if name in TEST_VARIABLES or (_SERVICE_LINK.search(name) and _LINK_VALUE.match(text)):
            continue
        if name in known:
            given.append(_from_text(known[name], text, variable))
        elif not _SERVICE_LINK.search(name):
            problems.append(f"{variable}: {unknown_name(name, known, 'setting')}")
    return given, problems


def _from_text(setting: Setting, text: str, label: str) -> Given:
    return Given(setting.name, from_text(setting, text), label)


# ---------------------------------------------------------------- YAML


def read_config_file(path: str | Path) -> str:
    """The text of a config file; raises ConfigError where there is none to be had."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ConfigError([f"{path}: larger than 1 MB, this is no config file"])
        return data.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror}"]) from None
    except UnicodeDecodeError as error:
        raise ConfigError([f"{path}: not UTF-8 text (byte {error.start})"]) from None


def read_yaml(
    text: str, name: str, settings: Mapping[str, Setting] = SETTINGS
) -> tuple[list[Given], list[str]]:
    """(settings, problems) of a YAML mapping from setting names to values.

    Only YAML's own plain types are built, whatever tags the file has.
    """
    if len(text.encode()) > MAX_FILE_BYTES:
        return [], [f"{name}: larger than 1 MB, this is no config file"]
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        return [], [_syntax_problem(error, name)]
    except RecursionError:
        return [], [f"{name}: nested too deeply"]
    if root is None or root.value == "":
        return [], []
    if not isinstance(root, yaml.MappingNode):
        return [], [f"{name}: must map setting names to values, like `tp: 2`"]
    return _read_entries(root.value, name, settings)


def _read_entries(
    entries: list[tuple[Any, Any]], name: str, settings: Mapping[str, Setting]
) -> tuple[list[Given], list[str]]:
    if len(entries) > 10 * len(settings):  # a search for near names in each would take minutes
        return [], [f"{name}: {len(entries)} entries, but there are only {len(settings)} settings"]
    given, problems, lines = [], [], {}
    for key_node, value_node in entries:
        key, line = str(key_node.value), key_node.start_mark.line + 1
        where = f"{name}, line {line}"
        if not isinstance(key_node, yaml.ScalarNode):
            problems.append(f"{where}: a setting's name must be plain text")
        elif key not in settings:
            problems.append(f"{where}: {unknown_name(key, settings)}")
        elif key in lines:
            problems.append(f"{where}: {key} is already set in line {lines[key]}")
        else:
            lines[key] = line
            try:
                given.append(Given(key, _construct(value_node), f"{where}: {key}"))
            except (yaml.YAMLError, ValueError, RecursionError):
                problems.append(f"{where}: {key}: not a plain YAML value")
    return given, problems


def _construct(node: yaml.Node) -> Any:
    value = yaml.SafeLoader("").construct_object(node, deep=True)
    return tuple(value) if isinstance(value, list) else value


def _syntax_problem(error: yaml.YAMLError, name: str) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f"{name}, line {mark.line + 1}" if mark else name
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "not YAML"
    if "'\\t'" in problem:
        problem = "a tab where YAML wants spaces"
    return f"{where}: {' '.join(str(problem).split())}"


def dump_yaml(config: EngineConfig) -> str:
    """The config as a YAML file that gives the same settings again; it has no controls."""
    flat = config.flat()
    lines = []
    for name, part in PARTS.items():
        lines.append(dump_part(name, {key: flat[key] for key in settings_of(part)}))
    return "\n".join(lines)


def dump_part(name: str, values: Mapping[str, Any]) -> str:
    """Settings that belong together, as a part of a YAML file."""
    plain = {key: list(v) if isinstance(v, tuple) else v for key, v in values.items()}
    return f"# {name}\n{yaml.safe_dump(plain, sort_keys=False, default_flow_style=False)}"


# ---------------------------------------------------------------- the process's surroundings


def fault_of(environ: Mapping[str, str] | None = None) -> str | None:
    """The fault that a test wants injected (SHIFTJAX_FAULT, with SHIFTJAX_TESTING=1 only).

    Raises ConfigError for a fault without the permission to have one.
    """
    environ = os.environ if environ is None else environ
    fault = environ.get(f"{PREFIX}FAULT")
    if fault and environ.get(f"{PREFIX}TESTING") != "1":
        raise ConfigError([f"{PREFIX}FAULT is for tests: it needs {PREFIX}TESTING=1"])
    return fault or None


def compile_cache_place(
    config: EngineConfig, environ: Mapping[str, str] | None = None
) -> Path | None:
    """Where the compilation cache is to be, made or not; None: there is to be none."""
    environ = os.environ if environ is None else environ
    setting = config.compile.cache_dir
    if setting == "auto":
        return Path(environ.get("XDG_CACHE_HOME") or "~/.cache") / "shiftjax" / "compiled"
    return None if setting == "none" else Path(setting)


def compile_cache_dir(
    config: EngineConfig, environ: Mapping[str, str] | None = None
) -> Path | None:
    """The directory of the compilation cache, made if need be (mode 0700); None: no cache.

    One that nobody asked for may have no place, as on a read-only system: that is a warning.
    Compiled programs are code: a directory that others can write is refused with ConfigError.
    """
    setting, place = config.compile.cache_dir, compile_cache_place(config, environ)
    if place is None:
        return None
    try:
        path = place.expanduser()
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
        reason = error.strerror if isinstance(error, OSError) else error
        problem = f"cache_dir: {place} cannot be made: {reason}"
        if setting != "auto":
            raise ConfigError([problem]) from None
        logger.warning("%s; every start compiles anew", problem)
        return None
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise ConfigError([f"cache_dir: {path} can be written by others; chmod 700 it or move it"])
    return path


def hosts_of(
    environ: Mapping[str, str] | None, options: Mapping[str, Any], problems: list[str]
) -> dict[str, Any]:
    """What `hosts = auto` stands for: number, rank and, where it is not given, coordinator.

    LeaderWorkerSet's variables, then Slurm's; what is wrong with them is added to `problems`.
    """
    environ = os.environ if environ is None else environ
    for number, rank, leaders in _HOST_VARIABLES:
        if number not in environ:
            continue
        numbers = {"hosts": environ[number], "host_rank": environ.get(rank, "")}
        if not all(text.isdecimal() for text in numbers.values()) or leaders not in environ:
            problems.append(f"hosts = auto: {number} needs {rank} and {leaders} beside it")
            return {"hosts": 1}
        if environ.get("SLURM_NTASKS", environ[number]) != environ[number]:
            problems.append("hosts = auto: Slurm must start one task on each node")
        # Slurm writes node[03-04,7],other: the first one is node 0.
        first = re.match(r"([^,\[]*)(?:\[(\w+))?", environ[leaders])
        host = "".join(part or "" for part in first.groups()) if first else ""
        coordinator = options["coordinator"] or f"{host}:{DEFAULT_HOSTS_PORT}"
        if int(numbers["hosts"]) == 1:  # the same command serves from one machine, too
            return {"hosts": 1, "coordinator": None, "host_secret_file": None}
        return {name: int(text) for name, text in numbers.items()} | {"coordinator": coordinator}
    problems.append("hosts = auto: neither LeaderWorkerSet nor Slurm has started this process")
    return {"hosts": 1}


def environ_beside(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a process that uses the devices for a while beside this one.

    JAX gives this one most of a GPU's memory at once: the other takes what it needs as it needs it,
    and a twentieth at most.
    """
    environ = os.environ if environ is None else environ
    memory = {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.05",
    }
    return {**environ, **memory}


def make_virtual_devices(
    config: EngineConfig, environ: MutableMapping[str, str] | None = None
) -> None:
    """Ask XLA for as many CPU devices as the config needs; call it before JAX is first used.

    Only the CPU backend looks at this. A count that XLA_FLAGS already holds is kept unless
    `devices` asks for another one.
    """
    environ = os.environ if environ is None else environ
    parallel, option = config.parallel, "--xla_force_host_platform_device_count="
    needed = (parallel.devices or parallel.least_devices) // (config.host.hosts or 1)
    present = environ.get("XLA_FLAGS", "").split()
    others = [flag for flag in present if not flag.startswith(option)]
    is_open = parallel.devices is not None or others == present
    if needed > 1 and is_open:
        environ["XLA_FLAGS"] = " ".join([*others, f"{option}{needed}"])


def crowding(num_devices: int, num_cores: int, load: float) -> str | None:
    """What virtual devices on too few idle cores come to, for people; None: they have room.

    `load` is the mean number of busy threads on the machine.
    """
    idle = max(0, num_cores - int(load))
    if num_devices <= max(1, idle):
        return None
    return (
        f"{num_devices} virtual devices share {num_cores} cores, {idle} of them idle: whenever "
        "devices talk, all wait for the last one, so steps may take seconds while others compute "
        "here; use no more devices than idle cores"
    )


def num_cores() -> int:
    """The processor's cores that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return cores or 1


def warn_of_crowding(num_devices: int) -> None:
    """Log what `crowding` says of this machine now."""
    words = crowding(num_devices, num_cores(), os.getloadavg()[0])
    if words is not None:
        logger.warning(words)


def keep_communicators_apart(
    config: EngineConfig, environ: MutableMapping[str, str] | None = None
) -> None:
    """Have XLA make every communicator of a fleet on its own; call it before JAX is first used.

    XLA:GPU makes one for a set of devices by splitting that of a larger set. A fleet has many sets
    that overlap, in other orders: splitting has hung where they came from different parents
    (openxla/xla pull requests 15935, 34196, 36981), and has bound members of a set in another
    order to the wrong devices (45000). What XLA_FLAGS already says of it holds.
    """
    environ = os.environ if environ is None else environ
    option, present = "--xla_gpu_enable_nccl_comm_splitting", environ.get("XLA_FLAGS", "").split()
    if config.fleet.fleet and not any(flag.partition("=")[0] == option for flag in present):
        environ["XLA_FLAGS"] = " ".join([*present, f"{option}=false"])
