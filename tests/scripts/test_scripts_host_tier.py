"""The benchmark of the host tier, as far as it can be checked without measuring."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from cases import host_tier as bench


def row(tier: str, prompt: int, seconds: float, token: int = 5) -> dict:
    return {
        "engine": tier,
        "prompt": prompt,
        "seconds": seconds,
        "cpu_seconds": 2 * seconds,
        "token": token,
    }


def test_the_summary_has_medians_and_ratios_of_rounds_and_notices_other_tokens():
    rows = [row("without", 0, 8.0), row("with", 0, 1.0), row("without", 1, 9.0)]
    rows += [row("with", 1, 3.0), row("without", 0, 30.0), row("with", 0, 3.0)]
    told = bench.summary(rows)
    assert told["seconds"] == {"without": 9.0, "with": 3.0}
    assert told["cpu_seconds"] == {"without": 18.0, "with": 6.0}
    assert told["ratio_seconds"] == told["ratio_cpu_seconds"] == 8.0
    assert told["same_tokens"] is True
    assert bench.summary([*rows[:-1], row("with", 0, 3.0, token=6)])["same_tokens"] is False
