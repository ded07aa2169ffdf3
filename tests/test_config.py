"""Settings: every rule, all problems at once, and where values come from."""

import os
import stat
import subprocess
import sys
from dataclasses import FrozenInstanceError

import pytest
import yaml

from shiftjax.config import (
    CONTROLS,
    RULES,
    SETTINGS,
    CacheOptions,
    EngineConfig,
    ParallelOptions,
    rule_problems,
)
from shiftjax.options import ConfigError
from shiftjax.settings import (
    MAX_FILE_BYTES,
    compile_cache_dir,
    crowding,
    dump_yaml,
    keep_communicators_apart,
    make_virtual_devices,
    read_config_file,
    resolve,
)


def problems_of(**options):
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_options(**options)
    assert all("\n" not in problem for problem in caught.value.problems)
    return list(caught.value.problems)


def yaml_problems(text, **flags):
    with pytest.raises(ConfigError) as caught:
        resolve(flags, {}, text, "c.yaml")
    assert all("\n" not in problem for problem in caught.value.problems)
    return list(caught.value.problems)


# ---------------------------------------------------------------- single values


def test_defaults_are_valid_and_frozen():
    config = EngineConfig()
    assert config == EngineConfig.from_options()
    assert config.model.model == "smollm2-135m"
    with pytest.raises(FrozenInstanceError):
        config.parallel.tp = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("option", "value", "fragment"),
    [
        ("model", "", "must not be empty"),
        ("model", None, "must be text, got None"),
        ("model", 7, "must be text, got 7"),
        ("tokenizer", "  ", "must not be empty"),
        ("dtype", "float64", "must be one of auto, float32, bfloat16, float16, got 'float64'"),
        ("dtype", 16, "must be one of auto"),
        ("max_model_len", 0, "must be at least 1, got 0"),
        ("max_model_len", 2**40, "must be at most"),
        ("seed", -1, "must be at least 0"),
        ("seed", 2**32, "must be at most"),
        ("sp", True, "must be a whole number, got True"),
        ("sp", 2.0, "must be a whole number, got 2.0"),
        ("tp", 0, "must be at least 1"),
        ("tp", -4, "must be at least 1"),
        ("tp", "2", "must be a whole number, got '2'"),
        ("pp", 0, "must be at least 1"),
        ("pp", 257, "must be at most 256"),
        ("dp", 0, "must be at least 1"),
        ("devices", 0, "must be at least 1"),
        ("devices", 10**30, "must be at most 1024, got a number of 100 bits"),
        ("weights", "copy", "must be one of alias, gather"),
        ("block_size", 0, "must be"),
        ("block_size", 24, "must be a power of two, got 24"),
        ("block_size", 1024, "must be at most 512"),
        ("num_blocks", 1, "must be at least 2"),
        ("memory_fraction", float("nan"), "must be a finite number, got nan"),
        ("memory_fraction", float("inf"), "must be a finite number, got inf"),
        ("memory_fraction", 0, "must be at least 0.05"),
        ("memory_fraction", 1.01, "must be at most 1.0"),
        ("memory_fraction", True, "must be a number, got True"),
        ("kv_cache_dtype", "int8", "must be one of auto"),
        ("kv_cache_dtype", "fp8_e5m2", "must be fp8, whose codes are e4m3: fp8_e5m2 has no"),
        ("prefix_caching", 1, "must be true or false, got 1"),
        ("prefix_caching", "yes", "must be true or false, got 'yes'"),
        ("preemption", "drop", "must be one of recompute, swap"),
        ("host_memory", "-1", "must be a size like 8GiB, 500MB or 0, got '-1'"),
        ("host_memory", "8iB", "must be a size like"),
        ("host_memory", "9" * 40, "must be a size like"),
        ("host_memory", "1025TiB", "must be at most 1024TiB"),
        ("max_num_seqs", 0, "must be at least 1"),
        ("max_num_batched_tokens", 0, "must be at least 1"),
        ("policy", "fastest", "must be one of threshold, cost, base, shift"),
        ("machine", "", "must not be empty"),
        ("shift_threshold", -1, "must be at least 0"),
        ("overlap", None, "must be true or false"),
        ("cache_dir", None, "must be text"),
        ("token_buckets", [], "must be positive and increasing"),
        ("token_buckets", [0, 1024], "must be positive and increasing"),
        ("token_buckets", [64, 64, 1024], "must be positive and increasing"),
        ("token_buckets", [64, "x"], "must be a list of whole numbers"),
        ("token_buckets", [64, True], "must be a list of whole numbers"),
        ("token_buckets", 64, "must be a list of whole numbers, got 64"),
        ("gpu_options", "{}", "must be auto, none or xla_NAME=VALUE ..., got '{}'"),
        ("gpu_options", "xla_gpu_x", "must be auto, none or xla_NAME=VALUE"),
        ("gpu_options", "xla_gpu_x=1 jax_y=2", "got 'jax_y'"),
    ],
)
def test_a_bad_value_is_one_line_that_names_it(option, value, fragment):
    problems = problems_of(**{option: value})
    assert len(problems) == 1
    assert problems[0].startswith(f"{option}: ")
    assert fragment in problems[0]


