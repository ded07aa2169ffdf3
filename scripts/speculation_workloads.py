"""What the benchmark of drafting asks: texts to write again, calls of tools, questions by task."""

import inspect
import json
from collections.abc import Iterator
from itertools import count, cycle, islice, zip_longest
from pathlib import Path

from shiftjax.control import blocks, lane

TOPICS = [
    "rivers",
    "lighthouses",
    "bread",
    "glaciers",
    "violins",
    "maps",
    "bees",
    "tides",
    "clocks",
    "bridges",
    "tea",
    "comets",
    "salt",
    "owls",
    "steel",
    "paper",
    "storms",
    "chess",
    "gardens",
    "sleep",
    "ink",
    "whales",
    "markets",
    "snow",
    "wool",
    "islands",
    "bells",
    "deserts",
]
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
FUNCTIONS = (lane.poll, blocks.extend_hashes, lane.wait_for_one, blocks.block_tokens)
MT_BENCH = "mt_bench"
MT_BENCH_CATEGORIES = frozenset(
    ["writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"]
)


def edits() -> Iterator[str]:
    """Functions, each with the request to write it again."""
    for number, function in enumerate(cycle(FUNCTIONS)):
        yield (
            f"Write this Python function again, with the name changed to `renamed_{number}`, and "
            f"nothing else:\n```python\n{inspect.getsource(function)}```"
        )


def calls() -> Iterator[str]:
    """Frames of an agent: each a call and its result, the next to come."""
    for number in count():
        frames = "\n".join(
            f'{{"tool": "read", "arguments": {{"path": "src/part_{n}.py", "lines": [1, 200]}}}}\n'
            f'{{"result": "200 lines of part_{n}", "status": "ok"}}'
            for n in range(number, number + 8)
        )
        yield f"{frames}\nGo on in the same way with parts {number + 8} to {number + 16}."


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


def make_workloads(names: list[str], prompts: Path | None) -> dict[str, Iterator[str]]:
    """The prompts of each workload; those of a file's tasks in the place of `chat`."""
    own = {"edit": edits, "agent": calls, "chat": questions}
    workloads: dict[str, Iterator[str]] = {}
    for name in names:
        if name == "chat" and prompts is not None:
            by_task = tasks(prompts.read_text().splitlines())
            workloads |= {task: iter(turns) for task, turns in by_task.items()}
        else:
            workloads[name] = own[name]()
    return workloads


def batches(prompts: Iterator[str], streams: int, num_rounds: int) -> list[list[str]]:
    """The next prompts of a workload, for so many rounds of so many; raises ValueError if few."""
    found = [list(islice(prompts, streams)) for _ in range(num_rounds)]
    missing = streams * num_rounds - sum(map(len, found))
    if missing:
        raise ValueError(f"{missing} prompts too few for {num_rounds} rounds of {streams} streams")
    return found
