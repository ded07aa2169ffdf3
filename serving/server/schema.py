"""What a request may say: one schema for HTTP and gRPC. Every field typed, bounded and checked.

Types are checked by msgspec, without coercion; bounds by `SamplingParams`; what depends on the
model by the engine's admission. Raises `ServeError` that names the field.
"""

import re
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from serving.server.errors import ServeError, Violation, invalid
from serving.server.fields import (
    FOREIGN,
    NESTED,
    UNSUPPORTED,
    ChatFields,
    CompletionFields,
    GenerationFields,
    Prediction,
    ResponseFormat,
    StructuredOutputs,
)
from serving.server.tools import ToolWish, read_calls, read_tools
from shiftjax.core.limits import MAX_WIDTH
from shiftjax.core.sampling_params import (
    INT32_MAX,
    MAX_LOGIT_BIAS,
    PARAMS,
    SamplingError,
    SamplingParams,
)

MAX_PROMPTS = 256  # in one request
MAX_TEXT_CHARACTERS = 256  # of ids, salts and users
MAX_METADATA, MAX_METADATA_CHARACTERS = 16, 512
MAX_MESSAGES = 4096
MAX_CHOICES = 1024
MAX_WHITESPACE_CHARACTERS = 64
_WHITESPACE = re.compile(
    r"([ \t\n\r]|\\[tnr]|\[([ \t\n\r]|\\[tnr])+\]|\{\d{1,2}(,\d{0,2})?\}|[?*+|()])*"
)
# What JSON may hold, whatever it means: decoding this much takes some ten milliseconds.
MAX_VALUES = 1 << 20  # separated by commas, as token ids are
MAX_NODES = 1 << 16  # lists, objects and names in objects
MAX_STRINGS = 1 << 17


@dataclass(frozen=True)
class GrammarSource:
    """A constraint as the request gives it: json (a schema), regex, choice or grammar (Lark)."""

    kind: str
    text: str
    field: str = field(default="response_format", compare=False)  # where it stood
    whitespace: str | None = None  # a regex for that between tokens of JSON; None: any


@dataclass(frozen=True)
class Wish:
    """A generation request whose every field has been checked, before tokens are known."""

    fields: CompletionFields | ChatFields
    sampling: SamplingParams
    grammar: GrammarSource | None
    unknown: tuple[str, ...]  # names of fields that nobody knows
    prediction: str | None = None  # the output that the client expects
    tools: ToolWish | None = None  # None: nothing can be called

    @property
    def priority(self) -> int:
        """Lower is earlier."""
        return self.fields.priority or 0

    @property
    def min_width(self) -> int:
        """Units of the group that shall serve it, at least."""
        return self.fields.min_width or 1


def parse_json(text: bytes) -> Any:
    """The JSON value of a body. Raises `ServeError`."""
    if _has_too_much(text):
        message = "The body holds too many values, lists or objects."
        raise ServeError("invalid", message, code="invalid_json")
    try:
        return msgspec.json.decode(text)
    except RecursionError:
        raise ServeError("invalid", "The body is nested too deeply.", code="invalid_json") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        message = f"The body is not JSON: {error}."
        raise ServeError("invalid", message, code="invalid_json") from None


def _has_too_much(text: bytes) -> bool:
    """Whether decoding would keep the event loop busy: eight MiB can hold four million lists."""
    if not _exceeds(text):
        return False
    bare = text.replace(rb"\\", b"").replace(rb"\"", b"")
    if bare.count(b'"') > 2 * MAX_STRINGS:
        return True
    return _exceeds(b"".join(bare.split(b'"')[::2]))  # what is not within strings


def _exceeds(text: bytes) -> bool:
    nodes = sum(text.count(mark) for mark in (b"[", b"{", b":"))
    strings = text.count(b'"') // 2
    return nodes > MAX_NODES or strings > MAX_STRINGS or text.count(b",") > MAX_VALUES


def read[T: msgspec.Struct](kind: type[T], values: Any) -> tuple[T, tuple[str, ...]]:
    """(fields, names that nobody knows) of an object of plain values."""
    unknown = unknown_names(kind, values)
    try:
        return msgspec.convert(values, kind), unknown
    except msgspec.ValidationError as error:
        raise _type_error(str(error)) from None
    except RecursionError:
        raise ServeError("invalid", "The body is nested too deeply.", code="invalid_json") from None


