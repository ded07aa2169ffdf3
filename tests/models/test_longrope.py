"""Longrope's numbers are those of the longest sequence that an engine serves."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from engines import make, run, tokens

from shiftjax.core.request import SamplingParams

PHI = Path(__file__).parent.parent / "data" / "parity" / "phi3_longrope"
ORIGINAL = 128  # of the model: transformers computed these sequences with the short factors


@pytest.mark.costs(10)
@pytest.mark.parametrize(("longest", "is_short"), [(ORIGINAL, True), (ORIGINAL + 1, False)])
def test_a_short_context_is_served_with_the_short_factors(tmp_path, longest, is_short):
    shutil.copytree(PHI, tmp_path, dirs_exist_ok=True)
    data = json.loads((PHI / "config.json").read_text())
    for each in (data, data["rope_parameters"]):
        each["original_max_position_embeddings"] = ORIGINAL
    data["max_position_embeddings"] = 4 * ORIGINAL
    (tmp_path / "config.json").write_text(json.dumps(data))
    expected = np.load(PHI / "expected.npz")
    engine = make(tmp_path, sp=1, tp=1, max_model_len=longest).engine
    prompts = [expected[f"token_ids_{i}"].tolist() for i in range(2)]
    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    events = run(engine, prompts, [sampling] * 2)
    found = [tokens(events[i, 0]) for i in range(2)]
    wanted = [expected[f"greedy_{i}"].tolist() for i in range(2)]
    assert (found == wanted) == is_short
