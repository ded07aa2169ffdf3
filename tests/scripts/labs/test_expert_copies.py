"""Where experts are put: as many on each device, all of what tokens ask for, evenly."""

import json

import numpy as np
import pytest

from scripts.labs.expert_copies import drawn_chances, main, placed


@pytest.mark.parametrize("copies", [0, 1, 2])
def test_devices_have_as_many_experts_and_all_that_is_asked_for(copies):
    chances = drawn_chances(1, 30, 4, 1.0)[0]
    assert chances.sum() == pytest.approx(4) and chances.max() <= 1
    found = placed(np.pad(chances, (0, 2)), 8, copies)
    assert found.size == 8 * (4 + copies) and found.sum() == pytest.approx(4)
    loads = found.reshape(8, -1).sum(axis=1)
    assert loads.max() / loads.mean() < (1.2 if copies == 0 else 1.05)
    if copies:
        assert found.max() < chances.max()


def test_counts_of_a_server_are_priced(tmp_path, capsys):
    counts = np.ones((48, 128), int)
    counts[:, :16] = 8
    file = tmp_path / "counts.json"
    file.write_text(json.dumps({"counts": counts.tolist()}))
    main(["qwen3-30b-a3b", "tp8", "--counts", str(file)])
    rows = {
        row.split(" | ")[0].strip("| "): row.split(" | ")
        for row in capsys.readouterr().out.splitlines()
    }
    assert rows["as they are"][-1].strip("| ") == f"{8 * 8 / 15:.2f}"
    assert float(rows["moved"][-1].strip("| ")) < 1.1
    assert all(cell.startswith("-") for cell in rows["moved"][3:-1]), "one device had half of it"
