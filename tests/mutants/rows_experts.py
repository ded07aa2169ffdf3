"""Mutants of experts that are used as in modes of their own: who has them, who adds them up."""

from mutant import Mutant

EXPERTS = "shiftjax/models/experts.py"
EXCHANGE = "shiftjax/models/exchange.py"
LAYOUT = "shiftjax/parallel/layout.py"
VIEWS = "shiftjax/device/views.py"

TEST_LAYER = "tests/models/test_experts.py"
TEST_USES = "tests/device/test_expert_uses.py"
DEALT = f"{TEST_USES}::test_pairs_are_dealt_out_in_equal_parts"
HELD = f"{TEST_USES}::test_every_expert_of_every_token_is_on_one_device_or_dealt_among_some"
PARITY = "tests/models/test_parity.py::test_every_use_of_experts_equals_transformers"

ROWS = (
    Mutant(
        "the first expert of a device is off by one",
        "experts",
        EXPERTS,
        "own = chosen - parallel.expert_place * layer.num_own",
        "own = chosen - parallel.expert_place * layer.num_own - 1",
        (TEST_LAYER,),
        "tokens are computed with the expert before theirs",
    ),
    Mutant(
        "what is beside experts is added twice",
        "experts",
        EXCHANGE,
        "return partial if beside is None else partial + beside",
        "return partial if beside is None else partial + 2 * beside",
        (TEST_LAYER,),
        "a shared expert counts twice",
    ),
    Mutant(
        "all devices with the same experts compute the same pairs",
        "experts",
        EXPERTS,
        "    if parallel.deals > 1:",
        "    if parallel.deals < 0:",
        (TEST_LAYER,),
        "sums are as many times too large",
    ),
    Mutant(
        "what cannot be dealt out evenly is left out",
        "experts",
        EXPERTS,
        "ends[-1] * nth // num_devices",
        "ends[-1] // num_devices * nth",
        (DEALT,),
        "the last pairs are lost",
    ),
    Mutant(
        "tokens of the devices that share experts come in the opposite order",
        "experts",
        EXCHANGE,
        "first = jnp.arange(shares) * apart +",
        "first = jnp.arange(shares)[::-1] * apart +",
        (TEST_LAYER,),
        "padding takes the place of tokens",
    ),
    Mutant(
        "experts are viewed as if base stored them",
        "experts",
        LAYOUT,
        'stored = self.sp if axis != "experts" or self.widest else self.least_split.sp',
        "stored = self.sp",
        (HELD,),
        "experts that are stored in a mode between are a neighbour's",
    ),
    Mutant(
        "biases and scales are those of the first experts",
        "experts",
        VIEWS,
        "np.array(shard[start : start + rows])",
        "np.array(shard[:rows])",
        (PARITY,),
        "an expert has the scale of a neighbour's",
    ),
)
