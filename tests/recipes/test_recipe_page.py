"""The page of the recipes names files that are there, and every test that carries one out."""

import re

from copied import ROOT

PAGE = (ROOT / "docs" / "CORE.md").read_text()
FILE = re.compile(r"`((?:shiftjax|serving|deploy|tests|docs)/[\w/*.-]+\.[\w*]+)`")


def test_every_file_that_the_page_names_is_there():
    named = set(FILE.findall(PAGE))
    assert len(named) > 30
    assert not [name for name in named if not list(ROOT.glob(name))]


def test_every_recipe_test_is_on_the_page():
    tests = {f"tests/recipes/{path.name}" for path in (ROOT / "tests/recipes").glob("test_*.py")}
    own = {"tests/recipes/test_recipe_page.py"}
    assert tests - own <= set(FILE.findall(PAGE))
