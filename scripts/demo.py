"""`make demo`: one set of weights, one KV cache, two parallelisms, on 8 virtual CPU devices.

SmolLM2-135M with sp=4 and tp=2: steps with more than 64 tokens (prefill) run in base mode, the
others (decode) in shift mode, tensor parallel over all 8 devices. One prompt streams; then six
run together, the first of them long, so that the modes alternate.
"""

import sys
import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.rule import Rule

from serving.cli.main import guarded
from serving.run.progress import print_table, throughput
from serving.run.start import open_llm
from shiftjax import SamplingParams
from shiftjax.config import EngineConfig

if TYPE_CHECKING:
    from shiftjax.llm import LLM

OPTIONS = {"model": "smollm2-135m", "sp": 4, "tp": 2, "shift_threshold": 64, "num_blocks": 512}
OPTIONS |= {"max_num_batched_tokens": 256, "token_buckets": [8, 64, 256]}
OPTIONS |= {"max_model_len": 1024, "max_num_seqs": 8}
STORY = (
    "The lighthouse keeper wrote one line about the weather in her book every evening. "
    "Tonight the wind came from the north and the ships stayed in the harbour. "
)
PROMPTS = [
    STORY * 12 + "\nIn short, the story is about",
    "The capital of France is",
    "To boil an egg you need",
    "def fibonacci(n):\n",
    "The three primary colours are",
    "A good engineer always",
]


def main() -> int:
    """Run the demo; the exit codes are those of `shiftjax`."""
    return guarded(_demo)


def _demo() -> int:
    console = Console(highlight=False)
    console.print((__doc__ or "").partition("\n\n")[2])
    console.print("Loading and compiling (under two minutes the first time, then seconds) ...")
    llm = open_llm(EngineConfig.from_options(**OPTIONS))
    console.print(Rule("one prompt, streamed"))
    _stream(llm, "Once upon a time, in a village by the sea,")
    console.print(Rule("six prompts together"))
    num_tokens, seconds = _together(llm)
    console.print(Rule())
    print_table("all steps", llm.stats(), stderr=False)
    print_table("six prompts together", throughput(num_tokens, seconds), stderr=False)
    options = ", ".join(f"{name}={value!r}" for name, value in OPTIONS.items() if name != "model")
    console.print("\nThe same in Python:\n")
    console.print("  from shiftjax import LLM", markup=False)
    console.print(f"  LLM({OPTIONS['model']!r}, {options})", markup=False, soft_wrap=True)
    return 0


def _stream(llm: "LLM", prompt: str) -> None:
    print(prompt, end="", flush=True)
    for _, delta, _ in llm.stream([prompt], SamplingParams(temperature=0, max_tokens=40)):
        print(delta, end="", flush=True)
    print()


def _together(llm: "LLM") -> tuple[int, float]:
    """Run all prompts at once; returns (tokens sampled, seconds)."""
    start = time.monotonic()
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=32))
    seconds = time.monotonic() - start
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        completion = output.outputs[0]
        steps = completion.metrics.steps_by_mode if completion.metrics else {}
        counts = ", ".join(f"{mode} {count}" for mode, count in steps.items())
        print(f"{counts:18} {_line(prompt[-28:]):28} -> {_line(completion.text)[:50]}")
    return sum(len(output.outputs[0].token_ids) for output in outputs), seconds


def _line(text: str) -> str:
    """A text as one line of a table."""
    return " ".join(text.split())


if __name__ == "__main__":
    sys.exit(main())
