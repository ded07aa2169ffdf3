"""Mutants of a cache that devices split by position."""

from mutant import Mutant

POSITIONS = "shiftjax/parallel/positions.py"
NEIGHBOURS = "shiftjax/models/neighbours.py"
CHOICE = "shiftjax/sim/kv_positions.py"
GATHERED = "shiftjax/models/gathered_tiles.py"
SOFTMAXES = "shiftjax/models/softmaxes.py"
WORK = "shiftjax/models/attention_work.py"
MOVER = "shiftjax/fleet/mover_device.py"
RULE = "shiftjax/deploy/position_rule.py"
COLLECTIVES = "shiftjax/costs/collectives.py"

KERNELS = "shiftjax/models/position_backend.py"
TILES = "shiftjax/models/tile_backend.py"

TEST_POSITIONS = "tests/parallel/test_positions.py"
ON_DEVICES = "tests/device/test_split_positions.py"
TEST_ATTENTION = "tests/models/test_split_attention.py"
TEST_GATHERED = "tests/models/test_gathered_tiles.py"
TEST_KERNELS = "tests/models/test_position_backend.py"
TEST_TILES = "tests/models/test_tile_backend.py"
ON_ONE = "tests/device/test_position_cases.py"
TEST_CHOICE = "tests/sim/test_kv_positions.py"
TEST_COSTS = "tests/costs/test_step_costs.py"
TEST_RULE = "tests/deploy/test_position_rule.py"
TEST_MOVER = "tests/fleet/test_mover_device.py"
IN_FLEETS = "tests/device/test_fleet_steps.py"

