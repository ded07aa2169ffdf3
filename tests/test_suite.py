"""What keeps the suite quick and whole: what is kept between runs, and what a run accepts."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import kept
import pytest
from jax.experimental.compilation_cache import compilation_cache
from spent import covering

MATRIX = """
    import pytest
    import spent

    ROWS = [(name, degree) for name in "abc" for degree in (1, 2)]

    @pytest.mark.parametrize(("name", "degree"), spent.quick(ROWS, ("a", 1)))
    def test_row(name, degree):
        pass
"""
SUITE = """
    import pytest, time

    def spend(seconds):
        end = time.process_time() + seconds
        while time.process_time() < end:
            pass

    def test_cheap():
        pass

    def test_dear():
        spend(DEAR)

    @pytest.mark.costs(0.6)
    def test_that_may():
        spend(0.3)

    @pytest.mark.thorough
    def test_thorough():
        spend(0.3)

    def test_as_root():
        pytest.skip("root may read everything")
"""
LEAST = "jax_persistent_cache_min_compile_time_secs"
SKIPS = """
    import pytest

    def test_without_a_tool():
        pytest.skip("no browser")
"""
MODULE = """
    import pytest

    pytest.skip("no tool at all", allow_module_level=True)
"""
CONFTEST = """
    import spent

    spent.TEST_SECONDS = 0.2

    def pytest_addoption(parser):
        parser.addoption("--quick", action="store_true")
        parser.addoption("--mutants", action="store_true")
        parser.addoption("--exhaustive", action="store_true")

    def pytest_configure(config):
        config.pluginmanager.register(spent.Spent(is_limited=True))
