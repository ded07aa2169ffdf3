"""Every setting of the engine, declared once: name, type, default, bounds, help, flags. No JAX.

Keyword arguments of `LLM`, command line flags, `SHIFTJAX_*` variables and YAML keys all derive
from the fields below (`SETTINGS`); `shiftjax/settings.py` reads the outside sources.
"""

import inspect
import itertools
import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from shiftjax.core.policies import DEFAULT_POLICY, POLICIES
from shiftjax.draft_options import DraftOptions
from shiftjax.lora_options import LoraOptions, lora_problems
from shiftjax.options import (
    ConfigError,
    Setting,
    control,
    controls_of,
    num_bytes_of,
    option,
    problem_with,
    settings_of,
    shown,
    unknown_name,
    xla_options,
)
from shiftjax.parallel.arrangements import FleetOptions, fleet_problems, traits_of
from shiftjax.parallel.degrees import AUTO_PHASES, Degrees, parse_phases
from shiftjax.targets import Targets, make_targets, parse_classes

DEFAULT_SHIFT_THRESHOLD = 256  # tokens; the default that Arctic Inference documents
MOST_HOST_BYTES = 1 << 50
MOST_PORT = 65535  # the port after that of `coordinator` is JAX's
# Of a group, on the GPU servers that are planned for and simulated: vLLM's defaults there, with
# which published figures were taken.
SERVER_BUDGETS = types.MappingProxyType({"max_num_seqs": 256, "max_num_batched_tokens": 8192})


def _power_of_two(value: int) -> str | None:
    return None if value & (value - 1) == 0 else f"must be a power of two, got {shown(value)}"


def _increasing(values: tuple[int, ...]) -> str | None:
    grows = all(a < b for a, b in itertools.pairwise(values))
    if values and values[0] >= 1 and grows:
        return None
    return f"must be positive and increasing, got {shown(values)}"


def _read_by(parse: Callable[[str], Any], *words: str) -> Callable[[str], str | None]:
    """Return what says why `parse` cannot read a text, which may be one of `words` instead."""

    def check(text: str) -> str | None:
        try:
            _ = text in words or parse(text)
        except ValueError as error:
            return str(error)
        return None

    return check


def _no_e5m2(text: str) -> str | None:
    if text not in ("fp8_e5m2", "float8_e5m2"):
        return None
    return f"must be fp8, whose codes are e4m3: {text} has no scales and two bits of precision"


def _size(text: str) -> str | None:
    try:
        num_bytes = num_bytes_of(text)
    except ValueError as error:
        return str(error)
    return None if num_bytes <= MOST_HOST_BYTES else f"must be at most 1024TiB, got {shown(text)}"


def _address(text: str) -> str | None:
    host, _, port = text.rpartition(":")
    if host and port.isdecimal() and 0 < int(port) < MOST_PORT:
        return None
    return f"must be HOST:PORT with a port below {MOST_PORT}, got {shown(text)}"