def unknown_names(kind: type[msgspec.Struct], values: Any) -> tuple[str, ...]:
    """What nobody knows, as `name` or `object.name`. Raises `ServeError` for what others know."""
    if not isinstance(values, dict):
        raise ServeError("invalid", "The body must be a JSON object.", code="invalid_json")
    for name, harmless in FOREIGN.get(kind, {}).items():
        _check_harmless(name, values.get(name), harmless, "is not a field of this endpoint")
    return tuple(sorted(_unknown_in(kind, values, "")))


def _unknown_in(kind: type[msgspec.Struct], values: dict[str, Any], place: str) -> list[str]:
    unknown: list[str] = []
    for name, value in values.items():
        path = place + name
        if path in UNSUPPORTED and name not in kind.__struct_fields__:
            _check_harmless(path, value, UNSUPPORTED[path], "is not supported by this server")
        elif name not in kind.__struct_fields__:
            unknown += [path] * (name not in FOREIGN.get(kind, {}))
        elif name in NESTED:
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, dict):
                    unknown += _unknown_in(NESTED[name], each, f"{path}.")
    return unknown


def _check_harmless(name: str, value: Any, harmless: tuple[Any, ...], words: str) -> None:
    same = (each for each in harmless if isinstance(each, bool) == isinstance(value, bool))
    if value is not None and value not in same:
        raise invalid(name, words, "unsupported_parameter")


def _type_error(message: str) -> ServeError:
    """msgspec's words (`Expected ..., got ... - at `$.field[0]``), with the field first."""
    what, _, path = message.partition(" - at ")
    field = path.strip("`").removeprefix("$").removeprefix(".")
    missing = re.fullmatch(r"Object missing required field `(\w+)`", what)
    if missing:
        field = f"{field}.{missing[1]}".strip(".")
        return invalid(field, "is missing", "missing_required_parameter")
    what = what.replace("`", "")
    what = "must be " + what[9:].replace(", got", ", not") if what.startswith("Expected ") else what
    return invalid(field or "body", what.replace(" | null", ""), "invalid_type")


def read_completion(values: Any) -> Wish:
    """Check the body of a completion."""
    fields, unknown = read(CompletionFields, values)
    _check_prompt(fields.prompt)
    given = _given(fields)
    given["logprobs"] = fields.logprobs
    if fields.echo and fields.logprobs is not None:
        if fields.prompt_logprobs is not None:
            raise invalid("prompt_logprobs", "cannot be combined with echo and logprobs")
        given["prompt_logprobs"] = fields.logprobs
    if given.get("max_tokens") == 0 and fields.echo and given.get("prompt_logprobs") is None:
        given["prompt_logprobs"] = 0  # nothing is generated: the prompt comes back
    return _wish(fields, given, unknown)


def read_chat(values: Any) -> Wish:
    """Check the body of a chat."""
    fields, unknown = read(ChatFields, values)
    if not 0 < len(fields.messages) <= MAX_MESSAGES:
        raise invalid("messages", f"must have 1 to {MAX_MESSAGES} entries")
    given = {"max_tokens": None} | _given(fields)
    if given["max_tokens"] == 0:
        raise invalid("max_tokens", "must be at least 1 in a chat")
    if fields.top_logprobs and not fields.logprobs:
        raise invalid("top_logprobs", "needs logprobs to be true")
    given["logprobs"] = (fields.top_logprobs or 0) if fields.logprobs else None
    fields.messages = read_calls(fields.messages)
    tools = read_tools(fields.tools or [], fields.tool_choice, fields.parallel_tool_calls)
    wish = _wish(fields, given, unknown)
    if tools is not None and wish.grammar is not None:
        raise invalid(wish.grammar.field, "cannot be combined with tools that may be called")
    return replace(wish, tools=tools)


