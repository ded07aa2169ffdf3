"""A tokenizer for models that come without one: a token for every byte of the text. No JAX."""

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from shiftjax.text.tokenizer import Tokenizer

END = 256  # the id of the end of text, after those of the bytes
PLAIN_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def byte_backend() -> tokenizers.Tokenizer:
    """Ids 0 to 255, each a byte, in the order of GPT-2's alphabet; no special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: number for number, character in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def byte_tokenizer() -> Tokenizer:
    """With an end of text, and a chat template of `role: content` lines."""
    backend = byte_backend()
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    return Tokenizer(backend, eos_token_ids=[END], chat_template=PLAIN_TEMPLATE)


def whole_text_ids(tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    """The tokens below `vocab_size` that are text which can be printed, each by itself."""
    pieces = tokenizer.token_bytes.pieces if tokenizer.token_bytes else ()
    texts = (piece.decode("utf-8", "replace") for piece in pieces[:vocab_size])
    return [
        token
        for token, text in enumerate(texts)
        if text and "\ufffd" not in text and text.isprintable()
        if token not in tokenizer.special_ids
    ]
