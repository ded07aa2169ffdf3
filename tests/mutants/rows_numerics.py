"""Mutants of `numerics`: what the bits of a log-probability must not depend on."""

from mutant import Mutant

SUMS, LEAVES = "shiftjax/models/sums.py", "shiftjax/models/leaves.py"
OF_SUMS = ("tests/models/test_sums.py",)
BITS = ("tests/device/test_numerics.py",)
RULE = ("tests/deploy/test_numerics_rule.py",)

ROWS = (
    Mutant(
        "leaves are summed in the order of places", "numerics", SUMS,
        "zip(parts[::2], parts[1::2], strict=True)",
        "zip(parts[: len(parts) // 2], parts[len(parts) // 2 :], strict=True)",
        OF_SUMS, "a mode that sums its own leaves has another order than one that exchanges them",
    ),
    Mutant(
        "units of fixed-point numbers follow a device's own leaves", "numerics", SUMS,
        "largest = largest if ways.num == 1 else jax.lax.pmax(largest, ways.axes)", "pass",
        OF_SUMS, "devices add numbers of other units",
    ),
    Mutant(
        "a device multiplies its leaves at once", "numerics", LEAVES,
        "_leaves_of(x, matrix, parallel.num_leaves)", "_leaves_of(x, matrix, 1)",
        BITS, "base and shift differ in their last bits",
    ),
    Mutant(
        "XLA keeps float32 where it likes", "numerics", "shiftjax/device/strict.py",
        '"cpu": {"xla_allow_excess_precision": False}', '"cpu": {}',
        BITS, "a program of another size rounds elsewhere",
    ),
    Mutant(
        "tiles take more of a context at once than rows", "numerics",
        "shiftjax/models/attention_work.py",
        "sizes._replace(tile_chunk=loop(1).chunk)", "sizes",
        ("tests/models/test_attention.py",), "a token of a chunk has other bits than a decoded one",
    ),
    Mutant(
        "a context is cut by the blocks of the group that has it", "numerics",
        "shiftjax/device/groups.py", "largest = max(", "largest = min(",
        BITS, "a request that moves to a wider group has other sums from there on",
    ),
    Mutant(
        "phases have leaves of their own", "numerics", "shiftjax/phases/configurations.py",
        "with_equal_leaves(on_one_stripe([*found.values()]))", "on_one_stripe([*found.values()])",
        BITS, "prompts are computed with other sums than a static engine of as many devices has",
    ),
    Mutant(
        "probabilities are summed by device", "numerics", "shiftjax/device/sampling.py",
        "if self.parallel.numerics.is_strict:", "if False:",
        BITS, "a wider group of a fleet has another normaliser",
    ),
    Mutant(
        "contractions of codes are cut as items are few", "numerics",
        "pallas_kernels/block_problem.py",
        "return BlockConfig(FEW_ROWS[-1], 1, cores)", "return block_config(x, matrices, result)",
        ("tests/kernels/test_block_product.py",), "a mode with less of a matrix adds up otherwise",
    ),
    Mutant(
        "on GPUs decodes attend by a kernel of their own", "numerics",
        "pallas_kernels/step_work.py",
        "sequences = sequences._replace(num_decodes=0)", "pass",
        ("tests/kernels/test_decode_invariance.py",), "decoded tokens are not computed at all",
    ),
    Mutant(
        "XLA chooses tiles of products by their rows", "numerics", "shiftjax/device/strict.py",
        "if TILE in options:", "if options.pop(TILE, None) is None:",
        ("tests/device/test_gpu_start.py",), "a row has other bits beside more rows",
    ),
    Mutant(
        "XLA sums the weights of a softmax", "numerics", "shiftjax/models/attention.py",
        "_sum_by_halves(p) if in_order else p.sum(axis=-1)", "p.sum(axis=-1)",
        ("tests/models/test_attention.py",), "the order depends on how many heads a device has",
    ),
    Mutant(
        "a step may have a single row", "numerics", "shiftjax/arch/numerics.py",
        "LEAST_ROWS = 8", "LEAST_ROWS = 1",
        RULE, "XLA multiplies one row in another order",
    ),
)  # fmt: skip