def test_every_setting_has_help_flags_and_bounds():
    for setting in SETTINGS.values():
        assert setting.help, setting.name
        assert all(flag.startswith("--") for flag in setting.flags)
        if setting.kind in (int, float):
            assert (setting.low is not None and setting.high is not None) or setting.check
    flags = [flag for setting in SETTINGS.values() for flag in setting.flags]
    assert len(flags) == len(set(flags))


def test_all_problems_come_at_once():
    problems = problems_of(tpp=2, sp=True, pp=0, policy="best", block_size=3, weights=3, dp=0)
    assert [problem.split(":")[0] for problem in problems] == [
        "unknown option 'tpp'; did you mean tp?",
        *("sp", "pp", "dp", "weights", "block_size", "policy"),
    ]


@pytest.mark.parametrize(
    ("name", "meant"),
    [("max_model_length", "max_model_len"), ("tensor_parallel", None), ("Policy", "policy")],
)
def test_an_unknown_name_gets_a_suggestion(name, meant):
    (problem,) = problems_of(**{name: 1})
    assert problem.startswith(f"unknown option '{name}'")
    assert (f"did you mean {meant}?" in problem) == (meant is not None)


def test_a_part_with_a_bad_value_cannot_become_a_config():
    with pytest.raises(ConfigError, match="sp: must be at least 1"):
        EngineConfig(parallel=ParallelOptions(sp=0))


# ---------------------------------------------------------------- rules between values

