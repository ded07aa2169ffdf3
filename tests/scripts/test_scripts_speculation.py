"""The benchmark of drafting, as far as it can be checked without measuring."""

import argparse
import json
import sys
from itertools import islice
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from cases import speculation as bench  # noqa: E402
from cases.speculation_rows import Answer, Round, joined, rows_of, summary  # noqa: E402
from cases.speculation_workloads import QUESTIONS, TOPICS, make_workloads, tasks  # noqa: E402
from cases.workers import WORKERS, Worker  # noqa: E402
from option_table import add_options  # noqa: E402

from shiftjax.options import ConfigError  # noqa: E402


def line(turn: str, **more: str) -> str:
    return json.dumps({"turns": [turn, "a second turn"]} | more)


def one_round(seconds: float, *lengths: int, tpot: float = 0.1, accepted: int | None = 0) -> Round:
    answers = [Answer(list(range(n)), tpot, accepted, accepted and 2 * accepted) for n in lengths]
    return Round(seconds, answers)


def test_no_question_comes_twice():
    asked = list(make_workloads(["chat"], None)["chat"])
    assert len(asked) == len(set(asked)) == len(QUESTIONS) * len(TOPICS)
    for own in ("edit", "agent"):
        prompts = list(islice(make_workloads([own], None)[own], 20))
        assert len(set(prompts)) == 20


def test_questions_are_grouped_by_task_and_those_of_mt_bench_mixed():
    lines = [line(f"w{n}", category="writing") for n in range(2)]
    lines += [line("c0", category="coding"), line("q0", category="qa")]
    lines += [line("m0", category="math_reasoning"), line("c1", category="coding")]
    found = tasks(lines)
    assert found == {
        "mt_bench": ["w0", "c0", "w1", "c1"],
        "qa": ["q0"],
        "math_reasoning": ["m0"],
    }
    assert tasks([line("x"), line("y")]) == {"questions": ["x", "y"]}


def test_a_file_of_prompts_takes_the_place_of_chat(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join([line("q0", category="qa"), line("r0", category="rag")]))
    workloads = make_workloads(["edit", "chat"], path)
    assert list(workloads) == ["edit", "qa", "rag"]
    assert list(workloads["rag"]) == ["r0"]


def test_a_ratio_is_the_median_of_rounds():
    """Two slow rounds of three of the plain engine do not count more than their rounds."""
    plain = [one_round(4.0, 8), one_round(1.0, 8), one_round(9.0, 8)]
    other = [one_round(2.0, 8, tpot=0.05), one_round(1.0, 8, tpot=0.05), one_round(3.0, 8)]
    row = summary(other, plain)
    assert row["ratio_to_plain"] == 2.0  # of 2, 1 and 3
    assert row["decode_ratio"] == 2.0  # of 2, 2 and 1
    assert row["tpot_ms"] == 50.0
    assert row["tokens_per_second"] == [4.0, 8.0, 2.7]


def test_steps_and_drafts_are_counted_over_all_answers():
    row = summary([one_round(1.0, 8, 12, accepted=5)], [one_round(1.0, 8, 11)])
    assert row["tokens_per_step"] == 2.0  # 20 tokens, 10 of them accepted
    assert row["accepted_of_drafted"] == 0.5
    assert row["tokens_equal"] == 0.5


def test_an_answer_of_one_token_has_no_time_per_token():
    alone = [Round(1.0, [Answer([7], None, 0, 0)])]
    row = summary(alone, alone)
    assert row["decode_ratio"] is row["tpot_ms"] is None
    assert row["ratio_to_plain"] == 1.0


def test_the_choice_stands_beside_the_best_fixed_length():
    rounds = {
        "plain": [one_round(8.0, 8)],
        "cost": [one_round(3.0, 8)],
        "fixed4": [one_round(4.0, 8)],
        "fixed8": [one_round(2.0, 8)],
        "llama_cpp": [one_round(1.0, 8, accepted=None)],
    }
    rows = {row["engine"]: row for row in rows_of("edit", 1, rounds)}
    assert [name for name, row in rows.items() if "of_best_fixed" in row] == ["cost"]
    assert rows["cost"]["of_best_fixed"] == 0.667
    assert rows["llama_cpp"]["tokens_per_step"] is None
    assert rows["llama_cpp"]["ratio_to_plain"] == 8.0


def test_overall_is_every_round_of_every_task():
    qa = {"plain": [one_round(2.0, 4)], "suffix": [one_round(1.0, 4)]}
    rag = {"plain": [one_round(4.0, 4)] * 2, "suffix": [one_round(1.0, 4)] * 2}
    both = joined([qa, rag])
    assert [len(rounds) for rounds in both.values()] == [3, 3]
    assert summary(both["suffix"], both["plain"])["ratio_to_plain"] == 4.0


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_options(parser, bench.OPTIONS)
    return parser.parse_args(words)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--peers llama_cpp", "need --peer-python"),
        ("--peers llama_cpp --peer-python p --dtype float32", "in bfloat16 only"),
        ("--engines suffix model", "model need --draft-model"),
        ("--per-task 8", "is for --prompts"),
        ("--per-task 12 --prompts f --streams 1 8", "no whole number of rounds of 8"),
        ("--rounds 100 --streams 8", "prompts too few for 100 rounds of 8 streams"),
    ],
)
def test_what_cannot_be_measured_is_refused(words, problem):
    with pytest.raises(ConfigError, match=problem):
        bench.settle(parsed(*words.split()))


def test_every_cell_has_prompts_of_its_own(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(line(f"q{n}", category="qa") for n in range(8)))
    words = f"--prompts {path} --per-task 4 --streams 1 2 --rounds 3".split()
    assert bench.settle(parsed(*words, "--workloads", "chat")) == {
        1: {"qa": [["q0"], ["q1"], ["q2"], ["q3"]]},
        2: {"qa": [["q4", "q5"], ["q6", "q7"]]},
    }
    both = bench.settle(parsed(*words, "--workloads", "edit", "chat"))
    assert [len(rounds) for rounds in both[1].values()] == [3, 4]


def test_every_engine_has_the_settings_of_its_name():
    words = ["--engines", *bench.ENGINES, "--draft-model", "a speculator"]
    asked = parsed(*words)
    bench.settle(asked)
    configs = bench.configs(asked, bench.MODEL)
    assert list(configs) == list(bench.ENGINES)
    assert configs["hybrid"].drafts.draft_model == "a speculator"
    assert configs["suffix"].drafts.draft_choice == "auto"
    assert configs["fixed8"].drafts.fixed_drafts
    assert configs["fixed8"].drafts.max_draft_tokens == 8
    assert configs["cost"].drafts.draft_choice == "cost"
    assert not any(config.cache.prefix_caching for config in configs.values())


def test_a_workers_times_per_token_arrive(tmp_path):
    """Over the real protocol, from a process that only says what it was asked."""
    worker_file = tmp_path / "worker.py"
    worker_file.write_text(
        f"import sys\nsys.path.insert(0, {str(WORKERS)!r})\n"
        "from protocol import reserve_stdout, serve\n"
        "serve(reserve_stdout(), {}, lambda prompts, lengths: {\n"
        "    'token_ids': [prompt[:1] * n for prompt, n in zip(prompts, lengths)],\n"
        "    'tpot_seconds': [0.25, None]})\n"
    )
    worker = Worker("echo", [sys.executable, str(worker_file)], tmp_path / "log")
    answers = bench.answer_by_peer(worker, [[5, 6], [7]], [3, 1]).answers
    worker.close()
    assert answers == [Answer([5, 5, 5], 0.25), Answer([7], None)]
