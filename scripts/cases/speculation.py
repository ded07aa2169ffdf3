"""Drafting beside plain decoding: the same requests, by engines that differ in that alone.

    python scripts/bench.py speculation --quick
    python scripts/bench.py speculation --peers llama_cpp llama_cpp_ngram --peer-python PYTHON
    python scripts/bench.py speculation --workloads chat --prompts SPEC_BENCH.jsonl --per-task 16 \\
        --max-model-len 2048 --streams 1 8
    python scripts/bench.py speculation --engines suffix cost fixed4 fixed8 fixed16

Workloads, all greedy chats, as many of each as `--streams` says at once:

    edit     a function of the package, to be written again with one name changed, after an example
    agent    the next call of a tool, in a conversation with many like it
    chat     questions with little to repeat; with `--prompts`, the tasks of that file instead
             (MT-bench's or Spec-Bench's lines), and over all of them a row `overall`

No prompt comes twice, so a corpus has only what others like it said, and prefixes are not cached.
Engines take turns, round by round, on one device; of every round the ratio to the plain engine, of
all rounds the median: `ratio_to_plain` of tokens per second from the request to the last token,
`decode_ratio` of the median time per token after the first, which leaves prefill out.
`tokens_equal` is the share of outputs that are the plain ones' to the last token: all in float32;
in bfloat16 two tokens may be as good as equal, and plain decoding alone and in a batch differ
there, too. `tokens_per_step` is what a sequence gets from a step that it decodes in.
`of_best_fixed` is the ratio to the best of the engines with a fixed length, where some run.

Peers are processes of their own (scripts/peers) with the same bfloat16 weights and prompts' token
ids; of every prompt they generate as many tokens as the plain engine did, to its end of sequence or
to `--tokens`, and go on over an end of their own. llama_cpp batches as llama-server does;
llama_cpp_ngram is the prompt lookup of llama-cpp-python, which has one stream only.

`--seeds N` also takes N seeded requests of a few tokens at temperature 1, each alone and all
together by every engine, and counts those that differ. `--streams` without a number leaves the
workloads out.

A row is of a workload, streams and an engine.
"""

import argparse
import os
import time
from collections.abc import Generator, Iterator, Mapping
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from cases.speculation_rows import FIXED, PLAIN, Answer, Round, joined, rows_of
from cases.speculation_workloads import Prompt, batches, conversation, make_workloads, questions
from cases.workers import Worker
from peers.prepare import default_work_dir, prepare

from shiftjax import LLM, SamplingParams
from shiftjax.config import EngineConfig
from shiftjax.options import ConfigError

SUFFIX = {"speculation": "suffix"}
ENGINES: dict[str, dict] = {
    PLAIN: {},
    **{name: {"speculation": name} for name in ("ngram", "suffix", "model", "hybrid")},
    **{c: SUFFIX | {"draft_choice": c} for c in ("fill", "cost")},
    **{
        f"{FIXED}{n}": SUFFIX | {"max_draft_tokens": n, "controls": {"fixed_drafts": True}}
        for n in (4, 8, 16)
    },
}
NEED_DRAFT_MODEL = {"model", "hybrid"}
PEERS = {"llama_cpp": "llama_cpp_worker.py", "llama_cpp_ngram": "llama_cpp_lookup_worker.py"}
ONE_STREAM_ONLY = {"llama_cpp_ngram"}
OWN_WORKLOADS = ("edit", "agent", "chat")
MODEL = "smollm2-135m"
SHOWN = ("tokens_equal", "tokens_per_step", "ratio_to_plain", "decode_ratio", "of_best_fixed")


# ---------------------------------------------------------------------- measuring


def answer_all(llm: LLM, prompts: list[Prompt], num_tokens: int) -> tuple[Round, list[list[int]]]:
    """These chats all at once, and their prompts' token ids."""
    sampling = SamplingParams(temperature=0, max_tokens=num_tokens)
    conversations = [conversation(prompt) for prompt in prompts]
    start = time.perf_counter()
    outputs = llm.chat(conversations, sampling)
    seconds, answers = time.perf_counter() - start, []
    for output in outputs:
        metrics = output.metrics
        assert metrics is not None
        counts = metrics.num_accepted_tokens, metrics.num_proposed_tokens
        answers.append(Answer(output.outputs[0].token_ids, metrics.tpot_seconds, *counts))
    return Round(seconds, answers), [output.prompt_token_ids for output in outputs]


