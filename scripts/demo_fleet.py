"""`make demo-fleet`: groups of 8 virtual CPU devices come and go while texts stream.

SmolLM2-135M, every device a unit with all weights. In a quiet time all units
form one group, tensor parallel. In a burst of requests every unit steps on its
own, data parallel. Quiet again: they form a group anew. What runs goes along
with its keys and values, and nothing is computed again.
"""

import sys
import time
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
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

OPTIONS = {
    "model": "smollm2-135m",
    "fleet": True,
    "devices": 8,
    "tp": 1,
    "fleet_widths": [1, 8],
    "fleet_policy": "load",
    "bind_at": 0.25,
    "release_at": 1.0,
    "shift_threshold": 16,
    "max_model_len": 512,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 64,
    "token_buckets": [16, 64],
    "num_blocks": 128,
    "cache_dir": "none",  # what a CPU compiles can be loaded on other units, what it reads not
}
FIRST = "Once upon a time, in a village by the sea,"
BURST = (
    "The capital of France is",
    "To boil an egg you need",
    "def fibonacci(n):\n",
    "The three primary colours are",
    "A good engineer always",
    "The tallest mountain on Earth is",
    "In the morning she",
    "Water is made of",
    "The best thing about winter is",
    "My grandmother used to say that",
    "A train leaves the station at",
    "Light travels faster than",
)
QUIET_TOKENS = 100  # of the first text, which lasts through the burst
BEFORE_BURST = 20  # tokens of it
COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red", "white", "bright_cyan")
SHOWN = 60  # characters of a text's end
REFRESH_SECONDS = 0.1


class Demo:
    """Texts that stream, and the changes of groups beside them."""

    def __init__(self, llm: LLM, console: Console):
        fleet = llm.engine.topology.find(Fleet)
        assert llm.tokenizer is not None and fleet is not None
        self.llm, self.console, self.tokenizer = llm, console, llm.tokenizer
        self.fleet = fleet
        self.begin = time.monotonic()
        self.prompts: dict[str, str] = {}
        self.tokens: dict[str, list[int]] = {}
        self.num_shown = 0
        self.live: Live | None = None
        self.refreshed_at = 0.0

    def ask(self, prompt: str, most: int) -> str:
        """One more text of so many tokens."""
        name = str(len(self.prompts))
        sampling = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True)
        ids = self.tokenizer.encode(prompt)
        self.llm.engine.add_request(Request(name, ids, sampling, time.monotonic()))
        self.prompts[name], self.tokens[name] = prompt, []
        return name

    def step(self) -> bool:
        """One turn of the engine; whether there is more to do."""
        engine = self.llm.engine
        for event in engine.step(time.monotonic()):
            self.tokens[event.request_id] += event.token_ids
            if event.is_last:
                self.prompts.pop(event.request_id)
        for turn in list(self.fleet.history)[self.num_shown :]:
            self.console.print(self._change(turn))
            self.num_shown += 1
        if self.live is not None and time.monotonic() - self.refreshed_at > REFRESH_SECONDS:
            self.live.refresh()  # between turns: a thread would look at texts that change
            self.refreshed_at = time.monotonic()
        return engine.has_work()

    def view(self) -> RenderableType:
        """The groups now and the ends of the texts."""
        lines = [Text.assemble("    now   ", strip(self.fleet.arrangement))]
        for name, prompt in self.prompts.items():
            text = prompt + self.tokenizer.decode(self.tokens[name])
            lines.append(Text(f"  ...{' '.join(text[-SHOWN:].split())}", style="dim"))
        return Group(*lines)

    def _change(self, turn: Turn) -> Text:
        seconds = f"{turn.seconds - self.begin:5.1f} s   "
        return Text.assemble(seconds, strip(turn.arrangement), "   ", change_words(turn))


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
    llm = open_llm(EngineConfig.from_options(**OPTIONS))
    demo = Demo(llm, console)
    console.print(Rule("one text, then a burst of twelve, then quiet"))
    console.print(Text.assemble("  0.0 s   ", strip(demo.fleet.arrangement), "   at the start"))
    with Live(
        console=console, get_renderable=demo.view, auto_refresh=False, transient=True
    ) as demo.live:
        _play(demo)
    console.print(Rule())
    _summary(demo, console)
    return 0


def _play(demo: Demo) -> None:
    first = demo.ask(FIRST, QUIET_TOKENS)
    while len(demo.tokens[first]) < BEFORE_BURST:
        demo.step()
    for number, prompt in enumerate(BURST):
        demo.ask(prompt, 16 + 2 * number)
    while demo.step():
        pass


def _summary(demo: Demo, console: Console) -> None:
    stats = demo.llm.stats()
    for prompt, tokens in zip((FIRST, *BURST[:3]), demo.tokens.values(), strict=False):
        text = demo.tokenizer.decode(tokens)
        console.print(Text(f"  {prompt.strip()!r} -> {' '.join(text.split())[:90]!r}"))
    names = ("steps_by_mode", "num_preemptions", "compiles_after_warmup")
    table = {name: stats[name] for name in names}
    table["texts moved while they ran"] = demo.fleet.stats.num_moved_sequences
    print_table("fleet", table, stderr=False)
    options = ", ".join(f"{name}={value!r}" for name, value in _shown())
    console.print("\nThe same in Python:\n")
    console.print(f"  LLM({OPTIONS['model']!r}, {options})", markup=False, soft_wrap=True)


def _shown() -> Sequence[tuple[str, object]]:
    return [(name, value) for name, value in OPTIONS.items() if name != "model"]


if __name__ == "__main__":
    sys.exit(main())