"""


def run(folder: Path, *arguments: str, **files: str) -> tuple[int, list[str], str]:
    """The exit code, complaints and output of pytest on some files."""
    for name, text in ({"conftest": CONFTEST} | files).items():
        (folder / f"{name}.py").write_text(textwrap.dedent(text))
    markers = "thorough", "exhaustive", "costs(seconds)"
    (folder / "pytest.ini").write_text("\n    ".join(("[pytest]\nmarkers =", *markers)))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *arguments],
        check=False,
        cwd=folder,
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(Path(__file__).parent),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
        capture_output=True,
        text=True,
    )
    output = done.stdout + done.stderr
    return done.returncode, [li for li in output.splitlines() if li.startswith("FAILED")], output


def test_dear_tests_and_skips_that_nobody_expects_fail_the_run(tmp_path):
    """With two workers, whose reports travel."""
    dear = SUITE.replace("DEAR", "0.5")
    workers = ("-p", "xdist", "-n", "2", "--dist", "loadfile")
    code, failed, output = run(
        tmp_path, *workers, test_a=dear, test_skips=SKIPS, test_module=MODULE
    )
    assert "4 passed, 3 skipped" in output and code == 1
    assert "of it in thorough tests" in output
    slow, *skipped = failed
    assert "test_a.py::test_dear" in slow and "mark it thorough" in slow
    assert sorted(line.rpartition(": ")[2] for line in skipped) == ["no browser", "no tool at all"]


def test_the_quick_suite_leaves_out_what_is_thorough(tmp_path):
    code, failed, output = run(tmp_path, "--quick", test_a=SUITE.replace("DEAR", "0"))
    assert (code, failed) == (0, [])
    assert "3 passed, 1 skipped, 1 deselected" in output


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["--quick"], {"a-1"}),
        ([], {"a-1", "b-2", "c-1"}),
        (["--exhaustive"], {"a-1", "a-2", "b-1", "b-2", "c-1", "c-2"}),
    ],
)
def test_of_a_matrix_every_value_runs_and_all_rows_if_asked(tmp_path, arguments, found):
    code, _, output = run(tmp_path, "-rA", *arguments, test_matrix=MATRIX)
    ran = {line.split("[")[1].split("]")[0] for line in output.splitlines() if "PASSED" in line}
    assert (code, ran) == (0, found)


def test_values_occur_as_often_as_is_asked():
    rows = [(name, degree) for name in "abcdef" for degree in (1, 2, 3, 4)]
    chosen = [rows[i] for i in covering(rows, [], 2)]
    assert len(chosen) == 12 and len({*chosen}) == 12
    assert {sum(name == row[0] for row in chosen) for name in "abcdef"} == {2}
    assert {sum(degree == row[1] for row in chosen) for degree in (1, 2, 3, 4)} == {3}
    assert covering(["one", "two"], [], 1) == [0, 1]  # rows of one value have nothing to share


def test_what_is_kept_is_bounded_and_the_longest_unused_goes(tmp_path):
    files = kept.Files(tmp_path / "some")
    for i, name in enumerate(("old", "used", "new")):
        files.put(name, bytes(100))
        os.utime(tmp_path / "some" / name, (i, i))
    assert files.get("used") == bytes(100)  # which is a use
    kept.prune(tmp_path, limit=250)
    assert files.get("old") is None
    assert sorted(os.listdir(tmp_path / "some")) == ["new", "used"]  # and nothing half written
    kept.prune(tmp_path, limit=150)
    assert os.listdir(tmp_path / "some") == ["used"]


def test_what_is_lent_comes_back_with_what_was_added(tmp_path, monkeypatch):
    monkeypatch.setenv(kept.VARIABLE, str(tmp_path / "kept"))
    for name in ("first", "second"):
        place = tmp_path / name
        place.mkdir()
        with kept.lent("served", place):
            assert (place / "deep" / "one").exists() == (name == "second")
            (place / "deep").mkdir(exist_ok=True)
            (place / "deep" / "one").write_text(name)
    assert (tmp_path / "kept" / "served" / "deep" / "one").read_text() == "first"


def test_a_variable_keeps_a_run_to_itself(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(kept.VARIABLE, "off")
    own = kept.folder()
    assert own.is_dir() and not list(tmp_path.iterdir())
    assert kept.folder() == own  # as children and workers are told
    monkeypatch.setenv(kept.VARIABLE, "")
    shared = kept.folder()
    assert shared.is_relative_to(tmp_path) and shared.stat().st_mode & 0o777 == 0o700


@pytest.fixture
def hits(tmp_path, monkeypatch):
    """Programs that were read, while all are kept in a folder of this test."""
    before = {name: getattr(jax.config, name) for name in ("jax_compilation_cache_dir", LEAST)}
    found: list[str] = []
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    jax.config.update(LEAST, 0.0)
    compilation_cache.reset_cache()
    get = kept.Files.get

    def noted(self, key: str) -> bytes | None:
        program = get(self, key)
        found.extend([key] if program is not None else [])
        return program

    monkeypatch.setattr(kept.Files, "get", noted)
    yield found
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def double(x: jax.Array) -> jax.Array:
    return jnp.tanh(x) * 2


def test_a_program_is_compiled_once_and_read_after_that(hits, tmp_path):
    first = jax.jit(double)(jnp.ones(3))
    assert not hits and list(tmp_path.iterdir())
    jax.clear_caches()
    assert jnp.array_equal(jax.jit(double)(jnp.ones(3)), first)
    assert hits


def test_a_test_that_counts_compilations_reads_none(hits, uncached, tmp_path):
    jax.jit(double)(jnp.ones(3))
    jax.clear_caches()
    jax.jit(double)(jnp.ones(3))
    assert not hits and not list(tmp_path.iterdir())


def test_equal_groups_of_devices_have_one_program(hits):
    """It is read, and runs on the devices that it was read for."""
    first, *_, last = jax.devices()
    for device in (first, last):
        found = jax.jit(double)(jax.device_put(jnp.ones(3), device))
        assert found.devices() == {device}
        assert jnp.array_equal(found, double(jnp.ones(3)))
        assert sum("double" in key for key in hits) == (device is last)
