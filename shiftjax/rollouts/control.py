"""What training does to a running engine: hold it, put it to sleep, give it other weights. No JAX.

    running --pause--> held --resume--> running
       '------sleep--> held, without KV and weights --wake_up--> what it was before
                       `update` changes weights in each of these states

While it is held, requests come and wait. Nothing is in flight then, so what a step has computed is
of one version of the weights. All calls are for the thread that steps the engine, or for one that
has its lock. Events come of them as of `Engine.step`; `take_events` has them, also after an error.
"""

from collections.abc import Collection
from typing import Any, Literal, Protocol, get_args

from shiftjax.core.engine import Engine
from shiftjax.core.request import Event

PauseMode = Literal["keep", "wait", "abort"]
Tag = Literal["weights", "kv_cache"]
TAGS: tuple[Tag, ...] = get_args(Tag)
MODES: tuple[PauseMode, ...] = get_args(PauseMode)


class RolloutError(ValueError):
    """What cannot be done to this engine, or not now; one sentence says why."""


class Store(Protocol):
    """The weights and KV pools of an engine, on its devices."""

    @property
    def is_whole(self) -> bool:
        """Whether devices hold every weight, all of one update."""
        ...

    def update(self, given: Any) -> int:
        """Take other weights in the place of these; returns the bytes that went to devices.

        Raises ValueError for weights that are not the model's. `is_whole` says whether some have
        been taken by then.
        """
        ...

    @property
    def levels(self) -> tuple[int, ...]:
        """How deep it can sleep."""
        ...

    def to_host(self) -> None:
        """Let go of the weights on devices, and keep them in host memory."""
        ...

    def drop(self) -> None:
        """Let go of the weights for good."""
        ...

    def restore(self) -> None:
        """Bring back what `to_host` has kept."""
        ...

    def drop_pools(self) -> None:
        """Let go of the KV pools."""
        ...

    def make_pools(self) -> None:
        """Make empty KV pools."""
        ...

    def held_bytes(self) -> dict[str, int]:
        """Bytes on devices by tag, and those of weights on the host."""
        ...


