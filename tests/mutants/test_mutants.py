"""The table of mutants fits the sources: each can be applied, and has tests that could find it."""

from collections import Counter
from pathlib import Path

import pytest
from mutant_table import MUTANTS
from run import mutated

ROOT = Path(__file__).parents[2]
MAIN_AREAS = {
    "scheduler", "blocks", "policy", "sampler", "views", "exchange", "mover", "handover", "phases",
    "drafts", "tool parsers", "schema", "costs", "kernels",
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_can_be_applied(mutant):
    text = (ROOT / mutant.file).read_text()
    changed = mutated(mutant, text)
    assert changed != text
    compile(changed, mutant.file, "exec")
    assert mutant.tests and mutant.why
    for test in mutant.tests:
        file, *names = test.split("::")
        assert file.startswith("tests/")
        code = (ROOT / file).read_text()
        assert all(f"def {name.partition('[')[0]}(" in code for name in names)


def test_every_main_area_has_mutants_of_different_names():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    of_area = Counter(mutant.area for mutant in MUTANTS)
    assert all(of_area[area] >= 3 for area in MAIN_AREAS), of_area
