"""CPU seconds of prompts and decode steps in two checkouts of this project, interleaved.

    python scripts/labs/step_seconds.py OTHER [--quantization fp8] [--pairs 6]

OTHER is a directory with another commit (`git worktree add`). Each pair starts a process of both,
which serve 8 prompts of 120 tokens and then decode. Lines are JSON: medians of CPU milliseconds,
and of the ratios of pairs, here over there, with the least and the most.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parents[2]
PROMPTS, TOKENS, STEPS, ROUNDS = 8, 120, 32, 3
CODE = f"""
import json, sys, time
from shiftjax.core.request import SamplingParams
from shiftjax.llm import LLM
llm = LLM(sys.argv[1], dtype="bfloat16", max_model_len=256, max_num_seqs={PROMPTS},
          prefix_caching=False, **json.loads(sys.argv[2]))
prompts = [[100 * i + j for j in range({TOKENS})] for i in range(1, {PROMPTS + 1})]
def seconds(num_tokens):
    begin = time.process_time()
    greedy = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    llm.generate(prompts, greedy)
    return time.process_time() - begin
seconds(2)
one = sorted(seconds(1) for _ in range({ROUNDS}))[{ROUNDS // 2}]
all = sorted(seconds({STEPS + 1}) for _ in range({ROUNDS}))[{ROUNDS // 2}]
print(json.dumps([1e3 * one, 1e3 * (all - one) / {STEPS}]))
"""


def measure(checkout: Path, model: str, options: str) -> list[float]:
    """Return CPU milliseconds of the prompts, and of a decode step, in a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(checkout), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", CODE, model, options]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if run.returncode:
        raise SystemExit(run.stderr)
    return json.loads(run.stdout.splitlines()[-1])


def main() -> None:
    """Print a line for prompts and one for decode steps."""
    parser = argparse.ArgumentParser(description="CPU seconds of steps in two checkouts.")
    parser.add_argument("other", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--quantization")
    parser.add_argument("--pairs", type=int, default=6)
    arguments = parser.parse_args()
    chosen = {"quantization": arguments.quantization} if arguments.quantization else {}
    places, options = (HERE, arguments.other.resolve()), json.dumps(chosen)
    pairs = [
        [measure(place, arguments.model, options) for place in places]
        for _ in range(arguments.pairs)
    ]
    for part, name in enumerate(("prompts", "decode step")):
        here, there = ([each[side][part] for each in pairs] for side in (0, 1))
        ratios = sorted(a / b for a, b in zip(here, there, strict=True))
        row = {"here ms": statistics.median(here), "there ms": statistics.median(there)}
        row |= {"ratio": statistics.median(ratios), "least": ratios[0], "most": ratios[-1]}
        print(json.dumps({"of": name} | {key: round(value, 3) for key, value in row.items()}))


if __name__ == "__main__":
    main()