def answer_by_peer(worker: Worker, prompts: list[list[int]], lengths: list[int]) -> Round:
    """These prompts all at once, so many tokens of each."""
    reply = worker.generate(prompts, lengths)
    pairs = zip(reply["token_ids"], reply["tpot_seconds"], strict=True)
    return Round(reply["seconds"], [Answer(*pair) for pair in pairs])


def run_rounds(
    engines: Mapping[str, LLM],
    peers: Mapping[str, Worker],
    batches: list[list[Prompt]],
    num_tokens: int,
) -> dict[str, list[Round]]:
    """Every batch by every engine in turn, the plain one first, whose lengths peers are told."""
    warm = [[1] * 8] * len(batches[0])  # contexts for so many slots are made, pages are there
    for llm in engines.values():
        llm.generate(warm, SamplingParams(temperature=0, max_tokens=2))
    for worker in peers.values():
        worker.generate(warm, [2] * len(warm))
    rounds: dict[str, list[Round]] = {name: [] for name in (*engines, *peers)}
    for batch in batches:
        ids: list[list[int]] = []
        for name, llm in engines.items():
            one, ids = answer_all(llm, batch, num_tokens)
            rounds[name].append(one)
        lengths = [len(answer.token_ids) for answer in rounds[PLAIN][-1].answers]
        for name, worker in peers.items():
            rounds[name].append(answer_by_peer(worker, ids, lengths))
    return rounds


def changed(engines: Mapping[str, LLM], num: int, num_tokens: int) -> dict[str, int]:
    """Of so many seeded requests at temperature 1, how many are not what they are alone.

    Alone in every step and without drafts; together, as many as an engine runs at once, by every
    engine.
    """
    pairs = [
        (prompt, SamplingParams(seed=seed, max_tokens=num_tokens))
        for seed, prompt in enumerate(islice(cycle(questions()), num))
    ]
    alone = [engines[PLAIN].generate([p], s)[0].outputs[0].token_ids for p, s in pairs]
    found = {}
    for name, llm in engines.items():
        together = llm.generate([p for p, _ in pairs], [s for _, s in pairs])
        found[name] = sum(o.outputs[0].token_ids != a for o, a in zip(together, alone, strict=True))
    return found


# ---------------------------------------------------------------------- the command


OPTIONS = {
    "--quick": (False, "one stream, 3 rounds, few tokens"),
    "--model": MODEL,
    "--dtype": (str, "default: bfloat16, with --quick and no peers float32"),
    "--rounds": 5,
    "--tokens": 128,
    "--max-model-len": 1024,
    "--streams": ([1, 8, 32], {"nargs": "*"}),
    "--engines": ([PLAIN, "ngram", "suffix"], {"choices": ENGINES}),
    "--draft-model": (str, "directory of a speculator, for model and hybrid"),
    "--peers": ([str], {"default": [], "choices": PEERS}),
    "--peer-python": (Path, "Python that has llama-cpp-python"),
    "--threads": (os.cpu_count() or 1, "of a peer"),
    "--workloads": ([*OWN_WORKLOADS], {"choices": OWN_WORKLOADS}),
    "--prompts": (Path, "questions: JSON lines with `turns`"),
    "--per-task": (int, "questions of each task of --prompts, instead of --rounds"),
    "--seeds": (0, "also: so many seeded requests, alone and together"),
    "--seed-tokens": (6, "tokens of each of them"),
}


def settle(args: argparse.Namespace) -> dict[int, dict[str, list[list[Prompt]]]]:
    """Complete the options and return the prompts of every round. Raises ConfigError."""
    if args.quick:
        args.rounds, args.tokens, args.streams = 3, 48, [1]
    args.dtype = args.dtype or ("float32" if args.quick and not args.peers else "bfloat16")
    if problem := problem_with(args):
        raise ConfigError([problem])
    return planned(args)


