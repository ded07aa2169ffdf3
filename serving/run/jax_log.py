"""What JAX logs while it looks for devices, as far as it is worth reading. No JAX.

It tries every backend that it knows. Its Python loggers say at INFO which are not here (`Unable to
initialize backend 'tpu': ... Failed to open libtpu.so`), and at ERROR, with a traceback, which
plugin does not start, as that for NVIDIA's GPUs on a machine without their libraries. Warnings,
such as of a GPU that is there and not used, and what C++ writes to stderr are left as they are.
"""

import logging

BACKENDS = "jax._src.xla_bridge"


def shorten_jax_log() -> None:
    """Show warnings and errors alone, the latter in a line each."""
    logging.getLogger("jax").setLevel(logging.WARNING)
    logging.getLogger(BACKENDS).addFilter(_in_a_line)


def _in_a_line(record: logging.LogRecord) -> bool:
    """Put the exception of a record, instead of its traceback, behind the message."""
    if record.exc_info and (error := record.exc_info[1]) is not None:
        reason = " ".join(str(error).split())
        record.msg, record.args = f"{record.getMessage()}: {reason}", ()
        record.exc_info = record.exc_text = None
    return True