# fmt: off
ROWS = (
    Mutant(
        "a place counts what its neighbour has", "positions", POSITIONS,
        "rest = num % self.stripe - self.run(place) * self.block",
        "rest = num % self.stripe - (self.run(place) + 1) * self.block",
        (TEST_POSITIONS,), "tokens are written to the slots of others",
    ),
    Mutant(
        "devices write the positions of others", "positions", POSITIONS,
        "return (self.count(slots + 1, place) - own) * own", "return own",
        (TEST_POSITIONS,), "a token's keys lie over those of the next one",
    ),
    Mutant(
        "rows see what is beyond them", "positions", NEIGHBOURS,
        "jnp.minimum(rows.job_end, high)", "rows.job_end",
        (TEST_ATTENTION, ON_DEVICES), "a draft attends to the tokens behind it",
    ),
    Mutant(
        "rows see what is behind their windows", "positions", NEIGHBOURS,
        "begin, end = jnp.maximum(rows.job_begin, low), ", "begin, end = rows.job_begin, ",
        (TEST_ATTENTION, ON_DEVICES), "a device reads blocks that are freed",
    ),
    Mutant(
        "parts are added as if their scores were alike", "positions", SOFTMAXES,
        "gain = jnp.exp(maximum - highest[None])", "gain = jnp.ones_like(maximum)",
        (TEST_ATTENTION, ON_DEVICES), "the part with the largest score counts too little",
    ),
    Mutant(
        "jobs are as long as on the device that has least", "positions", WORK,
        "positions.count(begin, positions.ways - 1), positions.count(end, 0)",
        "positions.count(begin, 0), positions.count(end, positions.ways - 1)",
        (TEST_ATTENTION, ON_DEVICES), "the last tokens of a context are seen by nobody",
    ),
    Mutant(
        "kernels read as much as the device that has least", "positions", KERNELS,
        "longest = positions.count(ends, 0)",
        "longest = positions.count(ends, positions.ways - 1)",
        (TEST_KERNELS,), "the last tokens of a context are seen by nobody",
    ),
    Mutant(
        "kernels see as far as the device that has most", "positions", NEIGHBOURS,
        "row_length=high, row_low", "row_low",
        (TEST_KERNELS, ON_ONE), "tokens of other sequences, or none, are seen",
    ),
    Mutant(
        "kernels see what is behind windows", "positions", NEIGHBOURS,
        "None if rows.row_low is None else low", "rows.row_low",
        (TEST_KERNELS,), "a device sees more or less of a window than it has",
    ),
    Mutant(
        "sums of kernels are to another base", "positions", SOFTMAXES,
        "jnp.maximum(lse * math.log(2), LOWEST)", "jnp.maximum(lse, LOWEST)",
        (TEST_KERNELS, ON_ONE), "the part with the largest score counts too much",
    ),
    Mutant(
        "parts come back without their normalisers", "positions", COLLECTIVES,
        "asked * (summed + 2) * STATE_BYTES", "asked * summed * STATE_BYTES",
        (TEST_COSTS,), "the exchange of short heads is priced too low",
    ),
    Mutant(
        "sinks take part on every device", "positions", NEIGHBOURS,
        "jnp.full(of_all, -jnp.inf), sinks)", "jnp.full(of_all, 0.0), sinks)",
        (TEST_ATTENTION, ON_DEVICES), "sums of parts are too small",
    ),
    Mutant(
        "devices weigh their parts as if they had all", "positions", SOFTMAXES,
        "/ jnp.where(whole == 0, 1.0, whole)", "/ part.total",
        (TEST_ATTENTION, ON_DEVICES), "what neighbours add up is no mean",
    ),
    Mutant(
        "all neighbours have the first one's heads", "positions", NEIGHBOURS,
        "self.part.place * own, own, 1)", "0, own, 1)",
        (TEST_ATTENTION, ON_DEVICES), "tokens of prompts have queries of other heads",
    ),
    Mutant(
        "a device is told of its own normalisers alone", "positions", COLLECTIVES,
        "ways * asked * 2 * STATE_BYTES", "asked * 2 * STATE_BYTES",
        (TEST_COSTS,), "their exchange is priced too low",
    ),
    Mutant(
        "pages lie as they are in a context", "positions", GATHERED,
        "return positions.place(lax.rem(nth, ways)) * self.blocks + lax.div(nth, ways)",
        "return nth",
        (TEST_GATHERED, TEST_ATTENTION), "prompts see their context in another order",
    ),
    Mutant(
        "all rounds begin where the first one does", "positions", GATHERED,
        "nth = first + n * rounds.piece + places", "nth = n * rounds.piece + places",
        (TEST_GATHERED, TEST_ATTENTION), "what is behind the buffer's end is never seen",
    ),
    Mutant(
        "tables begin with what tiles see", "positions", GATHERED,
        "column = nth - take(work.seq_begin, seq) + take(work.seq_first, seq)",
        "column = nth - take(work.seq_begin, seq)",
        (TEST_GATHERED, TEST_ATTENTION), "prompts with windows see what is behind these",
    ),
    Mutant(
        "tiles see what is behind the buffer's end", "positions", GATHERED,
        "exists = (key < end + ahead) & (key < (high - shift) * stripe)",
        "exists = key < end + ahead",
        (TEST_ATTENTION,), "the last page of a round counts several times",
    ),
    Mutant(
        "tiles forget the rounds before", "positions", GATHERED,
        "new = lax.fori_loop(0, count, run_chunk, old)",
        "new = lax.fori_loop(0, count, run_chunk, empty_state(q, *old.weighted.shape))",
        (TEST_ATTENTION,), "long prompts see the ends of their contexts alone",
    ),
    Mutant(
        "contexts of chunks are as long as these", "positions", "shiftjax/costs/kernel_costs.py",
        "math.ceil(context / self.split.gathered)", "math.ceil(tokens / self.split.gathered)",
        (TEST_COSTS,), "chunks behind long contexts are priced as first ones",
    ),
    Mutant(
        "what a request alone loses does not count", "positions", CHOICE,
        "return self.gain > LEAST_GAIN * self.loss", "return self.gain > LEAST_GAIN",
        (TEST_CHOICE,), "each token waits for exchanges that nobody needs",
    ),
    Mutant(
        "rounds of kernels see the contexts of others", "positions", TILES,
        "block = first - take(work.seq_begin, seq) + take(work.seq_first, seq)",
        "block = first - take(work.seq_begin, seq)",
        (TEST_TILES,), "prompts with windows see what is behind these",
    ),
    Mutant(
        "kernels see all of a context in every round", "positions", TILES,
        "begin = jnp.maximum(begin, low)", "begin = jnp.maximum(begin, 0)",
        (TEST_TILES,), "what the buffer has of others counts, too",
    ),
    Mutant(
        "kernels' pages are those of one round", "positions", TILES,
        "nth % (ways * rounds.blocks)", "jnp.minimum(nth, ways * rounds.blocks - 1)",
        (TEST_TILES,), "prompts after the first see its context",
    ),
    Mutant(
        "rounds of kernels are added as if their scores were alike", "positions", SOFTMAXES,
        "gains = [jnp.exp(each.maximum - highest) for each in (one, other)]",
        "gains = [jnp.ones_like(highest) for _ in (one, other)]",
        (TEST_TILES,), "the round with the largest score counts too little",
    ),
    Mutant(
        "contexts for kernels begin anywhere", "positions", WORK,
        "first = np.where(is_chunk, oldest // size * unit, 0)",
        "first = np.where(is_chunk, oldest // block_size, 0)",
        (TEST_TILES,), "spans are of two contexts",
    ),
    Mutant(
        "a block of the tables is a device's", "positions", RULE,
        "size = deployment.block_size * deployment.layout.copies", "size = deployment.block_size",
        (TEST_RULE, ON_DEVICES), "the pool is smaller than memory allows",
    ),
    Mutant(
        "runs of a fleet's stripes are counted by place", "positions", POSITIONS,
        "return place // self.splits + self._of_unit * reversed_digits(place, self.splits)",
        "return place",
        (TEST_POSITIONS, TEST_MOVER), "groups would have to exchange parts of blocks",
    ),
    Mutant(
        "what is gathered is read in the order of places", "positions", GATHERED,
        "return positions.place(lax.rem(nth, ways))", "return lax.rem(nth, ways)",
        (TEST_ATTENTION, IN_FLEETS), "prompts of wide groups see keys of other positions",
    ),
    Mutant(
        "wide groups take narrow blocks in the order of places", "positions", MOVER,
        "split = split[:, shapes.order]", "split = split[:, np.sort(shapes.order)]",
        (TEST_MOVER,), "a request that moves attends to keys of other positions",
    ),
    Mutant(
        "narrow groups take wide blocks in the order of places", "positions", MOVER,
        "got = got[:, shapes.order]", "got = got[:, np.sort(shapes.order)]",
        (TEST_MOVER,), "a request that moves attends to keys of other positions",
    ),
    Mutant(
        "phases have blocks of their own", "positions", RULE,
        "math.lcm(*(each.block_size for each in deployments))",
        "max(each.block_size for each in deployments)",
        ("tests/phases/test_configurations.py",), "a block cannot be split by all",
    ),
)
