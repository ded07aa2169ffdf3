"""`make demo-fleet`: groups of 8 virtual CPU devices come and go while texts stream.

SmolLM2-135M, every device a unit with all weights. In a quiet time all units
form one group, tensor parallel. In a burst of requests every unit steps on its
own, data parallel. Quiet again: they form a group anew. What runs goes along
with its keys and values, and nothing is computed again.
"""

import sys
import time

from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from serving.cli.main import guarded
from serving.run.progress import print_table
from serving.run.start import open_llm
from shiftjax.config import EngineConfig
from shiftjax.core.request import Request, SamplingParams
from shiftjax.fleet.regrouping import Fleet
from shiftjax.fleet.stats import Turn
from shiftjax.llm import LLM
from shiftjax.parallel.arrangements import Arrangement

OPTIONS = {"model": "smollm2-135m", "fleet": True, "devices": 8, "tp": 1, "fleet_widths": [1, 8]}
OPTIONS |= {"fleet_policy": "load", "bind_at": 0.25, "release_at": 1.0, "shift_threshold": 16}
OPTIONS |= {"max_model_len": 512, "max_num_seqs": 16, "num_blocks": 128}
OPTIONS |= {"max_num_batched_tokens": 64, "token_buckets": [16, 64]}
OPTIONS["cache_dir"] = "none"  # what a CPU compiles can be loaded on other units, what it reads not
FIRST = "Once upon a time, in a village by the sea,"
TEXTS = """The capital of France is
To boil an egg you need
def fibonacci(n):
The three primary colours are
A good engineer always
The tallest mountain on Earth is
In the morning she
Water is made of
The best thing about winter is
My grandmother used to say that
A train leaves the station at
Light travels faster than"""
BURST = TEXTS.splitlines()
QUIET_TOKENS = 100  # of the first text, which lasts through the burst
BEFORE_BURST = 20  # tokens of it
COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red", "white", "bright_cyan")


class Demo:
    """Texts that are generated, and the changes of groups beside them."""

    def __init__(self, llm: LLM, console: Console):
        fleet = llm.engine.topology.find(Fleet)
        assert llm.tokenizer is not None and fleet is not None
        self.llm, self.console, self.tokenizer, self.fleet = llm, console, llm.tokenizer, fleet
        self.begin, self.num_shown = time.monotonic(), 0
        self.tokens: dict[str, list[int]] = {}

    def ask(self, prompt: str, most: int) -> None:
        """Begin one more text of so many tokens."""
        sampling = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True)
        request = Request(prompt, self.tokenizer.encode(prompt), sampling, time.monotonic())
        self.llm.engine.add_request(request)
        self.tokens[prompt] = []

    def step(self) -> bool:
        """Run one turn of the engine; return whether there is more to do."""
        engine = self.llm.engine
        for event in engine.step(time.monotonic()):
            self.tokens[event.request_id] += event.token_ids
        for turn in list(self.fleet.history)[self.num_shown :]:
            seconds = f"{turn.seconds - self.begin:5.1f} s   "
            words = "   ", change_words(turn)
            self.console.print(Text.assemble(seconds, strip(turn.arrangement), *words))
            self.num_shown += 1
        return engine.has_work()

    def text(self, prompt: str) -> str:
        """Return what a prompt has become, in one line."""
        return " ".join(self.tokenizer.decode(self.tokens[prompt]).split())


def strip(arrangement: Arrangement) -> Text:
    """The units, those of one group between the same brackets and in one colour."""
    parts = Text()
    for number, group in enumerate(arrangement):
        units = " ".join(str(group.first + i) for i in range(group.width))
        parts.append(f"[{units}]", style=f"bold {COLOURS[number % len(COLOURS)]}")
    return parts


def change_words(turn: Turn) -> str:
    """Why groups have changed, and what went along."""
    what = "bound" if len(turn.arrangement) == 1 else "released"
    num = turn.num_sequences
    moved = f"{num} running text{'s' * (num > 1)} moved" if num else "nothing ran"
    again = f", {turn.num_recomputed} computed again" if turn.num_recomputed else ""
    return f"{what} ({turn.reason}): {moved}{again}, {1e3 * turn.host_seconds:.0f} ms"


def main() -> int:
    """Run the demo; the exit codes are those of `shiftjax`."""
    return guarded(_demo)


def _demo() -> int:
    console = Console(highlight=False)
    console.print((__doc__ or "").partition("\n\n")[2])
    console.print("Loading and compiling, a minute or two ...")
    demo = Demo(open_llm(EngineConfig.from_options(**OPTIONS)), console)
    console.print(Rule("one text, then a burst of twelve, then quiet"))
    console.print(Text.assemble("  0.0 s   ", strip(demo.fleet.arrangement), "   at the start"))
    demo.ask(FIRST, QUIET_TOKENS)
    while len(demo.tokens[FIRST]) < BEFORE_BURST:
        demo.step()
    for number, prompt in enumerate(BURST):
        demo.ask(prompt, 16 + 2 * number)
    while demo.step():
        pass
    console.print(Rule())
    for prompt in (FIRST, *BURST[:3]):
        console.print(Text(f"  {prompt!r} -> {demo.text(prompt)[:90]!r}"))
    stats = demo.llm.stats()
    names = ("steps_by_mode", "num_preemptions", "compiles_after_warmup")
    moved = {"texts moved while they ran": demo.fleet.stats.num_moved_sequences}
    print_table("fleet", {name: stats[name] for name in names} | moved, stderr=False)
    options = ", ".join(f"{name}={value!r}" for name, value in OPTIONS.items())
    console.print(f"\nThe same in Python:\n\n  LLM({options})", markup=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
