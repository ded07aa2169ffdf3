"""Chat messages to a prompt, by the model's own template."""

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from shiftjax.text.errors import ChatRequestError, ChatTemplateError
from shiftjax.text.sandbox import MAX_UNITS, Budget, ChatEnvironment, render
from shiftjax.text.tokenizer import Tokenizer

__all__ = ["ChatRequestError", "ChatTemplate", "ChatTemplateError", "encode_chat", "render_chat"]

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_MAX_DEPTH = 64  # of JSON inside a message or a tool's schema
_OPEN_END = "\ue000open end\ue000"  # marks where a message that is continued ends


class ChatTemplate:
    """A compiled template; compiling takes milliseconds, rendering mostly less than one.

    Raises `ChatTemplateError` if `source` is no Jinja. Safe to use from several threads.
    """

    def __init__(
        self, source: str, *, time_limit_seconds: float = 5.0, max_output_chars: int = 1 << 24
    ) -> None:
        self.source = source
        environment = ChatEnvironment()
        self._time_limit_seconds = time_limit_seconds
        self._max_output_chars = max_output_chars
        self._reserved = frozenset(environment.globals) | {"messages"}
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(
                f"The chat template is wrong at line {error.lineno}: {error.message}"
            ) from error
        except (RecursionError, MemoryError, SyntaxError) as error:
            raise ChatTemplateError("The chat template is nested too deeply.") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """Return the prompt; see `render_chat`."""
        if add_generation_prompt and continue_final_message:
            words = "continue_final_message needs add_generation_prompt to be false"
            raise ChatRequestError(f"{words}: a new message does not continue the last one.")
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        if clash := self._reserved & variables.keys():
            raise ChatRequestError(f"Template variables {sorted(clash)} are reserved.")
        plain = {"tools": None, "documents": None} | _plain(variables, "template variables")
        said = _normalise(messages)
        plain["messages"] = _opened(said) if continue_final_message else said
        plain["add_generation_prompt"] = add_generation_prompt
        try:
            prompt = render(self._template, Budget(MAX_UNITS, self._time_limit_seconds), plain)
        except ChatTemplateError:
            raise
        except jinja2.exceptions.SecurityError as error:
            raise ChatTemplateError(
                f"The chat template tried to leave its sandbox: {error}"
            ) from error
        except Exception as error:  # whatever the template's code ran into
            raise ChatTemplateError(f"The chat template failed: {error!r}") from error
        if len(prompt) > self._max_output_chars:
            raise ChatTemplateError(
                f"The chat template made {len(prompt)} characters; "
                f"the limit is {self._max_output_chars}."
            )
        return _cut_at_open_end(prompt) if continue_final_message else prompt


def render_chat(
    template: str | ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
    bos_token: str | None = None,
    eos_token: str | None = None,
    **kwargs: Any,
) -> str:
    """Return the prompt that `template` makes of `messages`.

    A message is `{"role": ..., "content": ...}` with further JSON fields as the template knows
    them; content given as parts is its text parts joined with newlines, other parts are refused.
    `kwargs` are template variables (`tools`, `enable_thinking` ...). The prompt holds its own BOS:
    encode it with `add_special_tokens=False`. With `continue_final_message` it ends with the
    text of the last message, else, unless `add_generation_prompt` is false, where an answer begins.

    Raises `ChatRequestError` for messages that are malformed or that the template refuses,
    `ChatTemplateError` for a template that is broken, forbidden or over its limits.
    """
    compiled = ChatTemplate(template) if isinstance(template, str) else template
    named = {"bos_token": bos_token, "eos_token": eos_token}
    tokens = {name: token for name, token in named.items() if token is not None}
    return compiled.render(
        messages,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        **tokens,
        **kwargs,
    )


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    template: ChatTemplate | None = None,
    add_special_tokens: bool = False,
    **kwargs: Any,
) -> list[int]:
    """Return the prompt's token ids; `kwargs` as in `render_chat`.

    `template` is the tokenizer's own, compiled, or another; without it the tokenizer's is compiled.
    `add_special_tokens` adds what the tokenizer adds to any text to what the template writes.
    """
    source = template or tokenizer.chat_template
    if source is None:
        raise ChatRequestError("This model has no chat template: send a plain prompt, or give one.")
    bos, eos = tokenizer.bos_token, tokenizer.eos_token
    prompt = render_chat(source, messages, bos_token=bos, eos_token=eos, **kwargs)
    return tokenizer.encode(prompt, add_special_tokens=add_special_tokens)


def _opened(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages; the end of the last one's text is marked. The mark ends with a space."""
    last = messages[-1]
    if not last.get("content") or last.get("tool_calls"):
        raise ChatRequestError("continue_final_message needs a last message of text alone.")
    return [*messages[:-1], last | {"content": f"{last['content']}{_OPEN_END} "}]


def _cut_at_open_end(prompt: str) -> str:
    """The prompt up to the mark; a template that trims messages trims the open one, too."""
    end = prompt.rfind(_OPEN_END)
    if end < 0:
        words = "The chat template does not write the last message, so it cannot be continued."
        raise ChatRequestError(words)
    is_whole = prompt.startswith(f"{_OPEN_END} ", end)
    return prompt[:end] if is_whole else prompt[:end].rstrip()


def _normalise(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Check the messages and return them as plain dictionaries with text as content."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise ChatRequestError("messages must be a list of at least one message.")
    return [_normalise_message(index, message) for index, message in enumerate(messages)]


def _normalise_message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    place = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise ChatRequestError(f"{place} must be an object with role and content.")
    if message.get("role") not in ROLES:
        raise ChatRequestError(
            f"{place}.role is {message.get('role')!r}; it must be one of {', '.join(ROLES)}."
        )
    plain = _plain(message, place)
    content = plain.get("content")
    if isinstance(content, list):
        plain["content"] = _join_parts(content, f"{place}.content")
    elif content is None:
        if not plain.get("tool_calls"):
            raise ChatRequestError(f"{place}.content is missing.")
    elif not isinstance(content, str):
        raise ChatRequestError(f"{place}.content must be text or a list of text parts.")
    return plain


def _join_parts(parts: list[Any], place: str) -> str:
    texts = []
    for index, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind == "text" and not isinstance(part.get("text"), str):
            raise ChatRequestError(f"{place}[{index}].text is missing, or no text.")
        if kind != "text":
            raise ChatRequestError(
                f"{place}[{index}] is of type {kind!r}: only parts of type 'text' are supported."
            )
        texts.append(part["text"])
    return "\n".join(texts)


def _plain(value: Any, place: str, depth: int = 0) -> Any:
    """Copy JSON data; other objects are refused, as their methods would be open to the template."""
    if depth > _MAX_DEPTH:
        raise ChatRequestError(f"{place} is nested more than {_MAX_DEPTH} deep.")
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item, place, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, place, depth + 1) for item in value]
    raise ChatRequestError(f"{place} holds a {type(value).__name__}, which is not JSON data.")
