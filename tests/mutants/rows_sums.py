"""Mutants of sums over devices by a switch: how devices meet, and the norm behind a sum."""

from mutant import Mutant

KERNEL, BACKEND = "pallas_kernels/sum_norm.py", "shiftjax/models/sum_backend.py"
CASES = "shiftjax/device/sum_cases.py"
PROTOCOL = ("tests/kernels/test_sum_protocol.py",)
NORM = ("tests/kernels/test_sum_norm.py",)
CHOICE = ("tests/models/test_sum_backend.py",)

ROWS = (
    Mutant(
        "a device waits for all but one", "sums", KERNEL,
        "wait(counter, _num_devices(axes))", "wait(counter, _num_devices(axes) - 1)",
        PROTOCOL, "a sum lacks what the slowest device adds",
    ),
    Mutant(
        "partial sums are not kept until the next sum", "sums", KERNEL,
        "before = None if meeting is None else meeting.before", "before = None",
        PROTOCOL, "a device that runs ahead overwrites what others still read",
    ),
    Mutant(
        "sums are read before devices have met", "sums", KERNEL,
        '        _meet(ins.pop().at[lax.axis_index("row")], axes)\n', "        ins.pop()\n",
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
        "the check takes devices that disagree", "sums", CASES,
        "if any((own != streams[0]).any() for streams in outputs for own in streams):",
        "if False:",
        CHOICE, "devices go on from different hidden states",
    ),
)  # fmt: skip
