"""The program `shiftjax`: Ctrl-C while modules are imported ends it without a traceback."""

import signal


def main() -> int:
    """Import the command line, which takes a while, and run it."""
    was = signal.getsignal(signal.SIGINT)
    if was is signal.default_int_handler:  # else it is ignored, as behind `nohup`
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from serving.cli.main import main as run

    signal.signal(signal.SIGINT, was)
    return run()
