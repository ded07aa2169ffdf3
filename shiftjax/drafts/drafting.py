"""The drafts of one group's sequences: what they are copied from, and what was learned. No JAX."""

from array import array
from collections.abc import Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from shiftjax.core.proposal import Claims, ModelGuess, Proposal
from shiftjax.draft_options import DraftOptions
from shiftjax.drafts.acceptance import Acceptance, Record
from shiftjax.drafts.corpora import Corpora
from shiftjax.drafts.draft_history import History, Place, Text
from shiftjax.drafts.search import Guess, Lookup, follow, make_search
from shiftjax.drafts.sorted_index import SortedIndex

INLINE_TOKENS = 1000  # a text up to this long is indexed at once (0.2 ms), a longer one elsewhere
START_WORK, EXTEND_WORK = 256, 16  # tokens of finished texts that a call indexes, at most or least


@dataclass(slots=True)
class _Family:
    """The continuations of one request: one index of the prompt, one history of what they say."""

    history: History
    prompt: Future[SortedIndex]
    num_members: int = 0


@dataclass(slots=True)
class _Prediction:
    """The output that the client expects."""

    tokens: array[int]
    index: Future[SortedIndex]

    def lookup(self, key: array[int], most: int) -> list[Place]:
        if not self.index.done():
            return []
        return [(self.tokens, end) for end in self.index.result().ends(key, most)]


@dataclass(slots=True)
class _Sequence:
    family: _Family
    text: Text  # prompt and output
    num_prompt: int
    parent: Hashable | None
    corpus: Hashable
    prediction: _Prediction | None
    guess: "ModelGuess | None" = None  # what follows the tokens that are known now
    record: Record = field(default_factory=Record)

    def lookup(self, key: array[int], most: int) -> list[Place]:
        """What this request has said, then, older, its prompt."""
        found, prompt = self.family.history.places(key, most), self.family.prompt
        if len(found) < most and prompt.done():
            ends = prompt.result().ends(key, most - len(found))
            found += [(self.text.tokens, end) for end in ends]
        return found


