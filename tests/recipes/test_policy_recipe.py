"""The recipe "A policy" of docs/CORE.md: a class and a row make a policy known everywhere."""

from pathlib import Path

import pytest
from copied import change, changed_files, copy_tree, run

POLICY = "shiftjax/core/policies.py"
CLASS = '''@dataclass(frozen=True)
class ParityPolicy(Policy):
    """Steps of an even number of tokens in BASE, all others in SHIFT."""

    name: ClassVar[str] = "parity"

    def mode_of(
        self, work: Work, modes: Sequence[Mode], num_waiting: int, last_mode: Mode | None
    ) -> Mode:
        """By the last bit."""
        return modes[work.num_tokens % 2 - 1]


'''
MESH = ("-m", "serving.cli.main", "mesh", "simulate", "--trace", "poisson", "--machine", "a10x8")
TRACE = ("rate=4", "seconds=3", "prompt_tokens=300", "output_tokens=9")
SETS = [word for each in TRACE for word in ("--set", each)]
SERVED = """
from shiftjax import LLM, SamplingParams

PROMPTS = [[5, 6, 7] * 5, [9, 8] * 4, [4]]
COSTS = {"machine": "h200x8", "speculation": "ngram", "draft_choice": "cost"}


def tokens(**settings):
    llm = LLM("random:tiny", devices=2, sp=2, tp=1, max_model_len=64, dtype="float32",
              max_num_seqs=4, max_num_batched_tokens=16, cache_dir="none", **settings)
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=12))
    steps = {mode for mode in ("base", "shift") if llm.engine.stats().steps[mode, 2]}
    return [one.outputs[0].token_ids for one in outputs], steps


expected, _ = tokens(policy="base")
for settings in ({}, COSTS):
    assert tokens(policy="parity", **settings) == (expected, {"base", "shift"}), settings
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    made = copy_tree(tmp_path_factory.mktemp("policy"))
    before, last = "_CLASSES: tuple", "    GreedyPolicy,\n)"
    change(made, POLICY, before, CLASS + before)
    change(made, POLICY, last, "    ParityPolicy,\n" + last)
    assert changed_files(made) == {POLICY}
    return made


def test_it_is_a_name_of_compare(copy):
    names = ("--compare", "shift,parity", "policy=parity,tp=2")
    rows = run(copy, *MESH, *SETS, "llama-8b", *names).splitlines()[1:]
    words = ("shift to 256", "mode by parity", "sp4tp2, mode by parity")
    assert len(rows) == 3 and all(each in row for each, row in zip(words, rows, strict=True))
    base, _, shift = rows[1].split("/")[-3:]
    assert int(base.split()[-1]) > 0 and int(shift.split()[0]) > 0


def test_it_drafts(copy):
    """Choosing drafts by cost asks a policy for the mode of steps that are not planned yet."""
    drafts = ("--acceptance", "0.8", "--compare", "parity")
    heading, row = run(copy, *MESH, *SETS, "llama-8b", *drafts).splitlines()
    assert "accepted/step" in heading and row.split()[0] == "parity"
    assert row.split()[-1] == "0"  # failed


def test_it_is_a_flag_and_a_line_of_a_file(copy, tmp_path):
    file = tmp_path / "engine.yaml"
    file.write_text("model: llama-8b\nsp: 4\ntp: 2\npolicy: parity\n")
    rows = run(copy, *MESH, *SETS, "--config", str(file), "--compare", "tp").splitlines()
    assert "sp4tp2, mode by parity" in rows[1]
    serve = ("-m", "serving.cli.main", "serve", "--policy", "parity", "--print-config")
    assert "policy: parity" in run(copy, *serve)
    assert "|parity" in run(copy, "-m", "serving.cli.main", "serve", "--help")


@pytest.mark.thorough
def test_engines_serve_it_with_drafts_too(copy):
    """Both modes run, and the tokens are those of one mode."""
    run(copy, "-c", SERVED)
