"""The chat template of the settings: text or a file, before that of the model."""

import pytest
from kit import TEMPLATE, byte_tokenizer

from serving.run.start import chat_template
from serving.server.options import ServerOptions
from shiftjax.options import ConfigError
from shiftjax.text.chat import ChatTemplate, encode_chat

MINE = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
HI = [{"role": "user", "content": "hi"}]


def template_of(given: str | None, tokenizer=None) -> ChatTemplate | None:
    return chat_template(tokenizer, ServerOptions(chat_template=given))


def test_the_models_own_is_the_default():
    own = template_of(None, byte_tokenizer())
    assert own is not None and own.source == TEMPLATE
    assert template_of(None) is None


def test_a_text_and_a_file(tmp_path):
    file = tmp_path / "mine.jinja"
    file.write_text(MINE)
    tokenizer = byte_tokenizer()
    for given in (MINE, str(file)):
        template = template_of(given, tokenizer)
        ids = encode_chat(tokenizer, HI, template=template)
        assert tokenizer.decode(ids) == "<hi>"
    assert template_of(MINE) is not None, "a model may have none of its own"


def test_what_is_wrong_is_said_at_the_start(tmp_path):
    (tmp_path / "empty").touch()
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for given, words in (
        ("{% for", "wrong at line 1"),
        (str(tmp_path / "nosuch"), "No such file"),
        (str(tmp_path), "Is a directory"),
        (str(tmp_path / "empty"), "characters"),
        (str(tmp_path / "bytes"), "no UTF-8"),
    ):
        with pytest.raises(ConfigError) as caught:
            template_of(given)
        assert "chat_template" in str(caught.value)
        assert words in str(caught.value)
