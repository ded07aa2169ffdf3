"""The steps of deploy/Dockerfile, as far as they can be checked without a container engine.

That is what they say of this repository: files, extras, entry point, user and ports; and that a
wheel can be built of what is copied, and of nothing else. Not checked: the base image, what pip
downloads, whether layers can be written, and what runs in it.
"""

import json
import re
import tomllib
import zipfile
from pathlib import Path

import pytest
from wheel_kit import ROOT, build_wheel, known_files

from serving.cli.main import make_parser

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def steps() -> list[tuple[str, str]]:
    """(instruction, its words) in order."""
    text = (ROOT / "deploy/Dockerfile").read_text()
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    pairs = (line.partition(" ") for line in joined)
    return [(instruction, words.strip()) for instruction, _, words in pairs]


def words_of(instruction: str) -> list[str]:
    return [words for name, words in steps() if name == instruction]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """Built of what the image has when it runs pip; files that git ignores are left out."""
    places: dict[str, Path] = {}
    for *sources, target in (words.split() for words in words_of("COPY")):
        for source in sources:
            found = known_files(source)
            assert found, f"COPY {source}: there is none"
            inside = source if (ROOT / source).is_dir() else "."
            places |= {name: Path(target) / Path(name).relative_to(inside) for name in found}
    return zipfile.ZipFile(build_wheel(tmp_path_factory.mktemp("image"), places))


def test_what_is_copied_makes_the_whole_package(wheel):
    names = set(wheel.namelist())
    for package in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]:
        assert f"{package.removesuffix('*')}/__init__.py" in names
    for package, patterns in PROJECT["tool"]["setuptools"]["package-data"].items():
        folder = Path(package.replace(".", "/"))
        for pattern in patterns:
            wanted = {str(path.relative_to(ROOT)) for path in (ROOT / folder).glob(pattern)}
            assert wanted and wanted <= names
    assert not [name for name in names if name.startswith("tests")]


def test_pip_is_asked_for_extras_that_there_are():
    (argument,) = words_of("ARG")
    name, _, default = argument.partition("=")
    (run,) = words_of("RUN")
    (extras,) = re.findall(r'pip install [^"]*"\.\[([^\]]*)\]"', run)
    asked = extras.replace(f"${{{name}}}", default).split(",")
    known = PROJECT["project"]["optional-dependencies"]
    assert {"serving", "events"} <= set(asked) <= set(known)  # events: as llm-d.yaml asks for them
    assert "cuda12" in known  # what the comment says to use


def test_it_starts_a_server_as_the_user_and_on_the_ports_of_the_manifests():
    names = [name for name, _ in steps()]
    assert names[0] == "FROM" and names.index("RUN") < names.index("USER") < names.index("CMD")
    assert json.loads(words_of("ENTRYPOINT")[0]) == list(PROJECT["project"]["scripts"])
    arguments = make_parser().parse_args(json.loads(words_of("CMD")[0]))
    defaults = make_parser().parse_args(["serve"])
    ports = [str(port) for port in (defaults.port or 8000, defaults.grpc_port or 50051)]
    assert words_of("EXPOSE") == [" ".join(ports)] and arguments.host == "0.0.0.0"
    (uid,) = re.findall(r"--uid (\d+)", words_of("RUN")[0])
    manifests = [path.read_text() for path in (ROOT / "deploy").glob("*.yaml")]
    users = {user for text in manifests for user in re.findall(r"runAsUser: (\d+)", text)}
    assert users == {uid}
