"""Which sums over devices have a kernel, and in how many shots: by their rows and width. No JAX.

In one shot each device reads the sums of all rows: a device's part is read once for each device. In
two, a device reads those of its own rows, and sends what it makes of them.
"""

STEP = 512  # columns: four blocks, a warp each
MOST_WIDTH = 16384  # columns: 128 registers of a thread
MOST_ROWS = 64  # of one shot: a thread block each, and all of them must be at work at once
MOST_BLOCKS = 128  # thread blocks of two shots: one for each multiprocessor of Hopper, nearly
MOST_SPLIT_ROWS = 8192  # of two shots
NUMBER_BYTES = 2  # bfloat16
# Fewer read each other's memory sooner than the switch adds up. vLLM's tables for Hopper, pull
# request 24111: 0.5 MB of 4 devices in 10 us by reading, 16 by the switch; of 6 in 13 by either.
LEAST_DEVICES = 6
# Of partial sums that a device sends in all, in one shot. The second shot takes about a
# microsecond more, in which NVLink on Hopper sends 0.4 MB; where there is none, 2 MiB are worth it.
MOST_SENT, MOST_SENT_ALONE = 1 << 19, 2 << 20


def shots(rows: int, devices: int, width: int, *, splits_rows: bool = True) -> int:
    """Return in how many shots the kernels do a sum of bfloat16 rows; 0: they do not.

    With `splits_rows` devices may have the stream of their own rows alone.
    """
    if devices < LEAST_DEVICES or wrong_size(1, width):
        return 0
    sent = devices * NUMBER_BYTES * width * rows
    can_split = splits_rows and not wrong_rows(rows, devices, width)
    if rows <= MOST_ROWS and sent <= (MOST_SENT if can_split else MOST_SENT_ALONE):
        return 1
    return 2 if can_split else 0


def blocks_of(rows: int, devices: int) -> int:
    """Return thread blocks of two shots: each takes as many of a device's rows."""
    own = rows // devices
    return next(blocks for blocks in range(min(own, MOST_BLOCKS), 0, -1) if own % blocks == 0)


def wrong_rows(rows: int, devices: int, width: int) -> str | None:
    """Return why there is no kernel of two shots for sums of this size; None: there is."""
    if rows % devices or not rows:
        return f"{rows} rows are not as many for each of {devices} devices"
    if rows > MOST_SPLIT_ROWS:
        return f"{rows} rows are more than {MOST_SPLIT_ROWS}"
    return wrong_size(1, width)


def wrong_size(rows: int, width: int) -> str | None:
    """Return why there is no kernel of one shot for sums of this size; None: there is."""
    if rows > MOST_ROWS:
        return f"{rows} rows are more than {MOST_ROWS}"
    if width % STEP:
        return f"a hidden size of {width} is not a multiple of {STEP}"
    if width > MOST_WIDTH:
        return f"a hidden size of {width} is more than the registers of a thread block hold"
    return None
