"""The stream of groups: generates and grades groups on its own event loop, in the background."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field, replace
from typing import Any

from rlsdk.interfaces import (
    BatchError,
    DeadlineError,
    Episode,
    GenerationOutput,
    RlsdkError,
    Span,
    Trajectory,
)
from rlsdk.rollouts.client.client import GenerationClient
from rlsdk.rollouts.client.flights import Kept, Receiver, SampleSeed
from rlsdk.rollouts.client.replica_state import Replica, Restarts
from rlsdk.rollouts.groups.grading import Codec, Grader, Grading
from rlsdk.rollouts.groups.group import Failure, Grade, Group, GroupTask, Sample
from rlsdk.rollouts.groups.group_assembly import (
    GREEDY,
    Deliver,
    Delivery,
    GroupAssembly,
    Inbox,
    Made,
    Record,
    Recording,
    Unfinished,
)
from rlsdk.rollouts.groups.rollouter import GroupRequests, SampleGenerate, single_turn

Rollout = Callable[..., Awaitable[Trajectory | Episode]]
_HALT_GRACE_S = 5.0


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """How groups are generated."""

    rollout: Rollout
    """A `Rollouter`."""
    rollout_options: Mapping[str, Any] = field(default_factory=dict)
    max_model_tokens: int
    brings_score: bool = False
    """Whether episodes bring their score with them (`Episode.reward`): one that has none is not scored."""
    progress_s: float = 600.0
    """A replica that has work but decodes no token for this many seconds counts as lost."""
    adapts_concurrency: bool = False
    """Whether the number of concurrent samples per replica is adapted to its measured throughput."""


class RolloutStream:
    """The stream: `start` adds groups, and `take` returns them in the order in which they finish."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        codec: Codec,
        options: StreamOptions,
        *,
        grader: Grader | None = None,
        graders: Mapping[str, Grader] | None = None,
        restarts: Restarts | None = None,
    ) -> None:
        """Starts the thread.

        Args:
            replicas: replicas of the rollout engine.
            codec: the policy's codec.
            options: how groups are generated.
            grader: grades samples; None: they are not graded, and every score is 0.
            graders: graders for groups from these sources, instead of `grader`.
            restarts: restarts lost replicas; None: they stay lost.
        """
        self._replicas = replicas
        self._restarts = restarts
        self._codec = codec
        self._options = options
        self._grader = grader
        self._graders = graders or {}
        self._done: Inbox = queue.SimpleQueue()
        self._ready = threading.Event()
        self._last_sample = time.monotonic()
        self._thread = threading.Thread(target=self._main, name="rlsdk-stream", daemon=True)
        self._thread.start()
        self._ready.wait()

    def seconds_since_last_sample(self) -> float:
        """Seconds since the last sample arrived: once everything is sampled, the time spent only on grading."""
        return time.monotonic() - self._last_sample

    def start(
        self,
        tasks: Sequence[GroupTask],
        into: Inbox | None = None,
        *,
        record: Record | None = None,
        made: Mapping[int, Made] | None = None,
        begun: Mapping[int, Unfinished] | None = None,
        reports_sampled: bool = False,
    ) -> None:
        """Starts groups in order; returns immediately.

        Args:
            tasks: the groups.
            into: receives each finished `Group`, or the exception that ended the rollout; None: `take` returns them.
            record: called with each sample.
            made: ordinal of a group -> samples that are reused.
            begun: ordinal of a group -> what its unfinished samples have already.
            reports_sampled: `into` also receives a `Sampled` once a group only waits for grades.
        """
        inbox = self._done if into is None else into
        recording = None if record is None else Recording(record, inbox)
        delivery = Delivery(
            into=inbox, recording=recording, made=made or {}, begun=begun or {}, reports_sampled=reports_sampled
        )
        self._loop.call_soon_threadsafe(self._begin, tuple(tasks), delivery)

    def interrupt(self, timeout_s: float) -> None:
        """Pauses all decoding for a weight update. Samples keep their tokens.

        Raises:
            DeadlineError: a replica did not answer in time.
        """
        self._wait(self._client.interrupt(), timeout_s, "pause")

    def resume(self, timeout_s: float, *, keep_cache: bool = False) -> None:
        """Resumes what `interrupt` paused, with the weights that are served now.

        Raises:
            DeadlineError: a replica did not answer in time.
        """
        self._wait(self._client.resume(keep_cache=keep_cache), timeout_s, "resume")

    def continue_from(self, partial: Mapping[SampleSeed, GenerationOutput]) -> None:
        """Sets partial outputs of an earlier process, by seed and index, from which samples continue."""
        self._loop.call_soon_threadsafe(self._client.continue_from, dict(partial))

    def cancel(self, source: str, timeout_s: float) -> bool:
        """Cancels the groups of a source that are being sampled; they are not delivered. Waits until no replica decodes
        for them; False if one still does after `timeout_s`. Groups that are being graded are delivered."""
        given_up = asyncio.run_coroutine_threadsafe(self._cancel(source, timeout_s), self._loop)
        return given_up.result(timeout_s + _HALT_GRACE_S)

    async def _cancel(self, source: str, timeout_s: float) -> bool:
        for task, its_source in self._tasks.items():
            if its_source == source:
                task.cancel()
        return await self._client.cancel(source, timeout_s)

    def halt(self, timeout_s: float) -> Sequence[Kept]:
        """Stops all decoding permanently, and waits for grades of finished samples; returns the tokens of unfinished
        samples. Nothing is delivered afterwards."""
        halting = asyncio.run_coroutine_threadsafe(self._halt(timeout_s), self._loop)
        return halting.result(timeout_s + _HALT_GRACE_S)

    async def _halt(self, timeout_s: float) -> Sequence[Kept]:
        end = time.monotonic() + timeout_s
        kept = await self._client.halt(timeout_s)
        while self._grading.pending and time.monotonic() < end:
            await asyncio.sleep(0.01)
        return kept

    def busy_s(self) -> float:
        """Seconds in which a replica had samples to generate, averaged over the replicas."""
        return self._client.busy_s() / self._client.num_replicas

    def concurrency(self) -> float:
        """Samples that a replica may run concurrently, averaged over the replicas."""
        return self._client.concurrency()

    def _wait(self, work: Coroutine[Any, Any, None], timeout_s: float, doing: str) -> None:
        try:
            asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)
        except FutureTimeoutError:
            raise DeadlineError(
                f"a rollout replica did not {doing} within {timeout_s:g} s (deadlines.sync_s)"
            ) from None

    def take(self, timeout_s: float | None = None) -> Group:
        """Returns the next finished group.

        Raises:
            DeadlineError: no group finished within `timeout_s`.
            RlsdkError: the error that ended the rollout: every replica was lost, or a request was refused.
        """
        if (group := self.poll(timeout_s)) is None:
            raise DeadlineError(f"no group was finished within {timeout_s:g} s")
        return group

    def poll(self, timeout_s: float | None) -> Group | None:
        """As `take`; returns None if no group finished within `timeout_s`.

        Raises:
            RlsdkError: the error that ended the rollout: every replica was lost, or a request was refused.
        """
        try:
            done: Group | BaseException = self._done.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(done, BaseException):
            raise done
        return done

    def close(self) -> None:
        """Cancels all work and ends the thread; closes the rollouter, if it can be. Safe to call twice."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()
        if (close := getattr(self._options.rollout, "close", None)) is not None:
            close()

    def _main(self) -> None:
        asyncio.run(self._live())

    async def _live(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._tasks: dict[asyncio.Task[None], str] = {}
        """Tasks of groups whose samples are coroutines, with the source of each."""
        self._client = GenerationClient(
            self._replicas,
            progress_s=self._options.progress_s,
            adapts=self._options.adapts_concurrency,
            restarts=self._restarts,
        )
        self._grading = Grading(self._grader, self._graders, self._codec, brings_score=self._options.brings_score)
        collecting = asyncio.create_task(self._client.run())
        self._ready.set()
        await self._stop.wait()
        self._client.abort_all()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        collecting.cancel()
        await asyncio.gather(collecting, return_exceptions=True)

    def _begin(self, tasks: Sequence[GroupTask], delivery: Delivery) -> None:
        single = self._options.rollout is single_turn and not self._options.rollout_options
        for task in tasks:
            fits = len(task.prompt.prompt_ids) < self._options.max_model_tokens
            if single and fits and task.ordinal not in delivery.made:
                self._begin_single(task, delivery)
                continue
            running = self._loop.create_task(self._group(task, delivery))
            self._tasks[running] = task.id.source
            running.add_done_callback(self._tasks.pop)

    def _begin_single(self, task: GroupTask, delivery: Delivery) -> None:
        """As `_group` with the single-turn rollouter, without a coroutine for each sample: a small model ends hundreds
        of samples in one decoding step, and all of them wait for the last one's coroutine."""
        assembly = GroupAssembly(task, delivery)
        for part, name in self._parts(task):
            prompt = Span.given(part.prompt.prompt_ids)
            receivers = {}
            for index in range(part.num_samples):
                deliver = functools.partial(assembly.take, name, index)
                receivers[index] = Receiver(functools.partial(self._answered, part, prompt, deliver, assembly))
            self._requests(part, name).whole(receivers)

    def _answered(
        self,
        task: GroupTask,
        prompt: Span,
        deliver: Deliver,
        assembly: GroupAssembly,
        output: GenerationOutput | BaseException,
    ) -> None:
        if isinstance(output, BaseException):
            # Called later, because an exception of `deliver` is not the replica's fault.
            self._loop.call_soon(deliver, _failed(output) if isinstance(output, BatchError) else output)
            return
        self._last_sample = time.monotonic()
        trajectory = Trajectory(spans=(prompt, Span.of(output)), finish_reason=output.finish_reason)
        self._grading.add(task, Episode.of(trajectory), deliver)
        assembly.sampled()

    def _parts(self, task: GroupTask) -> list[tuple[GroupTask, str]]:
        """Requests of a group with their names: its samples, and the greedy one."""
        if not task.greedy_baseline:
            return [(task, "")]
        return [(task, ""), (replace(task, sampling=replace(task.sampling, temperature=0.0), num_samples=1), GREEDY)]

    def _requests(self, task: GroupTask, name: str) -> GroupRequests:
        return GroupRequests(task, self._client, self._codec, self._options.max_model_tokens, name)

    def _with_begun(self, requests: GroupRequests, delivery: Delivery) -> GroupRequests:
        """The requests with what their samples have already, and recorded; those of the default rollouter are whole
        samples, which are."""
        if self._options.rollout is single_turn or delivery.recording is None:
            return requests
        record, task, name = delivery.recording, requests.task, requests.name
        begun = delivery.begun.get(task.ordinal, {})
        requests.begun = {index: one for (of, index), one in begun.items() if of == name}
        requests.record = functools.partial(record.turn, task, name)
        requests.record_tool = functools.partial(record.tool, task, name)
        return requests

    async def _group(self, task: GroupTask, delivery: Delivery) -> None:
        assembly = GroupAssembly(task, delivery)
        made = delivery.made.get(task.ordinal, {})
        try:
            work = []
            for part, name in self._parts(task):
                requests = self._with_begun(self._requests(part, name), delivery)
                for index in range(part.num_samples):
                    if (name, index) in made:
                        assembly.sampled()
                        assembly.keep(name, index, made[name, index])
                        continue
                    deliver = functools.partial(assembly.take, name, index)
                    work.append(self._sample(part, requests.of_sample(index), deliver, assembly))
            await asyncio.gather(*work)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            assembly.fail(error)

    async def _sample(
        self, task: GroupTask, generate: SampleGenerate, deliver: Deliver, assembly: GroupAssembly
    ) -> None:
        try:
            made = await self._options.rollout(task.prompt, generate, **self._options.rollout_options)
            generate.account.num_unasked = generate.num_unasked
            episode = generate.account.checked(_episode(made))
        except RlsdkError as error:
            if not isinstance(error, BatchError):
                raise
            deliver(_failed(error, generate.account.num_tokens))
        except Exception as error:
            deliver(_failed(error, generate.account.num_tokens))
        else:
            self._last_sample = time.monotonic()
            self._grading.add(task, episode, deliver)
            assembly.sampled()


def _episode(made: Trajectory | Episode) -> Episode:
    """What a rollouter returned, as an episode.

    Raises:
        TypeError: it returned something else.
    """
    if isinstance(made, Episode):
        return made
    if isinstance(made, Trajectory):
        return Episode.of(made)
    raise TypeError(f"the rollouter returned {type(made).__name__}; expected a Trajectory or an Episode")


def _failed(error: BaseException, lost_tokens: int = 0) -> Sample:
    """The failed sample of a rollouter that raised; other samples are not affected."""
    message = f"{type(error).__name__}: {error}"
    failure = Failure(kind=getattr(error, "kind", "exception"), source="rollout", message=message)
    return Sample(episode=None, text="", grade=Grade(valid=False, failures=(failure,)), lost_tokens=lost_tokens)