def _given(fields: GenerationFields) -> dict[str, Any]:
    """The sampling fields that were given, less `logprobs`, which differs between the two."""
    values = {name: getattr(fields, name) for name in fields.__struct_fields__}
    given = {
        name: value
        for name, value in values.items()
        if name in PARAMS and name != "logprobs" and value is not None
    }
    most = fields.max_completion_tokens
    if most is not None:
        if fields.max_tokens not in (None, most):
            raise invalid("max_completion_tokens", "disagrees with max_tokens")
        given["max_tokens"] = most
    if "logit_bias" in given:
        given["logit_bias"] = _logit_bias(given["logit_bias"])
    return given


def _logit_bias(bias: dict[str, float]) -> dict[int, float]:
    if len(bias) > MAX_LOGIT_BIAS:
        raise invalid("logit_bias", f"must have at most {MAX_LOGIT_BIAS} entries, not {len(bias)}")
    if not all(re.fullmatch(r"-?(0|[1-9]\d{0,9})", key, re.ASCII) for key in bias):
        raise invalid("logit_bias", "must map token ids to numbers")
    return {int(key): value for key, value in bias.items()}


def _wish(
    fields: CompletionFields | ChatFields, given: dict[str, Any], unknown: tuple[str, ...]
) -> Wish:
    _check_common(fields)
    try:
        sampling = SamplingParams(**given)
    except SamplingError as error:
        raise _sampling_error(error, fields) from None
    return Wish(fields, sampling, _grammar_source(fields), unknown, _predicted(fields.prediction))


def _sampling_error(error: SamplingError, fields: GenerationFields) -> ServeError:
    """One error of all problems; a field goes by the name under which it came."""
    violations = [Violation(_given_name(name, fields), words) for name, words in error.problems]
    text = "; ".join(f"{field} {description}" for field, description in violations)
    return ServeError("invalid", text, violations=violations)


def _given_name(field: str, fields: GenerationFields) -> str:
    if field == "logprobs" and isinstance(fields, ChatFields):
        return "top_logprobs"
    renamed = field == "max_tokens" and fields.max_completion_tokens is not None
    return "max_completion_tokens" if renamed else field


def _check_common(fields: GenerationFields) -> None:
    if fields.stream_options is not None and not fields.stream:
        raise invalid("stream_options", "needs stream to be true")
    if fields.priority is not None and abs(fields.priority) > INT32_MAX:
        raise invalid("priority", f"must be between -{INT32_MAX} and {INT32_MAX}")
    if fields.min_width is not None and not 1 <= fields.min_width <= MAX_WIDTH:
        raise invalid("min_width", f"must be between 1 and {MAX_WIDTH}")
    for name in ("cache_salt", "user", "request_id", "prompt_cache_key", "safety_identifier"):
        text = getattr(fields, name)
        if text is not None and not (0 < len(text) <= MAX_TEXT_CHARACTERS and text.isprintable()):
            words = f"must be 1 to {MAX_TEXT_CHARACTERS} printable characters"
            raise invalid(name, words)
    metadata = fields.metadata or {}
    longest = max((len(text) for pair in metadata.items() for text in pair), default=0)
    if len(metadata) > MAX_METADATA or longest > MAX_METADATA_CHARACTERS:
        words = f"must have at most {MAX_METADATA} texts of {MAX_METADATA_CHARACTERS} characters"
        raise invalid("metadata", words)
    if fields.prompt_logprobs is not None and fields.stream:
        raise invalid("prompt_logprobs", "cannot be streamed; use echo and logprobs")


def _predicted(prediction: Prediction | None) -> str | None:
    """The expected output as one text; none is expected where that is empty."""
    if prediction is None:
        return None
    if prediction.type != "content":
        raise invalid("prediction.type", "must be content")
    if isinstance(prediction.content, str):
        return prediction.content or None
    for index, part in enumerate(prediction.content):
        if part.type != "text":
            raise invalid(f"prediction.content[{index}].type", "must be text")
    return "".join(part.text for part in prediction.content) or None


def _check_prompt(prompt: str | list[Any]) -> None:
    """Text, texts, token ids, or lists of token ids; never mixed."""
    if not prompt:
        raise invalid("prompt", "is empty: it needs at least one token")
    if isinstance(prompt, str):
        return
    kinds = {type(item) for item in prompt}
    if kinds == {int}:
        return
    if kinds not in ({str}, {list}):
        raise invalid("prompt", "must be text, a list of texts, token ids or lists of token ids")
    if len(prompt) > MAX_PROMPTS:
        raise invalid("prompt", f"must have at most {MAX_PROMPTS} prompts, not {len(prompt)}")
    for index, item in enumerate(prompt):
        if not item:
            raise invalid(f"prompt[{index}]", "is empty: it needs at least one token")
        if isinstance(item, list) and {type(token) for token in item} != {int}:
            raise invalid(f"prompt[{index}]", "must be a list of token ids")


