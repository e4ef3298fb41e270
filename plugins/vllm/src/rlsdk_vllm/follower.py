"""vLLM's cores on a node other than the first of their replica (`rlsdk_vllm.nodes`).

Tested versions: 0.31 and 0.32 (their CPU builds).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from rlsdk.interfaces import RankContext, RlsdkError, RolloutSpec
from rlsdk.kit.weights.tensor_origins import Source
from rlsdk_vllm.arguments import engine_args
from rlsdk_vllm.child_lifetime import cores_end_with_this_thread
from rlsdk_vllm.config import VllmOptions
from rlsdk_vllm.environment import eager_processes, prepare_environment, replica_environment
from rlsdk_vllm.nodes import CopiesHere

END_S = 10.0
"""Seconds for cores to end before they are killed."""


class Follower:
    """Created in a companion. Its constructor returns once the cores' processes exist; the front on the first node
    waits until they are ready."""

    def __init__(
        self,
        ctx: RankContext,
        spec: RolloutSpec,
        options: VllmOptions,
        shapes: Mapping[str, tuple[int, ...]],
        sources: Sequence[Source] | None,
        place: CopiesHere,
    ) -> None:
        self._over = threading.Event()
        self._begun = threading.Event()
        self._error: BaseException | None = None
        self._cores: Any = None

        def run() -> None:
            # The cores end with this thread, which starts them.
            try:
                self._start(ctx, spec, options, shapes, sources, place)
            except BaseException as error:
                self._error = error
            self._begun.set()
            self._over.wait()

        threading.Thread(target=run, name="rlsdk-vllm-cores", daemon=True).start()
        self._begun.wait()
        if self._error is not None:
            raise self._error

    def watch(self) -> None:
        """Waits until a core ends, then raises `RlsdkError`. Never returns."""
        self._cores.monitor_engine_liveness()
        raise RlsdkError(f"vLLM's {self._cores.failed_proc_name or 'core'} ended; see its last messages in Ray's logs")

    def end(self) -> None:
        """Ends the cores."""
        self._cores.shutdown(timeout=END_S)
        self._over.set()

    def _start(
        self,
        ctx: RankContext,
        spec: RolloutSpec,
        options: VllmOptions,
        shapes: Mapping[str, tuple[int, ...]],
        sources: Sequence[Source] | None,
        place: CopiesHere,
    ) -> None:
        """Starts the cores, as `vllm serve --headless` does."""
        prepare_environment(ctx, spec, options)
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.utils.network_utils import get_tcp_uri
        from vllm.v1.engine.utils import CoreEngineProcManager
        from vllm.v1.executor import Executor

        arguments = engine_args(AsyncEngineArgs, ctx, spec, options, shapes, sources, place)
        with cores_end_with_this_thread(), eager_processes(arguments, ctx), replica_environment(ctx, spec):
            config = arguments.create_engine_config(usage_context=UsageContext.ENGINE_CONTEXT, headless=True)
            self._cores = CoreEngineProcManager(
                local_engine_count=place.count,
                start_index=place.start,
                local_start_index=0,
                vllm_config=config,
                local_client=False,
                handshake_address=get_tcp_uri(place.host, place.port),
                executor_class=Executor.get_class(config),
                log_stats=False,
            )
