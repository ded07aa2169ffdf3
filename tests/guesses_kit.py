"""Drafts of any quality, and engines that take them."""

from echo_kit import VOCAB_SIZE

from shiftjax.core.engine import Engine
from shiftjax.core.request import SequenceState
from shiftjax.draft_options import DraftOptions
from shiftjax.drafts.drafting import Drafting
from shiftjax.drafts.prices import Prices
from shiftjax.drafts.speculation import Speculation
from shiftjax.sim.echo import echo_token


class Guesses(Drafting):
    """Drafts that are right in `quality` of ten tokens; None: right up to `wrong_at`."""

    def __init__(self, quality: int | None = 10, wrong_at: int = 99, most: int = 8, choice=None):
        rule = {"draft_choice": choice} if choice else {"fixed_drafts": True}
        super().__init__(DraftOptions(draft_max_seqs=0, **rule))
        self.quality, self.wrong_at, self.most, self.count = quality, wrong_at, most, 0
        self.known: dict[SequenceState, list[int]] = {}
        self.ended: dict[SequenceState, bool] = {}

    def start(self, name, prompt, corpus, prediction=None, parent=None):
        super().start(name, prompt, corpus, prediction, parent)
        self.known[name] = list(prompt)

    def extend(self, name, tokens, guess=None):
        super().extend(name, tokens, guess)
        self.known[name] += tokens

    def draft(self, name, most):
        assert self.known[name] == name.token_ids, "the history is not the sequence's"
        guesses, last = [], name.token_ids[-1]
        for place in range(min(most, self.most)):
            position = len(name.token_ids) - 1 + place
            token = echo_token(last, position, name.seed, VOCAB_SIZE)
            self.count += 1
            wrong = place >= self.wrong_at
            if self.quality is not None:
                wrong = (self.count * 2654435761 >> 8) % 10 >= self.quality
            last = (token + wrong) % VOCAB_SIZE
            guesses.append(last)
        return self.rated(name, guesses, [0.5] * len(guesses), "guess") if guesses else None

    def learn(self, name, draft, offered, accepted):
        assert 0 <= accepted <= offered == len(draft.tokens)
        super().learn(name, draft, offered, accepted)

    def end(self, name, finished):
        super().end(name, finished)
        self.ended[name] = finished


def let_draft(engine: Engine, guesses: Guesses, *buckets: int, costs=None, **options) -> Engine:
    for lane in engine.lanes:
        config = lane.scheduler.config
        sizes = buckets or (config.max_num_batched_tokens,)
        prices = Prices(
            sizes, engine.policy, lane.modes, costs or getattr(engine.policy, "costs", None)
        )
        lane.scheduler.lookahead = Speculation(
            guesses,
            prices,
            max_rows=config.max_rows,
            overlap=engine.overlap,
            num_micro_batches=config.num_micro_batches,
            **options,
        )
    return engine
