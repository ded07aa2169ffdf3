"""Mutants of what decides: scheduler, blocks, policies, drafts, phases, groups, the host tier."""

from mutant import Mutant

SCHEDULER = "shiftjax/core/scheduler.py"
PARKING = "shiftjax/phases/parking.py"
RESULTS = "shiftjax/core/results.py"
BUILDER = "shiftjax/core/plan_builder.py"
BLOCKS = "shiftjax/core/blocks.py"
TABLES = "shiftjax/core/block_tables.py"
SHARED = "shiftjax/fleet/shared_blocks.py"
POLICY = "shiftjax/core/policies.py"
HANDOVER = "shiftjax/fleet/handover.py"
RESHARDING = "shiftjax/phases/resharding.py"
SPECULATION = "shiftjax/drafts/speculation.py"
EXTENTS = "shiftjax/host_tier/extents.py"

TEST_SCHEDULER = "tests/core/test_scheduler.py"
TEST_BLOCKS = "tests/core/test_blocks.py"
TEST_ENGINE = "tests/core/test_engine.py"
TEST_THRESHOLD = "tests/core/test_policy.py"
TEST_POLICY = "tests/core/test_policy_cost.py"
TEST_HANDOVER = "tests/fleet/test_handover.py"
TEST_FLEET = "tests/fleet/test_regrouping.py"
TEST_PARKING = "tests/phases/test_parking.py"
TEST_SPECULATION = "tests/drafts/test_speculation.py"
TEST_TIER = "tests/host_tier/test_extents.py"

