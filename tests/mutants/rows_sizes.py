"""Mutants of the sizes of steps with prompts, and of the order of prompts."""

from mutant import Mutant

DRAIN = "shiftjax/sizing/drain.py"
SIZES = "shiftjax/sizing/cost_sizes.py"
SEAM = "shiftjax/core/step_sizes.py"
ENGINE = "shiftjax/core/engine.py"
SCHEDULER = "shiftjax/core/scheduler.py"
TABLES = "shiftjax/core/block_tables.py"
TOLD = "shiftjax/sizing/size_stats.py"
PRICES = "shiftjax/fleet/step_prices.py"
ASSEMBLY = "shiftjax/assembly.py"
MISSES = "shiftjax/sizing/misses.py"
BY_TARGETS = "shiftjax/sizing/target_sizes.py"

TEST_DRAIN = ("tests/sizing/test_drain.py",)
TEST_SIZES = ("tests/sizing/test_cost_sizes.py",)
TEST_PIPELINES = ("tests/sizing/test_pipeline_sizes.py",)
TEST_FLEET = ("tests/sim/test_sim_fleet.py",)
TEST_TOLD = ("tests/sizing/test_size_stats.py",)
TEST_SEAM = ("tests/core/test_step_sizes.py",)
TEST_MISSES = ("tests/sizing/test_misses.py",)
TEST_TARGETS = ("tests/sizing/test_target_sizes.py",)

