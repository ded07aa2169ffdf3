"""The steps of deploy/Dockerfile, as far as they can be checked without a container engine.

That is what they say of this repository: files, extras, entry point, user and ports; that a wheel
can be built of what is copied, and of nothing else; that pip finds all that it needs; and that the
command is one. Not checked: the base image, whether layers can be written, and what runs in it.
"""

import json
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from spent import exhaustive, thorough
from wheel_kit import ROOT, build_wheel, known_files

from serving.cli.main import main, make_parser

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


def test_the_wheel_has_every_file_of_the_packages(wheel):
    wanted = known_files("shiftjax", "serving", "pallas_kernels")
    assert len(wanted) > 300
    assert {name for name in wanted if not name.endswith("README.md")} <= set(wheel.namelist())


def test_docker_is_sent_what_is_copied_and_nothing_else():
    text = (ROOT / ".dockerignore").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    sent = {line.removeprefix("!") for line in lines if line.startswith("!")}
    copied = [source for words in words_of("COPY") for source in words.split()[:-1]]
    assert lines[0] == "*" and sent == set(copied)


def test_pip_is_asked_for_extras_that_there_are():
    default, asked = extras_with(None), extras_with("cuda13")
    known = PROJECT["project"]["optional-dependencies"]
    assert {"serving", "events"} <= set(default) <= set(known)  # events: as llm-d.yaml asks for
    assert {"cuda12", "cuda13"} <= set(known) and "cuda13" in asked  # what the comment says to use


def extras_with(extra: str | None) -> list[str]:
    """What pip installs of the package; None: as the argument is by default."""
    (argument,) = words_of("ARG")
    name, _, default = argument.partition("=")
    (run,) = words_of("RUN")
    (extras,) = re.findall(r'pip install [^"]*"\.\[([^\]]*)\]"', run)
    return extras.replace(f"${{{name}}}", default if extra is None else extra).split(",")


@pytest.mark.parametrize("extra", [*thorough("cuda13"), *exhaustive(None, "cuda12")])
def test_pip_finds_all_that_it_needs(wheel, tmp_path, extra):
    """On the index that it is set to; nothing is installed, and of most only metadata is read."""
    wanted = f"{wheel.filename}[{','.join(extras_with(extra))}]"
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
    report = tmp_path / "report.json"
    pip += ["--dry-run", "--ignore-installed", f"--report={report}", wanted]
    subprocess.run(pip, check=True, capture_output=True)
    installed = {one["metadata"]["name"] for one in json.loads(report.read_text())["install"]}
    assert {"jax", "uvicorn", "grpcio", "pyzmq", "shiftjax"} <= installed
    assert (f"jax-{extra}-plugin" in installed) == (extra is not None)


def test_the_command_is_one_that_the_program_takes(capsys):
    program, command = (json.loads(words_of(name)[0]) for name in ("ENTRYPOINT", "CMD"))
    assert program == list(PROJECT["project"]["scripts"])
    assert main([*command, "--print-config"]) == 0
    assert "host: 0.0.0.0" in capsys.readouterr().out


def test_it_starts_a_server_as_the_user_and_on_the_ports_of_the_manifests():
    names = [name for name, _ in steps()]
    assert names[0] == "FROM" and names.index("RUN") < names.index("USER") < names.index("CMD")
    assert json.loads(words_of("ENTRYPOINT")[0]) == list(PROJECT["project"]["scripts"])
    arguments = make_parser().parse_args(json.loads(words_of("CMD")[0]))
    defaults = make_parser().parse_args(["serve"])
    ports = [str(port) for port in (defaults.port or 8000, defaults.grpc_port or 50051)]
    assert words_of("EXPOSE") == [" ".join(ports)] and arguments.host == "0.0.0.0"
    (uid,) = re.findall(r"--uid (\d+)", words_of("RUN")[0])
    assert words_of("USER") == [uid]
    manifests = [path.read_text() for path in (ROOT / "deploy").rglob("*.yaml")]
    users = {user for text in manifests for user in re.findall(r"runAsUser: (\d+)", text)}
    assert users == {uid}
