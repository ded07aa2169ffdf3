"""A runner that embeds without a model, and breaks when it is told to."""

import time
from collections.abc import Callable

import numpy as np

from shiftjax.embed.embed_engine import EmbedPlan, EmbedShape

SHAPE = EmbedShape((16, 32), ((1, 2, 4), (1, 2)), 24, 64)
HIDDEN = 3


def embedding_of(token_ids) -> np.ndarray:
    """What the runner below makes of a text: its length, sum and last token."""
    return np.array([len(token_ids), sum(token_ids), token_ids[-1]], np.float32)


class SumRunner:
    """An `EmbedRunner`; `breaks(plan)` says how a step fails: "run", "fetch", "nan" or not.

    A step takes `seconds`, and waits while `gate` is closed.
    """

    def __init__(
        self, shape: EmbedShape = SHAPE, breaks: Callable[[EmbedPlan], str | None] | None = None
    ):
        self.shape, self.breaks = shape, breaks or (lambda plan: None)
        self.plans: list[EmbedPlan] = []
        self.num_in_flight = self.most_in_flight = 0
        self.seconds = 0.0

    def run(self, plan: EmbedPlan) -> tuple[EmbedPlan, str | None]:
        self.plans.append(plan)
        check(plan, self.shape)
        how = self.breaks(plan)
        if how == "run":
            raise RuntimeError("out of memory")
        self.num_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.num_in_flight)
        return plan, how

    def fetch(self, handle: tuple[EmbedPlan, str | None]) -> np.ndarray:
        plan, how = handle
        self.num_in_flight -= 1
        time.sleep(self.seconds)
        if how == "fetch":
            raise RuntimeError("the device is lost")
        found = np.array([embedding_of(text.token_ids) for text in plan.texts])
        if how == "nan":
            found[0] = np.nan
        return found


def check(plan: EmbedPlan, shape: EmbedShape) -> None:
    """A plan fits the sizes that are compiled."""
    assert 0 < len(plan.rows) <= shape.most_rows(plan.width)
    assert len(plan.texts) <= shape.max_texts
    for row in plan.rows:
        assert row
        assert len(row) <= plan.width // 8
        assert sum(len(text.token_ids) for text in row) <= plan.width