HOSTS = {"hosts": 2, "coordinator": "a:5", "host_secret_file": "secret"}
BROKEN_RULES = [
    ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "max_num_batched_tokens = 32 is less"),
    ({"devices": 8, "sp": 2, "tp": 2}, "dp 1 * sp 2 * tp 2 = 4 devices, but devices = 8"),
    ({"devices": 8, "sp": 4, "tp": 2, "dp": 2}, "dp 2 * sp 4 * tp 2 = 16 devices"),
    ({"devices": 8, "sp": 3}, "devices = 8 is no multiple of dp 1 * sp 3 = 3"),
    ({"devices": 8, "dp": 3}, "devices = 8 is no multiple of dp 3 = 3"),
    ({"devices": 8, "phases": "pp4:tp4"}, "pp4:tp4 takes 4 devices, but devices = 8"),
    ({"hosts": None}, "hosts = auto is read from the environment"),
    ({"max_loras": 2}, "max_loras has no meaning without enable_lora"),
    ({"max_lora_rank": 64}, "max_lora_rank has no meaning without enable_lora"),
    ({"hosts": 2}, "hosts = 2 needs coordinator and host_secret_file"),
    ({"host_rank": 1}, "host_rank has no meaning with hosts = 1"),
    (HOSTS | {"host_rank": 2}, "host_rank = 2 must be below hosts = 2"),
    (HOSTS | {"sp": 3, "tp": 1}, "as many devices each, and 3 are asked for"),
    (HOSTS | {"dp": 3}, "dp = 3 must be a multiple of hosts = 2"),
    (HOSTS | {"dp": 2, "enable_lora": True}, "enable_lora cannot be had with hosts and dp"),
    (HOSTS | {"host_memory": "1GiB"}, "host_memory = 1GiB cannot be had with hosts = 2: KV"),
    ({"policy": "base", "shift_threshold": 64}, "shift_threshold = 64 has no meaning"),
    (
        {"machine": "h200x8", "controls": {"step_sizes": "largest"}},
        "machine = h200x8 has no meaning",
    ),
    ({"preemption": "swap"}, "preemption = swap needs host_memory, say 8GiB, got '0'"),
    ({"host_memory": "8MB", "prefix_caching": False}, "host_memory = 8MB has no meaning without"),
    ({"disk_cache_dir": "kv"}, "disk_cache_dir needs host_memory, say 8GiB"),
    ({"num_blocks": 5, "max_model_len": 65}, "hold 64 tokens (block 0 is reserved), less than"),
    (
        {"token_buckets": [64, 512], "max_num_batched_tokens": 1024},
        "token_buckets end at 512, but a step may have",
    ),
    (
        {"token_buckets": [64, 128], "max_num_seqs": 512},
        "token_buckets end at 128, less than max_num_seqs = 512",
    ),
    (
        {"machine": "h200x8", "speculation": "suffix", "draft_choice": "fill"}
        | {"controls": {"step_sizes": "largest"}},
        "machine = h200x8 has no meaning",
    ),
    (
        {"speculation": "ngram", "controls": {"prompt_lookup_min": 6}},
        "prompt_lookup_min = 6 is above",
    ),
    ({"speculation": "hybrid"}, "speculation = hybrid needs draft_model"),
    ({"fleet": True, "sp": 2}, "sp = 2 has no meaning with fleet: groups are formed while"),
    ({"fleet": True, "weights": "gather"}, "weights = gather cannot be had with fleet"),
]
FLEETS = [
    ({"controls": {"switch": "soft"}}, "switch has no meaning without fleet"),
    ({"fleet": True, "controls": {"shift_weights": "slice"}}, "weights = slice cannot be had with"),
    ({"fleet": True, "bind_at": 0.5}, "bind_at has no meaning with fleet_policy = cost"),
    ({"fleet": True, "release_at": 9.0}, "release_at has no meaning with fleet_policy = cost"),
    ({"fleet": True, "fleet_policy": "load", "bind_at": 4.0}, "bind_at = 4.0 is not below"),
    (
        {"fleet": True, "fleet_policy": "fixed:2+2", "controls": {"switch": "hard"}},
        "switch has no meaning with fleet_policy = fixed:2+2",
    ),
    (
        {"fleet": True, "fleet_policy": "context", "controls": {"switch": "auto"}},
        "switch = auto needs fleet_policy = cost",
    ),
    ({"fleet": True, "fleet_policy": "fastest"}, "must be one of cost, load, priority, context"),
    ({"fleet": True, "fleet_widths": [1, 3]}, "must be powers of two and increasing"),
]
UNREAD = [
    ({"max_draft_tokens": 4}, "max_draft_tokens has no meaning with speculation = none"),
    (
        {"speculation": "ngram", "suffix_corpus_tokens": 9},
        "suffix_corpus_tokens has no meaning with speculation = ngram",
    ),
    (
        {"speculation": "ngram", "controls": {"suffix_factor": 2.0}},
        "with speculation = ngram",
    ),
    (
        {"speculation": "suffix", "controls": {"prompt_lookup_max": 9}},
        "with speculation = suffix",
    ),
    (
        {"speculation": "suffix", "controls": {"draft_max_seqs": 9}},
        "with fixed_drafts = False",
    ),
    ({"speculation": "suffix", "draft_model": "x"}, "draft_model has no meaning with speculation"),
    (
        {"speculation": "model", "draft_model": "x", "controls": {"suffix_factor": 2.0}},
        "with speculation = model",
    ),
]


