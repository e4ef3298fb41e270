"""The stream of groups: makes and grades groups on an event loop of its own, while its owner does other things."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from rlsdk.interfaces import BatchError, DeadlineError, FinishReason, RewardSample, RlsdkError, Trajectory
from rlsdk.rollouts.client import GenerationClient, Replica
from rlsdk.rollouts.group import Failure, Grade, Group, GroupTask, Sample
from rlsdk.rollouts.rollouter import GroupRequests, Tokens, without_stop

Rollout = Callable[..., Awaitable[Trajectory]]


class Codec(Protocol):
    """The policy's tokenizer, as the stream needs it."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Tokens) -> str: ...

    def decode_all(self, token_ids: Sequence[Tokens]) -> list[str]:
        """Many at once: much cheaper than one by one."""
        ...


class Grader(Protocol):
    """Grades samples elsewhere."""

    def submit(self, samples: Sequence[RewardSample]) -> Future[Sequence[Grade]]:
        """One grade per sample, whatever the cut into calls. Returns at once."""
        ...


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """How groups are made."""

    rollout: Rollout
    """A `Rollouter`."""
    rollout_options: Mapping[str, Any] = field(default_factory=dict)
    max_model_tokens: int
    progress_s: float = 600.0
    """A replica that has work and decodes no token for so long is an error."""


class RolloutStream:
    """Groups go in by `start`, and come out of `take` in the order in which they are finished."""

    def __init__(
        self, replicas: Sequence[Replica], codec: Codec, options: StreamOptions, *, grader: Grader | None = None
    ) -> None:
        """Starts the thread.

        Args:
            replicas: of the rollout engine.
            codec: of the policy.
            options: how groups are made.
            grader: None: samples are not graded, every score is 0.
        """
        self._replicas = replicas
        self._codec = codec
        self._options = options
        self._grader = grader
        self._done: queue.SimpleQueue[Group | BaseException] = queue.SimpleQueue()
        self._ready = threading.Event()
        self._last_sample = time.monotonic()
        self._thread = threading.Thread(target=self._main, name="rlsdk-stream", daemon=True)
        self._thread.start()
        self._ready.wait()

    def seconds_since_last_sample(self) -> float:
        """What passed since a sample came: when all is sampled, the time that grading alone takes."""
        return time.monotonic() - self._last_sample

    def start(self, tasks: Sequence[GroupTask]) -> None:
        """Begins these groups, first ones first; returns at once."""
        self._loop.call_soon_threadsafe(self._begin, tuple(tasks))

    def take(self, timeout_s: float | None = None) -> Group:
        """The next group that is finished.

        Raises:
            DeadlineError: none was finished within `timeout_s`.
            RlsdkError: what ended the rollout: every replica was lost, or a request was refused.
        """
        try:
            found = self._done.get(timeout=timeout_s)
        except queue.Empty:
            raise DeadlineError(f"no group was finished within {timeout_s:g} s") from None
        if isinstance(found, BaseException):
            raise found
        return found

    def close(self) -> None:
        """Gives up what is under way and ends the thread. Safe to call twice."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def _main(self) -> None:
        asyncio.run(self._live())

    async def _live(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._client = GenerationClient(self._replicas, progress_s=self._options.progress_s)
        self._grading = _Grading(self._grader, self._codec)
        collecting = asyncio.create_task(self._client.run())
        self._ready.set()
        await self._stop.wait()
        self._client.abort_all()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        collecting.cancel()
        await asyncio.gather(collecting, return_exceptions=True)

    def _begin(self, tasks: Sequence[GroupTask]) -> None:
        for task in tasks:
            running = self._loop.create_task(self._group(task))
            self._tasks.add(running)
            running.add_done_callback(self._tasks.discard)

    async def _group(self, task: GroupTask) -> None:
        requests = GroupRequests(task, self._client, self._codec, self._options.max_model_tokens)
        try:
            work = [self._sample(task, requests, at) for at in range(task.num_samples)]
            if task.greedy_baseline:
                greedy = replace(task, sampling=replace(task.sampling, temperature=0.0), num_samples=1)
                beside = GroupRequests(greedy, self._client, self._codec, self._options.max_model_tokens, "greedy")
                work.append(self._sample(greedy, beside, 0))
            samples = await asyncio.gather(*work)
            baseline = samples.pop() if task.greedy_baseline else None
            self._done.put(Group(task=task, samples=samples, baseline=baseline))
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._done.put(error)

    async def _sample(self, task: GroupTask, requests: GroupRequests, index: int) -> Sample:
        try:
            trajectory = await self._options.rollout(
                task.prompt, requests.of_sample(index), **self._options.rollout_options
            )
        except BatchError as error:
            return _failed(error)
        except RlsdkError:
            raise
        except Exception as error:
            return _failed(error)
        self._last_sample = time.monotonic()
        return await self._grading.grade(task, trajectory)


class _Grading:
    """Decodes and submits together what finished in one turn of the loop."""

    def __init__(self, grader: Grader | None, codec: Codec) -> None:
        self._grader = grader
        self._codec = codec
        self._waiting: list[tuple[GroupTask, Trajectory, asyncio.Future[Sample]]] = []

    async def grade(self, task: GroupTask, trajectory: Trajectory) -> Sample:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Sample] = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._flush)
        self._waiting.append((task, trajectory, future))
        return await future

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        texts = self._codec.decode_all(
            [without_stop(trajectory.response_ids, task.sampling.stop_token_ids)
             for task, trajectory, _ in waiting]
        )  # fmt: skip
        if self._grader is None:
            for (_, trajectory, future), text in zip(waiting, texts, strict=True):
                future.set_result(Sample(trajectory=trajectory, text=text, grade=Grade()))
            return
        samples = [
            RewardSample(
                prompt=task.prompt.text,
                response=text,
                answer=task.prompt.answer,
                row=task.prompt.row,
                truncated=trajectory.finish_reason is FinishReason.LENGTH,
                extra=trajectory.extra,
            )
            for (task, trajectory, _), text in zip(waiting, texts, strict=True)
        ]
        grades = asyncio.wrap_future(self._grader.submit(samples))
        grades.add_done_callback(lambda done: _deliver(done, waiting, texts))


def _deliver(
    done: asyncio.Future[Sequence[Grade]],
    waiting: Sequence[tuple[GroupTask, Trajectory, asyncio.Future[Sample]]],
    texts: Sequence[str],
) -> None:
    """Gives each sample its grade, or all of them the error."""
    error = None if done.cancelled() else done.exception()
    for at, (_, trajectory, future) in enumerate(waiting):
        if future.done():
            continue
        if done.cancelled():
            future.cancel()
        elif error is not None:
            future.set_exception(error)
        else:
            future.set_result(Sample(trajectory=trajectory, text=texts[at], grade=done.result()[at]))


def _failed(error: Exception) -> Sample:
    """A rollouter that raised costs its own sample."""
    message = f"{type(error).__name__}: {error}"
    failure = Failure(kind="exception", source="rollout", message=message)
    return Sample(trajectory=None, text="", grade=Grade(valid=False, failures=(failure,)))
