"""The command `reproduce`, as users type it."""

import pytest

from serving.cli.main import main


def test_a_part_of_a_paper_is_printed_and_written(capsys, tmp_path):
    assert (
        main(["reproduce", "shift", "--only", "contexts", "--quick", "--out", str(tmp_path)]) == 0
    )
    printed = capsys.readouterr().out
    assert "## Shift Parallelism (arXiv 2509.16495)" in printed
    assert "| 13 | " in printed
    assert "within 15%: " in printed
    assert (tmp_path / "report.html").exists()
    assert "| 13 | " in (tmp_path / "reproduce.md").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nothing"], "invalid choice"),
        (["shift", "--only", "loud"], "unknown part of shift 'loud'"),
        (["--only", "rates"], "say which paper"),
        (["shift", "--traces", "/no/such/folder"], "is no folder"),
    ],
)
def test_what_is_not_there_is_refused(words, said, capsys):
    try:
        code = main(["reproduce", *words])
    except SystemExit as error:
        code = error.code
    assert code == 2
    assert said in capsys.readouterr().err
