"""What drafts would be worth: replays texts as if a model wrote them, and counts the steps.

    python scripts/labs/replay_drafts.py TOKENIZER TEXTS.jsonl --method suffix --max-draft-tokens 8

A line is an object with the text in `--field`, and if wanted a prompt in `--prompt-field`. Every
text is drafted and verified against itself, one after the other, so that the corpus grows as in
traffic; nothing is computed. Tokens per step are those a sequence alone would get, with at most
`--most-rows` drafted rows a step; times are of this thread's CPU. Prints a line for people and one
of JSON.
"""

import argparse
import json
import time
from collections import Counter
from pathlib import Path

from shiftjax.draft_options import DraftOptions
from shiftjax.drafts.drafting import Drafting
from shiftjax.text.tokenizer import load_tokenizer


def num_agreeing(tokens: list[int], text: list[int]) -> int:
    """How many tokens a draft and a text have in common before they differ."""
    pairs = zip(tokens, text, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(tokens), len(text)))


def replay(
    drafting: Drafting,
    name: int,
    prompt: list[int],
    text: list[int],
    counts: Counter,
    most_rows: int,
):
    """One text: every step commits what agrees of its draft and one token more."""
    drafting.start(name, prompt, corpus=None)
    done = 0
    while done < len(text):
        start = time.thread_time_ns()
        draft = drafting.draft(name, min(most_rows, len(text) - done - 1))
        drafted = time.thread_time_ns()
        accepted = 0
        if draft is not None:
            accepted, size = num_agreeing(draft.tokens, text[done:]), len(draft.tokens)
            drafting.learn(name, draft, size, accepted)
            counts.update(drafted=size, accepted=accepted)
        learned = time.thread_time_ns()
        drafting.extend(name, text[done : done + accepted + 1])
        counts.update(draft_ns=drafted - start, extend_ns=time.thread_time_ns() - learned)
        counts.update(tokens=accepted + 1, steps=1)
        done += accepted + 1
    drafting.end(name, finished=True)


def main() -> None:
    """Replay and print."""
    parser = argparse.ArgumentParser(description="Replays texts and counts steps.")
    parser.add_argument("tokenizer", help="a GGUF file or a model's directory")
    parser.add_argument("texts", type=Path, help="JSON lines")
    parser.add_argument("--field", default="answer")
    parser.add_argument("--prompt-field", default="")
    parser.add_argument("--method", choices=("suffix", "ngram"), default="suffix")
    parser.add_argument("--max-draft-tokens", type=int, default=DraftOptions.max_draft_tokens)
    parser.add_argument("--suffix-offset", type=float, default=DraftOptions.suffix_offset)
    parser.add_argument("--most-rows", type=int, default=256, help="drafted, in a step")
    parser.add_argument("--most-texts", type=int, help="replay only the first of them")
    flags = parser.parse_args()
    encode = load_tokenizer(flags.tokenizer).encode
    options = DraftOptions(
        speculation=flags.method,
        max_draft_tokens=flags.max_draft_tokens,
        suffix_offset=flags.suffix_offset,
    )
    drafting, counts = Drafting(options), Counter()
    lines = flags.texts.read_text().splitlines()[: flags.most_texts]
    for name, line in enumerate(map(json.loads, lines)):
        prompt = encode(line[flags.prompt_field]) if flags.prompt_field else []
        replay(drafting, name, prompt, encode(line[flags.field]), counts, flags.most_rows)
    rates = {
        "tokens_per_step": counts["tokens"] / counts["steps"],
        "accepted_of_drafted": counts["accepted"] / max(1, counts["drafted"]),
        "draft_microseconds": counts["draft_ns"] / 1000 / counts["steps"],
        "extend_microseconds_per_token": counts["extend_ns"] / 1000 / counts["tokens"],
    }
    print(f"{counts['tokens']:,} tokens in {counts['steps']:,} steps, ", end="")
    print(", ".join(f"{name.replace('_', ' ')} {rate:.2f}" for name, rate in rates.items()))
    print(json.dumps({"tokens": counts["tokens"], "steps": counts["steps"], **rates}))


if __name__ == "__main__":
    main()
