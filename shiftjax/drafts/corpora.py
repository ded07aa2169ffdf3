"""Finished outputs that later requests may repeat, each tenant's apart. No JAX."""

from array import array
from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence

from shiftjax.drafts.draft_history import History, Text

MOST_CORPORA = 64


class Corpora:
    """One history per key, all of them under one budget of tokens.

    Texts enter whole and leave whole, the oldest first; beyond `MOST_CORPORA` the corpus that was
    used least recently leaves. To the index they are written, and taken out of it, by `work`, a
    slice at a time::

        add     -> text is kept (counts)    -> `_entering` -> indexed: can be found
        evicted -> text is gone (no count)  -> `_leaving`  -> its places are out of the index

    Leaving goes first, so that the index never holds more than `most_tokens` tokens.
    """

    def __init__(self, sizes: Sequence[int], most_tokens: int):
        self.most_tokens = most_tokens
        self.num_tokens = 0
        self._sizes = tuple(sizes)
        self._corpora: OrderedDict[Hashable, History] = OrderedDict()  # the latest used last
        self._texts: OrderedDict[Text, History] = OrderedDict()  # the oldest first, of all corpora
        self._entering: deque[tuple[History, Text]] = deque()
        self._leaving: deque[tuple[History, Text, int]] = deque()  # and the place to go on at

    def __len__(self) -> int:
        return len(self._corpora)

    def get(self, key: Hashable) -> History | None:
        """The corpus of this key, now the latest used; None: nobody has finished a text in it."""
        corpus = self._corpora.get(key)
        if corpus is not None:
            self._corpora.move_to_end(key)
        return corpus

    def add(self, key: Hashable, tokens: Sequence[int]) -> None:
        """Keep a text. One with more tokens than all corpora may have is not kept."""
        if not 0 < len(tokens) <= self.most_tokens:
            return
        corpus = self.get(key)
        if corpus is None:
            if len(self._corpora) == MOST_CORPORA:
                self._evict_corpus()
            corpus = self._corpora[key] = History(self._sizes)
        while self.num_tokens + len(tokens) > self.most_tokens:
            self._evict(next(iter(self._texts)))
        text = corpus.add(array("i", tokens))
        self.num_tokens += len(tokens)
        self._texts[text] = corpus
        self._entering.append((corpus, text))

    def work(self, most: int) -> None:
        """Index, or take out of the index, at most `most` tokens."""
        while self._leaving and most > 0:
            corpus, text, start = self._leaving.popleft()
            stop = min(text.stop, start + most)
            corpus.forget(text, start, stop)
            most -= stop - start
            if stop < text.stop:
                self._leaving.appendleft((corpus, text, stop))
        while self._entering:
            corpus, text = self._entering[0]
            if text.number in corpus.texts:
                stop = min(len(text.tokens) + 1, text.stop + most)
                most -= stop - text.stop
                corpus.index(text, stop)
                if stop <= len(text.tokens):
                    break
            self._entering.popleft()

    def _evict(self, text: Text) -> None:
        corpus = self._texts.pop(text)
        del corpus.texts[text.number]
        self.num_tokens -= len(text.tokens)
        self._leaving.append((corpus, text, text.first))

    def _evict_corpus(self) -> None:
        _, corpus = self._corpora.popitem(last=False)
        for text in list(corpus.texts.values()):
            self._evict(text)
