"""How much a model shall think, in the variables that its chat template has for it. No JAX."""

import re

# As OpenAI and Anthropic have them, in their order.
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_HARMONY = ("low", "medium", "high")  # the levels that GPT-OSS was trained with
_QUOTED = re.compile(rf"""(["'])({"|".join(EFFORTS)})\1""")


def effort_variables(effort: str | None, source: str | None) -> dict[str, str | bool]:
    """Variables of the chat template `source` for an effort; empty: it has none for it.

    The variables are those of vLLM: `reasoning_effort`, and `enable_thinking`, which is false for
    none. A template that names levels gets the nearest of those.
    """
    if effort not in EFFORTS or source is None:
        return {}
    variables: dict[str, str | bool] = {}
    if re.search(r"\benable_thinking\b", source):
        variables["enable_thinking"] = effort != "none"
    if re.search(r"\breasoning_effort\b", source):
        levels = _levels(source)
        if effort in levels or not (effort == "none" and variables):
            variables["reasoning_effort"] = _nearest(effort, levels)
    return variables


def _levels(source: str) -> tuple[str, ...]:
    """The levels of a template. GPT-OSS's names its default only, and prints any."""
    if "<|channel|>" in source:
        return _HARMONY
    found = {match[2] for match in _QUOTED.finditer(source)}
    return tuple(each for each in EFFORTS if each in found) if len(found) > 1 else EFFORTS


def _nearest(effort: str, levels: tuple[str, ...]) -> str:
    """The level next to an effort, the higher one of two."""
    place = EFFORTS.index(effort)
    return min(levels, key=lambda each: (abs(EFFORTS.index(each) - place), -EFFORTS.index(each)))
