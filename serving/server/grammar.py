"""Structured output: grammars become token masks (llguidance). Used off the event loop. No JAX."""

import asyncio
import contextlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import llguidance
import msgspec
import numpy as np

from serving.server.errors import ServeError
from serving.server.fields import is_deeper
from serving.server.grammar_source import GrammarSource
from serving.server.grammar_trial import Trial, parser_limits
from shiftjax.text.tokenizer import Tokenizer

MAX_SOURCE_BYTES = 64 << 10
MAX_TOOL_BYTES = 256 << 10  # of all schemas of a request's tools
MAX_CACHED = 64
MAX_DEPTH = 120  # of the lists and objects of a schema; llguidance reads a few more
NUM_PROBES = 16  # tokens, or runs of forced ones, that are tried
MAX_REASON = 200  # characters of llguidance's words in an error
MOST_FORCED = 64
NUM_THREADS = 2
TIMEOUT = 2.0  # seconds that compiling a grammar or schema may take
UNMATCHABLE = "nothing can match it"
TOO_LARGE = "it is too large or ambiguous: it exceeds the limits of this server"
_REASONS = (  # parts of llguidance's words, and ours
    ("NoExtensionBias", UNMATCHABLE),
    ("Current row has", TOO_LARGE),
    ("Too many items", TOO_LARGE),
    ("too many states", TOO_LARGE),
    ("fuel", TOO_LARGE),
)
REGEX_META = frozenset("\\.+*?()|[]{}^$#&-~")


class GrammarState:
    """A `TokenConstraint`: where one continuation is in its grammar.

    A matcher does not survive an error, and a draft may go where a limit of the parser is, though
    the output never does: then the matcher is made again, and nothing more is drafted.
    """

    decides_end = True

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        num_words: int,
        start: llguidance.LLMatcher | None = None,
        tokens: Sequence[int] = (),
    ):
        self._matcher, self._num_words = matcher, num_words
        self._start = start or matcher.deep_copy()  # at the beginning; all copies share it
        self._tokens = [*tokens]  # accepted
        self._is_drafting = True
        self.mask = self._compute()

    def copy(self) -> "GrammarState":
        """Return an independent state at the same position of the grammar."""
        matcher = self._matcher.deep_copy()
        return GrammarState(matcher, self._num_words, self._start, self._tokens)

    @property
    def is_dead(self) -> bool:
        """Whether no token is allowed next, not even the end of the text."""
        return self._matcher.is_error() or not self.mask.any()

    @property
    def is_stopped(self) -> bool:
        """Whether the grammar is complete."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def error(self) -> str:
        """What went wrong, in llguidance's words; empty: nothing."""
        return self._matcher.get_error() or ""

    def accept(self, token_id: int) -> bool:
        """Move on by a token; False if nothing can follow."""
        if not self._matcher.consume_token(token_id):
            return False
        self._tokens.append(token_id)
        self.mask = self._compute()
        return not self.is_dead

    def masks_along(self, draft: list[int]) -> list[np.ndarray]:
        """`mask` after none, one, two ... of these tokens, as far as the grammar can go on."""
        masks, matcher = [self.mask], self._matcher
        taken = 0
        for token_id in draft if self._is_drafting else ():
            # A token that the mask forbids would break the matcher; what follows a complete output
            # is its end, which `rollback` does not count.
            if not _allows(masks[-1], token_id) or matcher.is_stopped():
                break
            matcher.consume_token(token_id)
            taken += 1
            mask = self._compute()
            if matcher.is_error() or not mask.any():
                break
            masks.append(mask)
        if not self._is_broken():
            matcher.rollback(taken)
        return masks

    def forced_tokens(self, most: int) -> list[int]:
        """The usual tokens, `most` at most, of the text that must come next."""
        tokens = self._matcher.compute_ff_tokens()[:most] if self._is_drafting else []
        return [] if self._is_broken() else tokens

    def _is_broken(self) -> bool:
        """Whether guessing has met a limit; the matcher is then where it was, at some expense."""
        if not self._matcher.is_error():
            return False
        self._matcher, self._is_drafting = self._start.deep_copy(), False
        self._matcher.consume_tokens(self._tokens)
        return True

    def _compute(self) -> np.ndarray:
        """The mask in the words of the model, whose vocabulary may be padded."""
        words = np.zeros(self._num_words, np.uint32)
        if not self._matcher.is_error():
            known = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
            words[: len(known)] = known[: self._num_words]
        return words


