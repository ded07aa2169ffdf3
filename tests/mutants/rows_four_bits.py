"""Mutants of weights of four bits: how they are read, stored and multiplied."""

from mutant import Mutant

PRODUCTS = "shiftjax/models/four_bits.py"
STORED = "shiftjax/parallel/four_bits.py"
READERS = "shiftjax/weights/packed_codes.py"
PLACE = "shiftjax/device/place.py"

TEST_PRODUCTS = "tests/models/test_packed_products.py"
TEST_DEVICE = "tests/device/test_four_bits.py"
SAID = f"{TEST_DEVICE}::test_codes_on_devices_say_the_numbers_of_the_file"
QUANTISED = "tests/weights/test_quantised_checkpoints.py"

KERNEL_PRODUCTS = "tests/kernels/test_grouped.py::test_every_own_pair_is_its_experts_mlp"

ROWS = (
    Mutant(
        "kernels read the halves of bytes as each other", "kernels", "pallas_kernels/four_bits.py",
        "_shifted(word, 12 - 4 * pair), _shifted(word, 6 - 4 * pair)",
        "_shifted(word, 12 - 4 * (pair ^ 1)), _shifted(word, 6 - 4 * (pair ^ 1))",
        ("tests/kernels/test_four_bit_registers.py::test_every_word_has_its_eight_numbers",),
        "neighbouring inputs change places",
    ),
    Mutant(
        "kernels give a group the scale of the next", "kernels", "pallas_kernels/grouped_fetch.py",
        "first = lax.div(nth * problem.step,", "first = lax.div((nth + 1) * problem.step,",
        (KERNEL_PRODUCTS,), "texts are plausible and wrong",
    ),
    Mutant(
        "kernels multiply all steps with the first block", "kernels",
        "pallas_kernels/grouped_fetch.py",
        "    return block, nth - block", "    return 0 * block, nth - block",
        ("tests/kernels/test_dense.py",), "o and down of a device with several blocks are wrong",
    ),
    Mutant(
        "kernels drop the last group of a row", "kernels", "pallas_kernels/four_bits.py",
        "first = unit * UNIT // coded.group",
        "first = min(unit, units - 2) * UNIT // coded.group",
        (KERNEL_PRODUCTS,), "its inputs are in units of the group before",
    ),
    Mutant(
        "threads of a row have the scales of the other group", "kernels",
        "pallas_kernels/four_bits.py", "(-6,), (-2, -3, same))", "(-6,), (-3, -2, same))",
        ("tests/kernels/test_four_bit_registers.py::test_threads_hold_what_instructions_take",),
        "only a GPU shows it",
    ),
    Mutant(
        "channels of gate and up are turned another way", "kernels", "pallas_kernels/four_bits.py",
        "(-9, -5), (-11, -7, -2))", "(-9, -7), (-11, -5, -2))",
        ("tests/kernels/test_four_bit_registers.py::test_threads_hold_what_instructions_take",),
        "only a GPU shows it",
    ),
    Mutant(
        "the upper four bits come first", "weights", PRODUCTS,
        "jnp.stack([codes & 15, codes >> 4], axis=1)",
        "jnp.stack([codes >> 4, codes & 15], axis=1)",
        (TEST_PRODUCTS,), "neighbouring inputs change places",
    ),
    Mutant(
        "a group has the scale of the next", "weights", PRODUCTS,
        "numbers = numbers * units[:, None, :, None]",
        "numbers = numbers * jnp.roll(units, -1, axis=1)[:, None, :, None]",
        (TEST_PRODUCTS,), "texts are plausible and wrong",
    ),
    Mutant(
        "the last group of a row has the scale of the one before", "weights", PRODUCTS,
        "numbers = numbers * units[:, None, :, None]",
        "numbers = numbers * units.at[:, -1].set(units[:, -2])[:, None, :, None]",
        (TEST_PRODUCTS,), "texts are plausible and wrong",
    ),
    Mutant(
        "the least number of e2m1 is 1", "weights", PRODUCTS,
        "jnp.where(most > 1, (most << 22) + (126 << 23), most * (126 << 23))",
        "jnp.where(most > 1, (most << 22) + (126 << 23), most * (127 << 23))",
        (TEST_PRODUCTS,), "0.5 has no implicit bit",
    ),
    Mutant(
        "a block has the groups of the one before", "weights", STORED,
        "            return found\n", "            return np.roll(found, 1, axis=0)\n",
        (SAID,), "row-parallel matrices have wrong scales",
    ),
    Mutant(
        "blocks lie in one group however many there are", "weights", STORED,
        "if ((parts == found[..., None]) | (parts < 0)).all():", "if found.size:",
        (f"{TEST_DEVICE}::test_padded_heads_have_whole_groups",
         f"{TEST_DEVICE}::test_a_block_that_cuts_groups_is_refused_with_what_to_use"),
        "a group that a block cuts has a scale of another",
    ),
    Mutant(
        "experts' scales stay as the file has them", "weights", PLACE,
        "one = one._replace(transposed=True)", "pass",
        (SAID,), "scales and outputs change places",
    ),
)  # fmt: skip