SCHEDULER_ROWS = (
    Mutant(
        "a chunk has one token more than the budget", "scheduler", BUILDER,
        "num_tokens = min(num_new, self.tokens_left)",
        "num_tokens = min(num_new, self.tokens_left + 1)",
        (TEST_SCHEDULER,), "a step is larger than any that was compiled",
    ),
    Mutant(
        "rows of a prompt count as one", "scheduler", BUILDER,
        "self.rows_left -= num_rows", "self.rows_left -= min(num_rows, 1)",
        (TEST_SCHEDULER,), "prompt log-probabilities make more rows than a step has",
    ),
    Mutant(
        "the oldest is preempted", "scheduler", SCHEDULER,
        "victim = self.running.pop()", "victim = self.running.pop(0)",
        (TEST_SCHEDULER,), "who has waited longest loses its work, perhaps for ever",
    ),
    Mutant(
        "the next passes who waits for room", "scheduler", SCHEDULER,
        "sequence, self._num_spared(sequence), self.tables):\n                break\n",
        "sequence, self._num_spared(sequence), self.tables):\n                position += 1\n"
        "                continue\n",
        (TEST_SCHEDULER,), "a long prompt starves behind short ones",
    ),
    Mutant(
        "the watermark is not kept free", "scheduler", SCHEDULER,
        "            return self._watermark\n", "            return 0\n",
        (TEST_SCHEDULER,), "admissions preempt at once who runs",
    ),
    Mutant(
        "an output is one token too long", "scheduler", RESULTS,
        "if len(sequence.token_ids) >= sequence.max_length:",
        "if len(sequence.token_ids) > sequence.max_length:",
        (TEST_SCHEDULER,), "max_tokens is not kept",
    ),
    Mutant(
        "the last step computes a token that nobody wants", "scheduler", SCHEDULER,
        "length >= sequence.max_length or", "length > sequence.max_length or",
        (TEST_SCHEDULER,), "every output costs a step more than it has tokens",
    ),
    Mutant(
        "stop ids are banned for one token more", "scheduler", "shiftjax/core/request.py",
        "return length - sequence.num_prompt_tokens < sequence.request",
        "return length - sequence.num_prompt_tokens <= sequence.request",
        (TEST_SCHEDULER,), "min_tokens is one too many",
    ),
    Mutant(
        "prompt log-probabilities of the row before", "scheduler", RESULTS,
        "row = last_row - (item.start + item.num_tokens - 1 - position)",
        "row = max(0, last_row - (item.start + item.num_tokens - position))",
        (TEST_SCHEDULER,), "every token of a prompt has its neighbour's number",
    ),
    Mutant(
        "of a draft the first row alone must be finite", "scheduler", SCHEDULER,
        "(last == first_row + 1 or all(finite[first_row:last]))", "True",
        (TEST_SPECULATION,), "a token out of NaN is taken for one that was sampled",
    ),
    Mutant(
        "a low budget stays low", "scheduler", SCHEDULER,
        "self._budget = min(most, 2 * self._budget)", "self._budget = min(most, self._budget)",
        (TEST_ENGINE,), "after one lack of memory steps are small for ever",
    ),
    Mutant(
        "a commit that fails half way has told nothing", "scheduler", "shiftjax/core/engine.py",
        "return events + self._fail(lane, flight.plan, error)",
        "return self._fail(lane, flight.plan, error)",
        (TEST_ENGINE,), "clients of sequences that ended before the failure wait for ever",
    ),
)  # fmt: skip
BLOCKS_ROWS = (
    Mutant(
        "released blocks are not given back", "blocks", BLOCKS,
        "            if not count:\n                self._return(block)\n",
        "            if count < 0:\n                self._return(block)\n",
        (TEST_BLOCKS,), "the pool leaks until nothing fits",
    ),
    Mutant(
        "the most recently used block goes first", "blocks", BLOCKS,
        "self._cached.popitem(last=False)", "self._cached.popitem(last=True)",
        (TEST_BLOCKS,), "the prefix cache forgets what is asked for again",
    ),
    Mutant(
        "hashes do not know what came before", "blocks", BLOCKS,
        "block = parent + data[begin : begin + num_bytes]",
        "block = data[begin : begin + num_bytes]",
        (TEST_BLOCKS,), "keys of the same tokens after another beginning are reused",
    ),
    Mutant(
        "a collision of hashes is a hit", "blocks", BLOCKS,
        "if contents is None or contents.tokens != tokens:", "if contents is None:",
        (TEST_BLOCKS,), "a request reads the keys of other tokens",
    ),
    Mutant(
        "salts share their prefixes", "blocks", BLOCKS,
        "identity = model, kv, adapter, salt", "identity = model, kv, adapter",
        (TEST_BLOCKS,), "one tenant can time what another has asked",
    ),
    Mutant(
        "a block more where blocks are full", "blocks", BLOCKS,
        "return -(-num_tokens // self.block_size)", "return num_tokens // self.block_size + 1",
        (TEST_SCHEDULER,), "every full sequence holds a block that it never writes",
    ),
    Mutant(
        "siblings share a partial block", "blocks", TABLES,
        "num_blocks = (sequence.num_prompt_tokens - 1) // self.block_size",
        "num_blocks = -(-(sequence.num_prompt_tokens - 1) // self.block_size)",
        (TEST_SCHEDULER,), "two continuations write their tokens into one block",
    ),
    Mutant(
        "a prefix may be the whole prompt", "blocks", TABLES,
        "limit = (len(sequence.token_ids) - 1) // self.block_size\n        if self.prefix",
        "limit = len(sequence.token_ids) // self.block_size\n        if self.prefix",
        (TEST_SCHEDULER,), "no token is left to compute, and there are no logits",
    ),
    Mutant(
        "chunks are cached before they are known to be finite", "blocks", SCHEDULER,
        "continue  # part of a prompt: whether it is finite shows in a later row",
        "sequence.num_verified_tokens = item.start + item.num_tokens\n"
        "                self.tables.register(sequence)\n                continue",
        (TEST_SCHEDULER,), "others read keys that are NaN",
    ),
    Mutant(
        "fresh blocks evict the prefix that was found", "blocks", TABLES,
        "        self.device.retain(prefix)  # before allocating, which could evict them\n"
        "        fresh = [self._allocate() for _ in range(num_blocks - len(prefix))]\n",
        "        fresh = [self._allocate() for _ in range(num_blocks - len(prefix))]\n"
        "        self.device.retain(prefix)\n",
        (TEST_SCHEDULER,), "a table holds a block twice, for two places",
    ),
    Mutant(
        "a prefix is found in a block that another group writes", "blocks", SHARED,
        "                if states[block] == _CACHED:\n                    self._drop(block)\n", "",
        ("tests/fleet/test_shared_blocks.py",), "a request reads a stale block",
    ),
)  # fmt: skip
POLICY_ROWS = (
    Mutant(
        "BASE begins at the threshold", "policy", POLICY,
        "modes[0] if num_tokens > self.threshold", "modes[0] if num_tokens >= self.threshold",
        (TEST_THRESHOLD,), "the largest step that SHIFT wins runs in BASE",
    ),
    Mutant(
        "no doubt of the cost model", "policy", POLICY,
        "seconds[last] - seconds[best] > doubt", "seconds[last] - seconds[best] > 0",
        (TEST_POLICY,), "modes alternate for less than a switch costs",
    ),
    Mutant(
        "a queue makes SHIFT easier to reach", "policy", POLICY,
        "2 * doubt if best.sp == 1 else", "2 * doubt if best.sp != 1 else",
        (TEST_POLICY,), "a switch that is soon undone is made all the same",
    ),
    Mutant(
        "modes after another mode are not compiled", "policy", POLICY,
        "lasts = (None, *modes)", "lasts = (None,)",
        (TEST_POLICY,), "a step compiles in the middle of traffic",
    ),
    Mutant(
        "logit rows cost nothing in a mode", "policy", "shiftjax/costs/step_costs.py",
        "return tokens.device + rows.device", "return tokens.device",
        ("tests/costs/test_step_costs.py",), "BASE, whose rows cross devices, looks cheaper",
    ),
    Mutant(
        "buckets begin where the one before ends", "policy", "shiftjax/core/policy.py",
        "policy.wanted(modes, 1 + max(smaller, default=0), bucket)",
        "policy.wanted(modes, max(smaller, default=0), bucket)",
        (TEST_THRESHOLD,), "programs are compiled that no step runs",
    ),
    Mutant(
        "the threshold leaves out a token", "policy", "shiftjax/costs/crossing.py",
        "(middle, high) if shift_wins(middle) else (low, middle - 1)",
        "(middle, high) if shift_wins(middle + 1) else (low, middle - 1)",
        (TEST_THRESHOLD,), "the largest step that SHIFT wins is not the threshold",
    ),
)  # fmt: skip
HANDOVER_ROWS = (
    Mutant(
        "the last block, which is partial, is not moved", "handover", HANDOVER,
        "for number in range(-(-computed // wide_size)):",
        "for number in range(computed // wide_size):",
        (f"{TEST_FLEET}::test_what_runs_is_moved_and_not_computed_again",),
        "a running request goes on without its last keys",
    ),
    Mutant(
        "a call overwrites wide blocks that are not read yet", "handover", HANDOVER,
        "number = max(number, *(read_wide.get(block, 0) for block in blocks))",
        "number = max(number, 0)",
        (TEST_HANDOVER,), "a running request goes on with another's keys",
    ),
    Mutant(
        "a call overwrites narrow blocks that are not read yet", "handover", HANDOVER,
        "max(has_room[place], read_narrow.get(wide, 0))", "max(has_room[place], 0)",
        (TEST_HANDOVER,), "a running request goes on with another's keys",
    ),
    Mutant(
        "a call has a pair too many", "handover", HANDOVER,
        "while number < len(found) and len(found[number][place]) == per_call:",
        "while number < len(found) and len(found[number][place]) > per_call:",
        (TEST_HANDOVER,), "the arrays of a call have no place for it",
    ),
    Mutant(
        "shared blocks are not counted twice", "handover", HANDOVER,
        "                if shared is not None:\n                    self.new.retain(shared)\n"
        "                    table += shared\n",
        "                if shared is not None:\n                    table += shared\n",
        (f"{TEST_FLEET}::test_continuations_that_share_blocks_share_them_after_a_move",),
        "a block is free while a table holds it",
    ),
    Mutant(
        "a group takes one sequence more than it may", "handover", HANDOVER,
        "room -= routes[ends].carry(sequence, room > 0)",
        "room -= routes[ends].carry(sequence, room >= 0)",
        (TEST_FLEET,), "no step holds all that run",
    ),
    Mutant(
        "what was carried is cached no more", "handover", HANDOVER,
        "            sequence.num_registered_blocks = 0\n            return True\n",
        "            return True\n",
        (f"{TEST_FLEET}::test_what_was_moved_is_found_by_the_next_turn_of_a_conversation",),
        "the next turn of a conversation computes all of it again",
    ),
)  # fmt: skip
PHASES_ROWS = (
    Mutant(
        "decode never ends", "phases", RESHARDING,
        "is_over = bool(waits) and not any(scheduler.requests for scheduler in here)",
        "is_over = False",
        (TEST_PARKING,), "requests wait for a prefill phase that does not come",
    ),
    Mutant(
        "what was cached before a switch is found after it", "phases", RESHARDING,
        "lane.scheduler.tables.reset([])  # its pools are no more", "pass",
        (TEST_PARKING,), "a request reads the blocks of pools that are gone",
    ),
    Mutant(
        "parked requests go on in the opposite order", "phases", RESHARDING,
        "sorted(found, key=itemgetter(0))", "sorted(found, key=itemgetter(0), reverse=True)",
        (TEST_PARKING,), "who came first is decoded last",
    ),
    Mutant(
        "who ends with its first token reserves room", "phases", PARKING,
        "ends = num_tokens + 1 >= sequence.max_length", "ends = num_tokens >= sequence.max_length",
        (TEST_PARKING,), "a phase ends early for room that nobody needs",
    ),
    Mutant(
        "a reservation outlives an admission that failed", "phases", PARKING,
        "if not is_admitted:", "if is_admitted:",
        (TEST_PARKING,),
        "room on the host is kept for nobody",
    ),
    Mutant(
        "continuations stay behind where their prompt was computed", "phases", SCHEDULER,
        "if each is sequence or each.status is Status.WAITING:", "if each is sequence:",
        (TEST_PARKING,), "a request is in two phases at once",
    ),
    Mutant(
        "phases are taken for a mode", "phases", "shiftjax/phases/configurations.py",
        "(prefill.pp == 1 and decode == shift)", "(decode == shift)",
        ("tests/phases/test_configurations.py",), "the settings come to another deployment",
    ),
    Mutant(
        "the load of groups is not looked at", "phases", RESHARDING,
        "target = min(self.lanes[phase], key=load_of)", "target = self.lanes[phase][0]",
        (TEST_PARKING,), "one group decodes everything",
    ),
)  # fmt: skip
DRAFTS_ROWS = (
    Mutant(
        "drafts are accepted without a check", "drafts", RESULTS,
        "        if guess != token:\n", "        if guess == -1:\n",
        (TEST_SPECULATION,), "the output is what was guessed",
    ),
    Mutant(
        "the token after a wrong guess is kept", "drafts", RESULTS,
        "            return number\n", "            return number + 1\n",
        (TEST_SPECULATION,), "a token is sampled after one that is not there",
    ),
    Mutant(
        "rejected tokens count as computed", "drafts", SCHEDULER,
        "                if sequence.block_table:  # else it has been preempted since\n"
        "                    sequence.num_computed_tokens = end\n", "",
        (TEST_SPECULATION,), "attention reads the keys of rejected tokens",
    ),
    Mutant(
        "a draft runs past the end of its output", "drafts", SPECULATION,
        "most = min(room, sequence.max_length - 1 - len(sequence.token_ids))",
        "most = min(room, sequence.max_length + 1 - len(sequence.token_ids))",
        (TEST_SPECULATION,), "steps compute tokens that cannot come",
    ),
    Mutant(
        "drafts take the blocks that admissions leave", "drafts", SCHEDULER,
        "self.tables.num_growths(self._watermark)", "self.tables.num_growths(0)",
        (TEST_SPECULATION,), "guesses preempt requests",
    ),
    Mutant(
        "tokens after a wrong one are learned from", "drafts", "shiftjax/drafts/acceptance.py",
        "claims.values[: min(offered, accepted + 1)]", "claims.values[:offered]",
        ("tests/drafts/test_acceptance.py",), "guesses count as worse than they are",
    ),
    Mutant(
        "what an abort cut off is learned from", "drafts", "shiftjax/drafts/drafting.py",
        "        if finished:\n", "        if finished or True:\n",
        ("tests/drafts/test_drafting.py",), "half texts are guessed",
    ),
    Mutant(
        "tenants guess from each other's outputs", "drafts", SPECULATION,
        "corpus=(request.adapter, request.cache_salt, sequence.version),",
        "corpus=(request.adapter, sequence.version),",
        (TEST_SPECULATION,), "the speed of an answer tells what others were answered",
    ),
    Mutant(
        "drafts carry a step past the threshold", "drafts", "shiftjax/drafts/choice.py",
        "size = min(size, most_tokens)", "size = max(size, most_tokens)",
        ("tests/drafts/test_choice.py",), "decodes run in BASE because of guesses",
    ),
    Mutant(
        "drafts stop one sequence too late", "drafts", "shiftjax/drafts/choice.py",
        "if 0 < off_seqs <= room.num_running:", "if 0 < off_seqs < room.num_running:",
        ("tests/drafts/test_choice.py",), "draft_off_seqs is not kept",
    ),
)  # fmt: skip
TIER_ROWS = (
    Mutant(
        "the ends of prefixes are kept", "host tier", EXTENTS,
        "new = new[max(0, len(new) - room) :]", "new = new[:room]",
        (TEST_TIER,), "what is kept on the host is found by nobody",
    ),
    Mutant(
        "extents are read before they are known to be written", "host tier", EXTENTS,
        "return extent.is_proven or extent.writer is self", "return True",
        (TEST_TIER,), "a group restores what a failed step never copied",
    ),
    Mutant(
        "room that was kept is not given back", "host tier", EXTENTS,
        "self.num_reserved_bytes -= self.reservations.pop(owner, 0)",
        "self.reservations.pop(owner, 0)",
        (TEST_PARKING,), "the host is full of nothing",
    ),
    Mutant(
        "the extent that was used last goes first", "host tier", EXTENTS,
        "oldest = next(iter(self._idle))", "oldest = next(reversed(self._idle))",
        (TEST_TIER,), "the host forgets what is asked for again",
    ),
    Mutant(
        "a shared beginning is not pinned", "host tier", EXTENTS,
        "        for extent in {place.extent: None for place in shared}:\n"
        "            self.memory.pin(extent)\n", "",
        (TEST_TIER,), "what a sequence needs goes with another's end",
    ),
    Mutant(
        "a failed step's copies are believed", "host tier", EXTENTS,
        "if not is_written or extent.number in suspects:", "if extent.number in suspects:",
        (TEST_TIER,), "garbage is restored from the host",
    ),
)  # fmt: skip
ROWS: tuple[Mutant, ...] = (
    *SCHEDULER_ROWS,
    *BLOCKS_ROWS,
    *POLICY_ROWS,
    *HANDOVER_ROWS,
    *PHASES_ROWS,
    *DRAFTS_ROWS,
    *TIER_ROWS,
)  # fmt: skip