class Drafting:
    """Drafts for the sequences of one group of devices; one thread calls it.

    Every method but `close` takes time that does not depend on the length of a prompt, but for
    copying it. The index of a long prompt is built by a thread, while the prompt is prefilled:
    drafts made before it is ready copy from the output alone. Otherwise drafts depend on nothing
    but the calls before. The names of unknown sequences raise `KeyError`.
    """

    def __init__(self, options: DraftOptions):
        self.options = options
        self._search = make_search(options)
        self._corpora = Corpora(
            self._search.sizes, options.suffix_corpus_tokens if options.keeps_corpus else 0
        )
        self._acceptance = Acceptance()
        self._sequences: dict[Hashable, _Sequence] = {}
        self._families: dict[Hashable, _Family] = {}
        self._indexer = ThreadPoolExecutor(1, "draft-index")  # starts its thread when first used

    @property
    def num_corpus_tokens(self) -> int:
        """Tokens of finished outputs that are kept, all corpora together."""
        return self._corpora.num_tokens

    def start(
        self,
        name: Hashable,
        prompt: Sequence[int],
        corpus: Hashable,
        prediction: Sequence[int] | None = None,
        parent: Hashable | None = None,
    ) -> None:
        """A sequence begins.

        Args:
            name: what it is called from here on.
            prompt: its tokens.
            corpus: finished outputs are shared among the sequences of the same key, and no others:
                adapter and cache salt.
            prediction: the output that the client expects.
            parent: what the continuations of one prompt have in common; they see each other's
                tokens while they run.

        Raises:
            ValueError: there is a sequence of this name.
        """
        if name in self._sequences:
            raise ValueError(f"There is a sequence called {name!r} already.")
        self._corpora.work(START_WORK)
        tokens = array("i", prompt)
        family = self._families.get(parent)
        if family is None:
            repeated = tokens if self.options.copies else array("i")
            family = _Family(History(self._search.sizes), self._index(repeated))
            if parent is not None:
                self._families[parent] = family
        family.num_members += 1
        text = family.history.add(tokens, first=max(1, len(tokens)))
        if self.options.copies:
            family.history.index(text, len(tokens) + 1)
        expected = None if prediction is None else self._predict(array("i", prediction))
        self._sequences[name] = _Sequence(family, text, len(prompt), parent, corpus, expected)

    def extend(
        self, name: Hashable, tokens: Sequence[int], guess: ModelGuess | None = None
    ) -> None:
        """Tokens of a sequence were committed; a model may have guessed what comes after them."""
        sequence = self._sequences[name]
        sequence.guess = guess
        text = sequence.text
        text.tokens.extend(tokens)
        if self.options.copies:
            sequence.family.history.index(text, len(text.tokens) + 1)
        self._corpora.work(max(EXTEND_WORK, 4 * len(tokens)))  # 2 per token would keep up

    def draft(self, name: Hashable, most: int) -> Proposal | None:
        """The draft of the largest expectation, at most `most` tokens long; None: there is none.

        Copied from what the request has said itself, from its prediction or from its corpus, or
        guessed by a model.
        """
        sequence = self._sequences[name]
        most = min(most, self.options.max_draft_tokens)
        if most < 1:
            return None
        tail = sequence.text.tokens[-self._search.max_match :]
        drafts = []
        if self.options.copies:
            drafts.append(self._copied(sequence, tail, sequence.lookup, most, "own"))
        if sequence.prediction is not None:
            guess = self._predicted(sequence, tail, most)
            drafts.append(self._rated(sequence, guess, "prediction", "prediction"))
        corpus = self._corpora.get(sequence.corpus)
        if corpus is not None:
            drafts.append(self._copied(sequence, tail, corpus.places, most, "corpus"))
        if sequence.guess is not None:
            tokens, claims = sequence.guess
            guess = Guess(tokens[:most], claims[:most], 0)
            drafts.append(self._rated(sequence, guess, "model", "model"))
        best = max(drafts, key=lambda draft: sum(draft.survivals), default=None)
        return best if best and best.tokens else None

    def rated(
        self, name: Hashable, tokens: list[int], claims: list[float], drafter: str
    ) -> Proposal:
        """A draft that was made elsewhere, by a model or a grammar, as this sequence's.

        `claims` are the probabilities of its tokens, each given those before it.
        """
        return self._rated(self._sequences[name], Guess(tokens, claims, 0), drafter, drafter)

    def learn(self, name: Hashable, draft: Proposal, offered: int, accepted: int) -> None:
        """Of the first `offered` tokens of a draft, `accepted` were what the step sampled.

        Tokens whose outcome nobody knows, as behind a stop, are not offered.
        """
        record = self._sequences[name].record
        self._acceptance.learn(draft.keys, record, offered, accepted)

    def record(self, name: Hashable) -> float:
        """How a sequence's last drafts did; 1: as well as drafts like them. The best go first."""
        return self._sequences[name].record.factor

    def fade(self) -> None:
        """Nobody drafts for a while: what was learned counts for less when it is tried again.

        Else some bad luck at the start would be the end of all drafts.
        """
        self._acceptance.fade(sequence.record for sequence in self._sequences.values())

    def end(self, name: Hashable, finished: bool) -> None:
        """A sequence is over; only if it `finished` by itself does its output enter the corpus."""
        sequence = self._sequences.pop(name)
        family = sequence.family
        family.num_members -= 1
        if not family.num_members:
            family.prompt.cancel()
            self._families.pop(sequence.parent, None)
        if finished:
            self._corpora.add(sequence.corpus, sequence.text.tokens[sequence.num_prompt :])

    def close(self) -> None:
        """End the thread that builds indices."""
        self._indexer.shutdown(cancel_futures=True)

    def _predict(self, tokens: array[int]) -> _Prediction:
        return _Prediction(tokens, self._index(tokens))

    def _index(self, tokens: array[int]) -> Future[SortedIndex]:
        """The index of these tokens as they are now: there if they are few, else to come."""
        sizes = self._search.sizes
        if len(tokens) > INLINE_TOKENS:
            return self._indexer.submit(SortedIndex, tokens[:], sizes)
        future: Future[SortedIndex] = Future()
        future.set_result(SortedIndex(tokens, sizes))
        return future

    def _predicted(self, sequence: _Sequence, tail: array[int], most: int) -> Guess:
        """From where the output has come to, if it is as predicted; else by search."""
        prediction = sequence.prediction
        assert prediction is not None
        done = len(sequence.text.tokens) - sequence.num_prompt
        recent = min(done, len(tail))
        is_aligned = prediction.tokens[done - recent : done] == tail[len(tail) - recent :]
        if is_aligned:
            match = self._search.max_match
            return Guess(*follow([(prediction.tokens, done)], most), match)
        return self._search.guess(tail, prediction.lookup, most)

    def _copied(
        self, sequence: _Sequence, tail: array[int], lookup: Lookup, most: int, source: str
    ) -> Proposal:
        drafter = "ngram" if self.options.speculation == "ngram" else "suffix"
        guess = self._search.guess(tail, lookup, most)
        return self._rated(sequence, guess, drafter, source)

    def _rated(self, sequence: _Sequence, guess: Guess, drafter: str, source: str) -> Proposal:
        claims = Claims(source, guess.match, guess.claims)
        survivals = self._acceptance.survivals(claims, sequence.record)
        return Proposal(guess.tokens, survivals, drafter, claims)