SINGLE_HOST = [
    (HOSTS | {"pp": 2}, "hosts = 2 cannot be had with pp = 2"),
    (HOSTS | {"coordinator": "a"}, "coordinator: must be HOST:PORT"),
    (HOSTS | {"coordinator": "a:65535"}, "with a port below 65535"),  # the next one is JAX's
]


@pytest.mark.parametrize(("options", "fragment"), BROKEN_RULES + UNREAD + FLEETS + SINGLE_HOST)
def test_options_that_contradict_each_other_are_one_line(options, fragment):
    (problem,) = problems_of(**options)
    assert fragment in problem


def test_every_rule_is_tried_above():
    seen = set()
    for given, _ in BROKEN_RULES:
        defaults = {n: setting.default for n, setting in {**SETTINGS, **CONTROLS}.items()}
        options = given | given.get("controls", {})
        (problem,) = rule_problems(defaults | options)
        for rule in RULES:
            names = rule.__code__.co_varnames[: rule.__code__.co_argcount]
            if rule(**{name: (defaults | options)[name] for name in names}) == problem:
                seen.add(rule)
    assert seen == set(RULES)


@pytest.mark.parametrize(
    "options",
    [
        {"devices": 8, "sp": 4, "tp": 2},
        {"devices": 8, "tp": 2, "dp": 2},
        {"max_num_seqs": 32, "max_num_batched_tokens": 32},
        {"num_blocks": 5, "max_model_len": 64},
        {"num_blocks": 5, "max_model_len": 65, "kv_split": "position"},  # whose blocks are larger
        {"kv_split": "position", "host_memory": "8MB"},
        {"kv_split": "position", "fleet": True},
        HOSTS | {"kv_split": "position"},
        {"preemption": "swap", "host_memory": "2kb", "prefix_caching": False},
        {"host_memory": "1.5 GiB"},
        {"token_buckets": [8, 64, 1024]},
        {"memory_fraction": 1},
        {"shift_threshold": 0},
        {"machine": "h200x8"},
        {"fleet": True, "devices": 8, "tp": 2, "machine": "h200x8"},
        {"fleet": True, "fleet_policy": "load", "bind_at": 3.9, "controls": {"switch": "hard"}},
        {"fleet": True, "fleet_policy": "priority"},
        {"fleet": True, "controls": {"switch": "auto"}},
    ],
)
def test_options_at_their_bounds_are_accepted(options):
    EngineConfig.from_options(**options)


@pytest.mark.parametrize("name", CONTROLS)
def test_what_is_no_setting_is_set_by_the_builder_alone(name):
    value = CONTROLS[name].choices[0] if CONTROLS[name].choices else 1
    text = {name: str(value)}
    for use in (
        lambda: EngineConfig.from_options(**{name: value}),
        lambda: resolve({}, {f"SHIFTJAX_{name.upper()}": str(value)}),
        lambda: resolve({}, {}, yaml.safe_dump(text)),
    ):
        with pytest.raises(ConfigError, match="unknown"):
            use()
    assert name not in yaml.safe_load(dump_yaml(EngineConfig()))
    with pytest.raises(ConfigError, match=f"{name}: must be"):
        EngineConfig.from_options(controls={name: "x"})
    with pytest.raises(ConfigError, match="unknown control 'x'"):
        EngineConfig.from_options(controls={"x": 1})


def test_a_rule_is_not_applied_to_a_broken_value():
    assert problems_of(devices="8", sp=3, tp=3) == ["devices: must be a whole number, got '8'"]


def test_the_default_threshold_leaves_room_for_both_modes():
    for tokens, options in (
        (256, {}),
        (50, {"max_num_batched_tokens": 100}),
        (64, {"token_buckets": [32, 128]}),
        (0, {"shift_threshold": 0}),
        (None, {"weights": "gather"}),  # the costs of the machine say
        (99, {"weights": "gather", "shift_threshold": 99}),
    ):
        config = EngineConfig.from_options(**{"max_num_seqs": 8, **options})
        assert config.threshold_tokens == tokens