@dataclass(frozen=True)
class ModelOptions:
    """Which model, and in what number format."""

    model: str = option("smollm2-135m", "directory, GGUF file, Orbax checkpoint, hub id or alias")
    revision: str | None = option(None, "branch, tag or commit of a hub id; default: the newest")
    download_dir: str | None = option(
        None, "folder in which hub models are kept; default: that of HF_HOME"
    )
    tokenizer: str | None = option(None, "tokenizer file or directory; default: the model's own")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "number format of weights and activations; auto: what suits the backend"
    )
    quantization: Literal["auto", "none", "fp8", "mxfp4", "int4"] = option(
        "auto",
        "fp8: layers' matrices are e4m3 codes; mxfp4, int4: the checkpoint's four bits; none: "
        "plain numbers; auto: as the checkpoint is",
    )
    max_model_len: int | None = option(
        None, "longest prompt plus output, in tokens; default: the model's", low=1, high=1 << 24
    )
    task: Literal["auto", "generate", "embed"] = option(
        "auto", "what the model is for; auto: encoders embed texts, all others generate them"
    )
    generation_config: str = option(
        "auto",
        "defaults of sampling: auto: the model's generation_config.json; none: neutral values; "
        "or a directory with such a file",
    )
    override_generation_config: str | None = option(
        None, 'defaults of sampling that go before the file\'s, as {"temperature": 0.6}'
    )
    plugins: str = option(
        "all", "plugins of installed packages to load: all, none, or names with commas"
    )
    seed: int = option(
        0, "seed of requests that bring none, and of random weights", low=0, high=2**32 - 1
    )
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = option(
        "raw_logprobs",
        "log-probabilities of the model, or of what tokens are drawn from: after penalties, masks, "
        "temperature, min_p, top_k and top_p",
    )
    routed_experts: bool = option(
        False,
        "answers tell which experts each token chose, to requests that ask for it",
        flags=("--enable-return-routed-experts",),
    )
    numerics: Literal["fast", "float32", "invariant", "integer"] = option(
        "fast",
        "invariant, integer: the same bits in every mode, batch and chunk; float32: nearly, and "
        "cheaper",
    )
    deterministic: bool = option(
        False,
        "attention gives a sequence the same bits whatever runs beside it; slower for few",
    )


@dataclass(frozen=True)
class ParallelOptions:
    """The mesh: `dp` groups of `pp` stages of `sp * tp` devices.

    Of a stage, base is (sp, tp) and shift (1, sp * tp).
    """

    sp: int | None = option(
        None,
        "Ulysses sequence parallel size; default: what tp leaves, with experts by costs",
        flags=("--sequence-parallel-size", "--sp"),
        low=1,
        high=1024,
    )
    tp: int | None = option(
        None,
        "tensor parallel size; default: the least that fits the memory, with experts by costs",
        flags=("--tensor-parallel-size", "--tp"),
        low=1,
        high=1024,
    )
    pp: int = option(
        1,
        "pipeline parallel size: stages that have a part of the layers each",
        flags=("--pipeline-parallel-size", "--pp"),
        low=1,
        high=256,
    )
    dp: int = option(
        1,
        "data parallel size: groups with their own requests",
        flags=("--data-parallel-size", "--dp"),
        low=1,
        high=1024,
    )
    phases: str | None = option(
        None,
        "offline: prompts and decodes each in degrees of their own, in turns, as in pp8:tp8; auto: "
        "what is predicted to be quickest for a file of requests",
        check=_read_by(parse_phases, AUTO_PHASES),
    )
    devices: int | None = option(
        None, "devices to use; on CPU that many virtual ones are made", low=1, high=1024
    )
    weights: Literal["alias", "gather"] = option(
        "alias",
        "shift weights: a view of the base weights; gather: these alone are stored, and base steps "
        "gather them, layer by layer",
    )
    experts: str = option(
        "auto",
        "how far devices split experts. auto: each step as it is quickest, out of as many whole "
        "ones as fit; a number: the same, but at least so many ways; whole: as all other weights, "
        "in every step; all: over all devices",
    )
    experts_as: int | None = control(
        None, "all steps use experts as in the mode that splits tokens so many ways, or the nearest"
    )
    shift_weights: Literal["slice", "replicate"] | None = control(
        None, "baselines of alias: a slice that is taken in the step, or a second copy"
    )

    @property
    def gathers(self) -> bool:
        """Whether each device stores SHIFT's weights alone, and BASE gathers them."""
        return self.weights == "gather"

    @property
    def phase_degrees(self) -> tuple[Degrees, Degrees] | None:
        """The degrees of prefill and of decode that `phases` names; None: it names none."""
        is_pair = self.phases not in (None, AUTO_PHASES)
        return parse_phases(self.phases) if is_pair and self.phases else None

    @property
    def least_devices(self) -> int:
        """Devices that the degrees need, where those left open are 1."""
        if self.phase_degrees is not None:
            return self.phase_degrees[0].num_devices
        return Degrees(self.dp, self.pp, self.sp or 1, self.tp or 1).num_devices


