"""What the settings `numerics` cost in predicted steps."""

from functools import cache

from shiftjax.arch.formats import Formats
from shiftjax.arch.numerics import NUMERICS
from shiftjax.arch.presets import PRESETS
from shiftjax.config import EngineConfig
from shiftjax.costs.machine_files import load_engine, load_machine
from shiftjax.sim.modelled import Target, deploy_config
from shiftjax.sim.numerics_words import numerics_in_words, numerics_rows

TARGET = Target(PRESETS["llama-8b"], load_machine("h200x8"), load_engine("shiftjax"), Formats())


@cache
def deployed(numerics: str, **given):
    degrees = given if given else {"sp": 4, "tp": 2}
    config = EngineConfig.from_options(numerics=numerics, dtype="bfloat16", **degrees)
    return deploy_config(TARGET, config)


def test_a_sum_moves_the_bytes_of_its_format():
    """Of a step of 8,192 tokens in base: 2 sums a layer of its tokens / 4, over 2 devices."""
    rows = {row["numerics"]: row for row in numerics_rows(TARGET, deployed("invariant"))}
    assert rows.keys() == NUMERICS.keys()
    model = TARGET.model
    each = 2 * model.num_layers * (8192 // 4) * model.hidden_size / 1e6  # numbers in sums, millions
    fast = rows["fast"]["8,192 of prompts, MB"]
    for name, more in (("float32", 2), ("invariant", 4), ("integer", 2)):
        assert abs(rows[name]["8,192 of prompts, MB"] - fast - more * each) < 1, name


def test_wider_sums_take_longer():
    rows = {row["numerics"]: row for row in numerics_rows(TARGET, deployed("integer"))}
    for title in ("1 decodes, ms", "64 decodes, ms", "8,192 of prompts, ms"):
        assert rows["fast"][title] < rows["float32"][title]
        assert rows["float32"][title] < rows["invariant"][title]
        assert rows["float32"][title] < rows["integer"][title]


def test_nothing_is_said_where_nothing_is_summed_or_asked():
    assert numerics_in_words(TARGET, deployed("invariant")).count("\n") == 7
    assert numerics_in_words(TARGET, deployed("fast")) == ""
    assert numerics_in_words(TARGET, deployed("invariant", sp=1, tp=1)) == ""
