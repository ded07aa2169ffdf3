"""Drafting beside plain decoding: the same requests, by engines that differ in that alone.

    python scripts/bench_speculation.py --quick
    python scripts/bench_speculation.py --rounds 5 --streams 1 8 32 --prompts QUESTIONS.jsonl

Workloads, all greedy chats, as many of each as `--streams` says at once:

    edit     a function of the package, to be written again with one name changed
    agent    the next call of a tool, after many like it
    chat     questions with nothing to repeat; of `--prompts` (MT-bench's or Spec-Bench's lines)

No prompt comes twice, so a corpus has only what others like it said. Engines take turns, round by
round, in one process on one device; of every round the ratio of tokens per second to the plain
engine's, of all rounds the median. `tokens_equal` is the share of
outputs that are the plain ones' to the last token: all in float32; in bfloat16 two tokens may be
as good as equal, and plain decoding alone and in a batch differ there, too. `tokens_per_step` is
what a sequence gets from a step that it decodes in; `decode_ratio` is the ratio of median times per
token after the first, which leaves prefill out.

`--seeds N` also takes N seeded requests at temperature 1, each alone and all together by every
engine, and counts those that differ. `--streams` without a number leaves the workloads out.

Prints a row per workload, streams and engine, then one line of JSON. `--output FILE` appends the
rows with every round.
"""

import argparse
import inspect
import json
import statistics
import time
from collections.abc import Iterator
from itertools import count, cycle, islice
from pathlib import Path

from bench_machine import describe_machine

from shiftjax import LLM, SamplingParams
from shiftjax.control import blocks, lane
from shiftjax.outputs import RequestOutput

ENGINES = {
    "plain": {},
    "ngram": {"speculation": "ngram"},
    "suffix": {"speculation": "suffix"},
}
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
]
QUESTIONS = (
    "Name three kinds of {} and say a sentence about each.",
    "What would a child want to know of {}?",
    "Write a short poem about {}.",
    "How have people thought about {} in the past?",
)
FUNCTIONS = (lane.poll, blocks.extend_hashes, lane.wait_for_one, blocks.block_tokens)


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


def questions(path: Path | None) -> Iterator[str]:
    """The first turns of a file of questions, or some of ours."""
    if path is None:
        return (question.format(topic) for question in QUESTIONS for topic in TOPICS)
    return (json.loads(line)["turns"][0] for line in path.read_text().splitlines())


def measure(llm: LLM, prompts: list[str], num_tokens: int) -> tuple[float, list[RequestOutput]]:
    """(seconds, outputs) of these chats, all at once."""
    sampling = SamplingParams(temperature=0, max_tokens=num_tokens)
    conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
    start = time.perf_counter()
    outputs = llm.chat(conversations, sampling)
    return time.perf_counter() - start, outputs


def changed(engines: dict[str, LLM], num: int, num_tokens: int) -> dict[str, int]:
    """Of so many seeded requests at temperature 1, how many are not what they are alone.

    Alone without drafts; together, as many as an engine runs at once, by every engine.
    """
    prompts = islice(cycle(questions(None)), num)
    pairs = [
        (prompt, SamplingParams(seed=seed, max_tokens=num_tokens))
        for seed, prompt in enumerate(prompts)
    ]
    alone = [engines["plain"].generate([p], s)[0].outputs[0].token_ids for p, s in pairs]
    found = {}
    for name, llm in engines.items():
        together = llm.generate([p for p, _ in pairs], [s for _, s in pairs])
        found[name] = sum(o.outputs[0].token_ids != a for o, a in zip(together, alone, strict=True))
    return found


def summary(rounds: list[tuple[float, list[RequestOutput]]], plain: list) -> dict:
    """One engine at one workload, beside the plain engine's rounds."""
    speed = [sum(len(o.outputs[0].token_ids) for o in out) / s for s, out in rounds]
    plain_speed = [sum(len(o.outputs[0].token_ids) for o in out) / s for s, out in plain]
    pairs = [
        (one.outputs[0].token_ids, other.outputs[0].token_ids)
        for (_, outputs), (_, others) in zip(rounds, plain, strict=True)
        for one, other in zip(outputs, others, strict=True)
    ]
    metrics = [o.metrics for _, outputs in rounds for o in outputs if o.metrics]
    tokens = sum(m.num_output_tokens for m in metrics)
    accepted, drafted = (sum(getattr(m, f"num_{n}_tokens") for m in metrics) for n in NAMES)
    ratios = [a / b for a, b in zip(speed, plain_speed, strict=True)]
    return {
        "tokens_equal": sum(a == b for a, b in pairs) / len(pairs),
        "tokens_per_step": round(tokens / (tokens - accepted), 3),
        "accepted_of_drafted": round(accepted / drafted, 3) if drafted else None,
        "ratio_to_plain": round(statistics.median(ratios), 3),
        "decode_ratio": round(tpot(plain) / tpot(rounds), 3),
        "tokens_per_second": [round(one, 1) for one in speed],
    }


def tpot(rounds: list[tuple[float, list[RequestOutput]]]) -> float:
    """The median over all outputs of the mean seconds per token after the first."""
    metrics = [o.metrics for _, outputs in rounds for o in outputs if o.metrics]
    return statistics.median(m.tpot_seconds for m in metrics if m.tpot_seconds)


NAMES = ("accepted", "draft")
QUICK = {True: "float32", False: "bfloat16"}


def main() -> None:
    """Measure every workload at every number of streams, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one stream, 3 rounds, few tokens")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", help="default: bfloat16, with --quick float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--prompts", type=Path, help="questions: JSON lines with `turns`")
    parser.add_argument(
        "--seeds", type=int, default=0, help="also: so many seeded requests, alone and together"
    )
    parser.add_argument("--output", type=Path, help="a file to which rows are appended")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.tokens, args.streams = 3, 48, [1]
    most = max([8, *args.streams])
    sizes = {"max_num_seqs": most, "max_num_batched_tokens": 128, "max_model_len": 1024}
    sizes |= {"num_blocks": 1 + most * 64, "dtype": args.dtype or QUICK[args.quick], "devices": 1}
    names = dict.fromkeys(["plain", *args.engines])
    engines = {name: LLM(args.model, **sizes, **ENGINES[name]) for name in names}
    found: dict[str, dict] = {}
    if args.seeds:
        found["seeded"] = changed(engines, args.seeds, args.tokens)
        print(f"of {args.seeds} seeded requests not what they are alone: {found['seeded']}")
    workloads = {"edit": edits(), "agent": calls(), "chat": questions(args.prompts)}
    for workload, prompts in workloads.items():
        for streams in args.streams:
            rounds: dict[str, list] = {name: [] for name in engines}
            for _ in range(args.rounds):
                batch = list(islice(prompts, streams))
                if len(batch) < streams:
                    parser.error(f"--prompts: too few for {args.rounds} rounds of these streams")
                for name, llm in engines.items():
                    rounds[name].append(measure(llm, batch, args.tokens))
            for name in engines:
                row = {"workload": workload, "streams": streams, "engine": name}
                row |= summary(rounds[name], rounds["plain"])
                print(*(f"{key} {value}" for key, value in row.items()), sep="  ")
                found[f"{workload} x{streams} {name}"] = row
                if args.output:
                    with args.output.open("a") as file:
                        file.write(json.dumps(row | {"machine": describe_machine()}) + "\n")
    shown = {key: {k: row[k] for k in SHOWN if k in row} or row for key, row in found.items()}
    print(json.dumps(shown))


SHOWN = ("tokens_equal", "tokens_per_step", "ratio_to_plain")

if __name__ == "__main__":
    main()