@dataclass(frozen=True)
class HostOptions:
    """The machines of one engine, each with as many of its devices (docs/hosts.md)."""

    hosts: int | None = option(
        1,
        "machines of one engine, each of which runs this command; auto: as LeaderWorkerSet or "
        "Slurm say in the environment, with host_rank and coordinator",
        low=1,
        high=256,
    )
    host_rank: int = option(
        0, "which of the machines this is; 0 schedules and serves", low=0, high=255
    )
    coordinator: str | None = option(
        None,
        "HOST:PORT where machine 0 listens for the others, JAX at the port after it",
        check=_address,
    )
    host_secret_file: str | None = option(
        None, "file with the secret that the machines of one engine share"
    )

    @property
    def is_one_of_several(self) -> bool:
        """Whether the engine has devices on other machines, too."""
        return self.hosts != 1


@dataclass(frozen=True)
class CacheOptions:
    """The paged KV cache."""

    block_size: int = option(16, "tokens in a KV block", low=1, high=512, check=_power_of_two)
    num_blocks: int | None = option(
        None, "KV blocks, the null block included; default: from free memory", low=2, high=1 << 28
    )
    frees_blocks: bool = control(True, "free KV blocks that no layer sees any more")
    memory_fraction: float = option(
        0.9, "share of a device's memory for weights, KV blocks and temporaries", low=0.05, high=1.0
    )
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16", "fp8", "fp8_e4m3"] = option(
        "auto",
        "number format of the KV cache; auto: that of the model; fp8: e4m3 codes, in units of the "
        "checkpoint's scales",
        check=_no_e5m2,
    )
    kv_split: Literal["auto", "position", "replicate"] = option(
        "auto",
        "devices with the same heads of keys and values hold a part of the positions each, or "
        "copies; auto: copies, unless parts pay by predicted costs, only they hold the longest "
        "context, or they are of latents",
    )
    normalisers: bool | None = control(
        None,
        "whether all steps of SHIFT that can make the queries of all devices with the same heads, "
        "so that normalisers alone travel; None: those that are quicker by predicted costs",
    )
    prefix_caching: bool = option(
        True, "share KV blocks between equal prefixes", flags=("--enable-prefix-caching",)
    )
    preemption: Literal["recompute", "swap"] = option(
        "recompute", "a preempted sequence's KV blocks are computed anew, or swapped to the host"
    )
    host_memory: str = option(
        "0",
        "host memory of all groups, like 8GiB, for KV blocks that leave the devices: prefixes that "
        "are found again, and swap",
        check=_size,
    )

    disk_cache_dir: str | None = option(
        None,
        "directory, on a local disk, for KV blocks that fall out of host memory: prefixes that are "
        "found again, also after a restart",
    )
    disk_cache_bytes: str = option(
        "64GiB", "bytes that files in disk_cache_dir may have, like 500GiB", check=_size
    )

    retention_fraction: float = option(
        0.25,
        "share of the KV blocks, at most, that requests may keep for later ones (agent_hint)",
        low=0.0,
        high=0.9,
    )

    @property
    def host_bytes(self) -> int:
        """`host_memory` as a number."""
        return num_bytes_of(self.host_memory)

    @property
    def disk_bytes(self) -> int:
        """`disk_cache_bytes` as a number."""
        return num_bytes_of(self.disk_cache_bytes)