# ---------------------------------------------------------------- sources


def test_flags_win_over_environment_over_file_over_defaults():
    yaml_text = "tp: 2\nmax_num_seqs: 8\nseed: 3\n"
    environ = {"SHIFTJAX_MAX_NUM_SEQS": "16", "SHIFTJAX_SEED": "4", "HOME": "/root"}
    config = resolve({"seed": "5"}, environ, yaml_text)
    assert (config.parallel.tp, config.scheduler.max_num_seqs, config.model.seed) == (2, 16, 5)
    assert config.cache == CacheOptions()


def test_text_is_read_by_the_type_of_the_setting():
    flags = {"prefix_caching": "False", "memory_fraction": "0.5", "token_buckets": "16,1024"}
    environ = {"SHIFTJAX_OVERLAP": "0", "SHIFTJAX_MODEL": "123"}
    config = resolve(flags, environ)
    assert config.cache == CacheOptions(prefix_caching=False, memory_fraction=0.5)
    assert config.compile.token_buckets == (16, 1024)
    assert (config.scheduler.overlap, config.model.model) == (False, "123")


def test_auto_takes_back_what_a_file_says():
    assert resolve({"tp": "auto"}, {}, "tp: 2").parallel.tp is None


def test_problems_of_all_sources_come_at_once_and_say_where():
    environ = {"SHIFTJAX_SP": "", "SHIFTJAX_MAX_NUM_SEQ": "4", "SHIFTJAX_BLOCK_SIZE": "3"}
    with pytest.raises(ConfigError) as caught:
        resolve({"tp": "two", "policy": "best", "sp": "2"}, environ, "dp: -1\ntpp: 2", "c.yaml")
    assert list(caught.value.problems) == [
        "c.yaml, line 2: unknown option 'tpp'; did you mean tp?",
        "SHIFTJAX_MAX_NUM_SEQ: unknown setting 'MAX_NUM_SEQ'; did you mean MAX_NUM_SEQS?",
        "c.yaml, line 1: dp: must be at least 1, got -1",
        "SHIFTJAX_SP: must be a whole number, got ''",
        "SHIFTJAX_BLOCK_SIZE: must be a power of two, got 3",
        "--tensor-parallel-size/--tp: must be a whole number, got 'two'",
        "--policy: must be one of threshold, cost, base, shift, got 'best'",
    ]


def test_what_kubernetes_puts_into_the_environment_is_no_setting():
    links = ("PORT", "SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT_80_TCP_ADDR")
    assert resolve({}, {f"SHIFTJAX_{link}": "tcp://10.0.0.1:80" for link in links})


def test_rules_hold_across_sources():
    with pytest.raises(ConfigError, match="4 devices, but devices = 8"):
        resolve({"devices": "8"}, {"SHIFTJAX_SP": "2"}, "tp: 2")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tp: 2\ntp: 4", "c.yaml, line 2: tp is already set in line 1"),
        ("tp: '2'", "c.yaml, line 1: tp: must be a whole number, got '2'"),
        ("tp: [2]", "c.yaml, line 1: tp: must be a whole number, got [2]"),
        ("tp: {a: 1}", "c.yaml, line 1: tp: must be a whole number, got a dict"),
        ("model: no", "c.yaml, line 1: model: must be text, got False"),
        ("seed: 2020-13-45", "c.yaml, line 1: seed: not a plain YAML value"),
        ("memory_fraction: .nan", "c.yaml, line 1: memory_fraction: must be a finite number"),
        ("\n\n\tp: 2", "c.yaml, line 3: a tab where YAML wants spaces"),
        ("tp: 2\n  sp: 3", "c.yaml, line 2: mapping values are not allowed here"),
        ("tp: [2", "c.yaml, line 1: expected ',' or ']', but got '<stream end>'"),
        ("- tp", "c.yaml: must map setting names to values"),
        ("just text", "c.yaml: must map setting names to values"),
        ("tp: 1\n---\ntp: 2", "c.yaml, line 2: but found another document"),
        ("tp: \x00", "c.yaml: special characters are not allowed"),
        ("[a]: 1", "c.yaml, line 1: a setting's name must be plain text"),
        ("model: !!python/object/apply:os.getcwd []", "c.yaml, line 1: model: not a plain YAML"),
        ("token_buckets: &a [*a]", "c.yaml, line 1: token_buckets: not a plain YAML value"),
        ("seed: 0x" + "f" * 5000, "c.yaml, line 1: seed: must be at most 4294967295, got a number"),
        ("tp: " + "[" * 5000, "c.yaml: nested too deeply"),
        ("".join(f"k{i}: 1\n" for i in range(1000)), "c.yaml: 1000 entries, but there are only"),
        ("#" * (MAX_FILE_BYTES + 1), "c.yaml: larger than 1 MB"),
    ],
)
def test_a_corrupt_file_is_one_line_with_its_place(text, expected):
    (problem,) = yaml_problems(text)
    assert problem.startswith(expected)


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "tp: null\n"])
def test_an_empty_file_is_the_defaults(text):
    assert resolve({}, {}, text) == EngineConfig()


