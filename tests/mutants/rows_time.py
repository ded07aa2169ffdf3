"""Mutants that change no token: they cost time, or give it to the wrong request."""

from mutant import Mutant

ROWS: tuple[Mutant, ...] = ()
