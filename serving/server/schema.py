"""What a request may say: one schema for HTTP and gRPC. Every field typed, bounded and checked.

Types are checked by msgspec, without coercion; bounds by `SamplingParams`; what depends on the
model by the engine's admission. Raises `ServeError` that names the field.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from serving.server.errors import ServeError, Violation, invalid
from serving.server.fields import (
    AgentHint,
    ChatFields,
    CompletionFields,
    ContextManagement,
    GenerationFields,
    Prediction,
)
from serving.server.grammar_source import GrammarSource, grammar_source_of
from serving.server.hints import HINTS, take_hints
from serving.server.json_body import read
from serving.server.tools import ToolWish, read_calls, read_tools
from shiftjax.core.kept_blocks import LONGEST_KEEP, NO_HINTS, CacheHints
from shiftjax.core.limits import MAX_WIDTH, RequestLimits
from shiftjax.core.sampling_params import (
    INT32_MAX,
    MAX_LOGIT_BIAS,
    PARAMS,
    SamplingError,
    SamplingParams,
)
from shiftjax.text.generation_config import with_defaults

MAX_PROMPTS = 256  # in one request
MAX_TEXT_CHARACTERS = 256  # of ids, salts and users
MAX_METADATA, MAX_METADATA_CHARACTERS = 16, 512
MAX_MESSAGES = 4096


@dataclass(frozen=True)
class Wish:
    """A generation request whose every field has been checked, before tokens are known."""

    fields: CompletionFields | ChatFields
    sampling: SamplingParams
    grammar: GrammarSource | None
    unknown: tuple[str, ...]  # names of fields that nobody knows
    prediction: str | None = None  # the output that the client expects
    tools: ToolWish | None = None  # None: nothing can be called
    given: Collection[str] = ()  # fields of `sampling` that the request names
    hints: tuple[str, ...] = ()  # names of fields that are known, and have no effect here
    effort_name: str = "reasoning_effort"  # as the client calls it
    is_capped: bool = False  # `max_tokens` may be more than there is room for
    tells_experts: bool = False  # where the engine can, unless the request says that it need not

    @property
    def ignored(self) -> tuple[str, ...]:
        """Names of fields that a client is told of, as they change nothing."""
        return (*self.unknown, *self.hints)

    @property
    def priority(self) -> int:
        """Lower is earlier."""
        return self.fields.priority or 0

    @property
    def min_width(self) -> int:
        """Units of the group that shall serve it, at least."""
        return self.fields.min_width or 1

    @property
    def cache_hints(self) -> CacheHints:
        """What becomes of its KV."""
        return _hints_of(self.fields.agent_hint)


def read_completion(values: Any, **unless_given: Any) -> Wish:
    """Check the body of a completion; `unless_given` are sampling fields that it may lack."""
    values, hints = take_hints(values, HINTS)
    fields, unknown = read(CompletionFields, values)
    _check_prompt(fields.prompt)
    given = unless_given | _given(fields)
    given["logprobs"] = fields.logprobs
    if fields.echo and fields.logprobs is not None:
        if fields.prompt_logprobs not in (None, fields.logprobs):
            raise invalid("prompt_logprobs", "must be as many as logprobs beside echo")
        given["prompt_logprobs"] = fields.logprobs
    if given.get("max_tokens") == 0 and fields.echo and given.get("prompt_logprobs") is None:
        given["prompt_logprobs"] = 0  # nothing is generated: the prompt comes back
    return replace(_wish(fields, given, unknown), hints=hints)


def read_chat(values: Any) -> Wish:
    """Check the body of a chat."""
    values, hints = take_hints(values, HINTS)
    fields, unknown = read(ChatFields, values)
    if not 0 < len(fields.messages) <= MAX_MESSAGES:
        raise invalid("messages", f"must have 1 to {MAX_MESSAGES} entries")
    given = {"max_tokens": None} | _given(fields)
    if given["max_tokens"] == 0:
        raise invalid("max_tokens", "must be at least 1 in a chat")
    if fields.top_logprobs and not fields.logprobs:
        raise invalid("top_logprobs", "needs logprobs to be true")
    if fields.continue_final_message and fields.add_generation_prompt:
        words = "must be false with continue_final_message: nothing new begins"
        raise invalid("add_generation_prompt", words)
    given["logprobs"] = (fields.top_logprobs or 0) if fields.logprobs else None
    fields.messages = read_calls(fields.messages)
    tools = read_tools(fields.tools, fields.tool_choice, fields.parallel_tool_calls)
    wish = _wish(fields, given, unknown)
    is_forced = tools is not None and tools.is_forced  # then there is no text to have a form
    grammar = None if is_forced else wish.grammar
    return replace(wish, tools=tools, grammar=grammar, hints=hints)


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
    wrong = [key for key in bias if not re.fullmatch(r"-?(0|[1-9]\d{0,9})", key, re.ASCII)]
    if wrong:
        shown = ", ".join(repr(key[:40]) for key in wrong[:3])
        raise invalid("logit_bias", f"must map token ids to numbers, and not {shown}")
    return {int(key): value for key, value in bias.items()}


def _wish(
    fields: CompletionFields | ChatFields, given: dict[str, Any], unknown: tuple[str, ...]
) -> Wish:
    _check_common(fields)
    try:
        sampling = SamplingParams(**given)
    except SamplingError as error:
        raise _sampling_error(error, fields) from None
    source, prediction = grammar_source_of(fields), _predicted(fields.prediction)
    return Wish(fields, sampling, source, unknown, prediction, given=frozenset(given))


def with_server_defaults(wish: Wish, defaults: Mapping[str, Any]) -> Wish:
    """The wish with the model's defaults of sampling where it names none. Raises `ServeError`."""
    try:
        sampling = with_defaults(wish.sampling, wish.given, defaults)
    except SamplingError as error:
        raise _sampling_error(error, wish.fields) from None
    return replace(wish, sampling=sampling)