def test_a_printed_config_gives_the_same_config_again():
    options = {"sp": 4, "tp": 2, "model": "off", "token_buckets": [16, 1024], "cache_dir": "none"}
    config = EngineConfig.from_options(**options, memory_fraction=0.123, prefix_caching=False)
    text = dump_yaml(config)
    assert resolve({}, {}, text) == config
    assert all(f"\n{name}:" in text for name in SETTINGS)


def test_files_that_cannot_be_read(tmp_path):
    large, latin = tmp_path / "large.yaml", tmp_path / "latin.yaml"
    large.write_bytes(b"#" * (10 << 20))
    latin.write_bytes(b"model: \xff")
    cases = {
        large: "larger than 1 MB",
        latin: "not UTF-8",
        tmp_path / "absent.yaml": "No such file",
        tmp_path: "Is a directory",
    }
    for path, fragment in cases.items():
        with pytest.raises(ConfigError, match=fragment):
            read_config_file(path)


# ---------------------------------------------------------------- surroundings


@pytest.mark.parametrize(
    ("num_devices", "load", "idle"), [(1, 9.0, None), (4, 0.9, None), (4, 1.1, 3), (8, 30.0, 0)]
)
def test_virtual_devices_want_idle_cores(num_devices, load, idle):
    words = crowding(num_devices, 4, load)
    assert (words is None) == (idle is None)
    assert words is None or f"share 4 cores, {idle} of them idle" in words


def test_the_compilation_cache_is_private(tmp_path):
    path = compile_cache_dir(EngineConfig(), {"XDG_CACHE_HOME": str(tmp_path / "x")})
    assert path == tmp_path / "x" / "shiftjax" / "compiled"
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert compile_cache_dir(EngineConfig.from_options(cache_dir="none"), {}) is None


def test_a_compilation_cache_that_others_can_write_is_refused(tmp_path):
    os.chmod(tmp_path, 0o777)
    with pytest.raises(ConfigError, match="can be written by others"):
        compile_cache_dir(EngineConfig.from_options(cache_dir=str(tmp_path)), {})
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match="cannot be made"):
        compile_cache_dir(EngineConfig.from_options(cache_dir=str(file / "x")), {})


COUNT = "--xla_force_host_platform_device_count="


@pytest.mark.parametrize(
    ("options", "before", "after"),
    [
        ({"devices": 8}, "", COUNT + "8"),
        ({"devices": 8}, f"--a=1 {COUNT}4", f"--a=1 {COUNT}8"),
        ({"sp": 4, "tp": 2}, "--a=1", f"--a=1 {COUNT}8"),
        ({"sp": 4, "tp": 2}, COUNT + "9", COUNT + "9"),
        ({"tp": 1}, "--a=1", "--a=1"),
        ({"devices": 1}, COUNT + "9", COUNT + "9"),
    ],
)
def test_virtual_devices_are_asked_of_xla(options, before, after):
    environ = {"XLA_FLAGS": before}
    make_virtual_devices(EngineConfig.from_options(**options), environ)
    assert environ["XLA_FLAGS"] == after


