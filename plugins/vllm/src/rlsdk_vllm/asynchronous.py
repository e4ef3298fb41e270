"""vLLM's asynchronous engine, whose core computes in its own process, concurrently with this one."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from rlsdk.interfaces import DeadlineError, RankContext, RolloutSpec
from rlsdk.kit.ranks.other_nodes import OtherNodes
from rlsdk.kit.ranks.waiting import result_while
from rlsdk.kit.weights.tensor_origins import Source
from rlsdk_vllm.adapter import VllmEngine
from rlsdk_vllm.arguments import check_split, engine_args, explained_start
from rlsdk_vllm.child_lifetime import cores_end_with_this_thread, started_within
from rlsdk_vllm.config import VllmOptions
from rlsdk_vllm.environment import (
    eager_processes,
    has_copies_apart,
    prepare_environment,
    replica_environment,
    undisturbed_process,
)
from rlsdk_vllm.low_rank import lora_request
from rlsdk_vllm.nodes import FOLLOWER, first_place, follower_of
from rlsdk_vllm.requests import Progress, explained_refusal, progress_of, prompt_of, sampling_params
from rlsdk_vllm.samples import Sample

Result = TypeVar("Result")
END_S = 30.0
"""Seconds for processes and the thread that ends them, in addition to the time after which vLLM kills processes."""
STUCK_S = 300.0
"""Seconds for vLLM to notice that processes were killed because they started too slowly, and for its imports."""


class AsyncEngine(VllmEngine):
    """Every sample is a stream that a task reads, on this engine's own event loop; `step` collects new tokens.

    The core may be ahead of the collected tokens, so each token carries its version. The core ends with this process,
    even if this process is killed. The run's deadline limits every wait for the core, except while weights arrive.
    """

    turn_s = 0.002
    is_spread = True

    def __init__(
        self,
        ctx: RankContext,
        spec: RolloutSpec,
        options: VllmOptions,
        shapes: Mapping[str, tuple[int, ...]],
        sources: Sequence[Source] | None = None,
    ) -> None:
        super().__init__(ctx, spec)
        check_split(ctx, spec, options)
        prepare_environment(ctx, spec, options)
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        async def start() -> Any:
            # Runs on the loop's thread: the core ends with this thread.
            with (
                cores_end_with_this_thread(),
                started_within(ctx.timeout_s, self._check_starting),
                eager_processes(arguments, ctx),
                replica_environment(ctx, spec),
            ):
                return AsyncLLM.from_engine_args(arguments)

        self._others: OtherNodes | None = None
        """Processes on other nodes, if copies of attention are on several nodes."""
        place = first_place(ctx, spec) if has_copies_apart(ctx, spec) else None
        arguments = engine_args(AsyncEngineArgs, ctx, spec, options, shapes, sources, place)
        if place is not None:
            self._others = OtherNodes(ctx, FOLLOWER, follower_of(spec, options, shapes, sources, place))
        self._timeout_s = ctx.timeout_s
        self._num_cores = spec.dp_size
        self._heard = time.monotonic()
        """Time when the core was last idle or returned something."""
        self._came: deque[Progress | BaseException] = deque()
        self._streams: dict[str, asyncio.Task[None]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rlsdk-vllm", daemon=True)
        self._thread.start()
        try:
            with undisturbed_process(), explained_start(spec):
                self._engine = self._run(start(), "starting", ctx.timeout_s + STUCK_S)
            if self._others is not None:
                self._others.wait(ctx.timeout_s)
        except BaseException:
            self._end_loop()
            if self._others is not None:
                try:
                    self._others.check_starting()
                finally:
                    self._others.end()
            raise
        self.vocabulary = self._engine.model_config.get_vocab_size()

    def add(self, sample: Sample) -> None:
        if not self._streams:
            self._heard = time.monotonic()
        self._run(self._add(sample), "adding a sample")

    def step(self) -> list[Progress]:
        """Returns new tokens since the last call.

        Raises:
            DeadlineError: no running sample got a token for longer than the run's deadline.
            Exception: the error that ended the core or a stream.
            RlsdkError: a core on another node ended.
        """
        self._check_others()
        found = []
        while self._came:
            came = self._came.popleft()
            if isinstance(came, BaseException):
                raise came
            found.append(came)
        if found or self.paused or not self._streams:
            self._heard = time.monotonic()
        elif time.monotonic() - self._heard > self._timeout_s:
            raise self._silent(f"no token of {len(self._streams)} running samples", self._timeout_s)
        return found

    def abort(self, keys: Sequence[str]) -> None:
        self._run(self._abort(list(keys)), "ending samples")

    def pause(self) -> None:
        super().pause()
        self._run(self._engine.pause_generation(mode="keep", clear_cache=False), "pausing")

    def resume(self) -> None:
        self._heard = time.monotonic()
        super().resume()
        self._run(self._engine.resume_generation(), "resuming")

    def drop_caches(self) -> None:
        if not self._run(self._engine.reset_prefix_cache(reset_running_requests=True), "dropping the KV cache"):
            raise RuntimeError("vLLM did not free its prefix cache")

    def call_workers(self, method: str, *args: Any, moving: bool = False) -> list[Any]:
        limit = math.inf if moving else None
        if self._num_cores == 1:
            return list(self._run(self._engine.collective_rpc(method, args=args), method, limit))
        # `collective_rpc` would return only the answers of the first core.
        called = self._engine.engine_core.call_utility_all_async("collective_rpc", method, None, args, {})
        return [answer for workers in self._run(called, method, limit) for answer in workers]

    def report_version(self, version: str) -> None:
        if update := getattr(self._engine, "update_weight_version", None):
            self._run(update(version), "setting the version")

    def sleep(self, level: int) -> None:
        self._run(self._engine.sleep(level), "sleeping")

    def wake(self, parts: Sequence[str]) -> None:
        self._run(self._engine.wake_up(list(parts)), "waking up")

    def close(self) -> None:
        """Ends the core's process too, even if it does not respond."""
        # They are not checked any more: a failed node must not prevent the end.
        others, self._others = self._others, None
        try:
            self._run(self._shut_down(), "ending", END_S)
        finally:
            self._end_loop()
            if others is not None:
                others.end()

    def _check_starting(self) -> None:
        if self._others is not None:
            self._others.check_starting()

    async def _add(self, sample: Sample) -> None:
        with explained_refusal(sample):
            stream = await self._engine.add_request(
                sample.key, prompt_of(sample), sampling_params(sample), lora_request=lora_request(sample.adapter)
            )
        self._streams[sample.key] = asyncio.create_task(self._follow(sample.key, stream))

    async def _follow(self, key: str, stream: Any) -> None:
        """Collects the tokens of a sample until it is finished."""
        try:
            finished = None
            while finished is None:
                progress = progress_of(key, await stream.get())
                finished = progress.finished
                self._came.append(progress)
        except Exception as error:
            self._came.append(error)
        finally:
            self._streams.pop(key, None)

    async def _abort(self, keys: Sequence[str]) -> None:
        for key in keys:
            if key in self._streams:
                self._streams[key].cancel()
        await self._engine.abort(keys)

    async def _shut_down(self) -> None:
        streams = list(self._streams.values())
        for stream in streams:
            stream.cancel()
        self._engine.shutdown()
        await asyncio.gather(*streams, return_exceptions=True)

    def _run(self, work: Coroutine[Any, Any, Result], doing: str, timeout_s: float | None = None) -> Result:
        """Runs a coroutine on the loop's thread and returns its result.

        Args:
            doing: what vLLM is doing, for error messages.
            timeout_s: None: the run's deadline; infinity: no limit.

        Raises:
            DeadlineError: it took longer.
            RlsdkError: a core on another node ended.
        """
        limit = self._timeout_s if timeout_s is None else timeout_s
        waiting = asyncio.run_coroutine_threadsafe(work, self._loop)
        late = partial(self._silent, f"no answer ({doing})", limit)
        return result_while(waiting, limit, self._check_others, late=late)

    def _check_others(self) -> None:
        """Raises `RlsdkError` if a core on another node ended."""
        if self._others is not None:
            self._others.check_alive()

    def _silent(self, missing: str, limit_s: float) -> DeadlineError:
        return DeadlineError(
            f"vLLM's process gave {missing} within {limit_s:g} s: it hangs, or the machine is too slow for "
            "deadlines.collective_s. Give more time, or look for the cause with rollout.vllm.log_level INFO"
        )

    def _end_loop(self) -> None:
        """Ends the loop's thread, and with it the core, if it still runs."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(END_S)
        if not self._thread.is_alive():
            self._loop.close()