def fitting(wish: Wish, num_prompt: int, limits: RequestLimits) -> SamplingParams:
    """The sampling of a prompt of so many tokens; one that is capped ends where the room does."""
    most = wish.sampling.max_tokens
    if not wish.is_capped or most is None:
        return wish.sampling
    room = min(limits.max_model_len, limits.num_kv_tokens + 1) - num_prompt
    return replace(wish.sampling, max_tokens=None) if most > room else wish.sampling


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


def check_metadata(metadata: Mapping[str, str]) -> None:
    """Raise `ServeError` for what is more than a client may note of its request."""
    longest = max((len(text) for pair in metadata.items() for text in pair), default=0)
    if len(metadata) > MAX_METADATA or longest > MAX_METADATA_CHARACTERS:
        words = f"must have at most {MAX_METADATA} texts of {MAX_METADATA_CHARACTERS} characters"
        raise invalid("metadata", words)


def _check_common(fields: GenerationFields) -> None:
    if fields.stream_options is not None and not fields.stream:
        raise invalid("stream_options", "needs stream to be true")
    if fields.priority is not None and abs(fields.priority) > INT32_MAX:
        raise invalid("priority", f"must be between -{INT32_MAX} and {INT32_MAX}")
    if fields.min_width is not None and not 1 <= fields.min_width <= MAX_WIDTH:
        raise invalid("min_width", f"must be between 1 and {MAX_WIDTH}")
    for name in ("cache_salt", "user", "request_id", "prompt_cache_key", "safety_identifier"):
        _check_text(name, getattr(fields, name))
    _hints_of(fields.agent_hint)
    check_metadata(fields.metadata or {})
    if fields.prompt_logprobs is not None and fields.stream:
        raise invalid("prompt_logprobs", "cannot be streamed; use echo and logprobs")


def _hints_of(hint: AgentHint | None) -> CacheHints:
    """Return what an `agent_hint` asks for. Raises `ServeError`."""
    if hint is None:
        return NO_HINTS
    for name in ("session_id", "parent_session_id"):
        _check_text(f"agent_hint.{name}", getattr(hint, name))
    ttl = 0.0 if hint.cache_control is None else hint.cache_control.ttl
    if not 0 <= ttl <= LONGEST_KEEP:
        words = f"must be between 0 and {LONGEST_KEEP:.0f} seconds"
        raise invalid("agent_hint.cache_control.ttl", words)
    if hint.cache_control is not None and hint.cache_control.block_offset is not None:
        raise invalid("agent_hint.cache_control.block_offset", "is not supported by this server")
    management = hint.context_management or ContextManagement()
    kinds = {edit.type for edit in management.edits}
    place = "agent_hint.context_management"
    if any((edit.block_start, edit.block_end) != (None, None) for edit in management.edits):
        raise invalid(f"{place}.edits", "must be of the whole context: leave out its blocks")
    if len(kinds) > 1:
        raise invalid(f"{place}.edits", "must not both prefetch and evict")
    is_alone = management.manage_request
    if is_alone and not kinds:
        raise invalid(f"{place}.edits", "is empty: there is nothing to manage")
    if "prefetch" in kinds and not is_alone:
        raise invalid(f"{place}.edits", "prefetch needs manage_request to be true")
    return CacheHints(ttl, hint.session_id, "evict" in kinds, is_alone)


def _check_text(name: str, text: str | None) -> None:
    if text is not None and not (0 < len(text) <= MAX_TEXT_CHARACTERS and text.isprintable()):
        words = f"must be 1 to {MAX_TEXT_CHARACTERS} printable characters"
        raise invalid(name, words)


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
