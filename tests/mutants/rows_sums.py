"""Mutants of sums over devices by a switch: how devices meet, and the norm behind a sum."""

from mutant import Mutant

KERNEL, BACKEND = "pallas_kernels/sum_norm.py", "shiftjax/models/sum_backend.py"
CASES = "shiftjax/device/sum_cases.py"
PROTOCOL = ("tests/kernels/test_sum_protocol.py",)
NORM = ("tests/kernels/test_sum_norm.py",)
CHOICE = ("tests/models/test_sum_backend.py",)
ROWS_KERNEL, SIZES = "pallas_kernels/sum_rows.py", "pallas_kernels/sum_sizes.py"
SWITCH = "shiftjax/costs/switch_sums.py"
ROWS_PROTOCOL = ("tests/kernels/test_rows_protocol.py",)
OF_ROWS = ("tests/kernels/test_sum_rows.py",)
PRICES = ("tests/costs/test_switch_sums.py",)

ROWS = (
    Mutant(
        "a device waits for all but one", "sums", KERNEL,
        "wait(counter, num_devices(axes))", "wait(counter, num_devices(axes) - 1)",
        PROTOCOL, "a sum lacks what the slowest device adds",
    ),
    Mutant(
        "partial sums are not kept until the next sum", "sums", KERNEL,
        "before = None if meeting is None else meeting.before", "before = None",
        PROTOCOL, "a device that runs ahead overwrites what others still read",
    ),
    Mutant(
        "sums are read before devices have met", "sums", KERNEL,
        '        meet(ins.pop().at[lax.axis_index("row")], axes)\n', "        ins.pop()\n",
        PROTOCOL, "a sum is of an earlier layer on some devices",
    ),
    Mutant(
        "every norm is the first layer's", "sums", KERNEL,
        "0 if given.nth is None else given.nth[0]", "0",
        NORM, "texts are plausible and wrong",
    ),
    Mutant(
        "the largest number of a block is the largest positive one", "sums",
        "pallas_kernels/norm_codes.py",
        "jnp.max(jnp.abs(values), axis=-1)", "jnp.max(values, axis=-1)",
        NORM, "codes of large negative numbers saturate",
    ),
    Mutant(
        "a switch serves where results must be the same bits", "sums", BACKEND,
        "        if needs.deterministic:", "        if False:",
        CHOICE, "deterministic promises what no switch does",
    ),
    Mutant(
        "a switch serves though its check failed", "sums", BACKEND,
        "elif words := needs.check(shape):", "elif (words := needs.check(shape)) and False:",
        CHOICE, "sums are wrong, or a server hangs",
    ),
    Mutant(
        "nobody waits for the rows of others", "sums", ROWS_KERNEL,
        "        meet(counters.at[MOST_BLOCKS + block], axes)\n", "",
        ROWS_PROTOCOL, "a product reads rows that have not come",
    ),
    Mutant(
        "both meetings of a launch share a counter", "sums", ROWS_KERNEL,
        "meet(counters.at[MOST_BLOCKS + block]", "meet(counters.at[block]",
        ROWS_PROTOCOL, "a quick device's next signal is taken for a slow one's last",
    ),
    Mutant(
        "rows are stored on devices that have not begun", "sums", ROWS_KERNEL,
        "        meet(counters.at[block], axes)\n", "",
        ROWS_PROTOCOL, "what a device still reads is overwritten",
    ),
    Mutant(
        "every device computes the first one's rows", "sums", ROWS_KERNEL,
        "group.rank * own)", "0 * own)",
        OF_ROWS, "most rows of a norm are never written",
    ),
    Mutant(
        "a thread block does its first row alone", "sums", ROWS_KERNEL,
        "do(block + i * blocks)", "do(block)",
        OF_ROWS, "prompts of more than 1,024 tokens are garbage",
    ),
    Mutant(
        "rows that devices cannot share are split all the same", "sums", SIZES,
        "    if rows % devices or not rows:", "    if not rows:",
        OF_ROWS, "the last rows have no device",
    ),
    Mutant(
        "models that add a bias split their stream", "sums", SWITCH,
        "of_a_layer(model, parts) == 2 for", "of_a_layer(model, parts) >= 1 for",
        PRICES, "a norm without a sum reads the rows of one device",
    ),
    Mutant(
        "sums in two shots have the price of one", "sums", SWITCH,
        "volume = VOLUMES[self.shots(mode, num_tokens)]", "volume = VOLUMES[1]",
        PRICES, "SHIFT looks dear from a few tokens on",
    ),
    Mutant(
        "groups that share the devices have sums by the switch in their prices", "sums",
        "shiftjax/deploy/deployment.py",
        "is_one_group = self.dp == self.pp == 1", "is_one_group = self.pp == 1",
        PRICES, "plan prefers replicas whose sums are XLA's",
    ),
    Mutant(
        "the last stream is that of a device's rows", "sums", "shiftjax/device/step.py",
        "sums.closed(last, self.layout.model)", "last",
        ("tests/models/test_open_sums.py",), "logits are of the wrong rows",
    ),
    Mutant(
        "the check takes devices that disagree", "sums", CASES,
        "if any((own != streams[0]).any() for streams in outputs for own in streams):",
        "if False:",
        CHOICE, "devices go on from different hidden states",
    ),
)  # fmt: skip
