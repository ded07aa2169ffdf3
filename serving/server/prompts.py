"""From the fields of a request to the token ids of its prompts. No JAX."""

from collections.abc import Sequence
from typing import Any

from serving.server.dialogue import Dialogue
from serving.server.errors import invalid
from serving.server.fields import ChatFields, Function
from serving.server.schema import Wish, prompts_of
from serving.server.texts import Texts


class Prompts:
    """What texts and conversations of one model become."""

    def __init__(self, texts: Texts, dialogue: Dialogue):
        self.texts, self.dialogue = texts, dialogue

    async def of(self, wish: Wish) -> list[tuple[str | None, list[int]]]:
        """(text, token ids) of every prompt; the text is None where ids came. Raises `ServeError`.

        A conversation is one prompt.
        """
        fields = wish.fields
        if isinstance(fields, ChatFields):
            variables = dict(fields.chat_template_kwargs or {})
            if fields.add_generation_prompt is not None:
                variables["add_generation_prompt"] = fields.add_generation_prompt
            functions = wish.tools.functions if wish.tools else ()
            return [(None, await self.of_chat(fields.messages, functions, variables))]
        prompts, special = prompts_of(fields), fields.add_special_tokens is not False
        return [
            (prompt, await self.texts.encode(prompt, special=special))
            if isinstance(prompt, str)
            else (None, list(prompt))
            for prompt in prompts
        ]

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
        return await self.texts.encode_chat(plain, {**variables, **tools})