def prompts_of(fields: CompletionFields) -> list[str | list[int]]:
    """The prompts as a list; a single one comes without."""
    prompt = fields.prompt
    return [prompt] if isinstance(prompt, str) or type(prompt[0]) is int else prompt


# ---------------------------------------------------------------- structured output


def _grammar_source(fields: GenerationFields) -> GrammarSource | None:
    sources = [*_from_format(fields.response_format), *_from_outputs(fields.structured_outputs)]
    if len(sources) > 1:
        raise invalid("structured_outputs", "and response_format hold more than one constraint")
    whitespace = _whitespace(fields.structured_outputs, sources)
    return replace(sources[0], whitespace=whitespace) if sources else None


def _whitespace(wanted: StructuredOutputs | None, sources: list[GrammarSource]) -> str | None:
    """The whitespace that JSON may have; with any other than its own it would not be JSON."""
    if wanted is None or not (wanted.whitespace_pattern or wanted.disable_any_whitespace):
        return None
    name = "disable_any_whitespace" if wanted.disable_any_whitespace else "whitespace_pattern"
    if [source.kind for source in sources] != ["json"]:
        raise invalid(f"structured_outputs.{name}", "needs output that is JSON")
    if wanted.disable_any_whitespace and wanted.whitespace_pattern:
        raise invalid(f"structured_outputs.{name}", "leaves no room for a whitespace_pattern")
    pattern = wanted.whitespace_pattern or ""
    if len(pattern) > MAX_WHITESPACE_CHARACTERS or not _WHITESPACE.fullmatch(pattern):
        words = (
            f"must be a regex of spaces, \\t, \\n and \\r, sets and repetitions of them, "
            f"with at most {MAX_WHITESPACE_CHARACTERS} characters"
        )
        raise invalid("structured_outputs.whitespace_pattern", words)
    return pattern


def _from_format(wanted: ResponseFormat | None) -> list[GrammarSource]:
    if wanted is None:
        return []
    if wanted.json_schema is not None and wanted.type in ("text", "json_object"):
        raise invalid("response_format.json_schema", "needs the type json_schema")
    if wanted.type == "text":
        return []
    if wanted.type == "json_object":
        return [GrammarSource("json", '{"type":"object"}')]
    if wanted.type != "json_schema":
        raise invalid("response_format.type", "must be text, json_object or json_schema")
    if wanted.json_schema is None:
        words = "is missing: json_schema needs one"
        raise invalid("response_format.json_schema", words, "missing_required_parameter")
    return [GrammarSource("json", _to_json(wanted.json_schema.schema))]


def _from_outputs(wanted: StructuredOutputs | None) -> list[GrammarSource]:
    if wanted is None:
        return []
    sources = []
    if wanted.json is not None:
        is_text = isinstance(wanted.json, str)
        sources.append(_output("json", wanted.json if is_text else _to_json(wanted.json)))
    for kind in ("regex", "grammar"):
        text = getattr(wanted, kind)
        if text is not None:
            sources.append(_output(kind, text))
    if wanted.choice is not None:
        if not 0 < len(wanted.choice) <= MAX_CHOICES:
            raise invalid("structured_outputs.choice", f"must have 1 to {MAX_CHOICES} entries")
        sources.append(_output("choice", _to_json(wanted.choice)))
    if wanted.json_object is not None:
        if not wanted.json_object:
            raise invalid("structured_outputs.json_object", "must be true or left out")
        sources.append(_output("json", '{"type":"object"}'))
    if not sources and not (wanted.whitespace_pattern or wanted.disable_any_whitespace):
        raise invalid("structured_outputs", "must hold a constraint")
    if any(not source.text for source in sources):
        raise invalid("structured_outputs", "must not be empty")
    return sources


def _output(kind: str, text: Any) -> GrammarSource:
    return GrammarSource(kind, text, "structured_outputs")


def _to_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
