"""`--speculative-config`: vLLM's and Arctic Inference's names for drafts, as fields of ours.

https://docs.vllm.ai/en/latest/features/spec_decode (method, num_speculative_tokens, ...) and
Arctic Inference's documentation of suffix decoding.
"""

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from shiftjax.options import ConfigError, shown, unknown_name

FLAG = "--speculative-config"
METHODS: Mapping[str, str] = {
    "ngram": "ngram",
    "suffix": "suffix",
    "arctic": "model",
    "mlp_speculator": "model",
}
NAMES: Mapping[str, str] = {
    "method": "speculation",
    "model": "draft_model",
    "num_speculative_tokens": "max_draft_tokens",
    "suffix_speculative_tokens": "max_draft_tokens",
    "prompt_lookup_min": "prompt_lookup_min",
    "prompt_lookup_max": "prompt_lookup_max",
    "suffix_decoding_max_spec_factor": "suffix_factor",
    "suffix_max_spec_factor": "suffix_factor",
    "suffix_max_spec_offset": "suffix_offset",
    "suffix_decoding_min_token_prob": "suffix_min_prob",
    "suffix_min_token_prob": "suffix_min_prob",
    "suffix_decoding_max_tree_depth": "suffix_max_match",
    "suffix_cache_max_depth": "suffix_max_match",
    "suffix_decoding_max_cached_requests": "suffix_corpus_tokens",
    "suffix_cache_max_requests": "suffix_corpus_tokens",
    "disable_by_batch_size": "draft_max_seqs",
    "hard_disable_by_batch_size": "draft_off_seqs",
}


def translated(text: str) -> dict[str, Any]:
    """Our settings and limits by name, from the flag's JSON object; their bounds are not checked.

    Raises ConfigError with a sentence for every name and method that is not here.
    """
    try:
        values = json.loads(text, parse_constant=_no_number)  # msgspec is not in the base install
    except (ValueError, RecursionError):
        raise ConfigError([f"{FLAG}: must be a JSON object, got {shown(text)}"]) from None
    if not isinstance(values, dict):
        raise ConfigError([f"{FLAG}: must be a JSON object, got {shown(values)}"])
    values = {name: value for name, value in values.items() if value is not None}  # null: unset
    has_suffix = values.pop("enable_suffix_decoding", None) is True
    if has_suffix:
        values.setdefault("method", "suffix")
    settings: dict[str, Any] = {}
    problems = []
    for name, value in values.items():
        setting = NAMES.get(name)
        problem = _problem(name, value)
        if problem is None and setting in settings:
            problem = f"{name} sets {setting} a second time"
        if problem is not None:
            problems.append(f"{FLAG}: {problem}")
        elif setting is not None:
            settings[setting] = value
    if "method" not in values:
        problems.append(f"{FLAG}: method is missing: {', '.join(METHODS)}")
    if problems:
        raise ConfigError(problems)
    settings["speculation"] = METHODS[settings["speculation"]]
    if has_suffix and settings["speculation"] == "model":
        settings["speculation"] = "hybrid"
    return settings | _implied(settings)


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _problem(name: str, value: Any) -> str | None:
    """Why an entry has no translation; None where it has one."""
    if name not in NAMES:
        return unknown_name(name, NAMES, "name")
    if name == "method" and value not in METHODS:
        return f"method = {shown(value)} is not in this version: {', '.join(METHODS)} are"
    if NAMES[name] == "suffix_corpus_tokens" and value != 0:
        return f"{name} counts requests, which differ in size: set --suffix-corpus-tokens instead"
    return None


def _implied(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What goes without saying there: caps are of fixed lengths, one bound of a key is both."""
    implied = {}
    if settings.keys() & {"draft_max_seqs", "draft_off_seqs"}:
        implied["fixed_drafts"] = True
    least, most = settings.get("prompt_lookup_min"), settings.get("prompt_lookup_max")
    if (least is None) != (most is None):
        both = most if least is None else least
        implied |= {"prompt_lookup_min": both, "prompt_lookup_max": both}
    return implied
