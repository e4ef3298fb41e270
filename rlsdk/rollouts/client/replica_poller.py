"""The client's side of one replica: fetches its finished samples, across restarts."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Protocol

from rlsdk.interfaces import DeadlineError, WorkerError
from rlsdk.rollouts.client.concurrency import ConcurrencyMeter
from rlsdk.rollouts.client.health import Event, State
from rlsdk.rollouts.client.pump import Collected
from rlsdk.rollouts.client.replica_state import ReplicaState, Restarts

LOOK_S = 0.5
"""Longest time, in seconds, that a replica waits for a sample before it answers with none."""
SUSPECT_SHARE, SUSPECT_S = 0.25, 30.0
"""A replica without progress for this share of its deadline, or for this many seconds, gets no new requests."""


class PollerCallbacks(Protocol):
    """Receiver of what a poller fetches."""

    is_interrupted: bool
    """Whether all decoding is paused, so that no progress is expected."""

    def take(self, at: int, collected: Collected) -> None:
        """Handles the samples that the replica with this index has finished."""
        ...

    def replica_failed(self, at: int, life: int, error: BaseException) -> None:
        """Handles the loss of the process with number `life`."""
        ...

    def revived(self, at: int) -> None:
        """Called once it is known whether a new process serves in its place."""
        ...


class ReplicaPoller:
    """Polls one replica while it has work."""

    def __init__(
        self, at: int, state: ReplicaState, callbacks: PollerCallbacks, restarts: Restarts, *, progress_s: float
    ) -> None:
        """`progress_s`: seconds after which a replica that has work and decodes no token counts as lost."""
        self._at, self._state, self._callbacks, self._restarts = at, state, callbacks, restarts
        self._progress_s = progress_s
        self._work = asyncio.Event()

    def wake(self) -> None:
        """Wakes the poller: there is work, or the replica was lost."""
        self._work.set()

    async def run(self) -> None:
        """Runs until it is cancelled or its replica is given up."""
        state = self._state
        while True:
            while not state.samples and state.error is None:
                self._work.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._work.wait(), LOOK_S)
                if state.health.state is State.RETIRED:  # lost while it had no work, for example in a sync
                    state.error = WorkerError(f"{state.replica.name} was lost and stays away")
            life = state.life
            if state.error is None:
                try:
                    self._callbacks.take(self._at, await self._answer())
                except Exception as error:
                    self._callbacks.replica_failed(self._at, life, error)
            if state.error is not None and not await self._is_revived():
                return

    async def _answer(self) -> Collected:
        """Returns the replica's finished samples; the progress deadline also applies if it does not answer.

        Raises:
            DeadlineError: it did not answer, or decoded nothing, within the deadline.
        """
        state = self._state
        asked = asyncio.ensure_future(state.replica.collect(LOOK_S))
        try:
            while state.error is None:
                done, _ = await asyncio.wait({asked}, timeout=LOOK_S * 2)
                if done:
                    return asked.result()
                self.check_progress()
            raise state.error
        finally:
            asked.cancel()

    async def _is_revived(self) -> bool:
        """Waits for a new process in place of a lost one; False if there will be none."""
        state = self._state
        assert state.error is not None
        try:
            await self._restarts.revive(self._at, state.life, state.error)
        except Exception as error:
            state.error = error
        else:
            state.error, state.paused, state.last_progress = None, False, (None, 0)
            state.life, state.progress_at = state.health.life, time.monotonic()
            if state.meter is not None:
                state.meter = ConcurrencyMeter(state.replica.max_running)
        self._callbacks.revived(self._at)
        return state.error is None

    def check_progress(self) -> None:
        """Marks a replica that has work and makes no progress as suspect.

        Raises:
            DeadlineError: there was no progress for `progress_s`.
        """
        state = self._state
        silent_s = time.monotonic() - state.progress_at
        if not state.samples or self._callbacks.is_interrupted:
            return
        if silent_s > self._progress_s:
            raise DeadlineError(
                f"{state.replica.name} has {state.samples} samples to make and decoded no token for "
                f"{self._progress_s:g} s (deadlines.rollout_s)"
            )
        if silent_s > min(self._progress_s * SUSPECT_SHARE, SUSPECT_S):
            state.health.handle(Event.LATE, state.life)