class Rollouts:
    """The control of one engine. `store` None: there is nothing on devices that it could change."""

    def __init__(self, engine: Engine, store: Store | None = None):
        self.engine = engine
        self.asleep: set[Tag] = set()
        self._store = store
        self._level = 0
        self._events: list[Event] = []
        self._is_paused = False  # by `pause`, not by sleep or a failed update

    @property
    def is_paused(self) -> bool:
        """Whether no step is begun."""
        return self.engine.holds == "all"

    @property
    def is_ending(self) -> bool:
        """Whether a pause waits for those that have begun."""
        return self.engine.holds == "new"

    @property
    def is_sleeping(self) -> bool:
        """Whether weights or KV pools are not on the devices."""
        return bool(self.asleep)

    @property
    def version(self) -> int:
        """That of the weights: how often they were changed, or what `update` was told."""
        return self.engine.version

    def held_bytes(self) -> dict[str, int]:
        """Bytes on devices: `weights` and `kv_cache`; and `host`, of weights."""
        return self._changeable().held_bytes()

    def take_events(self) -> list[Event]:
        """What has happened to requests in the calls since the last time."""
        events, self._events = self._events, []
        return events

    # ------------------------------------------------------------------ pause

    def pause(self, mode: PauseMode, now: float) -> None:
        """Begin no step any more.

        keep: requests stay where they are. abort: all of them end. wait: those that have begun are
        computed to their end first, by further steps, while others wait; `end_wait` follows when
        none is left.
        """
        if mode not in MODES:
            raise RolloutError(f"mode must be one of {', '.join(MODES)}, not {mode!r}.")
        self._is_paused = True
        if mode == "wait" and not self.is_paused:
            self.engine.holds = "new"
            self.end_wait(now)
            return
        self.engine.holds = "all"
        self._events += self.engine.settle(now)
        if mode == "abort":
            for name in self.engine.names:
                self._events += self.engine.abort(name)

    def end_wait(self, now: float) -> None:
        """Hold everybody, if all that had begun have ended; `is_paused` says whether."""
        if not self.engine.num_begun and self.engine.holds == "new":
            self.engine.holds = "all"
            self._events += self.engine.settle(now)

    def resume(self) -> None:
        """Begin steps again. Raises RolloutError while it sleeps or lacks weights."""
        if self.asleep:
            raise RolloutError("The engine sleeps: wake it up.")
        if self._store is not None and not self._store.is_whole:
            raise RolloutError("The engine lacks weights: update all of them.")
        self._is_paused = False
        self.engine.holds = "none"

    # ------------------------------------------------------------------ sleep

    def sleep(self, level: int, mode: PauseMode, now: float) -> None:
        """Give up device memory: 0 none of it, 1 KV and weights, which the host keeps, 2 both.

        Requests that stay (`keep`) are computed again from their tokens. With `wait` none may be
        unfinished but those that have not begun.
        """
        store, was_paused = self._changeable(), self._is_paused
        if level not in store.levels:
            raise RolloutError(f"level must be one of {store.levels}, not {level!r}.")
        if mode == "wait" and self.engine.num_begun:
            raise RolloutError("Requests are computed still: pause first, and wait for them.")
        if self.asleep:
            raise RolloutError("The engine sleeps already.")
        self.pause(mode, now)
        if level == 0:
            return
        self._is_paused = was_paused
        self.engine.forget_all()
        store.drop_pools()
        self.asleep.add("kv_cache")
        if level == 1:
            store.to_host()
        else:
            store.drop()
        self.asleep.add("weights")
        self._level = level

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Bring back KV pools and weights, both or one; what is awake stays as it is.

        Weights that were dropped come with the next `update`. When all is there the engine runs,
        unless it was paused before it slept. One that does not sleep is resumed.
        """
        wanted = TAGS if tags is None else tags
        unknown = set(wanted).difference(TAGS)
        if unknown:
            words = f"tags must be of {', '.join(TAGS)}, not {', '.join(sorted(map(str, unknown)))}"
            raise RolloutError(f"{words}.")
        store = self._changeable()
        if not self.asleep:
            self._is_paused = False
        if "weights" in wanted and "weights" in self.asleep:
            if self._level == 1:
                store.restore()
            self.asleep.discard("weights")
        if "kv_cache" in wanted and "kv_cache" in self.asleep:
            store.make_pools()
            self.asleep.discard("kv_cache")
        self._run_if_whole()

    # ------------------------------------------------------------------ weights

    def update(
        self, given: Any, now: float, *, version: int | None = None, recompute: bool = False
    ) -> None:
        """Change weights; requests go on with the new ones, and with the KV that they have.

        `recompute`: they lose it, and have that of the new weights. Nothing that was cached before
        is found any more. `version` must be larger than the last one (None: by 1).

        Raises ValueError: the weights are not the model's. Where some have been taken by then, no
        step is begun until an update of all of them.
        """
        store = self._changeable()
        version = self.version + 1 if version is None else version
        if version <= self.version:
            words = f"version must be larger than {self.version}, which there is, not {version}."
            raise RolloutError(words)
        if "weights" in self.asleep and self._level == 1:
            raise RolloutError('The weights sleep: wake_up(["weights"]) first.')
        self._events += self.engine.settle(now)
        try:
            store.update(given)
        except BaseException:
            if not store.is_whole:
                self.engine.holds = "all"
            raise
        self.engine.renew(version, recompute=recompute)
        if "weights" in self.asleep:  # dropped
            self.asleep.discard("weights")
        self._run_if_whole()

    def _run_if_whole(self) -> None:
        """Go on, if nothing but sleep or missing weights has stopped it."""
        is_whole = self._store is not None and self._store.is_whole
        if self.asleep or not is_whole:
            self.engine.holds = "all"
        elif not self._is_paused:
            self.engine.holds = "none"

    def _changeable(self) -> Store:
        if self._store is None:
            raise RolloutError("The weights of this engine cannot be changed while it runs.")
        return self._store
