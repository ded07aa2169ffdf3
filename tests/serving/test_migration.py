"""docs/migrate.md says what the code does: flags, fields of requests, metrics."""

import re
from pathlib import Path

import migration
import pytest
from kit import metric_values, running_server

from serving.server.errors import ServeError
from serving.server.schema import read_chat, read_completion

DATA = Path(__file__).parents[1] / "data"
PAGE = migration.PAGE.read_text("utf-8")
BODIES = {
    "chat": (read_chat, {"messages": [{"role": "user", "content": "x"}]}),
    "completions": (read_completion, {"prompt": "x"}),
}
DRAFTS = {  # where there are drafts
    "spec_decode_num_accepted_tokens",
    "spec_decode_num_accepted_tokens_per_pos",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_drafts",
}
ADAPTERS = {"lora_requests_info"}  # where there are adapters
STRANGE = {"refused": {"strange": 1}}


def test_the_tables_are_those_of_the_code():
    assert migration.written(PAGE) == PAGE, "run python scripts/migration.py"
    assert {name for _, name, _ in migration.PARTS.findall(PAGE)} == migration.TABLES.keys()


def fields() -> list[tuple[str, str]]:
    found = migration.fields_of_vllm().items()
    return [(name, each) for name, ends in found for each in ends if each in BODIES]


@pytest.mark.parametrize(("name", "endpoint"), fields())
def test_a_field_of_vllm_is_what_the_page_says(name, endpoint):
    read, body = BODIES[endpoint]
    words = migration.field_words(name)
    if words.startswith("refused"):
        with pytest.raises(ServeError) as error:
            read(body | {name: STRANGE})
        assert str(error.value).endswith(words.removeprefix("refused: "))
        return
    wish = read(body | ({} if name in body else {name: None}))
    assert not wish.unknown
    assert (words == "taken as a hint, without effect") is (name in migration.HINTS)


def names_in(heading: str) -> tuple[list[str], list[str]]:
    """The names in the first and in the second column of a table."""
    rows = PAGE.split(f"| {heading} |")[1].split("\n\n")[0].splitlines()[2:]
    columns = [row.strip("|").split(" | ") for row in rows]
    code = re.compile(r"`([a-z0-9_]+)`")
    return (
        [n for row in columns for n in code.findall(row[0])],
        [n for row in columns for n in code.findall(row[1])],
    )


def test_the_page_has_every_metric_of_vllm_that_is_not_there():
    body = {"prompt": "hello", "max_tokens": 4}
    with running_server(metrics_prefix="vllm") as server, server.client() as client:
        client.post("/v1/completions", json=body)
        server.assert_quiescent()
        text = client.get("/metrics").text
        there = {name.removesuffix("_total") for name in re.findall(r"# TYPE vllm:(\w+)", text)}
        values = metric_values(client)
    assert values
    theirs = (DATA / "vllm_metrics.txt").read_text("utf-8").split()
    absent, _ = names_in("metric of vLLM | why")
    there |= DRAFTS | ADAPTERS
    assert sorted(absent) == sorted(n for n in theirs if n.removesuffix("_total") not in there)
    _, ours = names_in("metric of SGLang | here")
    assert ours and not {n.removesuffix("_total") for n in ours} - there
