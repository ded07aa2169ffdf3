"""A form with one file (multipart/form-data), written to disk as it comes. For a thread. No JAX."""

import re
from pathlib import Path
from typing import Any

from serving.server.errors import ServeError, invalid
from serving.stored.appended import private

MAX_PARTS = 8
MAX_FIELD_BYTES = 1024
MAX_NAME_CHARACTERS = 255


class Upload:
    """Reads a form piece by piece: its fields, and the file named `file`, which goes to `path`.

    `most` is how many bytes the file may have. Everything raises `ServeError` for a wrong form,
    and OSError for a disk that is full.
    """

    def __init__(self, content_type: bytes, path: Path, most: int):
        from python_multipart.multipart import MultipartParser, parse_options_header

        self._options = parse_options_header
        kind, options = parse_options_header(content_type)
        if kind.lower() != b"multipart/form-data" or not options.get(b"boundary"):
            words = "The body must be a form with a file (Content-Type: multipart/form-data)."
            raise ServeError("media_type", words)
        callbacks: Any = {
            "on_part_begin": self._begin,
            "on_header_field": lambda data, start, end: self._note("name", data[start:end]),
            "on_header_value": lambda data, start, end: self._note("value", data[start:end]),
            "on_header_end": self._end_header,
            "on_headers_finished": self._open,
            "on_part_data": lambda data, start, end: self._take(data[start:end]),
            "on_end": self._end,
        }
        try:
            self._parser = MultipartParser(options[b"boundary"], callbacks)
        except ValueError:
            raise _malformed() from None
        self.fields: dict[str, str] = {}
        self.filename = ""
        self.num_bytes = 0
        self._path, self._most = path, most
        self._file = open(path, "xb", opener=private)  # noqa: SIM115
        self._has_file = self._is_whole = False
        self._num_parts = 0
        self._header = {"name": b"", "value": b""}
        self._disposition = b""
        self._field: str | None = None  # of the part that comes; None: it is the file

    def feed(self, data: bytes) -> None:
        """Take a piece of the body."""
        try:
            self._parser.write(data)
        except ValueError:  # of the parser, whatever kind
            raise _malformed() from None

    def finish(self) -> None:
        """The body has ended: the file is on disk."""
        if not self._is_whole:
            raise _malformed()
        if not self._has_file:
            raise invalid("file", "is missing", "missing_required_parameter")
        self._file.flush()
        self._file.close()

    def close(self) -> None:
        """Close the file; what was written of it stays."""
        self._file.close()

    # ------------------------------------------------------------------ parts

    def _begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise ServeError("invalid", f"The form has more than {MAX_PARTS} parts.")
        self._disposition = b""

    def _note(self, what: str, data: bytes) -> None:
        self._header[what] += data

    def _end_header(self) -> None:
        if self._header["name"].lower() == b"content-disposition":
            self._disposition = self._header["value"]
        self._header = {"name": b"", "value": b""}

    def _open(self) -> None:
        _, options = self._options(self._disposition)
        name = options.get(b"name", b"").decode("utf-8", "replace")
        self._field = None if name == "file" else name
        if name == "file":
            if self._has_file or b"filename" not in options:
                raise invalid("file", "must be one file")
            self._has_file = True
            self.filename = _plain(options[b"filename"].decode("utf-8", "replace"))
        elif name in self.fields:
            raise invalid(name, "is given twice")
        else:
            self.fields[name] = ""

    def _take(self, data: bytes) -> None:
        if self._field is None:
            self.num_bytes += len(data)
            if self.num_bytes > self._most:
                raise too_large(self._most)
            self._file.write(data)
            return
        text = self.fields[self._field] + data.decode("utf-8", "replace")
        if len(text) > MAX_FIELD_BYTES:
            raise invalid(self._field, f"must have at most {MAX_FIELD_BYTES} bytes")
        self.fields[self._field] = text

    def _end(self) -> None:
        self._is_whole = True


def too_large(most: int) -> ServeError:
    """The error for a file with more bytes than one may have."""
    return ServeError("too_large", f"The file is larger than {most} bytes.", param="file")


def _malformed() -> ServeError:
    return ServeError("invalid", "The body is no multipart form.", code="invalid_form")


def _plain(name: str) -> str:
    """The last part of a name that a client gave: it is shown, and never a path of ours."""
    last = re.split(r"[/\\]", name)[-1][:MAX_NAME_CHARACTERS]
    return "".join(c for c in last if c.isprintable()) or "file"
