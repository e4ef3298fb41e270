"""Health of a replica: a pure state machine. A lost replica serves again only after a completed sync."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from enum import StrEnum, auto


class State(StrEnum):
    """State of one replica."""

    HEALTHY = auto()
    """Serves the current weights."""
    SUSPECT = auto()
    """Has work but is late with an answer: it keeps its requests and gets no new ones."""
    LOST = auto()
    """Dead, or silent for too long: its requests go to other replicas."""
    RESTARTING = auto()
    """Its process is being restarted."""
    SYNCING = auto()
    """Its new process runs and has no weights yet."""
    RETIRED = auto()
    """It was lost too often and is not restarted."""


class Event(StrEnum):
    """An observation of a replica, or an action on it."""

    ANSWERED = auto()
    """It made progress."""
    LATE = auto()
    """It has work and made no progress for a while."""
    FAILED = auto()
    """It died, was silent for too long, could not be started, or could not be synced."""
    RESTART = auto()
    """A new process is being started."""
    STARTED = auto()
    """The new process is up, and its engine is built."""
    SYNCED = auto()
    """A sync has returned its checked receipt."""
    GIVEN_UP = auto()
    """It is not started again."""


_S, _E = State, Event
_NEXT: Mapping[tuple[State, Event], State] = {
    (_S.HEALTHY, _E.ANSWERED): _S.HEALTHY,
    (_S.HEALTHY, _E.LATE): _S.SUSPECT,
    (_S.HEALTHY, _E.SYNCED): _S.HEALTHY,
    (_S.HEALTHY, _E.FAILED): _S.LOST,
    (_S.SUSPECT, _E.ANSWERED): _S.HEALTHY,
    (_S.SUSPECT, _E.LATE): _S.SUSPECT,
    (_S.SUSPECT, _E.SYNCED): _S.HEALTHY,
    (_S.SUSPECT, _E.FAILED): _S.LOST,
    (_S.LOST, _E.RESTART): _S.RESTARTING,
    (_S.LOST, _E.GIVEN_UP): _S.RETIRED,
    (_S.RESTARTING, _E.STARTED): _S.SYNCING,
    (_S.RESTARTING, _E.FAILED): _S.LOST,
    (_S.SYNCING, _E.SYNCED): _S.HEALTHY,
    (_S.SYNCING, _E.FAILED): _S.LOST,
}
_STRAY = frozenset((Event.ANSWERED, Event.LATE, Event.FAILED))
"""Events that may arrive late from a dead process; they are then ignored."""


def after(state: State, event: Event) -> State:
    """The next state.

    Raises:
        ValueError: the event is impossible in this state: a bug in the driver.
    """
    next_state = _NEXT.get((state, event))
    if next_state is None and event in _STRAY:
        return state
    if next_state is None:
        raise ValueError(f"{event} cannot come while a replica is {state}")
    return next_state


class Health:
    """One replica's state and number of starts. Thread-safe."""

    def __init__(self) -> None:
        """Starts as healthy: a sync brings the first weights to every replica."""
        self._lock = threading.Lock()
        self.state = State.HEALTHY
        self.life = 0
        """Number of its process; events of an earlier process are ignored."""
        self.in_a_row = 0
        """Restarts since it last made progress."""

    @property
    def serves(self) -> bool:
        """Whether it has work or may get some."""
        return self.state in (State.HEALTHY, State.SUSPECT)

    def handle(self, event: Event, life: int | None = None) -> State:
        """Applies an event.

        Args:
            event: what happened.
            life: number of the process that it concerns; None: the current one.

        Raises:
            ValueError: the event is impossible in this state.
        """
        with self._lock:
            if life is not None and life != self.life:
                return self.state
            self.state = after(self.state, event)
            if event is Event.RESTART:
                self.life += 1
                self.in_a_row += 1
            elif event is Event.ANSWERED and self.state is State.HEALTHY:
                self.in_a_row = 0
            return self.state
