"""vLLM's asynchronous engine: its core computes in a process of its own, whatever this process does meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from rlsdk.interfaces import RankContext, RolloutSpec
from rlsdk_vllm.adapter import (
    Progress,
    VllmEngine,
    engine_args,
    explained_refusal,
    explained_start,
    prepare_environment,
    progress_of,
    prompt_of,
    sampling_params,
    undisturbed_process,
)
from rlsdk_vllm.config import VllmOptions
from rlsdk_vllm.samples import Sample

Result = TypeVar("Result")


class AsyncEngine(VllmEngine):
    """Every sample is a stream that a task follows, on an event loop of this engine's own; `step` collects what came.

    The core may be ahead of what was collected. That is why each token brings along the version that it is of.
    """

    turn_s = 0.002
    is_spread = True

    def __init__(
        self, ctx: RankContext, spec: RolloutSpec, options: VllmOptions, shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        super().__init__()
        prepare_environment(ctx, spec, options)
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        async def start() -> Any:
            return AsyncLLM.from_engine_args(arguments)

        arguments = engine_args(AsyncEngineArgs, ctx, spec, options, shapes)
        self._came: deque[Progress | BaseException] = deque()
        self._streams: dict[str, asyncio.Task[None]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rlsdk-vllm", daemon=True)
        self._thread.start()
        try:
            with undisturbed_process(), explained_start(spec):
                self._engine = self._run(start())
        except BaseException:
            self._end_loop()
            raise
        self.vocabulary = self._engine.model_config.get_vocab_size()

    def add(self, sample: Sample) -> None:
        self._run(self._add(sample))

    def step(self) -> list[Progress]:
        """Raises: what ended the core or a stream."""
        found = []
        while self._came:
            came = self._came.popleft()
            if isinstance(came, BaseException):
                raise came
            found.append(came)
        return found

    def abort(self, keys: Sequence[str]) -> None:
        self._run(self._abort(list(keys)))

    def pause(self) -> None:
        super().pause()
        self._run(self._engine.pause_generation(mode="keep", clear_cache=False))

    def resume(self) -> None:
        super().resume()
        self._run(self._engine.resume_generation())

    def drop_caches(self) -> None:
        if not self._run(self._engine.reset_prefix_cache(reset_running_requests=True)):
            raise RuntimeError("vLLM did not give its prefix cache up")

    def call_workers(self, method: str, *args: Any) -> list[Any]:
        return list(self._run(self._engine.collective_rpc(method, args=args)))

    def sleep(self, level: int) -> None:
        self._run(self._engine.sleep(level))

    def wake(self, parts: Sequence[str]) -> None:
        self._run(self._engine.wake_up(list(parts)))

    def close(self) -> None:
        """Ends the core's process as well."""
        self._run(self._abort(list(self._streams)))
        self._run(self._shut_down())
        self._end_loop()

    async def _add(self, sample: Sample) -> None:
        with explained_refusal(sample):
            stream = await self._engine.add_request(sample.key, prompt_of(sample), sampling_params(sample))
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
        self._engine.shutdown()

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
