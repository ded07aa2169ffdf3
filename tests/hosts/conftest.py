"""The way to what tests of the server share, and to the load scripts' parts."""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "serving"), str(TESTS.parent / "scripts")]
