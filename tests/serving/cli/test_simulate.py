"""The commands `plan` and `mesh simulate`, as users type them."""

import csv
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from oracle import quantised_files
from spent import quick

from serving.cli.main import main
from shiftjax.costs.machine_files import load_machine, machine_names

SYNTHETIC = ("mesh", "simulate", "--trace", "poisson")
SMALL = ("--set", "rate=2", "--set", "seconds=5", "--set", "prompt_tokens=500")
QUICK = (*SYNTHETIC, *SMALL, "--set", "output_tokens=10", "--dtype", "fp8")


def test_plan_prints_every_configuration_and_a_recommendation(capsys):
    assert main(["plan", "--model", "llama-70b", "--dtype", "fp8", "--machine", "h200x8"]) == 0
    out = capsys.readouterr().out
    table = out.partition("recommended")[0].splitlines()
    names = [line.split()[0] for line in table if " True " in line or " False " in line]
    assert names[:8] == ["dp8", "dp4", "dp2", "dp1", "dp4", "dp2", "dp1", "dp2"]
    assert names[10:] == ["dp4pp2", "dp2pp2tp2", "pp2tp4", "dp2pp4", "pp4tp2", "pp8"]
    assert "stages: " in out and "times the tokens per second of dp" in out
    assert "recommended: --sp 8 --tp 1 --shift-threshold" in out
    assert out.count("recommended: ") == 1  # fleets and stages are told of beside it


