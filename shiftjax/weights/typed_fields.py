"""Typed reading of JSON objects and GGUF metadata: every problem is collected, then raised."""

import json
import math
from pathlib import Path
from typing import Any

from shiftjax.weights.source import CheckpointError

_MAX_JSON_BYTES = 64 << 20


def read_json(path: Path, kind: type = dict) -> Any:
    """Read one JSON object, or a list where that is the `kind`; CheckpointError for all else."""
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: has more than {_MAX_JSON_BYTES} bytes")
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not valid JSON: {error}") from error
    if not isinstance(data, kind):
        what = "object" if kind is dict else "list"
        raise CheckpointError(f"{path}: must be a JSON {what}, found {type(data).__name__}")
    return data


class Fields:
    """Typed access to a JSON object that collects problems; null counts as absent."""

    def __init__(self, data: dict[str, Any], file: str):
        self.data = data
        self.file = file
        self.problems: list[str] = []

    def problem(self, text: str) -> None:
        """Record a problem of this file, to be raised by `raise_problems`."""
        self.problems.append(f"{self.file}: {text}")

    def raise_problems(self) -> None:
        """Raise CheckpointError with every recorded problem, if there is one."""
        if self.problems:
            raise CheckpointError(*dict.fromkeys(self.problems))

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.data.get(name) is not None

    def _value(self, name: str, default: Any, what: str, accepts: Any) -> Any:
        value = self.data.get(name)
        if value is None:
            if default is None:
                self.problem(f"{name} is missing, expected {what}")
        elif accepts(value):
            return value
        else:
            self.problem(f"{name} must be {what}, found {value!r}")
        return 1 if default is None else default  # 1 keeps later checks quiet

    def count(self, name: str, default: int | None = None, minimum: int = 1) -> int:
        """A whole number; a missing field without a default is a problem."""
        what = f"a whole number of at least {minimum}"
        return self._value(name, default, what, lambda v: type(v) is int and v >= minimum)

    def positive(self, name: str, default: float | None = None) -> float:
        """A finite number above 0."""

        def accepts(value: Any) -> bool:
            return type(value) in (int, float) and math.isfinite(value) and value > 0

        return float(self._value(name, default, "a number above 0", accepts))

    def flag(self, name: str) -> bool:
        """True or false; false where the field is missing."""
        return self._value(name, False, "true or false", lambda v: type(v) is bool)

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One id or a list of ids, without repetition; empty where the field is missing."""
        value = self.data.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if any(type(item) is not int or item < 0 for item in ids):
            self.problem(f"{name} must be a token id or a list of token ids, found {value!r}")
            return ()
        return tuple(dict.fromkeys(ids))
