"""`python -m shiftjax`: the program `shiftjax`, where its script is not on the path."""

import sys

from serving.cli.entry import main

if __name__ == "__main__":
    sys.exit(main())
