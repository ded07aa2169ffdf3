"""Nonsense given to the commands that predict and measure: sentences, and no number."""

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from spent import examples

from serving.cli.main import main
from shiftjax.config import SETTINGS
from shiftjax.costs.machine_files import dump_machine, load_machine

HUGE = "9" * 99
WORDS = st.one_of(
    st.sampled_from(
        ["", HUGE, "nan", "inf", "-1", "0", "1e1", "1e400", "[]", "{}", ":", "a=b", ",", "/"]
    ),
    st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=6),
)
TRACE = ("rate=2", "seconds=2", "prompt_tokens=50", "output_tokens=2")
SYNTHETIC = ("--trace", "poisson", *(word for each in TRACE for word in ("--set", each)))
FOLDER = tempfile.TemporaryDirectory(prefix="shiftjax-test-")  # gone when the tests are
GOAL = {"--rate": "1", "--ttft": "1", "--tpot": "1"}


def is_number(text: str, kind: Callable[[str], float], least: float) -> bool:
    try:
        return least <= kind(text) < float("inf")
    except ValueError:
        return False


COUNTS = WORDS.filter(lambda text: text == HUGE or not is_number(text, int, 1))
RATES = WORDS.filter(lambda text: not is_number(text, float, 5e-324))
SPREADS = WORDS.filter(lambda text: not is_number(text, float, 0))
NAMES = WORDS.map(lambda text: f"none {text}")  # none of any that there are
SHARED = {
    **dict.fromkeys(("--model", "--machine", "--engine", "--dtype", "--kv-cache-dtype"), NAMES),
    **dict.fromkeys(("--block-size", "--max-num-seqs", "--max-num-batched-tokens"), COUNTS),
    "--config": NAMES,
    "--hosts": st.one_of(COUNTS, st.just("65")),
}
PLAN = SHARED | {
    **dict.fromkeys(("--input", "--output"), COUNTS),
    **dict.fromkeys(("--compile", "--percentile", "--trace", "--gpu-price"), NAMES),
    **dict.fromkeys(("--gpus",), COUNTS),
    **dict.fromkeys(("--margin", "--length-cv"), SPREADS),
}
SIMULATE = SHARED | {
    "--trace": NAMES,
    "--rates": RATES,
    "--compare": st.one_of(
        NAMES, st.sampled_from(["dp3", "tp16", "dp0", "tp2tp2", "pp8:tp4", "fleet:9", "fleet:tp3"])
    ),
    **dict.fromkeys(("--window", "--acceptance", "--set", "--shift-threshold"), NAMES),
    "--host-memory": WORDS,  # no deployment has phases
}


@st.composite
def flags_of(draw: st.DrawFn, command: str, usual: tuple[str, ...], wrong: dict) -> list[str]:
    flag = draw(st.sampled_from(sorted(wrong)))
    return [*command.split(), *usual, f"{flag}={draw(wrong[flag])}"]


@st.composite
def goals(draw: st.DrawFn) -> list[str]:
    flag = draw(st.sampled_from([*GOAL, "--gpu-price", "--window", "--length-cv"]))
    pairs = GOAL | {flag: draw(SPREADS if flag == "--length-cv" else RATES)}
    return ["plan", "--model", "llama-8b", *(f"{name}={value}" for name, value in pairs.items())]


@st.composite
def steps(draw: st.DrawFn) -> list[str]:
    places = NAMES.map("/dev/null/{}".format)
    wrong = {"--meshes": NAMES, "--repeats": COUNTS, "--out": places}
    flag = draw(st.sampled_from(sorted(wrong)))
    text = draw(wrong[flag])
    return ["bench", "steps", f"{flag}={text}"]


# ------------------------------------------------------------------ files

ODD: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from([-1, -0.5, float("nan"), float("inf"), [], [[]], {}, {"a": 1}, [-1], "none x"]),
)
NUMBERS = sorted(n for n, s in SETTINGS.items() if s.kind in (int, float, bool, tuple))
MACHINE = yaml.safe_load(dump_machine(load_machine("l4x8"), "a test"))
MODELLED = {"machine": "h200x8", "model": "tiny", "trace": {"kind": "poisson", "rate": 1}}


@st.composite
def experiments(draw: st.DrawFn) -> str:
    odd, name = draw(ODD), draw(st.sampled_from(NUMBERS))
    key = draw(
        st.sampled_from(["machine", "hosts", "trace", "rates", "max_num_seqs", "acceptance", "x"])
    )
    content = draw(
        st.sampled_from(
            [
                odd,
                {"measured": odd} if odd != {} else {"x": 1},
                {"modelled": [odd]},
                {"x": odd},
                {"measured": {name: odd}},
                {"measured": {"deployments": {"a": {name: odd}}}},
                {"measured": {"deployments": odd}},
                {"measured": {"prompts": [odd]}},
                {"measured": {"tokens": odd}},
                {"modelled": [MODELLED | {key: odd}]},
            ]
        )
    )
    return yaml.safe_dump(content)


@st.composite
def machines(draw: st.DrawFn) -> str:
    data = copy.deepcopy(MACHINE)
    constants = sorted(
        name for name, node in data.items() if isinstance(node, dict) and "value" in node
    )
    name, odd = draw(st.sampled_from(constants)), draw(ODD)
    ways = draw(st.sampled_from(["value", "unit", "source", "node", "gone", "more"]))
    if ways in data[name]:
        data[name][ways] = "" if ways == "source" else odd
    elif ways == "node":
        data[name] = odd
    elif ways == "gone":
        del data["memory_bytes"]
    else:
        data[f"{name}s"] = data[name]
    return yaml.safe_dump(data)


def folder() -> Path:
    return Path(tempfile.mkdtemp(dir=FOLDER.name))


def written(text: str) -> str:
    path = folder() / "file.yaml"
    path.write_text(text)
    return str(path)


COMMANDS = st.one_of(
    flags_of("plan", ("--model", "llama-8b"), PLAN),
    flags_of("mesh simulate", (*SYNTHETIC, "--compare", "tp"), SIMULATE),
    goals(),
    steps(),
    experiments().map(lambda text: ["mesh", "run", written(text), "--out", str(folder())]),
    machines().map(lambda text: ["plan", "--model", "llama-8b", "--machine", written(text)]),
)


ALLOWED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@pytest.mark.costs(15)
@settings(max_examples=examples(200), deadline=None, suppress_health_check=ALLOWED)
@given(COMMANDS)
@example(["mesh", "run", written("measured: {tp: -1}"), "--out", str(folder())])
@example(["plan", "--window", "0:5", "--model", "llama-8b"])
@example(["plan", "--model", "llama-8b", "--config=none \r\x1b[2J"])
@example(["bench", "steps", "--meshes", "1x1", "--repeats", "0"])
@example(["bench", "steps", f"--repeats={HUGE}"])
@example(["bench", "steps", "--out=/dev/null/none"])
def test_nonsense_is_refused_in_sentences(capsys: pytest.CaptureFixture, argv: list[str]):
    code, (out, err) = main(argv), capsys.readouterr()
    assert code == 2 and out == "", (argv, code, out)
    lines = err.splitlines()  # one for each thing that is wrong, or is missing then
    assert 1 <= len(lines) <= 4 and all(line.startswith("shiftjax") for line in lines), (argv, err)
