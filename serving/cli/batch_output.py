"""The output file of a batch: whole records in the order of the lines, so that it can be resumed.

Where a run has broken off, at whatever byte, the file begins with what the whole run would have.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from serving.cli.batch_formats import Format, Line
from shiftjax.options import ConfigError, shown


def open_output(path: Path, lines: Sequence[Line], resume: bool, form: Format) -> list[Line]:
    """The lines that `path` lacks; a record that was cut off is removed from it.

    Raises ConfigError for a file that is not of this batch, or that exists without `resume`.
    """
    try:
        if path.is_dir():
            raise ConfigError([f"{path} is a directory"])
        if not path.exists() or path.stat().st_size == 0:
            path.touch()
            return list(lines)
        if not resume:
            raise ConfigError([f"{path} exists; --resume continues it, or remove it"])
        done = repair(path, form)
    except OSError as error:
        raise ConfigError([f"{path}: {error.strerror}"]) from None
    names = {line.number: line.name for line in lines}
    for number, name in done.items():
        if names.get(number) != name:
            raise ConfigError([f"{path} is of another input: it has {shown(name)} at {number}"])
    return [line for line in lines if line.number not in done]


def has_answer(path: Path) -> bool:
    """Whether a record of this output has no error. Raises OSError."""
    with path.open("rb") as file:
        return any(msgspec.json.decode(text).get("error") is None for text in file)


def repair(path: Path, form: Format) -> dict[int, str]:
    """The id of every line with a record, by number; cuts off a last record that is not whole.

    Raises ConfigError for a file that does not begin with records: it is not ours to continue.
    """
    done: dict[int, str] = {}
    end = 0
    data = path.read_bytes().splitlines(keepends=True)
    for number, text in enumerate(data, start=1):
        key = _record_key(text, form)
        if key is None:
            is_begun = text.startswith(form.start[: len(text)]) and not text.endswith(b"\n")
            if number < len(data) or not (done or is_begun):
                raise ConfigError([f"{path}, line {number}: no record of a batch; not resumed"])
            break
        done[key[0]] = key[1]
        end += len(text)
    with path.open("r+b") as file:
        file.truncate(end)
    return done


def _record_key(text: bytes, form: Format) -> tuple[int, str] | None:
    try:
        number, name = form.key(msgspec.json.decode(text))
    except Exception:  # JSON of any other kind, or none
        return None
    is_whole = text.endswith(b"\n") and isinstance(number, int) and isinstance(name, str)
    return (number, name) if is_whole else None