def test_plan_says_what_it_took_by_default(capsys):
    assert main(["plan", "--input", "1000", "--kv-cache-dtype", "fp8_e4m3"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith(
        "llama-3.3-70b (bfloat16, KV fp8) on h200x8 (host: 2,048 GiB, 50 GB/s a"
    )
    assert "1000 prompt and 250 output tokens" in first


@pytest.mark.parametrize("machine", quick(machine_names(), "b200x8", "gb200x4"))
def test_every_machine_plans_and_says_where_its_constants_are_from(capsys, machine):
    model = "tiny" if machine == "cpu" else "llama-70b"
    assert main(["plan", "--model", model, "--dtype", "fp8", "--machine", machine]) == 0
    out = capsys.readouterr().out
    published = "published figures alone; what kernels reach of them is H100's" in out
    assert published == load_machine(machine).published
    best = re.search(r"of fleets, --fleet --tp \d has most tokens per second, ([\d,]+); (.*)", out)
    table, _, fleets = out.partition("recommended: ")
    rates = [
        float(line.split()[-1].replace(",", "")) for line in table.splitlines() if " True" in line
    ]
    of_fleets = [line for line in fleets.splitlines() if line.startswith("fleet:")]
    assert best is not None and any(f" {best[1]} " in line for line in of_fleets)
    assert best[2].endswith(f" has {max(rates):,.0f}") and best[2].startswith("without --fleet ")


@pytest.mark.thorough
def test_a_recommendation_without_sp_speaks_of_no_shift(capsys):
    assert main(["plan", "--model", "qwen3-30b-a3b", "--goal", "throughput"]) == 0
    _, _, after = capsys.readouterr().out.partition("recommended: ")
    first, reason, *_ = after.splitlines()
    assert first == "--dp 8 --sp 1 --tp 1"
    assert "has most tokens per second" in reason and "SHIFT" not in reason
    assert "steps, and how far they split the experts" not in after


@pytest.mark.thorough
def test_a_recommendation_with_experts_says_how_far_steps_split_them(capsys, tmp_path):
    assert main(["plan", "--model", "qwen3-30b-a3b", "--out", str(tmp_path)]) == 0
    _, _, after = capsys.readouterr().out.partition("recommended: ")
    first, reason, command, *_ = after.splitlines()
    assert first == "--dp 2 --sp 4 --tp 1 --experts 1 --policy cost"
    assert "none has more tokens per second" in reason
    assert "--experts 1" in command and "--policy cost" in command
    _, _, table = after.partition("steps, and how far they split the experts:\n")
    sizes = [line.split()[0] for line in table.splitlines()[1:6]]
    assert sizes == ["8", "64", "512", "2,048", "8,192"]
    assert "whole ones" in table.splitlines()[5]
    rows = (tmp_path / "expert_steps.jsonl").read_text().splitlines()
    assert len(rows) == 5


ADVICE = ("plan", "--model", "llama-8b", "--machine", "l4x8,h100x8", "--input", "500")
LIMITS = ("--rate", "5", "--ttft", "1", "--tpot", "0.05")


def test_plan_recommends_nothing_that_has_no_room(capsys):
    argv = ["plan", "--model", "llama-8b", "--machine", "l4x8", "--dtype", "bfloat16"]
    assert main([*argv, "--input", "1000000000"]) == 2
    assert "are more than the 131,072 of llama-3.1-8b" in capsys.readouterr().err
    assert main([*argv, "--input", "100000"]) == 0
    table, _, after = capsys.readouterr().out.partition("recommended: ")
    assert after.startswith("--sp 8 --tp 1 ")
    short = next(line for line in table.splitlines() if "dp8 sp1 tp1" in line)
    assert re.search(r"room for [\d,]+ tokens .* - +- +-$", short)  # no row of zeros


def test_a_model_may_be_a_config_json(capsys):
    parity = Path(__file__).parents[2] / "data/configs"
    assert main(["plan", "--model", str(parity / "olmo-2-7b.json"), "--input", "100"]) == 0
    assert capsys.readouterr().out.startswith("configs (bfloat16, KV bfloat16) on h200x8")
    assert main(["plan", "--model", "/absent/config.json"]) == 2
    assert "/absent/config.json: cannot be read" in capsys.readouterr().err


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("format", "formats"), [("fp8-channel", "fp8, KV bfloat16"), ("awq", "int4, KV bfloat16")]
)
def test_a_quantised_checkpoint_takes_the_bytes_that_devices_hold(
    capsys, tmp_path, format, formats
):
    """Codes, scales and zero points as they are stored, all else as bfloat16."""
    heads: Any = {"num_attention_heads": 8, "num_key_value_heads": 8}
    _, stored, numbers = quantised_files.write(tmp_path, format, **heads)
    argv = ["plan", str(tmp_path), "--input", "8", "--output", "8", "--machine", "h100x8"]
    assert main([*argv, "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert f"({formats})" in said
    row = json.loads((tmp_path / "out" / "plan.jsonl").read_text().splitlines()[0])
    held = sum(_held_bytes(name, x, stored) for name, x in numbers.items())
    assert row["weights_gb"] == held / 1e9
    is_cut = "4 devices have 24 inputs each, which cuts groups of 16 that share a scale"
    assert (
        f"left out: dp2 sp1 tp4, dp2 sp2 tp2, dp2 sp4 tp1, pp2tp4: layers.0.mlp.down: {is_cut}"
        in said
    ) == (format == "awq")
    assert main([*argv, "--dtype", "bfloat16"]) == 0
    said = capsys.readouterr().out
    assert "(bfloat16, KV bfloat16)" in said and "left out" not in said


def _held_bytes(name, x, stored) -> float:
    """Bytes of a weight on a device that has it whole."""
    if name.replace(".weight", ".qweight") in stored:
        return x.size / 2 + x.size / 16 * (4 + 1)  # a float32 scale and a zero point a group
    is_code = name in stored and stored[name].dtype.itemsize == 1
    return x.size + 4 * len(x) if is_code else 2 * x.size


def test_plan_says_where_a_format_has_no_products(capsys):
    assert main(["plan", "--machine", "a100x8", "--dtype", "fp8", "--model", "llama-8b"]) == 0
    assert "a100x8 has no fp8 products: weights are stored in it" in capsys.readouterr().out
    assert main(["plan", "--machine", "h100x8", "--dtype", "fp8", "--model", "llama-8b"]) == 0
    assert "no fp8 products" not in capsys.readouterr().out


@pytest.mark.costs(8)
def test_plan_writes_rows_and_plots(capsys, tmp_path):
    assert main(["plan", "--model", "llama-8b", "--out", str(tmp_path)]) == 0
    assert len((tmp_path / "plan.jsonl").read_text().splitlines()) == 16
    page = (tmp_path / "report.html").read_text()
    assert [page.count(f"<h2>{name}") for name in ("memory", "a prompt", "roofline")] == [1] * 3
    assert page.count("<img") == 3


def test_plan_says_when_nothing_fits(capsys):
    assert main(["plan", "--model", "llama-17b-16e", "--machine", "l4x8"]) == 1
    out = capsys.readouterr().out
    assert re.search(r"; \w[\w ]* misses [\d.]+ GB on each device for the weights", out)


@pytest.mark.costs(8)
def test_simulate_compares_and_writes_rows(capsys, tmp_path):
    assert (
        main([*QUICK, "--compare", "dp,tp,shift", "--rates", "0.5,1", "--out", str(tmp_path)]) == 0
    )
    assert "steps base/between/shift" in capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "simulate.jsonl").read_text().splitlines()]
    assert [row["name"] for row in rows] == ["dp", "tp", "shift"] * 2
    with open(tmp_path / "simulate.csv") as file:
        assert [row["name"] for row in csv.DictReader(file)] == [row["name"] for row in rows]
    page = (tmp_path / "report.html").read_text()
    assert page.count("<img") == 6 and "http" not in page.split("<body")[-1][:200]


def write_trace(path: Path, count: int) -> None:
    """Requests a second apart that share a prefix."""
    lengths = {"prompt_tokens": 1100, "output_tokens": 4, "prefix_ids": [0, 1]}
    rows = [json.dumps({"arrival_seconds": at} | lengths) for at in range(count)]
    path.write_text("\n".join(rows))


def test_the_options_reach_the_replay(capsys, tmp_path):
    trace = tmp_path / "trace.jsonl"
    write_trace(trace, 3)
    argv = ["mesh", "simulate", "--trace", str(trace), "--dtype", "fp8"]
    argv += ["--compare", "shift,step_sizes=largest"]

    def row(*options: str) -> dict:
        assert main([*argv, *options, "--out", str(tmp_path)]) == 0
        return json.loads((tmp_path / "simulate.jsonl").read_text())

    assert row()["cached_share"] == pytest.approx(2 * 1024 / 3300)
    assert row("--no-prefix-caching")["cached_share"] == 0.0
    assert row()["steps_base"] == 1  # only the first prompt is long
    assert row("--shift-threshold", "0")["steps_shift"] == 0
    assert row("--shift-threshold", "2000")["steps_base"] == 0
    assert row("--window", "1:1")["requests"] == 1
    assert row("--max-num-batched-tokens", "512")["steps_base"] == 2  # the first in three chunks


@pytest.mark.thorough
def test_the_engines_settings_are_a_row_and_the_budgets_of_all(capsys, tmp_path):
    file, trace = tmp_path / "engine.yaml", tmp_path / "trace.jsonl"
    settings = "model: llama-8b\nsp: 4\ntp: 2\nprefix_caching: false\nport: 80\n"
    file.write_text(settings + "max_num_seqs: 4\nmax_num_batched_tokens: 512\n")
    write_trace(trace, 2)
    argv = ["mesh", "simulate", "--config", str(file), "--trace", str(trace), "--compare", "sp"]

    def rows(*options: str) -> list[dict]:
        assert main([*argv, *options, "--out", str(tmp_path)]) == 0
        lines = (tmp_path / "simulate.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    config, sp = rows()
    assert (config["name"], sp["name"]) == ("config", "sp")
    assert config["cached_share"] == sp["cached_share"] == 0.0
    assert config["steps_base"] == 4  # two of 512 tokens for each; the rest is below the threshold
    assert sp["steps_shift"] == 0 < config["steps_shift"]
    config, _ = rows("--shift-threshold", "512")  # flags win
    assert config["steps_base"] == 0
    capsys.readouterr()
    assert main(["plan", "--config", str(file)]) == 0
    out = capsys.readouterr().out
    row = next(line for line in out.splitlines() if line.lstrip().startswith("config ")).split()
    assert row[:6] == ["config", "1", "1", "4", "2", "True"]
    assert "\nconfig: these settings take " in out


@pytest.mark.thorough
def test_the_users_settings_are_compared_with_what_is_recommended(capsys, tmp_path):
    file = tmp_path / "engine.yaml"

    def words(settings: str) -> str:
        file.write_text(f"model: llama-8b\n{settings}")
        argv = ["--config", str(file), "--machine", "l4x8", "--goal", "throughput"]
        assert main(["plan", *argv]) == 0
        lines = capsys.readouterr().out.splitlines()
        return next(line for line in lines if line.startswith("config: "))

    same = "config: these settings take 1.00 times the time to the first token of what is "
    same += "recommended, 1.00 times its time per token, and have "
    assert words("sp: 8\ntp: 1\n").startswith(same)
    other = words("dp: 8\nsp: 1\ntp: 1\n")
    assert "take 6.09 times" in other and "have 58% of its tokens per second" in other
    assert words("sp: 1\ntp: 1\nmax_num_seqs: 8\nnum_blocks: 9\n").endswith(
        "no room for such a request"
    )


@pytest.mark.thorough
def test_drafts_are_columns_and_the_engines_settings_count(capsys, tmp_path):
    def rows(*options: str) -> list[dict]:
        assert main([*QUICK[:-2], *options, "--compare", "shift", "--out", str(tmp_path)]) == 0
        lines = (tmp_path / "simulate.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    (plain,) = rows()
    assert plain["drafted_tokens"] == 0 and "drafted" not in capsys.readouterr().out
    (drafted,) = rows("--acceptance", "0.9,0.5")
    assert "accepted/step" in capsys.readouterr().out
    assert 0 < drafted["accepted_tokens"] < drafted["drafted_tokens"]
    assert drafted["completion_mean_seconds"] < plain["completion_mean_seconds"]
    (replayed,) = rows("--acceptance", "tokens_per_step=4.77,accepted_of_drafted=0.78")
    assert replayed["accepted_tokens"] > drafted["accepted_tokens"]
    file = tmp_path / "engine.yaml"
    file.write_text("model: llama-70b\nspeculation: suffix\nmax_draft_tokens: 1\n")
    own = rows("--config", str(file), "--acceptance", "1")
    assert [row["name"] for row in own] == ["config", "shift"]
    assert all(0 < row["accepted_tokens"] < 10 / 2 * row["requests"] for row in own)
    assert main([*QUICK[:-2], "--config", str(file)]) == 2
    assert "how often they are right" in capsys.readouterr().err
    file.write_text("model: llama-70b\n")
    assert main([*QUICK[:-2], "--config", str(file), "--acceptance", "1"]) == 2
    assert "needs speculation" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "fragment"),
    [
        (("mesh", "simulate", "llama-70b"), "required: --trace"),
        (("mesh", "simulate", "--trace", "/absent"), "/absent: cannot be read"),
        ((*QUICK, "--compare", "dp,tpp"), "did you mean tp?"),
        ((*QUICK, "--rates", "fast"), "'fast' is no number"),
        ((*QUICK, "--rates", "0"), "must be above 0"),
        ((*QUICK, "--acceptance", "7"), "acceptance must be a probability"),
        ((*QUICK, "--acceptance", "tokens=7"), "acceptance must be a probability"),
        ((*QUICK, "--rates", "-1"), "must be above 0"),
        ((*QUICK, "--shift-threshold", "-1"), "must be at least 0"),
        ((*QUICK, "--compare", "dp", "--shift-threshold", "9"), "which --compare does not name"),
        ((*QUICK, "--window", "0:5"), "--window is for trace files"),
        ((*QUICK, "--set", "rate=-4"), "rate must be above 0 and finite, got -4"),
        ((*QUICK, "--set", "rat=4"), "unknown argument of poisson 'rat'; did you mean rate?"),
        ((*SYNTHETIC, "--set", "rate=4"), "poisson needs seconds"),
        ((*QUICK, "--set", "rate=nan"), "rate must be above 0 and finite, got nan"),
        ((*QUICK, "--rates", "nan"), "must be above 0"),
        ((*QUICK, "--rates", "inf"), "must be above 0"),
        ((*QUICK, "--block-size", "134217728"), "block_size must be at most 512, got 134217728"),
        (("mesh", "simulate", "--trace", "/etc/hostname", "--set", "rate=4"), "synthetic traces"),
        ((*QUICK, "--machine", "h200"), "unknown machine 'h200'"),
        ((*QUICK, "--model", "llama-700b"), "did you mean llama-70b?"),
        ((*QUICK, "--kv-cache-dtype", "fp4"), "'fp4' is none of"),
        (("plan", "--max-num-seqs", "0"), "max_num_seqs must be at least 1"),
        (("plan", "--input", "0"), "at least 1 token"),
        (("plan", "--rate", "5"), "--ttft, --tpot is missing"),
        (("plan", "--gpu-price", "5"), "--rate, --ttft, --tpot is missing"),
        (("plan", "--rate", "nan", "--ttft", "1", "--tpot", "1"), "--rate must be a number above"),
        (("plan", "--hosts", "2", "--machine", "l4x8"), "l4x8 has no network between hosts"),
        (("plan", "--hosts", "2", "--compile"), "--compile is for the devices of one host"),
        ((*QUICK, "--hosts", "2", "--compare", "fleet"), "stay on one host: drop it, or --hosts"),
        ((*QUICK, "--hosts", "2", "--compare", "pp8:tp8"), "stay on one host: drop it, or"),
        ((*ADVICE, *LIMITS, "--gpu-price", "l4x8=1"), "--gpu-price has no price of h100x8"),
        ((*ADVICE, *LIMITS, "--gpu-price", "cheap"), "'cheap' is no price"),
        ((*ADVICE, *LIMITS, "--gpu-price", "-1"), "--gpu-price must be above 0"),
        ((*ADVICE, *LIMITS, "--window", "0:9"), "--window is for --trace"),
        ((*ADVICE, *LIMITS, "--compile", "1x2"), "drop it, or --rate"),
        ((*ADVICE, *LIMITS, "--goal", "ttft"), "--goal is of the table"),
        ((*ADVICE, *LIMITS, "--trace", "t.jsonl"), "--input: --trace has lengths of its own"),
        (("plan", *LIMITS, "--trace", "t", "--output", "9"), "--output: --trace has lengths"),
        (("plan", "--percentile", "50"), "--rate, --ttft, --tpot is missing"),
        (("mesh", "simulat"), "did you mean simulate?"),
    ],
)
def test_wrong_usage_is_exit_code_2(capsys, argv, fragment):
    assert main(list(argv)) == 2
    assert fragment in capsys.readouterr().err


def test_simulating_needs_no_jax():
    code = (
        "import sys; from serving.cli.main import main; "
        f"main({[*QUICK, '--compare', 'tp']!r}); print('jax' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "False"


@pytest.mark.thorough
def test_a_plan_trades_memory_for_reach_in_fleets(capsys, tmp_path):
    assert main(["plan", "--dtype", "fp8", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "of fleets, --fleet --tp 1 has most tokens per second" in out
    assert out.count("recommended: ") == 1
    rows = [json.loads(line) for line in (tmp_path / "fleets.jsonl").read_text().splitlines()]
    assert [(row["tp"], row["widths"]) for row in rows] == [
        (1, "1,2,4,8"),
        (2, "1,2,4"),
        (4, "1,2"),
    ]


def test_fleets_are_compared_and_their_changes_reported(capsys, tmp_path):
    names = ("--compare", "shift,fleet:load:move", "--bind-at", "0.5", "--release-at", "1")
    trace = ("mesh", "simulate", "--trace", "on_off", "--set", "quiet_rate=2", *SMALL[4:])
    rates = ("--set", "burst_rate=30", "--set", "period_seconds=3", "--set", "burst_seconds=0.5")
    rates += ("--set", "seconds=8")
    options = ("--set", "output_tokens=20", "--dtype", "fp8", "--out", str(tmp_path))
    assert main([*trace, *rates, *options, *names]) == 0
    assert "moved_sequences" in capsys.readouterr().out
    static, fleet = map(json.loads, (tmp_path / "simulate.jsonl").read_text().splitlines())
    assert (static["binds"], static["arrangements"]) == (0, "")
    assert fleet["binds"] > 0 and fleet["releases"] > 0 and fleet["moved_bytes"] > 0
    assert "8:" in fleet["arrangements"]
    page = (tmp_path / "report.html").read_text()
    assert all(text in page for text in ("fleet:load:move: arrangements", "queue by priority"))


def test_every_deployment_says_what_it_is_whatever_it_is_called(capsys):
    expected = {
        "dp": "dp4tp2",
        "tp": "tp8",
        "shift": "sp4tp2, shift to 256",
        "cost": "sp4tp2, mode by cost",
        "sp": "sp4tp2, always base",
        "dp2sp4": "dp2sp4, shift to 256",
        "pp4tp2": "pp4tp2",
        "tp1": "dp8",
        "fleet": "4 units of tp2 in groups of 1 2 4",
        "fleet:2+2": "4 units of tp2 that stay 2+2",
        "pp8:tp8": "prompts in pp8, decodes in tp8",
    }
    trace = ("--set", "seconds=1", "--set", "prompt_tokens=50", "--set", "output_tokens=2")
    assert (
        main(["mesh", "simulate", *PHASES[:-1], "rate=2", *trace, "--compare", ",".join(expected)])
        == 0
    )
    heading, *rows = capsys.readouterr().out.splitlines()
    assert heading.split()[:2] == ["name", "is"] and len(rows) == len(expected)
    for row, (name, words) in zip(rows, expected.items(), strict=True):
        assert row.strip().startswith(name) and f" {words}  " in row


def test_settings_of_fleets_need_a_fleet(capsys):
    assert main([*QUICK, "--compare", "shift", "--bind-at", "2"]) == 2
    assert "bind_at is for fleets, which --compare does not name" in capsys.readouterr().err


PHASES = ("--machine", "a10x8", "--model", "llama-8b", "--trace", "poisson", "--set", "rate=50")


@pytest.mark.thorough
def test_phases_have_shares_of_time_and_a_strip(capsys, tmp_path):
    sizes = ("--set", "seconds=1", "--set", "prompt_tokens=200", "--set", "output_tokens=5")
    command = ["mesh", "simulate", *PHASES, *sizes, "--compare", "tp8,pp8:tp8"]
    assert main([*command, "--host-memory", "1GiB", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "prefill/decode/switch" in out and "0%/0%/0%" in out
    lines = (tmp_path / "simulate.jsonl").read_text().splitlines()
    static, phased = (json.loads(line) for line in lines)
    names = ("prefill_share", "decode_share", "switch_share")
    assert sum(phased[name] for name in names) == pytest.approx(1)
    assert phased["phase_switches"] > 0 == static["phase_switches"]
    assert phased["weights_moved_bytes"] > 15e9 * phased["phase_switches"]
    page = (tmp_path / "report.html").read_text()
    assert "<h2>phases over time" in page and "<h2>pp8:tp8: switches" in page


def test_roles_say_their_splits_what_was_sent_and_who_kept_the_targets(capsys):
    names = ("roles:sp4+dp4,target_tpot=0.001", "roles:dp8", "dp")
    assert main([*QUICK, "--compare", *names]) == 0
    head, fixed, by_cost, plain = capsys.readouterr().out.splitlines()
    assert "inside/s" in head and "sent GB" in head
    assert "prompts in sp4, decodes in dp4" in fixed and "1+4:100%" in fixed
    assert "dp8, roles by cost" in by_cost and "roles" not in plain


@pytest.mark.parametrize(
    ("more", "fragment"),
    [
        (("--compare", "tp", "--host-memory", "1GiB"), "--host-memory is for phases"),
        (("--compare", "pp8:tp8", "--host-memory", "much"), "--host-memory must be a size"),
        (("--compare", "pp8:tp4"), "make the products equal"),
    ],
)
def test_phases_that_cannot_be_simulated(capsys, more, fragment):
    assert main(["mesh", "simulate", *PHASES, *more]) == 2
    assert fragment in capsys.readouterr().err