@dataclass(frozen=True)
class SchedulerOptions:
    """What goes into a step, and in which mode it runs."""

    max_num_seqs: int | None = option(
        None,
        "sequences in a step, at most; default: 256 on a GPU, 64 on a CPU",
        low=1,
        high=4096,
    )
    max_num_batched_tokens: int | None = option(
        None,
        "tokens in a step, at most; default: 8192 on a GPU of 80 GB or more, 2048 on others, "
        "1024 on a CPU",
        low=1,
        high=1 << 20,
    )
    policy: str | None = option(
        None,
        "how a step's mode is chosen; default: cost for a model with experts on a machine with "
        f"known costs, unless shift_threshold is given; else {DEFAULT_POLICY}",
        choices=tuple(name for name, policy in POLICIES.items() if not policy.is_simulated),
    )
    machine: str | None = option(
        None,
        "what the cost policy, sizes of steps, drafts and phases = auto take the machine for: a "
        "name or a .yaml file; default: by device",
    )
    shift_threshold: int | None = option(
        None,
        f"steps of more tokens run in base mode; default: {DEFAULT_SHIFT_THRESHOLD}, "
        "or half of max_num_batched_tokens where that is less; with weights = gather where the "
        "machine's costs say that it pays",
        flags=("--shift-parallel-threshold", "--shift-threshold"),
        low=0,
        high=1 << 20,
    )
    overlap: bool = option(True, "schedule a step while the one before it runs")
    target_ttft: float | None = option(
        None,
        "seconds to the first token that requests should keep to: sizes of steps are chosen for "
        "it, and the page and /metrics count those that do; default: none",
        flags=("--target-ttft", "--ttft-target"),
        low=0.001,
        high=86400.0,
    )
    target_tpot: float | None = option(
        None,
        "the same per later token, as a mean of a request",
        flags=("--target-tpot", "--tpot-target"),
        low=0.0001,
        high=3600.0,
    )
    targets_by_priority: str | None = option(
        None,
        "other targets for requests from a priority on, as PRIORITY:TTFT/TPOT, with commas: "
        "1:5/0.2,1000:none/none",
        check=_read_by(parse_classes),
    )
    step_sizes: Literal["cost", "largest"] = control(
        "cost",
        "how large steps with prompts are: by what they cost, where that is known, and prompts in "
        "an order of their lengths, too; or as large as they may be, in order of arrival",
    )

    @property
    def mode_policy(self) -> str:
        """The policy by which modes are chosen: `policy`, or its default."""
        return self.policy or DEFAULT_POLICY

    @property
    def targets(self) -> Targets:
        """The three settings of targets as one."""
        return make_targets(self.target_ttft, self.target_tpot, self.targets_by_priority)


@dataclass(frozen=True)
class CompileOptions:
    """Which steps are compiled, with which attention, and where the results are kept."""

    attention: Literal["auto", "pallas", "xla"] = option(
        "auto", "auto: kernels where they pass a check, else XLA loops; pallas: those or an error"
    )
    cache_dir: str = option(
        "auto", "compilation cache: a directory, none, or auto (per user, under XDG_CACHE_HOME)"
    )
    token_buckets: tuple[int, ...] | None = option(
        None, "token counts to compile steps for, increasing; default: geometric", check=_increasing
    )
    gpu_options: str = option(
        "auto",
        "XLA's options of steps on GPUs, as in XLA_FLAGS; auto: a step is one CUDA graph, or none",
        check=_read_by(xla_options, "auto", "none"),
    )


