"""Texts of a model's own: what a drafting model learns from (see train_speculator.py).

Prompts come from files (JSON lines with `question`, or `turns`, of which the first is asked) and
from the model itself: continuing a chat where the user begins to speak, it writes what users ask
(Magpie, Xu et al. 2024, arXiv 2406.08464, section 2).
"""

import json
from collections.abc import Sequence
from pathlib import Path

from shiftjax.core.request import SamplingParams
from shiftjax.llm import LLM
from shiftjax.text.chat import encode_chat
from shiftjax.text.tokenizer import Tokenizer

CONTEXT = 1024  # tokens of a prompt and its answer; prompts that are longer are left out
AT_ONCE = 64  # sequences
ROUND = 128  # prompts between two writes
INVENTED_TOKENS = 128  # of what a user says, at most


def open_engine(model: str) -> LLM:
    """The engine, for throughput on a small machine."""
    return LLM(
        model,
        dtype="bfloat16",
        max_model_len=CONTEXT,
        max_num_seqs=AT_ONCE,
        max_num_batched_tokens=512,
        token_buckets=[AT_ONCE, 512],
        block_size=16,
        num_blocks=1 + AT_ONCE * CONTEXT // 16,
    )


def read_questions(files: Sequence[Path]) -> list[str]:
    """The questions of files of JSON lines."""
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [row["question"] if "question" in row else row["turns"][0] for row in rows]


def invent(llm: LLM, openings: Sequence[str], count: int) -> list[str]:
    """Sample `count` things that a user might say, with one opening after the other."""
    assert llm.tokenizer is not None
    chosen = [openings[i % len(openings)] for i in range(count)]
    sampling = [SamplingParams(max_tokens=INVENTED_TOKENS, seed=i) for i in range(count)]
    outputs = llm.generate([user_begins(llm.tokenizer, each) for each in chosen], sampling)
    return [each + out.outputs[0].text for each, out in zip(chosen, outputs, strict=True)]


def user_begins(tokenizer: Tokenizer, opening: str) -> list[int]:
    """A chat up to where the user has said `opening` and goes on."""
    ids = encode_chat(tokenizer, [{"role": "user", "content": opening}])
    return ids[: max(i for i, token in enumerate(ids) if token in tokenizer.eos_token_ids)]


def answer(
    llm: LLM, questions: Sequence[str], file: Path, max_tokens: int, temperatures: Sequence[float]
) -> None:
    """Write {"prompt": ids, "output": ids} of every question, which take the temperatures in turns.

    A file that is there is complete; what a broken run has left beside it is continued.
    """
    if file.exists():
        return
    assert llm.tokenizer is not None
    chats = [[{"role": "user", "content": question}] for question in questions]
    prompts = [encode_chat(llm.tokenizer, chat) for chat in chats]
    prompts = [ids for ids in prompts if len(ids) + max_tokens <= CONTEXT]
    unfinished = file.with_suffix(".part")
    done = len(unfinished.read_text().splitlines()) if unfinished.exists() else 0
    for start in range(done, len(prompts), ROUND):
        part = prompts[start : start + ROUND]
        sampling = [
            SamplingParams(
                temperature=temperatures[i % len(temperatures)], seed=i, max_tokens=max_tokens
            )
            for i in range(start, start + len(part))
        ]
        outputs = llm.generate(part, sampling)
        with unfinished.open("a") as lines:
            for out in outputs:
                row = {"prompt": out.prompt_token_ids, "output": out.outputs[0].token_ids}
                lines.write(json.dumps(row) + "\n")
    unfinished.rename(file)
