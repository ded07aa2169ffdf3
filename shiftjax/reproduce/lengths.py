"""Requests with the lengths of data sets whose texts are not here, drawn anew. No JAX."""

import itertools
import math
import random
from collections.abc import Callable, Sequence

from shiftjax.sim.trace import TraceRequest

Quantiles = Sequence[tuple[float, int]]  # (share, tokens)

SHAREGPT_PROMPTS: Quantiles = (
    *((0.0, 4), (0.05, 6), (0.25, 14), (0.5, 34), (0.75, 171), (0.95, 1690)),
    *((0.99, 3586), (1.0, 3900)),
)
SHAREGPT_REPLIES: Quantiles = (
    *((0.0, 4), (0.05, 14), (0.25, 117), (0.5, 262), (0.75, 406), (0.95, 779)),
    *((0.99, 930), (1.0, 1024)),
)
"""Tokens of ShareGPT's first turns and of the replies to them; the ends are assumed."""
ARTICLE_PROMPTS = 2200, 3800  # tokens of articles that are cut to a context of 4,096
ARTICLE_MEDIAN, ARTICLE_P90 = 208, 371  # tokens of abstracts: Sarathi-Serve, arXiv 2403.02310
NORMAL_P90 = 1.2816  # standard deviations


def drawn(quantiles: Quantiles, share: float) -> int:
    """Tokens at a share from 0 to 1, between its neighbours on a logarithmic scale."""
    for (low, fewer), (high, more) in itertools.pairwise(quantiles):
        if share <= high:
            part = (share - low) / (high - low)
            return round(math.exp(math.log(fewer) + part * math.log(more / fewer)))
    raise ValueError(f"a share of {share} is above 1")


def sharegpt(count: int, most: int = 4096, seed: int = 0) -> list[TraceRequest]:
    """First turns of ShareGPT with their replies, all there at once, of `most` tokens together."""
    draw = random.Random(f"sharegpt {seed}")
    found: list[TraceRequest] = []
    while len(found) < count:
        prompt, reply = (
            drawn(each, draw.random()) for each in (SHAREGPT_PROMPTS, SHAREGPT_REPLIES)
        )
        if prompt + reply <= most:
            found.append(TraceRequest(0.0, prompt, reply))
    return found


def articles(count: int, most: int = 4096, seed: int = 0) -> list[TraceRequest]:
    """arXiv-summarization with inputs cut to a short context, all there at once."""
    draw = random.Random(f"articles {seed}")
    sigma = math.log(ARTICLE_P90 / ARTICLE_MEDIAN) / NORMAL_P90

    def one() -> TraceRequest:
        prompt = round(draw.uniform(*ARTICLE_PROMPTS))
        output = round(draw.lognormvariate(math.log(ARTICLE_MEDIAN), sigma))
        return TraceRequest(0.0, prompt, min(max(4, output), most - prompt))

    return [one() for _ in range(count)]


DATASETS: dict[str, Callable[[int], list[TraceRequest]]] = {
    "arxiv": articles,
    "sharegpt": sharegpt,
}
