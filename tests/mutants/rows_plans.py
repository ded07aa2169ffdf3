"""Mutants of plans: closed loops, what is recommended, what devices have room for."""

from mutant import Mutant

ARRIVALS = "shiftjax/sim/arrivals.py"
REPLAY = "shiftjax/sim/replay.py"

BEST = "shiftjax/sim/best_row.py"
STORED = "shiftjax/sim/stored_experts.py"
ESTIMATE = "shiftjax/sim/estimate.py"
MEMORY = "shiftjax/costs/memory.py"
MODELLED = "shiftjax/sim/modelled.py"
MESH = "shiftjax/sim/chosen_mesh.py"

TEST_LOOP = ("tests/sim/test_closed_loop.py",)
TEST_BEST = ("tests/sim/test_recommend.py",)
TEST_STORED = ("tests/sim/test_stored_experts.py",)
TEST_KV = ("tests/sim/test_kv_sizes.py",)
TEST_MESH = ("tests/sim/test_chosen_mesh.py",)

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
    Mutant(
        "the room that whole experts take is not weighed", "plans", STORED,
        "return min(near, key=lambda one: one.memory.weight_bytes)", "return found[0]",
        TEST_STORED, "long requests find no room in the KV cache",
    ),
    Mutant(
        "experts are stored split although that is slower", "plans", STORED,
        "if far <= AS_NEAR * min(behind)", "if far <= 2 * min(behind)",
        TEST_STORED, "large steps gain nothing",
    ),
    Mutant(
        "experts are recommended with base and shift alone", "plans",
        "shiftjax/sim/planning.py", "(has_experts or is_wide)", "is_wide",
        TEST_STORED, "steps between base and shift are slower",
    ),
    Mutant(
        "devices split experts as bytes say", "plans", "shiftjax/device/choosers.py",
        "if costs is None:\n        return ExpertModes(", "if True:\n        return ExpertModes(",
        ("tests/device/test_expert_choice.py",), "programs are not those that prices assume",
    ),
    Mutant(
        "throughput does not count for a recommendation", "plans", BEST,
        "e.tpot_seconds / tpot, most / e.tokens_per_second)", "e.tpot_seconds / tpot)",
        TEST_BEST, "rows are recommended that others dominate",
    ),
    Mutant(
        "kernels that nobody has run recommend a mesh", "plans", "shiftjax/costs/machine.py",
        "return self if self.measured else", "return self if self.num_devices else",
        TEST_BEST, "bursts wait 15% longer, and more if the kernels fail",
    ),
    Mutant(
        "a goal is what a row has least of", "plans", BEST,
        "lambda one, _: -one.tokens_per_second", "lambda one, _: one.tokens_per_second",
        TEST_BEST, "the slowest is recommended for throughput",
    ),
    Mutant(
        "what has no room takes no time", "plans", ESTIMATE,
        "getattr(self, name) if self.fits else None", "getattr(self, name)",
        TEST_BEST, "a row of zeros looks like the quickest",
    ),
    Mutant(
        "models with experts keep the rule", "plans", MESH,
        "target.model.experts is not None\n        and", "False\n        and",
        TEST_MESH, "an engine starts in a mesh twice as slow as the best",
    ),
    Mutant(
        "a mesh is chosen over the settings'", "plans", MESH,
        "        and all(each is None for each in says)\n", "",
        TEST_MESH, "--sp and --tp mean nothing to a model with experts",
    ),
    Mutant(
        "one device pays for peers", "plans", MEMORY,
        "machine.peer_bytes * (num_devices - 1)", "machine.peer_bytes * num_devices",
        TEST_KV, "a model that fits one device is refused",
    ),
    Mutant(
        "collectives hold nothing", "plans", MEMORY,
        "machine.reserved_bytes + engine.reserved_bytes + peers",
        "machine.reserved_bytes + engine.reserved_bytes",
        TEST_KV, "eight devices are given more KV than they have room for",
    ),
    Mutant(
        "sampling is on top of a step", "plans", MODELLED,
        "max(sampling, step - logit_bytes(deployment.layout, rows))", "step + sampling",
        TEST_KV, "less KV than engines log",
    ),
    Mutant(
        "every engine splits its sampling", "plans", MODELLED,
        "max(sampling, step - logit_bytes(deployment.layout, rows))", "step",
        TEST_KV, "more KV than engines log",
    ),
    Mutant(
        "experts in MXFP4 are as small as in their file", "plans", MEMORY,
        "or not engine.pads_mxfp4", "or engine.pads_mxfp4",
        TEST_KV, "5 GiB more KV beside gpt-oss-120b than vLLM logs",
    ),
)  # fmt: skip
