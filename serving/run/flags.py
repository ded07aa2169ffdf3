"""Command line flags, made from the fields of the config and of SamplingParams. No JAX."""

import argparse
import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from serving.run import foreign_flags, speculative_config
from serving.server.options import SERVER_SETTINGS, ServerOptions, server_problems
from shiftjax.config import CONTROLS, PARTS, SETTINGS, EngineConfig
from shiftjax.core.sampling_params import SamplingError, SamplingParams
from shiftjax.options import ConfigError, Setting, from_text, settings_of, shown, unknown_name
from shiftjax.parallel.arrangements import FleetOptions
from shiftjax.text.generation_config import with_defaults

logger = logging.getLogger(__name__)

SAMPLING_SETTINGS = settings_of(SamplingParams)
PREFIX = "sampling_"  # of the names that sampling flags have in a namespace

EXIT_CODES = """exit codes:
  0  done
  1  failed while running
  2  wrong usage or settings: every problem on a line of its own on stderr
  3  the model cannot be found or read
  75  the engine failed while serving: start the server again
  130, 143  interrupted, terminated (a server that is told once ends its work first, with 0)
  134, 137, 139  ended by the system, as a rule for want of memory: start again with less"""

SOURCES = """Settings come from flags, then from environment variables (SHIFTJAX_ and the setting's
name, as in SHIFTJAX_MAX_MODEL_LEN), then from the file of --config, then from defaults. `auto`
stands for the default of a setting that is derived from the model or the devices."""


class UsageParser(argparse.ArgumentParser):
    """An ArgumentParser whose usage errors are ConfigErrors, to be shown with all others."""

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError instead of leaving the process."""
        raise ConfigError([message])


def add_config_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for every setting, `--config` and `--print-config`."""
    group = parser.add_argument_group("configuration", SOURCES)
    group.add_argument("--config", metavar="FILE", help="YAML file of settings (name: value)")
    group.add_argument("--print-config", action="store_true", help="print the settings and end")
    group.add_argument(
        speculative_config.FLAG, metavar="JSON", help="drafts, in vLLM's or Arctic's names"
    )
    for name, part in PARTS.items():
        settings = settings_of(part)
        _add_flags(parser.add_argument_group(f"{name} settings"), settings.values())
    parser.set_defaults(configured=True)


def add_model_word(parser: argparse.ArgumentParser, *words: str) -> None:
    """Let the first word name the model, as `--model` does.

    `words` are the command's own, files all of them, whose arguments are added after this one.
    """
    parser.add_argument("word", nargs="?", metavar="MODEL", help="the same as --model")
    parser.set_defaults(words=words)


def add_server_flags(parser: argparse.ArgumentParser, *names: str) -> None:
    """Add a flag for every field of ServerOptions, or for those of these names."""
    settings = [SERVER_SETTINGS[name] for name in names or SERVER_SETTINGS]
    _add_flags(parser.add_argument_group("server settings"), settings)


def add_fleet_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for every field of FleetOptions but the one that says whether there is one."""
    settings = (s for name, s in settings_of(FleetOptions).items() if name != "fleet")
    _add_flags(parser.add_argument_group("fleets", "of all that are compared"), settings)


def add_sampling_flags(
    parser: argparse.ArgumentParser,
    *,
    without: Collection[str] = (),
    defaults: Mapping[str, Any] | None = None,
) -> None:
    """Add a flag for every field of SamplingParams but `without`; `defaults` are the command's."""
    defaults = defaults or {}
    settings = (
        replace(setting, default=defaults.get(name, setting.default))
        for name, setting in SAMPLING_SETTINGS.items()
        if name not in without
    )
    group = parser.add_argument_group("sampling", "of every request; fields of SamplingParams")
    _add_flags(group, settings, prefix=PREFIX)
    parser.set_defaults(sampling_defaults=defaults)


def _add_flags(group: Any, settings: Iterable[Setting], prefix: str = "") -> None:
    for setting in settings:
        flags = _flags_of(setting, prefix)
        options: dict[str, Any] = {"dest": prefix + setting.name, "default": None}
        if setting.kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif setting.kind is tuple and setting.item is str:
            options |= {"action": "append", "metavar": "TEXT"}
        else:
            options["metavar"] = "|".join(setting.choices) or _METAVARS.get(setting.kind, "TEXT")
        group.add_argument(*flags, help=_help(setting), **options)


_METAVARS: Mapping[type, str] = {int: "N", float: "X", tuple: "N,N", Mapping: "ID:X,ID:X"}


def _flags_of(setting: Setting, prefix: str) -> tuple[str, ...]:
    """The setting's flags; a sampling field that shares a name with a setting gets a prefix."""
    if prefix and setting.name in SETTINGS:
        return tuple(flag.replace("--", "--sampling-", 1) for flag in setting.flags)
    return setting.flags


def _help(setting: Setting) -> str:
    derived = setting.default is None or setting.default == ()
    default = "" if derived else f"default {str(setting.default).lower()}"
    return "; ".join(text for text in (setting.help, default) if text).replace("%", "%%")


