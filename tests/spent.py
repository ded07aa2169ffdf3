"""What tests cost and which are skipped: printed after every run, and limited in CI.

CPU seconds, with those of child processes, because seconds of a clock depend on what else a
machine does. What a module's tests share is counted for the first that takes it, so those that
always run come before the `thorough` ones of their file.
"""

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

# Of what is not marked `thorough`. A test that is there to run a dear kind of thing once in the
# quick suite says what it may take: `costs(seconds)`; it is not counted for its file.
TEST_SECONDS, FILE_SECONDS = 5.0, 20.0
SLACK = 1.5  # times as much is accepted: CPUs differ, and what else runs takes their caches
SHOWN = 15  # files
QUICK = False  # whether this is the quick suite, once pytest is configured


def examples(count: int) -> int:
    """Of a property: so many, and a quarter of them in the quick suite."""
    return max(10, count // 4) if QUICK else count


# Reasons to skip a test that are no one's mistake, as they begin; any other fails in CI.
ALLOWED_SKIPS = (
    "root may read everything",  # a test of file permissions; CI runs as root
    "this machine has no ::1",
    "needs pip install --no-deps ai-dynamo",  # pins an older jax, so it is in no extra
    "needs kubectl",  # no package of Debian's has one with today's kustomize
)


def thorough(*rows: Any, mark: Any = pytest.mark.thorough) -> list[Any]:
    """Rows of a parametrisation that are left to `make test-all`."""
    values = (row if isinstance(row, tuple) else (row,) for row in rows)
    return [pytest.param(*each, marks=mark) for each in values]


def exhaustive(*rows: Any) -> list[Any]:
    """Rows of a parametrisation that are left to `make test-exhaustive`."""
    return thorough(*rows, mark=pytest.mark.exhaustive)


def quick(rows: Iterable[Any], *some: Any, times: int = 1) -> list[Any]:
    """Rows of a parametrisation, all but `some` of which are left to `make test-all`.

    Of rows with several values it has as many as it takes for every value to occur so many times;
    the others are left to `make test-exhaustive`.
    """
    rows = list(rows)
    assert all(one in rows for one in some), some
    enough = covering(rows, [rows.index(one) for one in some], times)
    kinds = pytest.mark.exhaustive, pytest.mark.thorough
    marks = [kinds[i in enough] for i in range(len(rows))]
    pairs = zip(rows, marks, strict=True)
    return [row if row in some else thorough(row, mark=mark)[0] for row, mark in pairs]


def covering(rows: Sequence[Any], some: Sequence[int], times: int) -> list[int]:
    """Places of rows: `some`, and as many as give each value of each column `times` rows.

    The next is always the row with most values that are wanted, and among those with the rarest.
    Rows of one value are all wanted.
    """
    if not all(isinstance(row, tuple) for row in rows):
        return list(range(len(rows)))
    values = [{(column, repr(value)) for column, value in enumerate(row)} for row in rows]
    there = Counter(value for row in values for value in row)
    chosen, had = list(some), Counter(value for i in some for value in values[i])

    def worth(i: int) -> tuple[int, int, int]:
        wanted = [value for value in values[i] if had[value] < min(times, there[value])]
        return len(wanted), -sum(had[value] for value in values[i]), -i

    while len(chosen) < len(rows):
        best = max((i for i in range(len(rows)) if i not in chosen), key=worth)
        if not worth(best)[0]:
            break
        chosen.append(best)
        had.update(values[best])
    return chosen


def mutants(*rows: Any) -> list[Any]:
    """Rows that are wrong programs: some in `make test-all`, the others in `mutants/run.py`."""
    some = rows[:: len(rows) // 3]
    others = [row for row in rows if row not in some]
    return [*thorough(*some), *thorough(*others, mark=pytest.mark.mutant)]


class Spent:
    """A plugin of pytest, in the process that reports and in its workers."""

    def __init__(self, *, is_limited: bool):
        self.is_limited = is_limited
        self.files: Counter[str] = Counter()
        self.unmarked: Counter[str] = Counter()
        self.tests: dict[str, tuple[float, float]] = {}  # spent, and what it may
        self.thorough = 0.0
        self.skips: Counter[str] = Counter()
        self._began = 0.0

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]):
        """Of a file what always runs first; files with `thorough` tests first, as the longest."""
        files = list(dict.fromkeys(item.path for item in items))
        dear = {item.path for item in items if is_thorough(item)}
        place = {path: (path not in dear, i) for i, path in enumerate(files)}
        items.sort(key=lambda item: (place[item.path], is_thorough(item)))
        config.hook.pytest_deselected(items=[each for each in items if is_left_out(each, config)])
        items[:] = [each for each in items if not is_left_out(each, config)]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self):
        self._began = seconds()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]):
        report = yield
        if call.when == "teardown":
            most = item.get_closest_marker("costs")
            report.user_properties.append(("most", most.args[0] if most else None))
            report.user_properties.append(("cpu", seconds() - self._began))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport):
        if report.skipped:
            self._skipped(report)
        if report.when == "teardown":
            found = dict(report.user_properties)
            spent, most = found["cpu"], found["most"]
            file = report.nodeid.split("::")[0]
            self.files[file] += spent
            if "thorough" in report.keywords:
                self.thorough += spent
            else:
                self.unmarked[file] += 0 if most else spent
                self.tests[report.nodeid] = spent, most or TEST_SECONDS

    def pytest_collectreport(self, report: pytest.CollectReport):
        if report.skipped:
            self._skipped(report)

    def _skipped(self, report: Any) -> None:
        if not hasattr(report, "wasxfail"):
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
            self.skips[str(reason).removeprefix("Skipped: ")] += 1

    @property
    def complaints(self) -> list[str]:
        """What CI does not accept."""
        spent = [(s, name, most) for name, (s, most) in self.tests.items()]
        spent += [(s, name, FILE_SECONDS) for name, s in self.unmarked.items()]
        dear = [each for each in spent if each[0] > SLACK * each[2]]
        wrong = [
            f"{seconds:.1f} CPU seconds, far more than {most:.0f}; mark it thorough or make it "
            f"cheaper: {name}"
            for seconds, name, most in sorted(dear, reverse=True)
        ]
        return wrong + [
            f"skipped, {count} times, for no reason of {__name__}.ALLOWED_SKIPS: {reason}"
            for reason, count in self.skips.items()
            if not reason.startswith(ALLOWED_SKIPS)
        ]

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int):
        if self.is_limited and is_reporter(session.config) and self.complaints and not exitstatus:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any):
        if not self.files and not self.skips:
            return
        total = sum(self.files.values())
        terminalreporter.section("CPU seconds, with those of child processes")
        terminalreporter.write_line(
            f"{total:7.1f}  {len(self.files)} files, {self.thorough:.1f} of it in thorough tests"
        )
        for file, spent in self.files.most_common(SHOWN):
            terminalreporter.write_line(f"{spent:7.1f}  {file}")
        if self.is_limited:
            for complaint in self.complaints:
                terminalreporter.write_line(f"FAILED {complaint}", red=True)


def seconds() -> float:
    """CPU seconds of this process and of the children that have ended."""
    return sum(os.times()[:4])


def is_thorough(item: pytest.Item) -> bool:
    """Whether a test is left to `make test-all`."""
    return item.get_closest_marker("thorough") is not None


def is_left_out(item: pytest.Item, config: pytest.Config) -> bool:
    """Whether a test is of another suite than the one that runs."""
    if config.getoption("quick") and is_thorough(item):
        return True
    options = {"mutant": "mutants", "exhaustive": "exhaustive"}
    kinds = (kind for kind in options if item.get_closest_marker(kind))
    return any(not config.getoption(options[kind]) for kind in kinds)


def is_reporter(config: pytest.Config) -> bool:
    """Whether this is the process that prints, and not a worker of it."""
    return not hasattr(config, "workerinput")
