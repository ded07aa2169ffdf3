"""Where adapters may be loaded from while an engine serves. No JAX."""

from pathlib import Path

from shiftjax.adapters.adapter import AdapterError


def path_within(folder: Path | None, path: str) -> Path:
    """Return the path that a client gives, with links followed; relative ones begin in the folder.

    Raises AdapterError: there is no such folder, or the path leads out of it.
    """
    if folder is None:
        raise AdapterError("Adapters are not loaded while serving: start with --lora-folder.")
    try:
        root = folder.resolve(strict=True)
        found = (root / path).resolve()
        is_inside = found.is_relative_to(root) and found != root
    except (OSError, ValueError, RuntimeError) as error:  # no such folder, a null byte, a loop
        raise AdapterError("The path of the adapter cannot be read.") from error
    if not is_inside:
        raise AdapterError("The path of the adapter is outside of --lora-folder.")
    return found
