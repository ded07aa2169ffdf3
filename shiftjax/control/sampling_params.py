"""How the tokens of a request are chosen and when it ends. Complete validation, no JAX."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

INT32_MAX = 2**31 - 1
MAX_N = 128
MAX_LOGIT_BIAS = 300
MAX_ALLOWED_TOKENS = 1024
MAX_STOP_TOKENS = 128
MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 1024
MIN_TEMPERATURE = 1e-8  # below it logits / temperature leaves float32: that is greedy


class SamplingError(ValueError):
    """Sampling fields that are wrong: `problems` has (field, what is wrong with it) of them all."""

    def __init__(self, problems: Iterable[tuple[str, str]]):
        self.problems = tuple(problems)
        super().__init__("; ".join(f"{field} {words}" for field, words in self.problems))


@dataclass(frozen=True)
class SamplingParams:
    """What a user may ask of sampling; names and meanings are vLLM's.

    Construction normalises numbers to plain `int` and `float`, lists to tuples, and raises one
    `SamplingError` that lists every problem. What depends on the model (vocabulary, context) is
    checked by `validate_request`.

    `temperature` under `MIN_TEMPERATURE` is greedy, and 0.0 here. `top_k` 0 or -1 is off.
    `max_tokens` None means as many as the context and the KV pool hold; 0 computes the prompt only
    and needs `prompt_logprobs`.
    `min_tokens` output tokens come before any end-of-sequence or stop id. `logprobs` k returns
    the chosen token's and the k largest log-probabilities, 0 the chosen one's alone.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self):
        problems: list[tuple[str, str]] = []
        for name, check in _FIELD_CHECKS.items():
            try:
                object.__setattr__(self, name, check(getattr(self, name)))
            except ValueError as problem:
                problems.append((name, str(problem)))
        problems = problems or _combination_problems(self)
        if problems:
            raise SamplingError(problems)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken, without randomness."""
        return self.temperature == 0.0


def _shown(value: Any) -> str:
    """The value as an error message shows it: a bounded `repr`, however large the input."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, (str, bytes)):
        value = value[:40]
    elif not isinstance(value, (int, float, type(None))):
        return f"a {type(value).__name__}"
    return repr(value)


def _is_a(kind: type, value: Any) -> bool:
    """Whether the value is of this kind of number; True and False are not numbers."""
    return isinstance(value, kind) and not isinstance(value, bool)


def _integer(low: int, high: int) -> Callable[[Any], int]:
    def check(value: Any) -> int:
        if not _is_a(Integral, value):
            raise ValueError(f"must be an integer, not {_shown(value)}")
        if not low <= value <= high:
            raise ValueError(f"must be between {low} and {high}, not {_shown(int(value))}")
        return int(value)

    return check


def _number(low: float, high: float) -> Callable[[Any], float]:
    def check(value: Any) -> float:
        if not _is_a(Real, value):
            raise ValueError(f"must be a number, not {_shown(value)}")
        if not low <= value <= high:  # false for NaN too
            raise ValueError(f"must be between {low:g} and {high:g}, not {_shown(value)}")
        return float(value)

    return check


def _optional(check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else check(value)


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"must be true or false, not {_shown(value)}")
    return value


def _temperature(value: Any) -> float:
    value = _number(0.0, 100.0)(value)
    return 0.0 if value < MIN_TEMPERATURE else value


def _top_p(value: Any) -> float:
    value = _number(0.0, 1.0)(value)
    if value < 1e-8:
        raise ValueError(f"must be above 0, not {value!r}; for greedy use temperature 0")
    return value


def _token_ids(most: int, *, empty: bool) -> Callable[[Any], tuple[int, ...]]:
    token = _integer(0, INT32_MAX)

    def check(value: Any) -> tuple[int, ...]:
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"must be a list of token ids, not {_shown(value)}")
        if len(value) > most or (not value and not empty):
            raise ValueError(f"must have {0 if empty else 1} to {most} entries, not {len(value)}")
        return tuple(token(entry) for entry in value)

    return check


def _logit_bias(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise ValueError(f"must map token ids to numbers, not {_shown(value)}")
    if len(value) > MAX_LOGIT_BIAS:
        raise ValueError(f"must have at most {MAX_LOGIT_BIAS} entries, not {len(value)}")
    token, bias = _integer(0, INT32_MAX), _number(-100.0, 100.0)
    return {token(key): bias(entry) for key, entry in value.items()}


def _stop(value: Any) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value
    if value is None or not isinstance(strings, (list, tuple)):
        raise ValueError(f"must be a string or a list of strings, not {_shown(value)}")
    if len(strings) > MAX_STOP_STRINGS:
        raise ValueError(f"must have at most {MAX_STOP_STRINGS} strings, not {len(strings)}")
    for text in strings:
        if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_CHARACTERS:
            raise ValueError(
                f"entries must be strings of 1 to {MAX_STOP_CHARACTERS} characters, "
                f"not {_shown(text)}"
            )
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise ValueError("entries must be valid Unicode, without lone surrogates")
    return tuple(strings)


_FIELD_CHECKS: dict[str, Callable[[Any], Any]] = {
    "n": _integer(1, MAX_N),
    "temperature": _temperature,
    "top_k": _integer(-1, INT32_MAX),
    "top_p": _top_p,
    "min_p": _number(0.0, 1.0),
    "repetition_penalty": _number(0.01, 100.0),
    "presence_penalty": _number(-2.0, 2.0),
    "frequency_penalty": _number(-2.0, 2.0),
    "logit_bias": _optional(_logit_bias),
    "allowed_token_ids": _optional(_token_ids(MAX_ALLOWED_TOKENS, empty=False)),
    "seed": _optional(_integer(-(2**63), 2**63 - 1)),
    "max_tokens": _optional(_integer(0, INT32_MAX)),
    "min_tokens": _integer(0, INT32_MAX),
    "stop": _stop,
    "stop_token_ids": _token_ids(MAX_STOP_TOKENS, empty=True),
    "ignore_eos": _boolean,
    "logprobs": _optional(_integer(0, INT32_MAX)),
    "prompt_logprobs": _optional(_integer(0, INT32_MAX)),
}


def _combination_problems(params: SamplingParams) -> list[tuple[str, str]]:
    """Problems of fields that are each fine by themselves."""
    problems = []
    nothing = "0 generates nothing"
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        words = f"({params.min_tokens}) must not exceed max_tokens ({params.max_tokens})"
        problems.append(("min_tokens", words))
    if params.max_tokens == 0 and params.prompt_logprobs is None:
        problems.append(("max_tokens", f"{nothing} and is allowed with prompt_logprobs only"))
    if params.max_tokens == 0 and params.n > 1:
        problems.append(("max_tokens", f"{nothing}, so n must be 1, not {params.n}"))
    return problems
