"""Defaults of sampling from a model's `generation_config.json`, as vLLM reads them. No JAX."""

import json
import logging
from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from shiftjax.core.sampling_params import SamplingError, SamplingParams
from shiftjax.options import ConfigError, shown, unknown_name

logger = logging.getLogger(__name__)

FILE = "generation_config.json"
# Fields of the file, and what requests call them.
TAKEN = MappingProxyType(
    {name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}
    | {"max_new_tokens": "max_tokens"}
)
# Fields that change what transformers generates and have no effect here, with their neutral values.
_NOT_APPLIED = MappingProxyType(
    {
        "num_beams": 1,
        "num_beam_groups": 1,
        "penalty_alpha": 0.0,
        "typical_p": 1.0,
        "epsilon_cutoff": 0.0,
        "eta_cutoff": 0.0,
        "no_repeat_ngram_size": 0,
        "encoder_repetition_penalty": 1.0,
        "encoder_no_repeat_ngram_size": 0,
        "min_length": 0,
        "min_new_tokens": 0,
        "guidance_scale": 1.0,
    }
    | dict.fromkeys(
        (
            *("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias"),
            *("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"),
            *("stop_strings", "max_time"),
        )
    )
)


def sampling_defaults(source: str, override: str | None, directory: Path | None) -> dict[str, Any]:
    """Values of SamplingParams, by field, for requests that give none; {}: all are neutral.

    `source` is `auto` (the file in the model's `directory`), `none`, or a directory with such a
    file. `override` is a JSON object of fields that go before the file's. With `do_sample: false`
    the temperature is 0. Raises ConfigError for a file or a value that cannot be used.
    """
    found = {} if source == "none" else _of_file(source, directory)
    found |= _overriding(override) if override is not None else {}
    given = {ours: found[name] for name, ours in TAKEN.items() if found.get(name) is not None}
    if found.get("do_sample") is False:
        given["temperature"] = 0.0
    try:
        checked = SamplingParams(**given)
    except SamplingError as error:
        raise ConfigError(
            [
                f"{FILE}: {name} {words}; --generation-config none leaves the file out"
                for name, words in error.problems
            ]
        ) from None
    neutral = {field.name: field.default for field in fields(SamplingParams)} | {"max_tokens": None}
    values = {name: getattr(checked, name) for name in given}
    defaults = {name: value for name, value in values.items() if value != neutral[name]}
    if defaults:
        logger.info("where requests say nothing: %s", words_of(defaults))
    idle = [
        name for name, value in _NOT_APPLIED.items() if found.get(name) not in (None, value, [], {})
    ]
    if idle:
        logger.warning("%s: %s have no effect here", FILE, ", ".join(idle))
    return defaults


def words_of(defaults: Mapping[str, Any]) -> str:
    """The values for a reader: `temperature 0.6, top_k 20`."""
    return ", ".join(f"{name} {value:g}" for name, value in defaults.items())


def with_defaults(
    sampling: SamplingParams, given: Collection[str], defaults: Mapping[str, Any]
) -> SamplingParams:
    """`sampling` with the defaults of fields that `given` lacks. Raises SamplingError.

    The default of `max_tokens` counts where there would be no limit but the context.
    """
    added = {name: value for name, value in defaults.items() if name not in given}
    if sampling.max_tokens is None and "max_tokens" in defaults:
        added["max_tokens"] = defaults["max_tokens"]
    elif "max_tokens" in added:
        del added["max_tokens"]
    return replace(sampling, **added)


def _of_file(source: str, directory: Path | None) -> dict[str, Any]:
    folder = directory if source == "auto" else Path(source).expanduser()
    if folder is None:
        return {}
    path = folder / FILE
    if source != "auto" and not path.is_file():
        words = f"generation_config must be auto, none or a directory with a {FILE}"
        raise ConfigError([f"{words}, got {shown(source)}"])
    try:
        text = path.read_text("utf-8") if path.is_file() else "{}"
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path} cannot be read: {error}"]) from None
    return _object(text, str(path))


def _overriding(text: str) -> dict[str, Any]:
    """The fields of a setting, all of which have an effect."""
    name, known = "override_generation_config", (*TAKEN, "do_sample")
    found = _object(text, name)
    if wrong := [unknown_name(each, known, "field") for each in found if each not in known]:
        raise ConfigError([f"{name}: {each}; there are {', '.join(known)}" for each in wrong])
    return found


def _object(text: str, name: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError([f"{name} is not JSON: {error}"]) from None
    if not isinstance(values, dict):
        raise ConfigError([f"{name} must be a JSON object, got {shown(values)}"])
    return values
