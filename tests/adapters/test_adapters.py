"""Adapters in engines: each request gets the tokens of a model with its adapter merged."""

import pytest
from adapters_kit import expected, modules, said
from engines import RandomPolicy, checkpoint, crowd, make

PROMPTS = crowd(3, 9)
WANTED = [(prompt, (None, 1, 2, 3)[i % 4]) for i, prompt in enumerate(PROMPTS)]


def right(wanted, **overrides) -> list[list[int]]:
    return [expected(tuple(prompt), seed, **overrides) for prompt, seed in wanted]


@pytest.mark.parametrize(("degrees", "overrides"), [((2, 2), {}), ((1, 1), {}), ((1, 8), {})])
def test_each_request_has_its_adapter(degrees, overrides):
    directory, *_ = checkpoint(**overrides)
    options = {"enable_lora": True, "lora_modules": modules(1, 2, 3, **overrides)}
    built = make(directory, *degrees, max_loras=2, max_lora_rank=8, **options)
    built.engine.policy = RandomPolicy(0)
    assert said(built, WANTED) == right(WANTED, **overrides)
