"""Mutants of the published evaluations that are run again."""

from mutant import Mutant

FIGURES = "shiftjax/reproduce/figures.py"
SHIFT = "shiftjax/reproduce/shift.py"
TRACES = "shiftjax/reproduce/shift_traces.py"
ARCTIC = "shiftjax/reproduce/arctic.py"

TEST_FIGURES = ("tests/reproduce/test_figures.py",)
TEST_SHIFT = ("tests/reproduce/test_shift.py",)
TEST_ARCTIC = ("tests/reproduce/test_arctic.py",)

ROWS: tuple[Mutant, ...] = (
    Mutant(
        "errors are of theirs over ours",
        "reproduce",
        FIGURES,
        "return self.ours / self.published - 1",
        "return self.published / self.ours - 1",
        TEST_FIGURES,
        "a value of half counts as 100% too large",
    ),
    Mutant(
        "only what is too large is far",
        "reproduce",
        FIGURES,
        "errors = [abs(each.error) for",
        "errors = [each.error for",
        TEST_FIGURES,
        "all that is too small counts as near",
    ),
    Mutant(
        "what was not run is near",
        "reproduce",
        FIGURES,
        "if self.published is None or self.ours is None:\n            return None",
        "if self.published is None or self.ours is None:\n            return 0.0",
        TEST_FIGURES,
        "without traces more figures are met",
    ),
    Mutant(
        "the least of all contexts",
        "reproduce",
        SHIFT,
        "return max(over / under for",
        "return min(over / under for",
        TEST_SHIFT,
        "what the paper says is most is compared with what is least",
    ),
    Mutant(
        "ticks are spread",
        "reproduce",
        TRACES,
        "return replace(request, arrival_seconds=at)",
        "return request",
        TEST_SHIFT,
        "nine requests that were sent at once come one by one",
    ),
    Mutant(
        "a cut trace has a time",
        "reproduce",
        TRACES,
        "minutes = None if cut else makespan(run) / 60",
        "minutes = makespan(run) / 60",
        TEST_SHIFT,
        "half a minute of trace stands beside two hours",
    ),
    Mutant(
        "SwiftKV skips nothing",
        "reproduce",
        ARCTIC,
        "num_kv_layers=of.model.num_layers // 2",
        "num_kv_layers=of.model.num_layers",
        TEST_ARCTIC,
        "the compound lacks a part",
    ),
    Mutant(
        "a mixture of rates",
        "reproduce",
        ARCTIC,
        "len(steps) / sum(steps), (",
        "sum(1 / each for each in steps) / len(steps), (",
        TEST_ARCTIC,
        "quick texts count as often as slow ones, though they take fewer steps",
    ),
)
