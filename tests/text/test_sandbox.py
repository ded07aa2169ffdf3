"""Templates that try to get out, to run forever, or to fill the memory: all end with an error."""

import pytest

from shiftjax.text.chat import ChatTemplate, ChatTemplateError, render_chat

USER = [{"role": "user", "content": "hi"}]

ESCAPES = [
    "''.__class__.__mro__",
    "''.__class__.__base__.__subclasses__()",
    "''['__class__'].__mro__",
    "('' | attr('__class__')).__mro__",
    "'{0.__class__.__mro__}'.format('')",
    "raise_exception.__globals__['os']",
    "cycler.__init__.__globals__.os",
    "self.__init__.__globals__",
    "joiner.__init__.__globals__",
    "(messages | map(attribute='__class__') | list)[0].__mro__",
    "namespace.__init__.__globals__",
    "messages.append(1)",
    "messages[0].update(role='x')",
    "messages[0].pop('role')",
]


@pytest.mark.parametrize("expression", ESCAPES)
def test_escapes_are_refused(expression: str):
    with pytest.raises(ChatTemplateError, match=r"leave its sandbox|is undefined|has no attribute"):
        render_chat("{{ " + expression + " }}", USER)


@pytest.mark.parametrize(
    "expression", ["''.__class__", "''|attr('__class__')", "range.__globals__"]
)
def test_what_is_private_reads_as_nothing(expression: str):
    assert render_chat("{{ " + expression + " }}", USER) == ""


def loop(body: str, start: str = "''") -> str:
    return (
        f"{{% set ns = namespace(x={start}) %}}{{% for i in range(99) %}}{body}{{% endfor %}}"
        "{{ ns.x }}"
    )


ENDLESS = {
    "loops": "{% set r = range(99999) %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}",
    "output": "{% for i in range(9999) %}{% for j in range(9999) %}{{ i }}{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{{ f(n-1) ~ f(n-1) if n }}{% endmacro %}{{ f(99) }}",
    "one macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "recursive loop": "{% for x in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "filters": "{% for i in range(99999) %}{{ range(99999) | map('string') | list }}{% endfor %}",
    "scans": "{% set s = 'a' * 100000000 %}{% for i in range(99999) %}{{ 'b' in s }}{% endfor %}",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_what_has_no_end_ends(name: str):
    with pytest.raises(ChatTemplateError, match=r"without end|took longer|recursion"):
        ChatTemplate(ENDLESS[name], time_limit_seconds=0.5).render(USER)


GROWING = {
    "~": loop("{% set ns.x = ns.x ~ ns.x %}", "'aa'"),
    "+": loop("{% set ns.x = ns.x + ns.x %}", "'aa'"),
    "list +": loop("{% set ns.x = ns.x + ns.x %}", "[1]"),
    "numbers": loop("{% set ns.x = ns.x * ns.x %}", "10"),
    "set block": loop("{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}", "'a'"),
    "nested, written": loop("{% set ns.x = [ns.x, ns.x] %}"),
    "nested, joined": loop("{% set ns.x = [ns.x, ns.x] %}{{ ns.x ~ '' }}"),
    "nested, filtered": loop("{% set ns.x = {'a': ns.x, 'b': ns.x} %}{{ ns.x | tojson }}"),
    "nested, its items": loop("{% set ns.x = {'a': ns.x, 'b': ns.x} %}{{ ns.x.items() }}"),
    "nested, the namespace": loop("{% set ns.x = [ns.x, ns.x] %}{{ ns }}"),
    "nested, formatted": loop("{% set ns.x = [ns.x, ns.x] %}{{ '{}'.format(ns.x) }}"),
    "repeat": "{{ 'a' * 10000000000 }}",
    "repeat list": "{{ [1] * 10000000000 }}",
    "power": "{{ 10 ** 10000000000 }}",
    "round": "{{ 1.5 | round(10000000000, 'floor') }}",
    "center": "{{ 'a' | center(10000000000) }}",
    "ljust": "{{ 'a'.ljust(10000000000) }}",
    "to_bytes": "{{ (1).to_bytes(10000000000, 'big') }}",
    "% width": "{{ '%10000000000d' % 1 }}",
    "% star": "{{ '%*d' % (10000000000, 1) }}",
    "format filter": "{{ '%10000000000d' | format(1) }}",
    "format width": "{{ '{:10000000000}'.format(1) }}",
    "format nested": "{{ '{:{}}'.format(1, 10000000000) }}",
    "format_map": "{{ '{a:{b}}'.format_map({'a': 1, 'b': 10000000000}) }}",
    "strftime": "{{ strftime_now('%10000000000Y') }}",
    "replace": "{% set s = 'a' * 1000000 %}{{ s.replace('a', s) }}",
    "replace filter": "{% set s = 'a' * 1000000 %}{{ s | replace('a', s) }}",
    "join": "{% set s = 'a' * 1000000 %}{{ s.join(s) }}",
    "join filter": "{% set s = 'a' * 1000000 %}{{ range(99999) | map('int') | join(s) }}",
    "translate": "{{ ('a' * 99999).translate({97: 'b' * 99999}) }}",
    "indent": "{{ ('a\n' * 99999) | indent(99999) }}",
    "tojson": "{{ messages | tojson(indent=1000000000) }}",
    "wordwrap": "{{ ('a' * 99999) | wordwrap(1, wrapstring='b' * 99999) }}",
    "sum": "{{ ([[1] * 99999] * 99999) | sum(start=[]) }}",
}


@pytest.mark.parametrize("name", GROWING)
def test_growth_is_bounded(name: str):
    with pytest.raises(
        ChatTemplateError, match=r"too much text|over 4096 bits|field that is wider"
    ):
        render_chat(GROWING[name], USER)


def test_the_output_is_bounded():
    template = ChatTemplate("{{ 'a' * n }}", max_output_chars=100)
    assert template.render(USER, n=100) == "a" * 100
    with pytest.raises(ChatTemplateError, match="made 101 characters; the limit is 100"):
        template.render(USER, n=101)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("[1700000000000]", "[1700000000000]"),
        ("{'maximum': 4294967295} | tojson(indent=4)", '{\n    "maximum": 4294967295\n}'),
        ("'%d/12345 100%% * %5.2f' % (1700000000000, 1.5)", "1700000000000/12345 100% *  1.50"),
        ("'{{12345: {}}} {:*^5}'.format(1700000000000, 'x')", "{12345: 1700000000000} **x**"),
        ("1700000000000 * 1000 + 2 ** 40", "1701099511627776"),
        ("(content * 1000000) | replace('word ', 'words ') | length", "6000000"),
        ("1700000000.126 | round(2)", "1700000000.13"),
    ],
)
def test_large_numbers_and_texts_are_no_attack(expression: str, expected: str):
    assert render_chat("{{ " + expression + " }}", USER, content="word ") == expected


def test_looking_back_at_every_message_is_no_attack():
    source = (
        "{% for m in messages %}"
        "{{ messages[: loop.index] | selectattr('role', 'eq', 'user') | list | length ~ ' ' }}"
        "{% endfor %}"
    )
    assert render_chat(source, USER * 500) == "".join(f"{n} " for n in range(1, 501))


def test_what_could_have_no_end_but_has_one_is_let_through():
    messages = [{"role": "user", "content": "word " * 2000}] * 500  # five million characters
    source = "{% for m in messages %}{{ '<' + m.role ~ '>' + m.content | trim }}{% endfor %}"
    assert len(render_chat(source, messages)) == 500 * (10_000 - 1 + len("<user>"))
