"""Batch generation: JSON lines in, a record per line out, in the same order.

    python scripts/generate.py --prompts prompts.jsonl --output out.jsonl --sp 2 --tp 4

The same as `shiftjax batch prompts.jsonl --output out.jsonl --format plain`, whose other flags it
takes. An input line is {"prompt": ...} or {"messages": [...]}, with an `id` and fields of
SamplingParams if wanted; the sampling flags are the defaults of lines without them. A line that
cannot be run gives {"id", "line", "error"} in its place. --resume continues a broken run.
"""

import argparse
import sys
from collections.abc import Sequence

from serving.cli.main import guarded
from serving.cli.main import main as shiftjax
from serving.run.flags import UsageParser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the batch; exit codes as for `shiftjax`."""
    style = argparse.RawDescriptionHelpFormatter
    parser = UsageParser(description=__doc__, formatter_class=style, allow_abbrev=False)
    parser.add_argument("--prompts", required=True, metavar="FILE", help="JSON lines")
    parser.add_argument("--output", required=True, metavar="FILE", help="JSON lines")

    def run() -> int:
        known, rest = parser.parse_known_args(argv)
        files = [known.prompts, f"--output={known.output}"]
        return shiftjax(["batch", *files, "--format=plain", *rest])

    return guarded(run)


if __name__ == "__main__":
    sys.exit(main())
