"""What the benchmark of drafting asks: texts to write again, calls of tools, questions by task."""

import inspect
import json
from collections.abc import Callable, Iterator
from itertools import count, cycle, islice, zip_longest
from pathlib import Path

from shiftjax.core import blocks
from shiftjax.costs import buckets
from shiftjax.drafts import choice, search
from shiftjax.options import ConfigError
from shiftjax.parallel import degrees

_TOPICS = (
    "rivers lighthouses bread glaciers violins maps bees tides clocks bridges tea comets salt owls "
    "steel paper storms chess gardens sleep ink whales markets snow wool islands bells deserts"
)
TOPICS = _TOPICS.split()
QUESTIONS = (
    "Name three kinds of {} and say a sentence about each.",
    "What would a child want to know of {}?",
    "Write a short poem about {}.",
    "How have people thought about {} in the past?",
    "I have an hour for {}. What do you propose?",
    "Which mistakes do beginners make with {}?",
    "Explain in two paragraphs what {} and music have in common.",
    "Argue that a town needs more {}, then argue against it.",
    "Begin a short story in which {} matter.",
)
type Prompt = str | tuple[str, ...]  # or turns, the user's first
MODULES = blocks, buckets, choice, degrees, search
LINES = range(6, 21)  # of a function that is worth an edit
EDIT = "Write this Python function again, with the name changed to `{}`, and nothing else:\n"
EXAMPLE = '''def average(values: list[float]) -> float:
    """The mean of some numbers; 0 for none."""
    if not values:
        return 0.0
    return sum(values) / len(values)
'''
ROLES = "user", "assistant"
MT_BENCH = "mt_bench"
MT_BENCH_CATEGORIES = frozenset(
    ["writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"]
)


def functions() -> list[str]:
    """Return the source of functions of the package that are worth an edit."""
    found = ((m, f) for m in MODULES for _, f in inspect.getmembers(m, inspect.isfunction))
    sources = [inspect.getsource(f) for m, f in found if f.__module__ == m.__name__]
    return [source for source in sources if len(source.splitlines()) in LINES]


def edits() -> Iterator[tuple[str, ...]]:
    """Functions, each with the request to write it again, after an example of that."""
    asked = EDIT.format("mean_of") + _block(EXAMPLE)
    given = _block(EXAMPLE.replace("average", "mean_of"))
    for number, source in enumerate(cycle(functions())):
        yield asked, given, EDIT.format(f"renamed_{number}") + _block(source)


def _block(source: str) -> str:
    return f"```python\n{source}```"


def calls() -> Iterator[tuple[str, ...]]:
    """An agent at work, by turns: it reads a file and writes a test for it; the next to write."""
    done = json.dumps({"status": "ok"})
    for number in count():
        turns = [
            f"Read the parts {number} to {number + 8} of the program one after the other, and "
            "write a test for each. Answer with one call of a tool at a time."
        ]
        for n in range(number, number + 4):
            read = {"path": f"src/part_{n}.py", "lines": [1, 200]}
            test = f"from src.part_{n} import load\n\n\ndef test_part_{n}_has_all_lines():\n"
            test += "    assert len(load()) == 200\n"
            write = {"path": f"tests/test_part_{n}.py", "content": test}
            turns.append(json.dumps({"tool": "read", "arguments": read}))
            turns.append(json.dumps({"status": "ok", "result": f"200 lines of part_{n}"}))
            turns += [json.dumps({"tool": "write", "arguments": write}), done]
        yield tuple(turns[:-2])


def questions() -> Iterator[str]:
    """Every question about every topic; neighbours differ in both."""
    for first in range(len(TOPICS)):
        for place, question in enumerate(QUESTIONS):
            yield question.format(TOPICS[(first + 5 * place) % len(TOPICS)])


def tasks(lines: list[str]) -> dict[str, list[str]]:
    """First turns of MT-bench's or Spec-Bench's questions (arXiv 2401.07851), by task.

    A line is JSON with `turns`, and if wanted `category`: the task, but that MT-bench's eight
    categories are one, of which it takes turns; without any, the task is `questions`.
    """
    found: dict[str, dict[str, list[str]]] = {}
    for line in map(json.loads, lines):
        category = line.get("category", "questions")
        task = MT_BENCH if category in MT_BENCH_CATEGORIES else category
        found.setdefault(task, {}).setdefault(category, []).append(line["turns"][0])
    return {
        task: [turn for turns in zip_longest(*lists.values()) for turn in turns if turn is not None]
        for task, lists in found.items()
    }


def make_workloads(names: list[str], prompts: Path | None) -> dict[str, Iterator[Prompt]]:
    """Return the prompts of each workload; those of a file's tasks in the place of `chat`."""
    own: dict[str, Callable[[], Iterator[Prompt]]]
    own = {"edit": edits, "agent": calls, "chat": questions}
    workloads = {name: own[name]() for name in names}
    if prompts is not None and workloads.pop("chat", None) is not None:
        by_task = tasks(prompts.read_text().splitlines())
        workloads |= {task: iter(turns) for task, turns in by_task.items()}
    return workloads


def conversation(prompt: Prompt) -> list[dict[str, str]]:
    """The messages of a chat."""
    turns = (prompt,) if isinstance(prompt, str) else prompt
    return [{"role": role, "content": turn} for role, turn in zip(cycle(ROLES), turns)]


def batches(prompts: Iterator[Prompt], streams: int, num_rounds: int) -> list[list[Prompt]]:
    """The next prompts of a workload, for so many rounds of so many; raises ConfigError if few."""
    found = [list(islice(prompts, streams)) for _ in range(num_rounds)]
    missing = streams * num_rounds - sum(map(len, found))
    if missing:
        what = f"{missing} prompts too few for {num_rounds} rounds of {streams} streams"
        raise ConfigError([what])
    return found
