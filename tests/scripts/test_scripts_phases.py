"""The benchmark of stages and phases, as far as it can be checked without measuring."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from cases import phases as bench


def row(what: str, name: str, count: int, **values) -> dict:
    sizes = bench.Workload(4, 16, 8)._asdict()
    return {"what": what, "name": name, "count": count, "step_ms": 1.0} | sizes | values


ROWS = [
    *(row("micro_batches", "pp4", 1, step_ms=v, tokens_per_second=10.0) for v in (8.0, 9.0, 30.0)),
    row("micro_batches", "pp4", 4, step_ms=3.0, tokens_per_second=25.0),
    row("degrees", "pp4", 4, tokens_per_second=20.0),
    row("degrees", "tp4", 1, tokens_per_second=15.0),
    *(row("phases", "pp4:tp4", 4, host_share=0.5, switches=n, tokens_per_second=n) for n in (3, 5)),
]


def test_the_summary_has_medians_and_notices_other_tokens():
    told = bench.summary(ROWS, [{"a": [1, 2]}, {"a": [1, 2], "b": [3]}])
    assert told["bytes_equal"] is True
    assert told["step_ms_by_micro_batches"] == {1: 9.0, 4: 3.0}
    static = {"16:8 pp4": 20.0, "16:8 tp4": 15.0}
    assert told["tokens_per_second"] == static | {"16:8 pp4:tp4 host 50%": 4.0}
    assert told["switches"] == {"16:8 pp4:tp4 host 50%": 4.0}
    assert bench.summary(ROWS, [{"a": [1, 2]}, {"a": [1, 3]}])["bytes_equal"] is False


def test_a_workload_is_the_same_every_time():
    one, other = (bench.Workload(3, 16, 8).requests() for _ in range(2))
    assert [r.prompt_token_ids for r in one] == [r.prompt_token_ids for r in other]
    assert all(8 <= len(r.prompt_token_ids) < 16 for r in one)
