"""What an earlier start found out, kept beside the compilation cache in small files of JSON.

A file is named by the hash of all that its content depends on, its key, which it holds as well.
What cannot be read is as if it were not there; what cannot be written is a warning.
"""

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


def read(directory: Path | None, folder: str, key: Mapping[str, Any]) -> dict[str, Any]:
    """What was kept in a folder under a key; {} for nothing, and for what nobody can read."""
    if directory is None:
        return {}
    try:
        fields = json.loads(_file_of(directory / folder, key).read_text(encoding="utf-8"))
        return fields if fields["key"] == key else {}
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return {}


def keep(
    directory: Path | None,
    folder: str,
    key: Mapping[str, Any],
    found: Mapping[str, Any],
) -> None:
    """Write what was found; of processes that write at the same time the last one is right."""
    if directory is None:
        return
    path = _file_of(directory / folder, key)
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            try:
                json.dump({**found, "key": key}, file, indent=1)
                file.flush()
                os.replace(file.name, path)
            except OSError:  # a full disk
                with suppress(OSError):
                    os.unlink(file.name)
                raise
    except OSError as error:
        logger.warning("%s: what was found is not kept: %s", folder, error.strerror)


def _file_of(folder: Path, key: Mapping[str, Any]) -> Path:
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    return folder / f"{name}.json"