SPLITTING = "--xla_gpu_enable_nccl_comm_splitting"


@pytest.mark.parametrize(
    ("fleet", "before", "after"),
    [
        (True, "", f"{SPLITTING}=false"),
        (True, f"--a=1 {SPLITTING}_too=1", f"--a=1 {SPLITTING}_too=1 {SPLITTING}=false"),
        (True, f"{SPLITTING}=true --a=1", f"{SPLITTING}=true --a=1"),
        (True, f"--a=1 {SPLITTING}", f"--a=1 {SPLITTING}"),
        (False, "--a=1", "--a=1"),
    ],
)
def test_a_fleet_splits_no_communicators_unless_told_to(fleet, before, after):
    environ = {"XLA_FLAGS": before}
    keep_communicators_apart(EngineConfig.from_options(fleet=fleet), environ)
    assert environ["XLA_FLAGS"] == after


def test_xla_knows_the_flags_of_a_fleet():
    """In a process of its own: XLA ends one that has a flag that it does not know."""
    code = (
        "import jax; from shiftjax.config import EngineConfig as C; import shiftjax.settings as s;"
        "s.keep_communicators_apart(C.from_options(fleet=True)); print(len(jax.devices()))"
    )
    command, environ = [sys.executable, "-c", code], os.environ | {"XLA_FLAGS": ""}
    run = subprocess.run(command, env=environ, check=False, capture_output=True)
    assert run.stdout == b"1\n", run.stderr


def test_the_config_needs_no_jax():
    code = "import sys, shiftjax, shiftjax.settings; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


LWS = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "a-0.a.default"}
SLURM = {"SLURM_NNODES": "4", "SLURM_NODEID": "3", "SLURM_NODELIST": "n[07-09,12],m"}
AUTO = {"hosts": "auto", "host_secret_file": "secret"}


@pytest.mark.parametrize(
    ("environ", "flags", "expected"),
    [
        (LWS, {}, (2, 1, "a-0.a.default:50061")),
        (LWS, {"coordinator": "b:7"}, (2, 1, "b:7")),
        (LWS | {"LWS_GROUP_SIZE": "1", "LWS_WORKER_INDEX": "0"}, {}, (1, 0, None)),
        (SLURM, {}, (4, 3, "n07:50061")),
        (SLURM | {"SLURM_NODELIST": "gpu-1,gpu-2", "SLURM_NTASKS": "4"}, {}, (4, 3, "gpu-1:50061")),
    ],
)
def test_hosts_come_from_who_starts_them(environ, flags, expected):
    host = resolve(AUTO | flags, environ).host
    assert (host.hosts, host.host_rank, host.coordinator) == expected


@pytest.mark.parametrize(
    ("environ", "fragment"),
    [
        ({}, "neither LeaderWorkerSet nor Slurm"),
        (LWS | {"LWS_WORKER_INDEX": "x"}, "LWS_GROUP_SIZE needs LWS_WORKER_INDEX"),
        ({"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"}, "and LWS_LEADER_ADDRESS beside it"),
        (SLURM | {"SLURM_NTASKS": "8"}, "one task on each node"),
    ],
)
def test_hosts_that_nobody_has_started_are_refused(environ, fragment):
    with pytest.raises(ConfigError, match=fragment):
        resolve({"hosts": "auto"}, environ)


def test_each_of_several_hosts_starts_its_own_groups_alone():
    config = EngineConfig.from_options(**HOSTS, dp=4, sp=2, tp=1, devices=8, host_memory="1GiB")
    assert config.has_groups_on_each_host
    own = config.of_one_host
    assert (own.parallel.dp, own.parallel.devices, own.host.hosts) == (2, 4, 1)
    assert own.cache.host_memory == "1GiB" and not own.has_groups_on_each_host
    assert not EngineConfig.from_options(**HOSTS, sp=2, tp=1).has_groups_on_each_host
