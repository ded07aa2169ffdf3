"""Mutants of KV blocks by cache group, freed behind windows."""

from mutant import Mutant

CACHE = "shiftjax/arch/cache.py"
TABLES = "shiftjax/core/windowed_tables.py"
PREFIXES = "shiftjax/core/window_prefixes.py"
BLOCKS = "shiftjax/core/window_blocks.py"
SCHEDULER = "shiftjax/core/scheduler.py"
PACK = "shiftjax/device/pack.py"
ATTENTION = "shiftjax/models/attention.py"
RULE = "shiftjax/deploy/window_rule.py"
RESOLVE = "shiftjax/deploy/resolve.py"
DEPLOYMENT = "shiftjax/deploy/deployment.py"

TEST_TABLES = "tests/core/test_windowed_tables.py"
TEST_BLOCKS = "tests/core/test_window_blocks.py"
TEST_GROUPS = "tests/arch/test_cache_groups.py"
TEST_RULE = "tests/deploy/test_window_rule.py"
TEST_DRAFTS = "tests/drafts/test_speculation.py"
ON_DEVICES = "tests/device/test_freed_blocks.py"

# fmt: off
ROWS = (
    Mutant(
        "a block goes that is seen in part", "windows", CACHE,
        "return max(0, first_seen(position, window)) // block_size",
        "return -(-max(0, first_seen(position, window)) // block_size)",
        (TEST_GROUPS, TEST_TABLES), "tokens attend to what another sequence has written",
    ),
    Mutant(
        "blocks go that tokens behind a rejected draft see", "windows", TABLES,
        "self._first(group, sequence.num_verified_tokens)",
        "self._first(group, sequence.num_computed_tokens + 1)",
        (TEST_TABLES, TEST_DRAFTS), "a wrong draft changes the output",
    ),
    Mutant(
        "blocks of all groups are found by one hash", "windows", PREFIXES,
        "return block_hash + bytes((group,)) if group else block_hash", "return block_hash",
        (TEST_TABLES,), "layers read the keys of other layers",
    ),
    Mutant(
        "a prefix is found without its window", "windows", PREFIXES,
        "            if missing < 0:\n                break\n            count = missing",
        "            break",
        (TEST_TABLES, ON_DEVICES), "prefixes are found nowhere that were found in part",
    ),
    Mutant(
        "what is not verified is found", "windows", BLOCKS,
        "        self._unproven[block] = contents\n        return True",
        "        self.enter(block, contents)\n        return False",
        (TEST_BLOCKS, TEST_TABLES), "a request that failed poisons those with the same prompt",
    ),
    Mutant(
        "what is never verified stays unproven", "windows", TABLES,
        "            self.device.drop(block, contents)\n        for table, first",
        "            pass\n        for table, first",
        (TEST_TABLES,), "a block that is free counts as cached for ever",
    ),
    Mutant(
        "a swapped sequence takes the places of another group", "windows", PREFIXES,
        "begin += num_blocks - kept[group]", "begin += num_blocks",
        (TEST_TABLES, ON_DEVICES), "who comes back from the host reads others' keys",
    ),
    Mutant(
        "a prompt gets a window without room for a step", "windows", CACHE,
        "-(-(seen + step_tokens) // block_size) + 1", "-(-seen // block_size) + 1",
        (TEST_GROUPS, TEST_TABLES), "chunks of a prompt wait for each other",
    ),
    Mutant(
        "parts of a prompt are planned without their blocks", "windows", SCHEDULER,
        "if has_room and self._cover(sequence, builder):", "if has_room:",
        (TEST_TABLES,), "a step writes to no block",
    ),
    Mutant(
        "who may not be preempted again is given too little", "windows", TABLES,
        "max(held, kept) + late) - held", "kept) - held",
        (TEST_TABLES,), "sequences are preempted more often than allowed",
    ),
    Mutant(
        "every group has the first one's table", "windows", PACK,
        "zip(tables, sequence.tables, firsts,", "zip(tables, [sequence.block_table] * 9, firsts,",
        (ON_DEVICES,), "layers overwrite each other's keys",
    ),
    Mutant(
        "values behind a window count as numbers", "windows", ATTENTION,
        "exists &= key >= first_seen(begin + shift, window)", "pass",
        (ON_DEVICES,), "NaN in the null block ends requests that have nothing to do with it",
    ),
    Mutant(
        "a number of blocks is that of a group's", "windows", RESOLVE,
        "len(model.cache_groups) * (cache.num_blocks - 1) + 1", "cache.num_blocks",
        (TEST_RULE,), "a pool holds a fraction of the tokens that were asked for",
    ),
    Mutant(
        "windows as long as the context make groups", "windows", RULE,
        "kept >= layers * -(-longest // size)", "False",
        (TEST_RULE,), "models that free nothing have more tables in every step",
    ),
    Mutant(
        "tokens fit as if all were kept", "windows", DEPLOYMENT,
        "token = -(-self.blocks_of(self.max_model_len) * self.block_bytes // self.max_model_len)",
        "pass",
        (TEST_RULE,), "plans say that half of what fits does",
    ),
)