def _allows(mask: np.ndarray, token_id: int) -> bool:
    """Whether a token's bit is set; an id that the tokenizer does not know has none."""
    return token_id < 32 * len(mask) and bool(int(mask[token_id // 32]) >> (token_id % 32) & 1)


class Grammars:
    """Compiles constraints in threads, with a time limit, and keeps the last ones."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, timeout: float = TIMEOUT):
        self._num_words = -(-vocab_size // 32)
        self.timeout = timeout  # seconds that compiling one may take
        self._tokenizer = tokenizer
        self._compiled: OrderedDict[GrammarSource, GrammarState] = OrderedDict()
        self._llguidance: llguidance.LLTokenizer | None = None
        self._lock = threading.Lock()
        self._trials = [Trial() for _ in range(NUM_THREADS)]  # those that no thread uses
        self._is_closed = False
        with contextlib.suppress(OSError):  # it is tried again when there is a grammar
            self._trials[-1].start()
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar")

    async def start(self, source: GrammarSource, num: int) -> list[GrammarState]:
        """`num` states at the beginning of a grammar. Raises `ServeError` for one of no use.

        That it takes long is no fault of its own: the machine is busy, or others wait before it.
        """
        most = MAX_TOOL_BYTES if source.kind == "tools" else MAX_SOURCE_BYTES
        if len(source.text.encode()) > most:
            raise _refusal(source, f"is larger than {most} bytes")
        work = self._threads.submit(self.prepare, source, num)
        try:
            async with asyncio.timeout(self.timeout):
                return await asyncio.wrap_future(work)
        except TimeoutError:
            work.cancel()  # if it has not begun
            raise _too_busy() from None

    def close(self) -> None:
        """Let the threads and their processes end."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._is_closed = True
            for trial in self._trials:
                trial.close()

    def prepare(self, source: GrammarSource, num: int) -> list[GrammarState]:
        """Compile the grammar in the calling thread and return `num` states at its start."""
        with self._lock:
            state = self._compiled.get(source)
            if state is not None:
                self._compiled.move_to_end(source)
        state = state or self._compile(source)
        with self._lock:
            self._compiled[source] = state
            if len(self._compiled) > MAX_CACHED:
                self._compiled.popitem(last=False)
        return [state.copy() for _ in range(num)]

    def _compile(self, source: GrammarSource) -> GrammarState:
        tokenizer = self._open_tokenizer()
        grammar, limits = _grammar(source), parser_limits()
        if not self._is_quick(grammar):
            raise _refusal(source, "takes too long to compile")
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        state = GrammarState(matcher, self._num_words)
        problem = _problem_of(state)
        if problem is not None:
            raise _refusal(source, f"cannot be used: {problem[:MAX_REASON]}")
        return state

    def _is_quick(self, grammar: str) -> bool:
        """Whether another process can compile it in little time."""
        with self._lock:
            trial = self._trials.pop() if self._trials else Trial()
        try:
            return trial.survives(grammar, self.timeout)
        except OSError:
            raise _too_busy() from None
        finally:
            with self._lock:
                self._trials.append(trial)
                if self._is_closed:
                    trial.close()

    def _open_tokenizer(self) -> llguidance.LLTokenizer:
        with self._lock:
            if self._llguidance is None:
                backend, eos = self._tokenizer.backend, list(self._tokenizer.eos_token_ids)
                self._llguidance = llguidance.LLTokenizer(
                    backend.to_str(), n_vocab=self._tokenizer.vocab_size, eos_token=eos or None
                )
            return self._llguidance


def _problem_of(state: GrammarState) -> str | None:
    """Why a grammar is of no use, in a few words; None: it is.

    A few tokens are tried, the forced ones or the first that may come: some limits of the parser
    are met only then.
    """
    probe = state.copy()
    for _ in range(NUM_PROBES):
        if probe.is_dead or probe.is_stopped:
            break
        for token_id in probe.forced_tokens(MOST_FORCED) or [_first_allowed(probe.mask)]:
            probe.accept(token_id)
    if probe.is_stopped or not probe.is_dead:
        return None
    return _in_our_words(probe.error or UNMATCHABLE)


def _first_allowed(mask: np.ndarray) -> int:
    word = int(np.flatnonzero(mask)[0])
    return 32 * word + (int(mask[word]) & -int(mask[word])).bit_length() - 1


def _in_our_words(reason: str) -> str:
    """llguidance's reason; what it says of its own limits is of no use to who sent a grammar."""
    line = " ".join(reason.split())
    for sign, words in _REASONS:
        if sign in line:
            return words
    return line


def _grammar(source: GrammarSource) -> str:
    """llguidance's form of a source; texts are checked when the matcher is made."""
    match source.kind:
        case "json":
            try:
                schema = msgspec.json.decode(source.text)
            except (msgspec.MsgspecError, RecursionError):
                raise _refusal(source, "is not JSON") from None
            if not isinstance(schema, dict | bool):
                raise _refusal(source, "must be a JSON schema: an object, true or false")
            if is_deeper(schema, MAX_DEPTH):
                raise _refusal(source, f"is nested more than {MAX_DEPTH} levels deep")
            space = source.whitespace
            return llguidance.LLMatcher.grammar_from_json_schema(
                source.text, overrides=None if space is None else {"whitespace_pattern": space}
            )
        case "regex":
            return llguidance.LLMatcher.grammar_from_regex(source.text)
        case "choice":
            options = map(_escaped, msgspec.json.decode(source.text))
            return llguidance.LLMatcher.grammar_from_regex("|".join(options))
        case _ if source.answer is not None:
            parts = [{"lark_grammar": source.text}, _named(_grammar(source.answer))]
            return msgspec.json.encode({"grammars": parts}).decode()
        case _:
            return llguidance.LLMatcher.grammar_from_lark(source.text)


def _named(grammar: str) -> dict[str, Any]:
    """A grammar as the part of another that calls it `@answer`: JSON, or else Lark."""
    try:
        (part,) = msgspec.json.decode(grammar)["grammars"]
    except msgspec.MsgspecError:
        part = {"lark_grammar": grammar}
    return part | {"name": "answer"}


def _escaped(text: str) -> str:
    """The regex that matches a text and nothing else."""
    return "".join(f"\\{character}" if character in REGEX_META else character for character in text)


def _refusal(source: GrammarSource, words: str) -> ServeError:
    name = _NAMES[source.kind] + (" or the form of the answer" if source.answer else "")
    message = f"The {name} {words}."
    return ServeError("invalid", message, param=source.field, code="grammar_invalid")


def _too_busy() -> ServeError:
    return ServeError("busy", "There was no time to compile the grammar; try again.")


_NAMES = {
    **{kind: f"{kind} of the output" for kind in ("regex", "choice", "grammar")},
    **{"json": "schema of the output", "tools": "schema of a tool"},
}
