"""Mutants of the published evaluations that are run again."""

from mutant import Mutant

FIGURES = "shiftjax/reproduce/figures.py"
SHIFT = "shiftjax/reproduce/shift.py"
TRACES = "shiftjax/reproduce/shift_traces.py"
ARCTIC = "shiftjax/reproduce/arctic.py"
FLYING = "shiftjax/reproduce/flying.py"
LENGTHS = "shiftjax/reproduce/lengths.py"
SEESAW = "shiftjax/reproduce/seesaw.py"

TEST_FLYING = "tests/reproduce/test_flying.py"
TEST_LENGTHS = "tests/reproduce/test_lengths.py"
TEST_SEESAW = "tests/reproduce/test_seesaw.py"
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
    Mutant(
        "every replica gets all requests",
        "reproduce",
        SEESAW,
        "return replay(requests[::dp], share, deployment)",
        "return replay(requests, share, deployment)",
        (f"{TEST_SEESAW}::test_a_replica_is_run_with_its_share",),
        "static DP is half as quick as it is",
    ),
    Mutant(
        "phases park without a limit",
        "reproduce",
        SEESAW,
        '{"host_bytes": HOST_BYTES * devices} if len(degrees) > 1 else {}',
        "{}",
        (f"{TEST_SEESAW}::test_phases_park_within_the_hosts_memory",),
        "one cycle holds what the machines of the paper could not",
    ),
    Mutant(
        "slow links are quick",
        "reproduce",
        SEESAW,
        "way.scaled(1 / scale, scale)",
        "way.scaled(scale, 1 / scale)",
        (f"{TEST_SEESAW}::test_quick_links_make_tp_the_best_and_slow_ones_stages",),
        "figure 14 is drawn the wrong way round",
    ),
    Mutant(
        "the small A100 has 80 GB",
        "reproduce",
        SEESAW,
        "return replace(found, machine=replace(load_machine(machine), **fields))",
        "return found",
        (f"{TEST_SEESAW}::test_the_small_a100_has_the_links_of_its_kind",),
        "another card than that of the paper",
    ),
    Mutant(
        "lengths are linear between quantiles",
        "reproduce",
        LENGTHS,
        "round(math.exp(math.log(fewer) + part * math.log(more / fewer)))",
        "round(fewer + part * (more - fewer))",
        (TEST_LENGTHS,),
        "prompts are longer than those of the data set",
    ),
    Mutant(
        "a prompt may fill the context",
        "reproduce",
        LENGTHS,
        "if prompt + reply <= most:",
        "if prompt <= most:",
        (TEST_LENGTHS,),
        "requests that the model refuses",
    ),
    Mutant(
        "bursts that DP keeps up with",
        "reproduce",
        FLYING,
        "BUSY * most, PERIOD",
        "most, PERIOD",
        (f"{TEST_FLYING}::test_in_bursts_a_fleet_carries_what_dp_does",),
        "nobody waits in a burst",
    ),
    Mutant(
        "no bind for the urgent ones",
        "reproduce",
        FLYING,
        "fleet:priority:hard:shift:tp",
        "fleet:context:shift:tp",
        (f"{TEST_FLYING}::test_urgent_requests_are_served_as_by_tp",),
        "table 1 is run without its policy",
    ),
)
