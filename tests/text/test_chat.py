"""Prompts from messages, as transformers makes them; messages that are wrong are refused."""

import threading
from datetime import datetime

import pytest
from vocab_files import read_data

from shiftjax.text.chat import (
    ChatRequestError,
    ChatTemplate,
    ChatTemplateError,
    encode_chat,
    render_chat,
)
from shiftjax.text.tokenizer import Tokenizer

CASES = [case for case in read_data("smollm2_greedy.json")["cases"] if case["messages"]]
USER = [{"role": "user", "content": "hi"}]
ECHO = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_goldens_of_transformers(smollm2: Tokenizer, case: dict):
    template = ChatTemplate(smollm2.chat_template or "")
    assert render_chat(template, case["messages"]) == case["text"]
    assert encode_chat(smollm2, case["messages"]) == case["prompt_ids"]
    assert encode_chat(smollm2, case["messages"], template=template) == case["prompt_ids"]


def test_the_generation_prompt_is_optional(smollm2: Tokenizer):
    template = ChatTemplate(smollm2.chat_template or "")
    without = render_chat(template, USER, add_generation_prompt=False)
    assert render_chat(template, USER) == without + "<|im_start|>assistant\n"


def test_a_model_without_template(byte_level: Tokenizer):
    with pytest.raises(ChatRequestError, match="no chat template"):
        encode_chat(byte_level, USER)


def test_special_tokens_reach_the_template(byte_level: Tokenizer):
    template = ChatTemplate("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")
    assert render_chat(template, USER) == "hi"
    ids = encode_chat(byte_level, USER, template=template)
    assert (ids[0], ids[-1]) == (0, 1)
    assert render_chat(template, USER, bos_token="<s>", eos_token="</s>") == "<s>hi</s>"


# Every line was rendered by transformers 5.23 too.
DIALECT = [
    ("{{ tools is none }} {{ documents is none }} {{ nope is defined }}", "True True False"),
    ("{% if true %}\n  x\n  {% endif %}\ny", "  x\ny"),  # trim_blocks, lstrip_blocks
    ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
    ("{% generation %}{% set a = 1 %}{{ a }}{% endgeneration %}{{ a }}", "1"),
    ("{{ {'b': \"é<>&'\", 'a': none} | tojson }}", '{"b": "é<>&\'", "a": null}'),
    ("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}", '{\n "a": 2,\n "b": 1\n}'),
    ("{{ 'a' ~ 1 ~ none ~ [1, 'b'] }}", "a1None[1, 'b']"),
    (
        "{{ '%s-%d' % ('x', 3) }} {{ '%s' | format('q') }} {{ '{} {x}'.format(1, x=2) }}",
        "x-3 q 1 2",
    ),
    (
        "{% set s = namespace(n=0) %}{% for i in [1, 2] %}{% set s.n = s.n + i %}{% endfor %}"
        "{{ s.n }}",
        "3",
    ),
    (
        "{% for c in 'abcd' if c != 'b' %}{{ c ~ loop.index ~ loop.length }}{% endfor %}",
        "a13c23d33",
    ),
    ("{% for x in [[1, [2]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}", "12"),
    ("{% for x in [] %}{% else %}none{% endfor %}", "none"),
    (
        "{% macro m(a, b=2) %}{{ a ~ b ~ caller() }}{% endmacro %}{% call m(1) %}in{% endcall %}",
        "12in",
    ),
    ("{% macro m(self, context, obj) %}{{ obj }}{% endmacro %}{{ m(1, context=2, obj=3) }}", "3"),
    ("{% set x %}blk{{ 1 }}{% endset %}{{ x }}{% filter upper %}f{% endfilter %}", "blk1F"),
    ("{{ ['a', 'b'] | join(', ') }} {{ range(3) | map('string') | join }}", "a, b 012"),
    (
        "{{ 'a</think>b\n'.split('</think>')[-1].strip('\n') }} {{ 'abc' | replace('b', 'Z') }}",
        "b aZc",
    ),
    (
        "{{ messages[::-1] | map(attribute='role') | list }} {{ 2 ** 10 }} {{ 7 % 3 }}",
        "['user'] 1024 1",
    ),
]


@pytest.mark.parametrize(("source", "expected"), DIALECT)
def test_the_dialect_of_hugging_face(source: str, expected: str):
    assert render_chat(source, USER) == expected


