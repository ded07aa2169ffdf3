"""A server whose model says what a test wants to hear, and a tokenizer with a mark."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import tokenizers
from kit import BOS, EOS, GatedRunner, Running, make_engine, running_server
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from shiftjax.text.tokenizer import Tokenizer

MARK = "[TOOL_CALLS]"  # a special token
TOOLS = "{% for t in tools or [] %}{{ t | tojson }} | {% endfor %}"
CHAT = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments.a }}{% endfor %} | "
    "{% endfor %}assistant:"
)
# What tells the formats apart stands in comments: the model is a script.
TEMPLATES = {
    "hermes": """{# <tool_call>{\\"name\\": f, \\"arguments\\": a}</tool_call> #}""" + TOOLS + CHAT,
    "llama3_json": """{# <|start_header_id|> {"name": f, "parameters": a} #}""" + TOOLS + CHAT,
    "mistral": "{# [TOOL_CALLS] #}" + TOOLS + CHAT,
    "openai": "{# <|channel|>final<|message|> #}" + TOOLS + CHAT,
    "think": "{# <think></think> #}" + CHAT + "<think>\n",
    "smollm2": CHAT,
    "qwen3_coder": "{# <tool_call> <function= <parameter= #}" + TOOLS + CHAT,
    "kimi_k2": "{# <|tool_calls_section_begin|> #}" + TOOLS + CHAT,
    "gemma4": "{# <|tool_call> #}" + TOOLS + CHAT,
}


def marked_tokenizer(template: str, marks: tuple[str, ...] = ()) -> Tokenizer:
    """A token for every byte but 255, and MARK, <s>, </s>; further `marks` are special, too."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:-1]
    vocab = {character: index for index, character in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(text, special=True) for text in (MARK, "<s>", "</s>", *marks)]
    )
    return Tokenizer(backend, bos_token_id=BOS, eos_token_ids=[EOS], chat_template=template)


class ScriptedRunner(GatedRunner):
    """Says `script` after every prompt, then an end, as far as a constraint allows it.

    After a prompt that contains one of `later`, it says that script instead.
    """

    script: tuple[int, ...] = ()
    later: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def _tokens(self, item, previous):
        made = super()._tokens(item, previous)
        sequence, end = item.sequence, item.start + item.num_tokens
        script = self._script_after(sequence)
        for row in range(item.num_rows):
            place = end - item.num_rows + row + 1 - sequence.num_prompt_tokens
            if place >= 0:
                token = script[place] if place < len(script) else EOS
                made[row] = token if _is_allowed(item, row, token) else made[row]
        return made

    def _script_after(self, sequence) -> tuple[int, ...]:
        if not self.later:
            return self.script
        prompt = _word(sequence.token_ids[: sequence.num_prompt_tokens])
        return next((script for words, script in self.later if words in prompt), self.script)


def _word(token_ids) -> str:
    """Tokens as one text, in which others can be looked for."""
    return "".join(map(chr, token_ids))


def _is_allowed(item, row: int, token: int) -> bool:
    constraint = item.sequence.constraint
    if constraint is None:
        return True
    mask = constraint.mask if item.masks is None else item.masks[row]
    return bool(mask[token // 32] >> np.uint32(token % 32) & 1)


@contextmanager
def scripted_server(kind: str, **options) -> Iterator[Running]:
    """A server of a model with the template of a format; `say` sets what it says."""
    engine = make_engine(
        num_blocks=1024,
        block_size=64,
        max_model_len=32768,
        max_num_batched_tokens=8192,
        check=False,
        runner_kind=ScriptedRunner,
    )
    tokenizer = marked_tokenizer(TEMPLATES[kind])
    with running_server(engine, tokenizer=tokenizer, **options) as running:
        yield running


def say(server: Running, text: str, **later: str) -> None:
    """What the model says from now on; `later`, where the prompt contains a word."""
    tokenizer = server.service.running()[0].tokenizer

    def ids(words: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(words, add_special_tokens=False))

    server.runner.script = ids(text)
    server.runner.later = tuple((_word(ids(word)), ids(said)) for word, said in later.items())
