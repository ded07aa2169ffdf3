"""Traces of the engine's steps on request: JAX's profiler, into one directory, one at a time."""

import logging
from contextlib import suppress
from pathlib import Path

from serving.server.errors import ServeError

logger = logging.getLogger(__name__)


class Profiler:
    """Starts and stops traces in folders of `directory`; None: profiles are off."""

    def __init__(self, directory: str | None):
        self._directory = None if directory is None else Path(directory)
        self._name: str | None = None  # of the trace that runs

    def start(self, name: str) -> None:
        """Begin a trace in a new folder `name`. Raises `ServeError`."""
        directory = self._open()
        if self._name is not None:
            raise ServeError("not_now", "A profile is running: stop it first.")
        try:
            (directory / name).mkdir(parents=True)
        except FileExistsError:
            raise ServeError("not_now", "There is a profile of this name.") from None
        except OSError:
            raise ServeError("not_now", "The folder of profiles cannot be written.") from None
        import jax

        try:
            jax.profiler.start_trace(directory / name)
        except (OSError, RuntimeError) as error:
            logger.warning("a profile cannot be started: %s", error)
            with suppress(OSError):  # the name stays free
                (directory / name).rmdir()
            raise ServeError("not_now", "The profile cannot be started.") from None
        self._name = name

    def stop(self) -> None:
        """End the trace and write it. Raises `ServeError`."""
        self._open()
        if self._name is None:
            raise ServeError("not_now", "No profile is running.")
        import jax

        self._name = None
        try:
            jax.profiler.stop_trace()
        except (OSError, RuntimeError) as error:  # XLA says a full disk in one of its own
            logger.warning("a profile cannot be written: %s", error)
            raise ServeError("not_now", "The profile cannot be written.") from None

    def _open(self) -> Path:
        if self._directory is None:
            raise ServeError("not_now", "Profiles are off: the server needs --profile-dir.")
        return self._directory