def test_the_date_is_there():
    assert render_chat("{{ strftime_now('%Y') }}", USER) in {
        str(datetime.now().year + offset) for offset in (-1, 0)
    }


def test_variables_reach_the_template_and_cannot_replace_its_own():
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    source = "{{ tools[0].function.name }}{{ enable_thinking }}{{ add_generation_prompt }}"
    assert render_chat(source, USER, tools=tools, enable_thinking=False) == "fFalseTrue"
    for name in ("raise_exception", "range", "namespace"):
        with pytest.raises(ChatRequestError, match=f"'{name}'.* reserved"):
            ChatTemplate(source).render(USER, **{name: 1})  # type: ignore[reportArgumentType]


def test_text_parts_are_joined_and_other_fields_kept():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert render_chat(ECHO, [{"role": "user", "content": parts}]) == "user:one\ntwo;"
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    source = "{{ messages[0].tool_calls[0].function.name }}{{ messages[0].content }}"
    assert render_chat(source, [call]) == "fNone"


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        ([], "at least one message"),
        (None, "at least one message"),
        ("hi", "at least one message"),
        ({"role": "user", "content": "hi"}, "at least one message"),
        (["hi"], r"messages\[0\] must be an object"),
        ([*USER, {"content": "x"}], r"messages\[1\]\.role is None"),
        ([{"role": "root", "content": "x"}], "role is 'root'; it must be one of system"),
        ([{"role": ["user"], "content": "x"}], "role is"),
        ([{"role": "user"}], r"messages\[0\]\.content is missing"),
        ([{"role": "user", "content": 5}], "must be text or a list"),
        ([{"role": "user", "content": ["x"]}], r"content\[0\] is of type 'str'"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "type 'image_url': only parts"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\].text is missing"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "or no text"),
        ([{"role": "user", "content": "x", "extra": object()}], "holds a object"),
    ],
)
def test_malformed_messages(messages: list, match: str):
    with pytest.raises(ChatRequestError, match=match):
        render_chat(ECHO, messages)


def test_deep_messages():
    nested: list = []
    for _ in range(5000):
        nested = [nested]
    with pytest.raises(ChatRequestError, match="nested more than 64 deep"):
        render_chat(ECHO, [{"role": "user", "content": "x", "extra": nested}])


def test_the_caller_keeps_its_messages():
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    render_chat(ECHO, messages)
    assert messages == [{"role": "user", "content": [{"type": "text", "text": "a"}]}]


def test_the_templates_refusal_is_the_callers_fault():
    with pytest.raises(ChatRequestError, match="refuses these messages: roles must alternate"):
        render_chat("{{ raise_exception('roles must alternate') }}", USER)


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ("a\n{% for %}", "wrong at line 2"),
        ("{{ 1 | nofilter }}", "wrong at line 1: No filter named 'nofilter'"),
        ("{{ nope.field }}", "'nope' is undefined"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{% include 'other' %}", "no loader"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "nested too deeply"),
    ],
)
def test_broken_templates(source: str, match: str):
    with pytest.raises(ChatTemplateError, match=match) as caught:
        render_chat(source, USER)
    assert not isinstance(caught.value, ChatRequestError)


def test_one_template_in_many_threads():
    template = ChatTemplate("{% for i in range(300) %}{{ messages[0].content }}{% endfor %}")
    results: dict[int, str] = {}

    def work(number: int) -> None:
        message = {"role": "user", "content": f"<{number}>"}
        results[number] = template.render([message])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: f"<{number}>" * 300 for number in range(8)}


@pytest.mark.parametrize("content", ["Sure: ", "a\nb", "x </s> y"])
def test_a_message_is_continued_where_it_ends(smollm2, content):
    said = [*USER, {"role": "assistant", "content": content}]
    template = ChatTemplate(smollm2.chat_template)
    whole = render_chat(template, said, add_generation_prompt=False)
    assert whole == render_chat(template, said, continue_final_message=True) + "<|im_end|>\n"


def test_a_message_that_the_template_hides_cannot_be_continued():
    with pytest.raises(ChatRequestError, match="does not write the last message"):
        render_chat("{{ messages[0].role }}", USER, continue_final_message=True)
