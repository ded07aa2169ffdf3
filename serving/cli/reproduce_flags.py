"""The flags of `reproduce`: all that --help has to import of it."""

from pathlib import Path
from typing import Any

from serving.cli.mesh_flags import Add
from shiftjax.reproduce.papers import PAPERS


def add_command(subparsers: Any, add: Add) -> None:
    """Register the command; `add` makes a subparser as the rest of the command line does."""
    text = "run the evaluations of published systems, simulated, beside their figures"
    parser = add(subparsers, "reproduce", "cli.reproduce.reproduce", text)
    known = "; ".join(f"{name}: {words}" for name, words in PAPERS.items())
    text = f"{known}. Default: all, which takes minutes".replace("%", "%%")
    parser.add_argument("paper", nargs="?", choices=tuple(PAPERS), metavar="PAPER", help=text)
    text = "write the report with pictures, the rows and a Markdown table there"
    parser.add_argument("--out", type=Path, metavar="DIR", help=text)
    text = "folder of the traces that papers name, see docs; without it their figures are not run"
    parser.add_argument("--traces", type=Path, metavar="DIR", help=text)
    parser.add_argument("--only", metavar="PART,...", help="parts of one paper, by name")
    parser.add_argument("--quick", action="store_true", help=_QUICK)


_QUICK = "shorter runs with the same kinds of figures: to see that it works, not how near it is"
