"""Mutants of counted and told routing: who counts and tells what, what prices make of it."""

from mutant import Mutant

EXPERTS = "shiftjax/models/experts.py"
COUNTS = "shiftjax/routing/counts_device.py"
HISTORY = "shiftjax/routing/history.py"
ROUTING = "shiftjax/costs/routing.py"
TEST_LAYER = "tests/routing/test_layer_counts.py"
TEST_COUNTS = "tests/routing/test_counts_device.py"
TEST_HISTORY = "tests/routing/test_routing_history.py"
TEST_ROUTING = "tests/costs/test_routing.py"
TEST_PRICES = "tests/routing/test_repricing.py"
CHOSEN = "shiftjax/routing/chosen.py"
TABLES = "shiftjax/core/block_tables.py"
TEST_CHOSEN = "tests/routing/test_chosen.py"
TEST_TOLD = "tests/routing/test_chosen_experts.py"

ROWS = (
    Mutant(
        "padding is computed and counted",
        "routing",
        EXPERTS,
        "& (own < layer.num_own) & is_real[:, None]",
        "& (own < layer.num_own)",
        (TEST_LAYER,),
        "small steps weigh as large ones in the histogram",
    ),
    Mutant(
        "padding is sent and counted",
        "routing",
        EXPERTS,
        "jnp.where(is_real, chosen // layer.num_own, num_devices)",
        "chosen // layer.num_own",
        (TEST_LAYER,),
        "small steps weigh as large ones in the histogram",
    ),
    Mutant(
        "every device counts what it has others compute",
        "routing",
        EXPERTS,
        "routed, is_own = deal(",
        "_, is_own = deal(",
        (TEST_LAYER,),
        "tokens of SHIFT count as often as devices deal them out",
    ),
    Mutant(
        "on several hosts all count as the first",
        "routing",
        COUNTS,
        "everywhere, own, (0, first)",
        "everywhere, own, (0, 0)",
        (TEST_LAYER,),
        "the first device's experts have all tokens",
    ),
    Mutant(
        "all stages count as the first",
        "routing",
        COUNTS,
        "sum(layers[:stage])",
        "0 * sum(layers[:stage])",
        (TEST_COUNTS,),
        "half of the layers are never known",
    ),
    Mutant(
        "nothing is forgotten",
        "routing",
        HISTORY,
        "kept * moved[rows] + counts",
        "moved[rows] + counts",
        (TEST_HISTORY,),
        "prices follow the traffic of long ago",
    ),
    Mutant(
        "every addition is told",
        "routing",
        HISTORY,
        "np.all(np.abs(skews / self._told - 1) < LEAST_CHANGE)",
        "False",
        (TEST_HISTORY,),
        "predictions are made anew all the time",
    ),
    Mutant(
        "all stages are priced by the first layers",
        "routing",
        ROUTING,
        "        first += num",
        "        first += 0 * num",
        (TEST_ROUTING,),
        "the skew of later layers is nobody's",
    ),
    Mutant(
        "padding comes before the experts",
        "routing",
        ROUTING,
        "(0, -counts.shape[1] % padded_for)",
        "(-counts.shape[1] % padded_for, 0)",
        (TEST_ROUTING,),
        "devices are said to have other experts",
    ),
    Mutant(
        "devices vary together",
        "routing",
        ROUTING,
        "1 - below.prod(axis=1)",
        "1 - below.min(axis=1)",
        (TEST_ROUTING,),
        "chance adds nothing to the most loaded",
    ),
    Mutant(
        "a policy names what nobody compiled",
        "routing",
        "shiftjax/core/policies.py",
        "if wanted is None or mode in wanted",
        "if wanted is None or mode in modes",
        (TEST_PRICES,),
        "a step is compiled while requests wait",
    ),
    Mutant(
        "devices that bring tokens together tell of the first one's",
        "routing",
        "shiftjax/models/exchange.py",
        "start = jax.lax.axis_index(SHARE_AXIS) * count\n        return jax.lax",
        "start = 0 * count\n        return jax.lax",
        (TEST_LAYER,),
        "a trainer replays experts of other tokens",
    ),
    Mutant(
        "where an exchange has no room, all tokens are told by each",
        "routing",
        EXPERTS,
        "parallel.own_part(counted.chosen)",
        "counted.chosen[: sent.expert.shape[0]]",
        (TEST_LAYER,),
        "a trainer replays experts of other tokens",
    ),
    Mutant(
        "stages tell in the wrong order",
        "routing",
        "shiftjax/phases/pipeline_device.py",
        "told += own",
        "told = own + told",
        (TEST_TOLD,),
        "layers have the experts of other layers",
    ),
    Mutant(
        "wrong guesses have experts",
        "routing",
        CHOSEN,
        "rows[: 1 + num_accepted(item, sampled)]",
        "rows",
        (TEST_CHOSEN,),
        "tokens have the experts of guesses that were wrong",
    ),
    Mutant(
        "a token that is computed again has other experts",
        "routing",
        CHOSEN,
        "new = rows[self.end - start :]",
        "self.end = start\n        new = rows",
        (TEST_CHOSEN,),
        "a trainer replays other experts than a token was sampled by",
    ),
    Mutant(
        "prefixes that are found have no experts",
        "routing",
        CHOSEN,
        "                own.add(number * self._size, rows)",
        "                pass",
        (TEST_CHOSEN,),
        "answers with cached prompts lack experts",
    ),
    Mutant(
        "a prefix is found whether its experts are known or not",
        "routing",
        TABLES,
        "if not request.wants_notes:",
        "if True:",
        (TEST_CHOSEN,),
        "answers with cached prompts lack experts",
    ),
    Mutant(
        "experts of old weights stay",
        "routing",
        "shiftjax/core/scheduler.py",
        "sequence.version, sequence.notes = version, None",
        "sequence.version = version",
        (TEST_CHOSEN,),
        "KV of new weights is found with experts of old ones",
    ),
)
