"""How the tokens of a request are chosen and when it ends. Complete validation, no JAX.

A field of `SamplingParams` is the one declaration of a parameter: name, type, default, check, the
APIs that take it, its neutral value on the device, and its description. Fields of HTTP bodies,
OpenAPI, flags, conversion from gRPC and the sampler's inputs derive from it; `.proto` is compared.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any, Literal

INT32_MAX = 2**31 - 1
MAX_N = 128
MAX_LOGIT_BIAS = 300
MAX_ALLOWED_TOKENS = 1024
MAX_STOP_TOKENS = 128
MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARACTERS = 256
MIN_TEMPERATURE = 1e-8  # below it logits / temperature leaves float32: that is greedy


class SamplingError(ValueError):
    """Sampling fields that are wrong: `problems` has (field, what is wrong with it) of them all."""

    def __init__(self, problems: Iterable[tuple[str, str]]):
        self.problems = tuple(problems)
        super().__init__("; ".join(f"{field} {words}" for field, words in self.problems))


# Who takes a parameter by the name and in the form of its row. What an API has by another name, or
# in another form, it declares by itself. gRPC, `LLM` and the command line have all parameters.
Api = Literal["http", "dialects", "dynamo"]
HTTP: Api = "http"  # completions and chats
DIALECTS: Api = "dialects"  # Messages and Responses, beside fields of their own
DYNAMO: Api = "dynamo"  # its `sampling_options`


def _unchanged(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class OnDevice:
    """A parameter that the sampler reads: one number for each logit row.

    `neutral` changes nothing; rows with it are float32 if it is a float, else int32.
    """

    neutral: float
    name: str = ""  # of the row in `SamplingInputs`; empty: the parameter's
    value: Callable[[Any], float] = _unchanged  # from the parameter's to the device's
    draws: bool = False  # it only changes how a token is drawn: neutral in greedy rows
    counts: bool = False  # it needs to know how often each token occurred


@dataclass(frozen=True)
class Param:
    """A row of the table: what a field of `SamplingParams` says beside type and default."""

    check: Callable[[Any], Any]  # returns the value, normalised; raises ValueError
    help: str
    apis: Collection[Api]
    device: OnDevice | None


def _param(
    default: Any,
    check: Callable[[Any], Any],
    help: str,
    *,
    apis: Collection[Api] = (HTTP, DIALECTS, DYNAMO),
    device: OnDevice | None = None,
) -> Any:
    return field(
        default=default, metadata={"help": help, "param": Param(check, help, apis, device)}
    )


# --- checks: each returns the value, normalised, or raises ValueError -----------------------------


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


def _texts(most: int, longest: int) -> Callable[[Any], tuple[str, ...]]:
    def check(value: Any) -> tuple[str, ...]:
        strings = [value] if isinstance(value, str) else value
        if value is None or not isinstance(strings, (list, tuple)):
            raise ValueError(f"must be a string or a list of strings, not {_shown(value)}")
        if len(strings) > most:
            raise ValueError(f"must have at most {most} strings, not {len(strings)}")
        for text in strings:
            if not isinstance(text, str) or not 0 < len(text) <= longest:
                words = f"entries must be strings of 1 to {longest} characters"
                raise ValueError(f"{words}, not {_shown(text)}")
            if any("\ud800" <= character <= "\udfff" for character in text):
                raise ValueError("entries must be valid Unicode, without lone surrogates")
        return tuple(strings)

    return check


def _bad_words(value: Any) -> tuple[str, ...]:
    words = _texts(MAX_BAD_WORDS, MAX_BAD_WORD_CHARACTERS)(value)
    if any(word.isspace() for word in words):
        raise ValueError("entries must not be white space alone")
    return words


# --- the table -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class SamplingParams:
    """What a user may ask of sampling; names and meanings are vLLM's.

    Construction normalises numbers to plain `int` and `float`, lists to tuples, and raises one
    `SamplingError` that lists every problem. What depends on the model (vocabulary, context) is
    checked by `validate_request`.
    """

    n: int = _param(1, _integer(1, MAX_N), "continuations of each prompt", apis=(HTTP, DYNAMO))
    # Under `MIN_TEMPERATURE` it is 0.0 here.
    temperature: float = _param(
        1.0,
        _temperature,
        "divides the logits; 0: greedy",
        apis=(HTTP, DYNAMO),
        device=OnDevice(0.0, draws=True),
    )
    top_k: int = _param(
        0,
        _integer(-1, INT32_MAX),
        "only the k most likely tokens; 0 or -1: all, 1: greedy",
        apis=(HTTP, DYNAMO),
        device=OnDevice(0, value=lambda k: max(k, 0), draws=True),
    )
    top_p: float = _param(
        1.0,
        _top_p,
        "only the smallest set of most likely tokens that has this probability; 1: all",
        apis=(HTTP, DYNAMO),
        device=OnDevice(1.0, draws=True),
    )
    min_p: float = _param(
        0.0,
        _number(0.0, 1.0),
        "only tokens at least this many times as likely as the most likely one; 0: all",
        device=OnDevice(0.0, draws=True),
    )
    repetition_penalty: float = _param(
        1.0,
        _number(0.01, 100.0),
        "divides positive logits of tokens seen in prompt or output, multiplies negative ones",
        device=OnDevice(1.0, counts=True),
    )
    presence_penalty: float = _param(
        0.0,
        _number(-2.0, 2.0),
        "subtracted from the logits of generated tokens, once",
        device=OnDevice(0.0, counts=True),
    )
    frequency_penalty: float = _param(
        0.0,
        _number(-2.0, 2.0),
        "subtracted from the logits of generated tokens, once per time that they were generated",
        device=OnDevice(0.0, counts=True),
    )
    logit_bias: Mapping[int, float] | None = _param(
        None, _optional(_logit_bias), "added to the logits of these token ids"
    )
    allowed_token_ids: tuple[int, ...] | None = _param(
        None,
        _optional(_token_ids(MAX_ALLOWED_TOKENS, empty=False)),
        "no other tokens are chosen",
        apis=(HTTP,),
    )
    seed: int | None = _param(
        None,
        _optional(_integer(-(2**63), 2**63 - 1)),
        "the same seed draws the same tokens, whatever runs beside",
    )
    max_tokens: int | None = _param(
        16,
        _optional(_integer(0, INT32_MAX)),
        "most output tokens; 0: compute prompt_logprobs only; none: what context and KV pool hold",
        apis=(),  # HTTP has two names for it, the dialects and Dynamo have their own
    )
    min_tokens: int = _param(
        0,
        _integer(0, INT32_MAX),
        "so many output tokens come before any end-of-sequence or stop id",
        apis=(HTTP, DIALECTS),
    )
    stop: tuple[str, ...] = _param(
        (),
        _texts(MAX_STOP_STRINGS, MAX_STOP_CHARACTERS),
        "texts that end the output",
        apis=(HTTP,),
    )
    stop_token_ids: tuple[int, ...] = _param(
        (),
        _token_ids(MAX_STOP_TOKENS, empty=True),
        "token ids that end the output",
        apis=(HTTP, DIALECTS),
    )
    ignore_eos: bool = _param(
        False, _boolean, "go on behind an end-of-sequence id", apis=(HTTP, DIALECTS)
    )
    bad_words: tuple[str, ...] = _param(
        (), _bad_words, "words that do not come in the output", apis=(HTTP, DIALECTS)
    )
    thinking_token_budget: int | None = _param(
        None,
        _optional(lambda value: None if value == -1 else _integer(0, INT32_MAX)(value)),
        "tokens of reasoning, at most; then its end is forced; -1: no limit",
        apis=(HTTP, DIALECTS),
    )
    include_stop_str_in_output: bool = _param(
        False,
        _boolean,
        "end the text behind the stop string or the stop id, not before it",
        apis=(HTTP, DIALECTS),
    )
    skip_special_tokens: bool = _param(
        True, _boolean, "leave special tokens out of the text", apis=(HTTP, DIALECTS)
    )
    spaces_between_special_tokens: bool = _param(
        True,
        _boolean,
        "no effect: between special tokens there is what the tokenizer has there",
        apis=(HTTP, DIALECTS),
    )
    logprobs: int | None = _param(
        None,
        _optional(_integer(0, INT32_MAX)),
        "log-probabilities of the chosen token and of so many most likely ones",
        apis=(),  # a number in completions, two fields in chats
        device=OnDevice(-1, "num_logprobs", lambda asked: -1 if asked is None else asked),
    )
    prompt_logprobs: int | None = _param(
        None,
        _optional(_integer(0, INT32_MAX)),
        "the same of the prompt's tokens",
        apis=(),  # HTTP answers by whether it was given
    )

    def __post_init__(self):
        problems: list[tuple[str, str]] = []
        for name, param in PARAMS.items():
            try:
                object.__setattr__(self, name, param.check(getattr(self, name)))
            except ValueError as problem:
                problems.append((name, str(problem)))
        problems = problems or _combination_problems(self)
        if problems:
            raise SamplingError(problems)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken, without randomness."""
        return self.temperature == 0.0


PARAMS: dict[str, Param] = {each.name: each.metadata["param"] for each in fields(SamplingParams)}


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
