"""Mutants of plans: closed loops, what is recommended, what devices have room for."""

from mutant import Mutant

ARRIVALS = "shiftjax/sim/arrivals.py"
REPLAY = "shiftjax/sim/replay.py"

TEST_LOOP = ("tests/sim/test_closed_loop.py",)

ROWS: tuple[Mutant, ...] = (
    Mutant(
        "users ask when the answer begins", "plans", REPLAY,
        "coming.ended(record.arrival + record.completion)",
        "coming.ended(record.arrival + record.ttft)",
        TEST_LOOP, "more requests run than there are users",
    ),
    Mutant(
        "a refused user is lost", "plans", REPLAY,
        "                coming.ended(clock.now)\n", "                pass\n",
        TEST_LOOP, "a loop ends before its requests do",
    ),
    Mutant(
        "the first request needs no thought", "plans", ARRIVALS,
        "            self.ended(0.0)\n", "            self._free_at.append(0.0)\n",
        TEST_LOOP, "all users come at once, however long they think",
    ),
    Mutant(
        "users think twice as quickly", "plans", ARRIVALS,
        "rng.expovariate(1 / loop.think_seconds)", "rng.expovariate(2 / loop.think_seconds)",
        TEST_LOOP, "a loop is busier than asked for",
    ),
    Mutant(
        "a request comes when the trace says", "plans", ARRIVALS,
        "return replace(found, arrival_seconds=heapq.heappop(self._free_at))",
        "heapq.heappop(self._free_at)\n        return found",
        TEST_LOOP, "times to first tokens count from the start of the run",
    ),
)  # fmt: skip
