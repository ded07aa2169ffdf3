"""The metrics of an embedder. No JAX."""

from serving.server.embed_thread import EmbedTurn
from serving.server.errors import ServeError
from serving.server.metrics import Metrics
from serving.server.records import FIRST_TOKEN_BUCKETS, Declared, Records
from shiftjax.embed.embed_engine import EmbedStats

FILL_BUCKETS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
TABLE = (
    Declared("embedding_texts", "Texts that came out of an embedder.", labels=("outcome",)),
    Declared("embedding_queue_time_seconds", "Arrival of a text to its step.", FIRST_TOKEN_BUCKETS),
    Declared("embedding_rows_fill", "Tokens of texts over tokens computed.", FILL_BUCKETS),
)


class EmbeddingMetrics(Records):
    """An `EmbedObserver`: counts texts here, and requests where all requests are counted."""

    def __init__(self, requests: Metrics):
        super().__init__(TABLE)
        self._requests = requests

    def rejected(self, error: ServeError) -> None:
        """A request was refused at the door."""
        self._requests.rejected(error)

    def embedded(self, turn: EmbedTurn, before: EmbedStats) -> None:
        """A turn has ended; `before` are the counters until then."""
        computed = turn.stats.num_computed_tokens - before.num_computed_tokens
        if computed:
            real = turn.stats.num_tokens - before.num_tokens
            self.observe("embedding_rows_fill", real / computed)
        for result in turn.results:
            self.count("embedding_texts", 1, "ok" if result.error is None else "error")
            self.observe("embedding_queue_time_seconds", result.queue_seconds)

    def embedding_ended(self, num_tokens: int, seconds: float, error: ServeError | None) -> None:
        """A request has ended."""
        self._requests.answered(num_tokens, seconds, error)
