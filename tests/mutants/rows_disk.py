"""Mutants of the disk tier, and of blocks that hints keep."""

from mutant import Mutant

CHUNKS = "shiftjax/disk_tier/chunk_file.py"
INDEX = "shiftjax/disk_tier/chunk_index.py"
DISK = "shiftjax/disk_tier/disk.py"
TIER = "shiftjax/disk_tier/disk_blocks.py"
WAITS = "shiftjax/disk_tier/waits.py"
TABLES = "shiftjax/core/block_tables.py"
KEPT = "shiftjax/core/kept_blocks.py"

TEST_CHUNKS = "tests/disk_tier/test_chunk_file.py"
TEST_BLOCKS = "tests/disk_tier/test_disk_blocks.py"
TEST_KEPT = "tests/core/test_kept_blocks.py"

ROWS = (
    Mutant(
        "the checksum of a payload is not compared",
        "disk",
        CHUNKS,
        "if zlib.crc32(payload) != expected:",
        "if zlib.crc32(payload) < 0:",
        (TEST_CHUNKS,),
        "a flipped bit is served as KV",
    ),
    Mutant(
        "a chunk of another model is found",
        "disk",
        DISK,
        "if contents.identity == identity:",
        "if contents.identity:",
        (TEST_BLOCKS,),
        "KV of other weights is read",
    ),
    Mutant(
        "what has to go for a chunk stays on the disk",
        "disk",
        DISK,
        "        self._unlink(removed)\n",
        "",
        (TEST_BLOCKS,),
        "the directory grows without bound",
    ),
    Mutant(
        "a flush leaves the files",
        "disk",
        DISK,
        "        self._unlink(own)\n",
        "",
        (TEST_BLOCKS,),
        "a restart finds what was flushed",
    ),
    Mutant(
        "the oldest chunk is added as the youngest",
        "disk",
        INDEX,
        "self._chunks.move_to_end(chunk, last=False)",
        "self._chunks.move_to_end(chunk)",
        (TEST_BLOCKS,),
        "after a restart the last used chunk goes first",
    ),
    Mutant(
        "a failed step may read the same chunk again",
        "disk",
        TIER,
        "        self._disk.distrust(suspects)\n",
        "",
        (TEST_BLOCKS,),
        "each request with this prefix fails",
    ),
    Mutant(
        "reads come after what the plan writes",
        "disk",
        TABLES,
        "        self.tier.save(evicted)\n        wanted",
        "        self.tier.save(evicted)\n"
        "        for sequence in islice(waiting, MOST_AHEAD):\n"
        "            self.awaits(sequence)\n        wanted",
        (TEST_BLOCKS,),
        "an extent is dropped before it is written, and never again",
    ),
    Mutant(
        "a slow disk is waited for all the same",
        "disk",
        WAITS,
        "seconds >= computing",
        "seconds < 0",
        (TEST_BLOCKS,),
        "a request waits longer than computing takes",
    ),
    Mutant(
        "a request keeps all that may be kept",
        "disk",
        KEPT,
        "int(SHARE_OF_ONE * self.most_kept)",
        "self.most_kept",
        (TEST_KEPT,),
        "one client's hint leaves no room for another's",
    ),
    Mutant(
        "more is kept than may be",
        "disk",
        KEPT,
        "min(self.most_kept - len(self._keeps), int",
        "min(self.num_blocks, int",
        (TEST_KEPT,),
        "hints take the pool from those who give none",
    ),
    Mutant(
        "any session releases what another keeps",
        "disk",
        KEPT,
        "and keep.session == session",
        "",
        (TEST_KEPT,),
        "a client throws others' prefixes away",
    ),
    Mutant(
        "what is kept is not for those who run",
        "disk",
        KEPT,
        "return super().num_free_blocks + len(self._kept)",
        "return super().num_free_blocks",
        (TEST_KEPT,),
        "running requests are preempted for what is kept",
    ),
    Mutant(
        "the beginning of what is kept goes first",
        "disk",
        KEPT,
        "for block in reversed(blocks[:end]):",
        "for block in blocks[:end]:",
        (TEST_KEPT,),
        "what is left of a kept prefix is of no use",
    ),
)
