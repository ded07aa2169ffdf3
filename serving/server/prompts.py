"""From the fields of a request to the token ids of its prompts. No JAX."""

from collections.abc import Sequence
from typing import Any

from serving.server.dialogue import Dialogue
from serving.server.errors import invalid
from serving.server.fields import ChatFields, Function, TokenizeFields
from serving.server.schema import Wish, prompts_of
from serving.server.texts import Texts

Prompt = tuple[str | None, list[int]]
# Fields of a chat that its template, or what encodes its text, reads by the same name.
TEMPLATE_FIELDS = (
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "documents",
)


class Prompts:
    """What texts and conversations of one model become."""

    def __init__(self, texts: Texts, dialogue: Dialogue):
        self.texts, self.dialogue = texts, dialogue

    async def of(self, wish: Wish) -> list[Prompt]:
        """(text, token ids) of every prompt; the text is None where ids came. Raises `ServeError`.

        A conversation is one prompt.
        """
        fields = wish.fields
        most = self._most_tokens(wish)
        if isinstance(fields, ChatFields):
            functions = wish.tools.named if wish.tools else ()
            variables = {**self.dialogue.effort(fields), **template_variables(fields)}
            ids = await self.of_chat(fields.messages, functions, variables)
            return [_cut((None, ids), most, fields.truncation_side)]
        prompts, special = prompts_of(fields), fields.add_special_tokens is not False
        kept = "" if most is None else _kept(fields.truncation_side)
        encoded = [
            (prompt, await self.texts.encode(prompt, special=special, keep=kept))
            if isinstance(prompt, str)
            else (None, list(prompt))
            for prompt in prompts
        ]
        return [_cut(each, most, fields.truncation_side) for each in encoded]

    async def of_chat(
        self,
        messages: list[dict[str, Any]],
        functions: Sequence[Function],
        variables: dict[str, Any],
    ) -> list[int]:
        """Token ids of a conversation, as the template writes it. Raises `ServeError`."""
        if functions and "tools" in variables:
            raise invalid("chat_template_kwargs.tools", "cannot be combined with tools")
        plain, tools = self.dialogue.conversation(messages, functions)
        told = {**self.dialogue.template_defaults, **variables, **tools}
        return await self.texts.encode_chat(plain, told)

    def _most_tokens(self, wish: Wish) -> int | None:
        """To how many tokens a prompt is cut; None: to none. Raises `ServeError`."""
        most, longest = wish.fields.truncate_prompt_tokens, self.texts.max_model_len
        if most is None:
            return None
        if most == -1:
            num_output = 1 if wish.sampling.max_tokens is None else wish.sampling.max_tokens
            return max(1, longest - num_output)
        if not 1 <= most <= longest:
            raise invalid("truncate_prompt_tokens", f"must be -1 or between 1 and {longest}")
        return most


def template_variables(fields: ChatFields | TokenizeFields) -> dict[str, Any]:
    """What a body says to the chat template. Raises `ServeError` for what it says twice."""
    variables = dict(fields.chat_template_kwargs or {})
    given = {name: getattr(fields, name, None) for name in TEMPLATE_FIELDS}
    given = {name: value for name, value in given.items() if value is not None}
    for name in variables.keys() & given.keys():
        if variables[name] != given[name]:
            raise invalid(f"chat_template_kwargs.{name}", f"disagrees with {name}")
    return variables | given


def _kept(side: str | None) -> str:
    """The side of a prompt that stays; `side` is the one where it is cut, or None: left."""
    return "left" if side == "right" else "right"


def _cut(prompt: Prompt, most: int | None, side: str | None) -> Prompt:
    """The prompt with at most so many tokens; a part has no text of its own."""
    _, ids = prompt
    if most is None or len(ids) <= most:
        return prompt
    return None, ids[:most] if _kept(side) == "left" else ids[-most:]