def parse_args(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    """Parse; flags that nobody knows end up as sentences in `problems`, for `settle` to raise.

    Flags of other engines are translated first (`foreign_flags`).
    """
    ours = foreign_flags.translated(argv, foreign_flags.known_flags(parser, argv))
    arguments, rest = parser.parse_known_args(ours.argv)
    arguments.notes = ours.notes
    known = [flag for action in arguments.parser._actions for flag in action.option_strings]
    flags = [word.split("=")[0] for word in rest if word.startswith("-")]
    arguments.problems = [unknown_name(flag, known, "flag") for flag in flags]
    if not flags:  # beside an unknown flag, words are likely its values
        arguments.problems = _place_words(arguments, rest)
    arguments.problems = [*ours.problems, *arguments.problems]
    return arguments


def _place_words(arguments: argparse.Namespace, rest: list[str]) -> list[str]:
    """Find the model among the words, which argparse takes for others behind a flag; the problems.

    It is the first one where there is one more than the command's own.
    """
    own: tuple[str, ...] | None = getattr(arguments, "words", None)
    if own is None:
        return [f"unexpected argument {shown(word)}" for word in rest]
    placed = (arguments.word, *(getattr(arguments, name) for name in own))
    words = [*(str(word) for word in placed if word is not None), *rest]
    model = words.pop(0) if len(words) > len(own) else None
    for name, word in zip(own, words, strict=False):
        setattr(arguments, name, Path(word))
    problems = [f"unexpected argument {shown(word)}" for word in words[len(own) :]]
    if model is not None:
        if arguments.model not in (None, model):
            both = f"{shown(model)} and --model {shown(arguments.model)}"
            problems.append(f"{both} are two models: drop one")
        arguments.model = model
    return problems


def settle(arguments: argparse.Namespace) -> tuple[EngineConfig, SamplingParams]:
    """Config and sampling of a command; one ConfigError holds the problems of everything."""
    problems = list(arguments.problems)
    config, sampling = EngineConfig(), SamplingParams()
    try:
        config = _config_from(arguments) if arguments.configured else config
    except ConfigError as error:
        problems += error.problems
    try:
        sampling = make_sampling(given_sampling(arguments))
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    return config, sampling


def _config_from(arguments: argparse.Namespace) -> EngineConfig:
    """The engine's config; the server's options are left in `arguments.server`.

    Every command reads both, so that one file and one environment do for all.
    """
    given = {name: getattr(arguments, name, None) for name in (*SETTINGS, *SERVER_SETTINGS)}
    controls = {}
    if arguments.speculative_config is not None:
        found = speculative_config.translated(arguments.speculative_config)
        controls = {n: from_text(CONTROLS[n], str(v)) for n, v in found.items() if n in CONTROLS}
        given |= _unless_twice({n: v for n, v in found.items() if n not in CONTROLS}, given)
    config, arguments.server = read_settings(given, arguments.config, controls)
    return config


def _unless_twice(settings: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of `--speculative-config`, none of which another flag may give, too."""
    twice = [SETTINGS[name].flags[0] for name in settings if given[name] is not None]
    if twice:
        lines = [f"{flag} and {speculative_config.FLAG} say the same: drop one" for flag in twice]
        raise ConfigError(lines)
    return settings


def read_settings(
    given: Mapping[str, Any], path: str | None, controls: Mapping[str, Any] | None = None
) -> tuple[EngineConfig, ServerOptions]:
    """Settings from flags, those that are not None, from the environment and from a file."""
    from serving.run.foreign_file import in_our_words
    from shiftjax.settings import read_config_file, resolve_with

    flags = {name: str(value) for name, value in given.items() if value is not None}
    file = in_our_words(read_config_file(path) if path else "", str(path))
    for note in file.notes:
        logger.warning("%s", note)
    controls = file.controls | dict(controls or {})
    config, rest = resolve_with(SERVER_SETTINGS, flags, None, file.text, str(path), controls)
    server = ServerOptions(**rest)
    problems = server_problems(server)
    if problems:
        raise ConfigError(problems)
    return config, server


def given_sampling(arguments: argparse.Namespace) -> dict[str, Any]:
    """The sampling flags that were given, and the command's own defaults, by field."""
    values = {name: getattr(arguments, PREFIX + name, None) for name in SAMPLING_SETTINGS}
    given = {
        name: from_text(SAMPLING_SETTINGS[name], value) if isinstance(value, str) else value
        for name, value in values.items()
        if value is not None
    }
    return {**getattr(arguments, "sampling_defaults", {}), **given}


def make_sampling(values: Mapping[str, Any]) -> SamplingParams:
    """SamplingParams from fields by name; raises ConfigError with a line per problem."""
    problems = [unknown_name(n, SAMPLING_SETTINGS) for n in values if n not in SAMPLING_SETTINGS]
    known = {name: value for name, value in values.items() if name in SAMPLING_SETTINGS}
    try:
        sampling = SamplingParams(**known)
    except SamplingError as error:
        lines = [f"{name} {words}" for name, words in error.problems]
        raise ConfigError([*problems, *lines]) from None
    if problems:
        raise ConfigError(problems)
    return sampling


def sampling_with(defaults: Mapping[str, Any], arguments: argparse.Namespace) -> SamplingParams:
    """The sampling of a command, with a model's defaults where no flag says anything.

    Raises ConfigError where a flag does not go together with a default.
    """
    given = given_sampling(arguments)
    try:
        return with_defaults(make_sampling(given), given, defaults)
    except SamplingError as error:
        raise ConfigError([f"{name} {words}" for name, words in error.problems]) from None


def read_secret_lines(name: str, path: str) -> list[str]:
    """The lines of a file of secrets; raises ConfigError if there are none."""
    try:
        lines = Path(path).read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError):
        raise ConfigError([f"{name}: {path} cannot be read"]) from None
    if not lines:
        raise ConfigError([f"{name}: {path} is empty"])
    return lines