ROWS: tuple[Mutant, ...] = (
    Mutant(
        "first tokens weigh little", "sizes", DRAIN,
        "return WEIGHT * self.first + self.late", "return 0.1 * self.first + self.late",
        TEST_DRAIN, "prompts wait for decodes",
    ),
    Mutant(
        "first tokens may be as late as they like", "sizes", DRAIN,
        "most = 1 + SLACK", "most = 100",
        TEST_DRAIN, "an overload delays every first token",
    ),
    Mutant(
        "the rest is not padded", "sizes", DRAIN,
        "last = seconds(min(bisect_left(sizes, d + rest), i), rest)",
        "last = each * rest / p",
        TEST_DRAIN, "a few tokens are left for a step that is nearly empty",
    ),
    Mutant(
        "nobody comes any more", "sizes", DRAIN,
        "first + rate * drain * drain / 2", "first",
        TEST_DRAIN, "steps are too small where many come",
    ),
    Mutant(
        "prompts far behind all end last", "sizes", DRAIN,
        "first += num_more * (step * each + on_way + drain) / 2", "first += num_more * drain",
        TEST_DRAIN, "in an overload sizes are those of other traffic",
    ),
    Mutant(
        "what decodes wait for is no loss", "sizes", DRAIN,
        "drain, delay = (num_steps - 1) * each + last + on_way, each - alone",
        "drain, delay = (num_steps - 1) * each + last + on_way, 0.0",
        TEST_DRAIN, "steps are as large as ever",
    ),
    Mutant(
        "sizes are priced in base", "sizes", SIZES,
        "mode = self._policy.mode_of(work, self._modes, num_waiting, turn.last_mode)",
        "mode = self._modes[0]",
        TEST_SIZES, "small steps look dear where SHIFT would run them",
    ),
    Mutant(
        "sizes are what the file says", "sizes", SIZES,
        "factor = self.times.factor(StepKind(mode, *size, turn.is_hidden))", "factor = 1.0",
        TEST_SIZES, "a size that is slow on this machine is chosen for ever",
    ),
    Mutant(
        "nothing is learned", "sizes", SIZES,
        "        self.times.learn(kind, seconds - plan.proposing_seconds, expected)\n", "",
        TEST_SIZES, "a machine's file is believed, whatever steps take",
    ),
    Mutant(
        "a step of a pipeline is in one stage alone", "sizes", DRAIN,
        "on_way = (depth - 1) * (last if num_steps == 1 else each)", "on_way = 0.0",
        TEST_PIPELINES, "chunks are too small: each has to pass all stages",
    ),
    Mutant(
        "chunks wait for the last stage", "sizes", SIZES,
        "if num_stages == 1 or not demand.num_decodes:", "if num_stages == 1:",
        TEST_PIPELINES, "a prompt alone is one chunk, for which all stages but one are idle",
    ),
    Mutant(
        "other micro-batches wait for nothing", "sizes", SCHEDULER,
        "demand = demand._replace(num_others=others)", "pass",
        TEST_PIPELINES, "all decodes wait behind the chunks of one micro-batch",
    ),
    Mutant(
        "the guard is not told", "sizes", TOLD,
        'return "guard" if cheaper else "least"', 'return "least"',
        TEST_TOLD, "nobody sees why steps are large",
    ),
    Mutant(
        "a fleet prices the largest steps", "sizes", PRICES,
        "self.sizes[width].foresee(demand)", "demand.most",
        TEST_FLEET, "one wide group is kept where two would be quicker",
    ),
    Mutant(
        "a fleet has the patience of single units", "sizes", ASSEMBLY,
        "width = max(groups.costs)", "width = min(groups.costs)",
        TEST_SIZES, "long prompts wait eight times as long as they should",
    ),
    Mutant(
        "what a cache has is computed again", "sizes", SEAM,
        "num_new = len(request.prompt_token_ids) - num_known",
        "num_new = len(request.prompt_token_ids)",
        TEST_SEAM, "the next turn of a conversation waits behind shorter new prompts",
    ),
    Mutant(
        "priority comes after length", "sizes", ENGINE,
        "entry = (request.priority, self._due(request), self._num_requests, request)",
        "entry = (0, self._due(request), self._num_requests, request)",
        TEST_SEAM, "an urgent long request waits behind short ones",
    ),
    Mutant(
        "the order of a group is that of arrival", "sizes", SCHEDULER,
        "order=(request.priority, due, number, index),",
        "order=(request.priority, request.arrival_seconds, number, index),",
        TEST_SEAM, "queue and group do not agree who comes first",
    ),
    Mutant(
        "begun prompts keep their blocks in the context", "sizes", SEAM,
        "context = used_tokens - sum(len(s.token_ids) for s in builder.unfinished_prompts)",
        "context = used_tokens",
        TEST_SEAM, "decodes look dearer than they are",
    ),
    Mutant(
        "a look-up knows the last token, too", "sizes", TABLES,
        "limit = (len(tokens) - 1) // self.block_size\n        for number",
        "limit = len(tokens) // self.block_size\n        for number",
        TEST_SEAM, "a prompt that is cached whole takes no step",
    ),
    Mutant(
        "a request inside its target is worth little", "sizes", BY_TARGETS,
        "PRICE = 10.0", "PRICE = 0.01",
        TEST_TARGETS, "targets are given, and sizes are as without them",
    ),
    Mutant(
        "targets have no say where first tokens come late", "sizes", BY_TARGETS,
        "for each in sorted(found, key=_cost):",
        "for each in sorted((e for e in found if e.keeps), key=_cost):",
        TEST_TARGETS, "decodes pass their targets though first tokens had time",
    ),
    Mutant(
        "who waits in front has not come", "sizes", BY_TARGETS,
        "rate = self.rate(now) * (1 + num_queued / max(1, self.num_recent))",
        "rate = self.rate(now)",
        TEST_TARGETS, "in an overload the rate seems to fall, and steps become small",
    ),
    Mutant(
        "nobody is late later", "sizes", MISSES,
        "num = float(missed.sum()) + _late_later(drain, ttft, coming)",
        "num = float(missed.sum())",
        TEST_MISSES, "small steps in a burst make all who come late",
    ),
    Mutant(
        "who is late already counts", "sizes", MISSES,
        "here[left <= 0] = 0.0", "here[left <= 0] = 1.0",
        TEST_MISSES, "what cannot be helped looks like a loss of every size",
    ),
    Mutant(
        "decodes do not recover", "sizes", MISSES,
        "after = num_steps + debt / np.maximum(paces - steps.alone, _SMALL)",
        "after = num_steps + debt / _SMALL",
        TEST_MISSES, "long answers look lost after one large step",
    ),
    Mutant(
        "decodes have saved nothing", "sizes", MISSES,
        "ahead.append(tpot * max(0, sequence.num_output_tokens - 1) - took)", "ahead.append(0.0)",
        TEST_MISSES, "steps are small for decodes that have time",
    ),
    Mutant(
        "all requests have the target of most", "sizes", MISSES,
        "found = by_priority[priority] = _finite(targets.of(priority))",
        "found = by_priority[priority] = _finite(targets.of(0))",
        TEST_MISSES, "work in the background makes steps small",
    ),
    Mutant(
        "a preempted request waits for its first token again", "sizes", MISSES,
        "is_met = first is not None and first - arrival <= ttft", "is_met = False",
        TEST_MISSES, "it counts as late, and steps are large for it",
    ),
)  # fmt: skip