@dataclass(frozen=True)
class EngineConfig:
    """All settings of one engine. An instance is valid: anything else raises ConfigError."""

    model: ModelOptions = field(default_factory=ModelOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    host: HostOptions = field(default_factory=HostOptions)
    cache: CacheOptions = field(default_factory=CacheOptions)
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    compile: CompileOptions = field(default_factory=CompileOptions)
    drafts: DraftOptions = field(default_factory=DraftOptions)
    fleet: FleetOptions = field(default_factory=FleetOptions)
    lora: LoraOptions = field(default_factory=LoraOptions)

    @property
    def has_groups_on_each_host(self) -> bool:
        """Whether every host has groups of its own: they are not over hosts."""
        return self.host.is_one_of_several and self.parallel.dp > 1

    @property
    def of_one_host(self) -> "EngineConfig":
        """The same for one of the hosts that have groups of their own."""
        num, parallel = self.host.hosts or 1, self.parallel
        devices = None if parallel.devices is None else parallel.devices // num
        parallel = replace(parallel, dp=parallel.dp // num, devices=devices)
        return replace(self, parallel=parallel, host=HostOptions())

    def __post_init__(self) -> None:
        options, known = self.flat() | self.controls(), {**SETTINGS, **CONTROLS}
        broken = {n: p for n, v in options.items() if (p := problem_with(known[n], v))}
        problems = [f"{name}: {problem}" for name, problem in broken.items()]
        problems += rule_problems(options, broken)
        if problems:
            raise ConfigError(problems)

    @classmethod
    def from_options(
        cls, *, controls: Any = types.MappingProxyType({}), **options: Any
    ) -> "EngineConfig":
        """A config from the flat names that `LLM` takes; raises ConfigError with all problems.

        `controls` maps names of fields that are no settings to values, see `options.control`.
        """
        problems = [unknown_name(name, SETTINGS) for name in options if name not in SETTINGS]
        problems += [unknown_name(n, CONTROLS, "control") for n in controls if n not in CONTROLS]
        values = {n: tuple(v) if isinstance(v, list) else v for n, v in options.items()}
        values |= controls
        try:
            config = cls(**{name: _part(part, values) for name, part in PARTS.items()})
        except ConfigError as error:
            raise ConfigError([*problems, *error.problems]) from None
        if problems:
            raise ConfigError(problems)
        return config

    @property
    def step_tokens(self) -> int | None:
        """The most tokens of a step that the settings say; None: what suits the devices."""
        buckets = self.compile.token_buckets
        return self.scheduler.max_num_batched_tokens or (buckets[-1] if buckets else None)

    @property
    def threshold_tokens(self) -> int | None:
        """The threshold in force: `shift_threshold`, or its default; None: where costs say so."""
        given = self.scheduler.shift_threshold
        if given is not None or self.parallel.gathers:
            return given
        return min(DEFAULT_SHIFT_THRESHOLD, (self.step_tokens or 2 * DEFAULT_SHIFT_THRESHOLD) // 2)

    def flat(self) -> dict[str, Any]:
        """Every setting by its flat name, in the order of the fields."""
        return self._values(settings_of)

    def controls(self) -> dict[str, Any]:
        """Every field that is no setting."""
        return self._values(controls_of)

    def _values(self, fields_of: Callable[[type], Mapping[str, Setting]]) -> dict[str, Any]:
        parts = ((getattr(self, name), part) for name, part in PARTS.items())
        return {name: getattr(one, name) for one, part in parts for name in fields_of(part)}


def _part(part: type, values: Mapping[str, Any]) -> Any:
    return part(**{f.name: values[f.name] for f in fields(part) if f.name in values})


PARTS: Mapping[str, type] = types.MappingProxyType(
    {f.name: f.type for f in fields(EngineConfig) if isinstance(f.type, type)}
)
SETTINGS: Mapping[str, Setting] = types.MappingProxyType(
    {name: setting for part in PARTS.values() for name, setting in settings_of(part).items()}
)
CONTROLS: Mapping[str, Setting] = types.MappingProxyType(
    {name: each for part in PARTS.values() for name, each in controls_of(part).items()}
)


# ------------------------------------------------------- rules between settings
# A rule's parameters name the settings it reads; it returns what is wrong, or None. Those without
# an underscore also guard `SchedulerConfig`.


def budget_holds_the_decodes(
    max_num_batched_tokens: int | None, max_num_seqs: int | None
) -> str | None:
    """Refuse a step that cannot hold every running sequence; None: chosen to suit the other."""
    if max_num_batched_tokens is None or max_num_seqs is None:
        return None
    if max_num_batched_tokens >= max_num_seqs:
        return None
    return (
        f"max_num_batched_tokens = {max_num_batched_tokens} is less than max_num_seqs = "
        f"{max_num_seqs}: a step must hold one token of every sequence"
    )


def _fleet_has_its_own_degrees(
    fleet: bool, dp: int, sp: int | None, weights: str, shift_weights: str | None
) -> str | None:
    if not fleet:
        return None
    if dp != 1 or sp is not None:
        given = f"dp = {dp}" if dp != 1 else f"sp = {sp}"
        return f"{given} has no meaning with fleet: groups are formed while serving; drop it"
    if (given := shift_weights or weights) != "alias":
        return f"weights = {given} cannot be had with fleet: groups of all widths view one copy"
    return None


def _mesh_fills_the_devices(
    devices: int | None, sp: int | None, tp: int | None, dp: int, pp: int
) -> str | None:
    used = dp * pp * (sp or 1) * (tp or 1)
    degrees = {"dp": dp} | ({"pp": pp} if pp > 1 else {}) | {"sp": sp, "tp": tp}
    given = " * ".join(f"{name} {value}" for name, value in degrees.items() if value)
    if devices is None or devices == used:
        return None
    if sp and tp:
        return (
            f"{given} = {used} devices, but devices = {devices}: make them equal, or leave one out"
        )
    return (
        None if devices % used == 0 else f"devices = {devices} is no multiple of {given} = {used}"
    )


def _phases_fill_the_devices(phases: str | None, devices: int | None) -> str | None:
    if phases in (None, AUTO_PHASES) or devices is None:
        return None
    used = parse_phases(phases)[0].num_devices
    if used == devices:
        return None
    return f"phases = {phases} takes {used} devices, but devices = {devices}: make them equal"


def _hosts_are_complete(
    hosts: int | None, host_rank: int, coordinator: str | None, host_secret_file: str | None
) -> str | None:
    if hosts is None:
        return "hosts = auto is read from the environment of shiftjax serve: give a number"
    names = {"coordinator": coordinator, "host_secret_file": host_secret_file}
    if hosts == 1:
        given = [name for name, value in ({"host_rank": host_rank} | names).items() if value]
        return f"{given[0]} has no meaning with hosts = 1: drop it" if given else None
    if missing := [name for name, value in names.items() if value is None]:
        return f"hosts = {hosts} needs {' and '.join(missing)}"
    if host_rank >= hosts:
        return f"host_rank = {host_rank} must be below hosts = {hosts}"
    return None


def _hosts_share_the_devices(
    hosts: int | None, devices: int | None, dp: int, sp: int | None, tp: int | None
) -> str | None:
    used = devices or dp * (sp or 1) * (tp or 1)
    if hosts in (None, 1) or used % hosts == 0 or (devices is None and not (sp and tp)):
        return None
    return f"hosts = {hosts} must have as many devices each, and {used} are asked for in all"


def _hosts_share_the_groups(
    hosts: int | None, dp: int, host_memory: str, enable_lora: bool
) -> str | None:
    if hosts in (None, 1):
        return None
    if dp == 1 and num_bytes_of(host_memory):
        words = "KV blocks of a group over hosts stay on its devices"
        return f"host_memory = {host_memory} cannot be had with hosts = {hosts}: {words}"
    if dp > 1 and dp % hosts:
        return f"dp = {dp} must be a multiple of hosts = {hosts}, so that each has as many groups"
    if dp > 1 and enable_lora:
        return "enable_lora cannot be had with hosts and dp: load adapters into a server each"
    return None


def _threshold_is_used(policy: str | None, shift_threshold: int | None) -> str | None:
    if policy is None or POLICIES[policy].has_threshold or shift_threshold is None:
        return None
    return f"shift_threshold = {shift_threshold} has no meaning with policy = {policy}: drop one"


def _machine_is_used(
    policy: str | None,
    machine: str | None,
    speculation: str,
    draft_choice: str,
    fixed_drafts: bool,
    fleet: bool,
    fleet_policy: str,
    phases: str | None,
    weights: str,
    shift_threshold: int | None,
    step_sizes: str,
    pp: int,
) -> str | None:
    has_number = shift_threshold is not None or weights != "gather"
    policy = policy or DEFAULT_POLICY
    steps_by_cost = POLICIES[policy].needs_costs(0 if has_number else None)
    drafts_by_cost = speculation != "none" and draft_choice != "fill" and not fixed_drafts
    fleet_by_cost = fleet and traits_of(fleet_policy).needs_costs
    sizes_by_cost = step_sizes == "cost" and pp == 1 and phases is None
    chosen_by_cost = drafts_by_cost or fleet_by_cost or sizes_by_cost or phases == AUTO_PHASES
    if machine is None or chosen_by_cost or steps_by_cost:
        return None
    return f"machine = {machine} has no meaning with policy = {policy}: drop one"


def _host_memory_is_used(
    preemption: str, host_memory: str, prefix_caching: bool, phases: str | None
) -> str | None:
    if preemption == "swap" and not num_bytes_of(host_memory):
        return f"preemption = swap needs host_memory, say 8GiB, got {shown(host_memory)}"
    is_read = preemption == "swap" or prefix_caching or phases is not None
    if is_read or not num_bytes_of(host_memory):
        return None
    return (
        f"host_memory = {host_memory} has no meaning without prefix_caching and with preemption = "
        f"{preemption}: drop it"
    )


def _disk_is_used(
    disk_cache_dir: str | None, disk_cache_bytes: str, host_memory: str, prefix_caching: bool
) -> str | None:
    if disk_cache_dir is None:
        return None
    if not num_bytes_of(disk_cache_bytes):
        return "disk_cache_bytes = 0 leaves no room in disk_cache_dir: drop that"
    if not num_bytes_of(host_memory):
        return "disk_cache_dir needs host_memory, say 8GiB: what falls out of it goes to the disk"
    return None if prefix_caching else "disk_cache_dir has no meaning without prefix_caching"


def _pool_holds_a_sequence(
    max_model_len: int | None, num_blocks: int | None, block_size: int, fleet: bool, kv_split: str
) -> str | None:
    if max_model_len is None or num_blocks is None or fleet or kv_split == "position":
        return None  # of a fleet, the widest group has to; blocks of `position` are larger
    capacity = (num_blocks - 1) * block_size  # block 0 is the null block
    if capacity >= max_model_len:
        return None
    return (
        f"num_blocks = {num_blocks} of {block_size} tokens hold {capacity} tokens (block 0 is "
        f"reserved), less than max_model_len = {max_model_len}"
    )


def _buckets_hold_the_decodes(
    token_buckets: tuple[int, ...] | None,
    max_num_batched_tokens: int | None,
    max_num_seqs: int | None,
) -> str | None:
    if token_buckets is None or max_num_batched_tokens is not None or max_num_seqs is None:
        return None
    if token_buckets[-1] >= max_num_seqs:
        return None
    return (
        f"token_buckets end at {token_buckets[-1]}, less than max_num_seqs = {max_num_seqs}: a "
        "step must hold one token of every sequence"
    )


def _buckets_reach_the_budget(
    token_buckets: tuple[int, ...] | None, max_num_batched_tokens: int | None
) -> str | None:
    if token_buckets is None or max_num_batched_tokens is None:
        return None
    if token_buckets[-1] >= max_num_batched_tokens:
        return None
    return (
        f"token_buckets end at {token_buckets[-1]}, but a step may have "
        f"max_num_batched_tokens = {max_num_batched_tokens} tokens"
    )


def _model_is_named(speculation: str, draft_model: str | None) -> str | None:
    if speculation not in ("model", "hybrid") or draft_model is not None:
        return None
    return f"speculation = {speculation} needs draft_model: the directory or hub id of a speculator"


def _lookup_is_a_range(prompt_lookup_min: int, prompt_lookup_max: int) -> str | None:
    if prompt_lookup_min <= prompt_lookup_max:
        return None
    return (
        f"prompt_lookup_min = {prompt_lookup_min} is above prompt_lookup_max = {prompt_lookup_max}"
    )


_ALL_DEGREES = "it says the degrees of both phases"
# A setting, its value where it is off, and what it is refused with otherwise: settings, the value
# of each that agrees, and why no other does.
_NOT_BESIDE: Mapping[str, tuple[Any, dict[str, tuple[Any, str]]]] = {
    "pp": (
        1,
        {
            "fleet": (False, "groups of a fleet share what each unit holds whole"),
        },
    ),
    "hosts": (
        1,
        {
            "fleet": (False, "groups over hosts do not change; dp has some on each host"),
            "pp": (1, "stages pass their hidden states on one machine"),
            "phases": (None, "weights change places on one machine"),
            "disk_cache_dir": (None, "files are of one machine"),
            "routed_experts": (False, "a host is told of the tokens of its own devices alone"),
        },
    ),
    "phases": (
        None,
        {
            "dp": (1, _ALL_DEGREES),
            "pp": (1, _ALL_DEGREES),
            "sp": (None, _ALL_DEGREES),
            "tp": (None, _ALL_DEGREES),
            "fleet": (False, "groups of a fleet prefill and decode side by side"),
            "speculation": ("none", "it is for throughput, and drafts are for latency"),
            "disk_cache_dir": (None, "prompts come once"),
        },
    ),
    "enable_lora": (
        False,
        {
            "phases": (None, "each would load adapters anew"),
            "weights": ("alias", "factors would be gathered, too"),
        },
    ),
}


def _refused_together(options: Mapping[str, Any]) -> list[str]:
    """What pipeline stages cannot do, nor prompts and decodes in a configuration each."""
    return [
        f"{one} = {options[one]} cannot be had with {name} = {options[name]}: {why}; drop one"
        for one, (off, others) in _NOT_BESIDE.items()
        for name, (agrees, why) in others.items()
        if options[one] != off and options[name] != agrees
    ]


_READ_WITH = {  # beginnings of names of draft settings: the setting and the values that read them
    "suffix_": ("speculation", ("suffix", "hybrid")),
    "prompt_lookup_": ("speculation", ("ngram",)),
    "draft_model": ("speculation", ("model", "hybrid")),
    "draft_vocab": ("speculation", ("model", "hybrid")),
    "draft_max_seqs": ("fixed_drafts", (True,)),
    "draft_off_seqs": ("fixed_drafts", (True,)),
}


def _unused_draft_settings(options: Mapping[str, Any]) -> list[str]:
    """What is set, but read by another way of drafting only."""
    problems = []
    for name, setting in {**settings_of(DraftOptions), **controls_of(DraftOptions)}.items():
        pairs = [pair for start, pair in _READ_WITH.items() if name.startswith(start)]
        reader, values = pairs[0] if pairs else ("speculation", ())
        given = options[reader]
        is_read = given in values if pairs else given != "none" or name == reader
        if not is_read and options[name] != setting.default:
            problems.append(f"{name} has no meaning with {reader} = {given}: drop one")
    return problems


RULES: tuple[Callable[..., str | None], ...] = (
    budget_holds_the_decodes,
    _mesh_fills_the_devices,
    _hosts_are_complete,
    _hosts_share_the_devices,
    _hosts_share_the_groups,
    _phases_fill_the_devices,
    _fleet_has_its_own_degrees,
    _threshold_is_used,
    _machine_is_used,
    _host_memory_is_used,
    _disk_is_used,
    _pool_holds_a_sequence,
    _buckets_hold_the_decodes,
    _buckets_reach_the_budget,
    _lookup_is_a_range,
    _model_is_named,
)


def rule_problems(options: Mapping[str, Any], broken: Collection[str] = ()) -> list[str]:
    """What is wrong between settings; rules that read a setting in `broken` are left out."""
    problems = []
    for rule in RULES:
        names = inspect.signature(rule).parameters
        if not any(name in broken for name in names):
            problems.append(rule(**{name: options[name] for name in names}))
    problems += [] if broken else _unused_draft_settings(options) + lora_problems(options)
    problems += [] if broken else fleet_problems(options) + _refused_together(options)
    return [problem for problem in problems if problem]
