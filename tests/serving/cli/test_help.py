"""The examples that `--help` prints: commands that their own parsers take."""

import shlex

import pytest

from serving.cli.help import HELP, commands_of, needing_more
from serving.cli.main import make_parser
from serving.cli.simulate import compared_names
from serving.cli.trace_flags import trace_of
from serving.run.flags import parse_args, settle
from shiftjax.sim.experiments import target_from
from shiftjax.sim.named import fragment_of

EXAMPLES = [(name, line) for name, each in HELP.items() for line in each.examples]
FILES = {
    "engine.yaml": "max_model_len: 128\n",
    "requests.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n",
}


@pytest.fixture
def there(tmp_path, monkeypatch):
    """A folder with the files that examples name and parsers read."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("name", "line"), EXAMPLES, ids=[line for _, line in EXAMPLES])
def test_an_example_is_taken(there, name, line):
    program, *argv = shlex.split(line)
    assert program == "shiftjax" and argv[: len(name.split())] == name.split()
    parser = make_parser()
    assert needing_more(parser, argv) is None
    arguments = parse_args(parser, argv)
    settle(arguments)
    if argv[:2] == ["mesh", "simulate"]:
        assert trace_of(arguments)
        target = target_from({"model": "llama-70b", "machine": arguments.machine})
        for each in compared_names(arguments.compare or []):
            assert fragment_of(target, each)


def test_every_command_has_examples():
    assert {name for name, _ in commands_of(make_parser())} == set(HELP)
    assert all(each.examples for each in HELP.values())
