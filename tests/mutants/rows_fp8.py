"""Mutants of codes of eight bits: which numbers share a scale, and how they are multiplied."""

from mutant import Mutant

PRODUCTS = "shiftjax/models/products.py"
BLOCKS = "shiftjax/parallel/blocks.py"

FORMAT = "tests/device/test_fp8_format.py"
OF_PRODUCTS = f"{FORMAT}::test_products_are_those_of_the_definition"
OF_ACTIVATIONS = f"{FORMAT}::test_codes_of_activations_are_the_same_bits_in_every_mode"
OF_SQUARES = f"{FORMAT}::test_squares_of_a_checkpoint_are_kept_exactly"
OF_WEIGHTS = f"{FORMAT}::test_codes_and_scales_are_the_same_bits_in_every_mode"
TEST_BLOCKS = "tests/parallel/test_code_blocks.py"

OF_HEADS = "tests/kernels/test_head_codes.py"
OF_EXPERTS = "tests/kernels/test_grouped.py::test_every_own_pair_is_its_experts_mlp"
TEST_EXPERTS = "tests/device/test_expert_cases.py"

ROWS = (
    Mutant(
        "experts with scales of squares are taken for such of channels", "fp8",
        "shiftjax/models/expert_backend.py",
        "return shape._replace(squares=codes.rows_of_scale)", "return shape",
        (f"{TEST_EXPERTS}::test_only_experts_that_the_kernels_take_are_tried",),
        "the check tries another kernel than the one that serves",
    ),
    Mutant(
        "sums of experts' codes are cut for blocks of 256 channels", "fp8",
        "pallas_kernels/grouped_split.py",
        "Items(-(-channels // PART), BLOCK", "Items(-(-channels // (2 * PART)), BLOCK",
        ("tests/kernels/test_grouped.py::test_items_of_codes_are_blocks",),
        "prices have half the items, and read at half the rate",
    ),
    Mutant(
        "codes of experts' rows are those of the row before", "fp8",
        "pallas_kernels/grouped_rows.py",
        "source = token[place]", "source = token[jnp.maximum(place - 1, 0)]",
        (OF_EXPERTS,), "tokens are computed as their neighbours",
    ),
    Mutant(
        "large tiles of experts have scales of squares", "fp8", "pallas_kernels/grouped_codes.py",
        "return TILE_ROWS[-1 if can_be_many", "return TILE_ROWS[-1 if True or can_be_many",
        ("tests/kernels/test_grouped.py::test_squares_have_tiles_of_64_rows_at_most",),
        "registers spill, and prompts of Qwen3-235B take several times as long",
    ),
    Mutant(
        "tokens without attention have a scale of 0", "fp8", "pallas_kernels/head_codes.py",
        "unit = LEAST_SCALE if kind.fixed", "unit = 0.0 if kind.fixed",
        (f"{OF_HEADS}::test_rows_that_no_row_of_the_work_is_are_zeros",), "0 * 0 where XLA has 0",
    ),
    Mutant(
        "attention's codes are of numbers that nothing has rounded", "fp8",
        "pallas_kernels/head_codes.py",
        "values.astype(dtype).astype(jnp.float32)", "values",
        (f"{OF_HEADS}::test_rows_leave_as_codes",), "SHIFT's codes of o differ from BASE's",
    ),
    Mutant(
        "activations have the scale of the next block", "fp8", PRODUCTS,
        "scale = jnp.repeat(codes.scale.T, block, axis=1)",
        "scale = jnp.repeat(jnp.roll(codes.scale.T, -1, axis=1), block, axis=1)",
        (OF_PRODUCTS,), "texts are plausible and wrong",
    ),
    Mutant(
        "weights have the scale of the next block", "fp8", "shiftjax/parallel/square_blocks.py",
        "np.where(inputs < 0, -1, inputs // BLOCK)",
        "np.where(inputs < 0, -1, (inputs // BLOCK + 1) % (inputs.max() // BLOCK + 1))",
        (OF_SQUARES,), "o and down of a checkpoint in squares are wrong",
    ),
    Mutant(
        "the last block of a ragged row has the scale of the one before", "fp8", PRODUCTS,
        "return jnp.repeat(scale, BLOCK, axis=1)[:, :inputs]",
        "return jnp.repeat(scale, BLOCK, axis=1)[:, -BLOCK - inputs : -BLOCK]",
        (OF_PRODUCTS,), "hidden sizes that are no multiple of a block are wrong",
    ),
    Mutant(
        "the last block of a ragged row is left out", "fp8", PRODUCTS,
        "num_blocks = -(-width // block)", "num_blocks = max(1, width // block)",
        (OF_PRODUCTS,), "hidden sizes that are no multiple of a block fail",
    ),
    Mutant(
        "codes are rounded twice", "fp8", PRODUCTS,
        "return (wide / scale[..., None]).astype(CODE), scale",
        "return (wide / scale[..., None]).astype(jnp.bfloat16).astype(CODE), scale",
        (OF_ACTIVATIONS,), "numbers at the border of two codes get the other",
    ),
    Mutant(
        "what a fixed scale cannot say becomes NaN", "fp8", PRODUCTS,
        "jnp.clip(x.astype(jnp.float32) / fixed[0], -LARGEST_CODE, LARGEST_CODE)",
        "x.astype(jnp.float32) / fixed[0]",
        (OF_ACTIVATIONS,), "an activation beyond the calibrated ones ends the text",
    ),
    Mutant(
        "blocks of o go on in heads of other keys", "fp8", BLOCKS,
        "or (num_sharing > 1 and num_sharing % heads)", "or False",
        (TEST_BLOCKS,), "codes depend on the devices where heads are padded",
    ),
    Mutant(
        "squares are those of the rows before padding", "fp8", PRODUCTS,
        "jnp.repeat(scale, values.shape[1] // scale.shape[1], axis=1)",
        "jnp.tile(scale, (1, values.shape[1] // scale.shape[1]))",
        (OF_PRODUCTS,), "outputs have the scales of others",
    ),
)  # fmt: skip
