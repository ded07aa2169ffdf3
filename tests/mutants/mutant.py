"""What a mutant is: a wrong program, one change away from ours."""

from typing import NamedTuple


class Mutant(NamedTuple):
    """`old`, which stands exactly once in `file`, becomes `new`; one of `tests` must then fail."""

    name: str  # unique: `run.py --only` takes it
    area: str
    file: str  # as `tests`, from the root of the repository
    old: str
    new: str
    tests: tuple[str, ...]  # the cheapest first: files, or single tests of dear ones
    why: str  # what goes wrong for whoever uses it