def problem_with(args: argparse.Namespace) -> str | None:
    """What these arguments cannot be, or None."""
    if args.peers and args.peer_python is None:
        return "--peers need --peer-python"
    if args.peers and (args.model, args.dtype) != (MODEL, "bfloat16"):
        return f"--peers have the weights of {MODEL} in bfloat16 only"
    if (missing := NEED_DRAFT_MODEL & {*args.engines}) and not args.draft_model:
        return f"--engines {' '.join(sorted(missing))} need --draft-model"
    if args.per_task and args.prompts is None:
        return "--per-task is for --prompts"
    if bad := [n for n in args.streams if (args.per_task or 0) % n]:
        return f"--per-task {args.per_task} is no whole number of rounds of {bad[0]} streams"
    return None


def configs(args: argparse.Namespace, model: str) -> dict[str, EngineConfig]:
    """The settings of each engine; raises ConfigError where one has no such settings."""
    most = max([8, *args.streams])
    sizes = {"max_num_seqs": most, "max_num_batched_tokens": 128, "devices": 1}
    sizes |= {"max_model_len": args.max_model_len, "prefix_caching": False, "dtype": args.dtype}
    sizes["num_blocks"] = 1 + most * -(-args.max_model_len // 16)
    found = {}
    for name in dict.fromkeys([PLAIN, *args.engines]):
        own = {"draft_model": args.draft_model} if name in NEED_DRAFT_MODEL else {}
        found[name] = EngineConfig.from_options(model=model, **sizes, **ENGINES[name], **own)
    return found


def start_peers(args: argparse.Namespace, gguf: Path) -> dict[str, Worker]:
    """Return the peers' processes, loaded."""
    options = [gguf, "--threads", args.threads, "--max-model-len", args.max_model_len]
    logs = {name: default_work_dir() / f"{name}.log" for name in args.peers}
    return {n: Worker(n, [args.peer_python, PEERS[n], *options], log) for n, log in logs.items()}


def planned(args: argparse.Namespace) -> dict[int, dict[str, list[list[Prompt]]]]:
    """Return the prompts of every round, by streams and workload."""
    workloads, found = make_workloads(args.workloads, args.prompts), {}
    for streams in args.streams:
        per_task = args.per_task and args.per_task // streams
        num_rounds = {n: (n not in OWN_WORKLOADS and per_task) or args.rounds for n in workloads}
        found[streams] = {
            name: batches(prompts, streams, num_rounds[name]) for name, prompts in workloads.items()
        }
    return found


def measure_all(
    args: argparse.Namespace,
    plan: Mapping[int, Mapping[str, list[list[Prompt]]]],
    engines: Mapping[str, LLM],
    workers: Mapping[str, Worker],
) -> Iterator[dict[str, Any]]:
    """Every workload at every number of streams; peers of one stream are left out of others."""
    for streams, workloads in plan.items():
        peers = {n: w for n, w in workers.items() if streams == 1 or n not in ONE_STREAM_ONLY}
        cells = {}
        for workload, rounds in workloads.items():
            cells[workload] = run_rounds(engines, peers, rounds, args.tokens)
            yield from rows_of(workload, streams, cells[workload])
        tasks = [cell for workload, cell in cells.items() if workload not in OWN_WORKLOADS]
        if len(tasks) > 1:
            yield from rows_of("overall", streams, joined(tasks))


def measure(args: argparse.Namespace) -> Generator[dict[str, Any], None, dict[str, Any]]:
    """Yield the rows of all cells; return what of them is to be seen at once."""
    plan = settle(args)
    gguf, directory = prepare(default_work_dir()) if args.peers else (Path(), args.model)
    engines = {name: LLM.from_config(c) for name, c in configs(args, str(directory)).items()}
    workers = start_peers(args, gguf)
    result: dict[str, Any] = {}
    if args.seeds:
        result["seeded"] = changed(engines, args.seeds, args.seed_tokens)
    for row in measure_all(args, plan, engines, workers):
        name = f"{row['workload']} x{row['streams']} {row['engine']}"
        result[name] = {key: row[key] for key in SHOWN if key in row}
        yield row
    for worker in workers.values():
        worker.close()
    return result
