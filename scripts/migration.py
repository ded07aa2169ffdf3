"""Write the tables of docs/migrate.md: what vLLM's and SGLang's users have, and what it is here.

    python scripts/migration.py [docs/migrate.md]

A table stands between `<!-- NAME -->` and `<!-- end -->`; all around it is written by hand.
"""

import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from serving.run import foreign_table as table
from serving.run.foreign_flags import FOREIGN
from serving.server.fields import ChatFields, CompletionFields
from serving.server.hints import HINTS
from serving.server.refused_fields import REFUSED

ROOT = Path(__file__).parents[1]
DATA = ROOT / "tests" / "data"
PAGE = ROOT / "docs" / "migrate.md"
PARTS = re.compile(r"(<!-- (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def aliases() -> Iterator[str]:
    """A row for each of our flags, with the names that it has elsewhere."""
    theirs: dict[str, list[str]] = defaultdict(list)
    for name, ours in table.ALIASES.items():
        theirs[ours].append(name.removesuffix("="))
    for name, ours in table.SIZES.items():
        theirs[f"{ours} NGiB"].append(f"{name} N")
    for name, values in table.VALUES.items():
        for value, here in values.items():
            ours = here if here.startswith("--") else f"{name} {here}"
            theirs[ours].append(f"{name} {value}")
    yield from ("| there | here |", "| --- | --- |")
    for ours, names in theirs.items():
        yield f"| {_code(names)} | `{ours}` |"


def ignored() -> Iterator[str]:
    """A row for each reason why flags have no effect."""
    return _groups("ignored", "why they have no effect")


def refused() -> Iterator[str]:
    """A row for each answer to flags that are refused."""
    return _groups("refused", "what the refusal says")


def _groups(kind: str, heading: str) -> Iterator[str]:
    found: dict[str, list[str]] = defaultdict(list)
    for name, foreign in FOREIGN.items():
        if foreign.kind == kind and not name.startswith("--no-"):
            found[foreign.words].append(name)
    yield from (f"| flags | {heading} |", "| --- | --- |")
    for words, names in found.items():
        yield f"| {_code(names)} | {words} |"


def fields() -> Iterator[str]:
    """A row for each field of vLLM's requests that is not simply taken."""
    yield from ("| field of vLLM | here |", "| --- | --- |")
    for name, endpoints in sorted(fields_of_vllm().items()):
        if not {"chat", "completions"} & set(endpoints):
            continue
        words = field_words(name)
        if words != "taken":
            yield f"| `{name}` | {words} |"


def field_words(name: str) -> str:
    """What a field of completions and chats comes to."""
    if name in {*ChatFields.__struct_fields__, *CompletionFields.__struct_fields__}:
        return "taken"
    if name in HINTS:
        return "taken as a hint, without effect"
    if name in REFUSED:
        return f"refused: {REFUSED[name].instead}"
    return "ignored, with a `Warning` header"


def fields_of_vllm() -> Mapping[str, list[str]]:
    """Every field of vLLM 0.29's requests, with the endpoints that have it."""
    found: dict[str, list[str]] = defaultdict(list)
    for line in (DATA / "vllm_fields.txt").read_text("utf-8").splitlines():
        endpoint, _, names = line.partition(": ")
        for name in names.split():
            found[name].append(endpoint)
    return found


def _code(names: list[str]) -> str:
    return " ".join(f"`{name}`" for name in names)


TABLES = {"aliases": aliases, "ignored": ignored, "refused": refused, "fields": fields}


def written(page: str) -> str:
    """The page with its tables as they are now."""

    def part(match: re.Match[str]) -> str:
        return match[1] + "\n".join(TABLES[match[2]]()) + "\n" + match[3]

    return PARTS.sub(part, page)


def main() -> None:
    """Write the page anew."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    path.write_text(written(path.read_text("utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
