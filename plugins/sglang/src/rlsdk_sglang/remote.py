"""A running SGLang server, used instead of an engine in this process."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncGenerator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import aiohttp

from rlsdk.interfaces import ConfigError, RankContext, RlsdkError, RolloutSpec
from rlsdk_sglang import weights
from rlsdk_sglang.client import ClientThread
from rlsdk_sglang.config import SglangOptions

LONGEST_REPORT_BYTES = 1 << 26
CLOSE_S = 20.0
"""Seconds for closing connections."""


START = "python -m rlsdk_sglang.server --model-path MODEL --port PORT"


class RemoteServer:
    """A server on this machine that was started separately, and continues when a run ends.

    Raises:
        ConfigError: the server's settings are not those that the run needs.
    """

    def __init__(self, client: ClientThread, ctx: RankContext, spec: RolloutSpec, options: SglangOptions) -> None:
        self._client = client
        self.front: RemoteFront = client.call(RemoteFront, options.url)
        try:
            about = client.run(self.front.about(), ctx.timeout_s)
            _check_server(about, ctx, spec, options)
            # Leftovers of an earlier run.
            client.run(self.front.reset(), ctx.timeout_s)
        except BaseException:
            self.close()
            raise
        self.num_ranks = spec.tp_size * spec.dp_size
        self.num_stages = spec.pp_size

    def check_alive(self) -> None:
        """Does nothing: if the server ended, the next request fails."""

    def close(self) -> None:
        self._client.run(self.front.close(), CLOSE_S)


def _check_server(about: dict[str, Any], ctx: RankContext, spec: RolloutSpec, options: SglangOptions) -> None:
    def refuse(fault: str) -> ConfigError:
        return ConfigError(f"rollout.sglang.url {options.url!r}: {fault}. Start one by: {START}")

    if weights.LOADER not in (about.get("custom_weight_loader") or ()):
        raise refuse("this server was started without rlsdk's loader")
    wants = {
        "tp_size": spec.tp_size * spec.dp_size,
        "pp_size": spec.pp_size,
        "dtype": spec.model.dtype,
        "device": ctx.device.split(":")[0],
    }
    for name, wanted in wants.items():
        if about.get(name) not in (wanted, "auto"):
            raise refuse(f"its {name} is {about.get(name)!r}, the run's {wanted!r}")
    if spec.engine_kwargs:
        raise refuse(f"a running server cannot take engine_kwargs {sorted(spec.engine_kwargs)}")


class RemoteFront:
    """The operations of SGLang's `TokenizerManager` that this plugin uses, over HTTP.

    The server was started by `python -m rlsdk_sglang.server` on this machine: weights go through shared memory, and
    sampling is the plugin's own.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
            # Every running sample uses a connection, and the report of a long sample is a long line.
            connector=aiohttp.TCPConnector(limit=0),
            read_bufsize=LONGEST_REPORT_BYTES,
        )

    async def close(self) -> None:
        await self._session.close()

    async def about(self) -> dict[str, Any]:
        """Arguments and state of the server."""
        found: dict[str, Any] = json.loads(await self._ask("GET", "/server_info"))
        return found

    async def reset(self) -> None:
        await self._ask("POST", "/abort_request", {"abort_all": True})
        await self._ask("POST", "/continue_generation", {"torch_empty_cache": False})
        await self._ask("POST", "/update_weight_version", {"new_version": "0", "abort_all_requests": False})

    async def generate_request(self, asked: Any) -> AsyncGenerator[dict[str, Any], None]:
        """Yields the reports of a sample. If the caller stops early, the sample is aborted."""
        body = {
            "rid": asked.rid,
            "input_ids": asked.input_ids,
            "sampling_params": asked.sampling_params,
            "return_logprob": True,
            "stream": True,
            "logprob_start_len": asked.logprob_start_len,
            "top_logprobs_num": asked.top_logprobs_num,
        }
        ended = False
        try:
            async with self._session.post(f"{self.url}/generate", json=body) as answer:
                if answer.status != 200:
                    raise ValueError(await answer.text())
                async for line in answer.content:
                    if not line.startswith(b"data: {"):
                        continue
                    report = json.loads(line[len(b"data: ") :])
                    if "error" in report:
                        raise ValueError(report["error"].get("message"))
                    ended = report["meta_info"]["finish_reason"] is not None
                    yield report
        finally:
            if not ended:
                with suppress(aiohttp.ClientError):
                    await asyncio.shield(self._ask("POST", "/abort_request", {"rid": asked.rid}))

    async def pause_generation(self, asked: Any) -> None:
        await self._ask("POST", "/pause_generation", {"mode": asked.mode})

    async def continue_generation(self, asked: Any) -> None:
        await self._ask("POST", "/continue_generation", {"torch_empty_cache": asked.torch_empty_cache})

    async def get_internal_state(self) -> dict[str, Any]:
        return await self.about()

    async def flush_cache(self, timeout_s: float | None) -> Any:
        async with self._session.post(f"{self.url}/flush_cache", params={"timeout": timeout_s or 0.0}) as answer:
            return SimpleNamespace(success=answer.status == 200, message=await answer.text())

    async def begin_weight_update(self, asked: Any) -> tuple[bool, str]:
        return await self._try("/begin_weight_update", {"selector": asked.selector})

    async def end_weight_update(self, asked: Any) -> tuple[bool, str]:
        return await self._try("/end_weight_update", {})

    async def update_weights_from_tensor(self, asked: Any) -> tuple[bool, str]:
        tensors = [base64.b64encode(data).decode() for data in asked.serialized_named_tensors]
        body = {"load_format": asked.load_format, "flush_cache": asked.flush_cache, "selector": asked.selector}
        return await self._try("/update_weights_from_tensor", {"serialized_named_tensors": tensors, **body})

    async def update_weight_version(self, asked: Any) -> None:
        body = {"new_version": asked.new_version, "abort_all_requests": asked.abort_all_requests}
        await self._ask("POST", "/update_weight_version", body)

    async def release_memory_occupation(self, asked: Any) -> None:
        await self._ask("POST", "/release_memory_occupation", {"tags": asked.tags})

    async def resume_memory_occupation(self, asked: Any) -> None:
        await self._ask("POST", "/resume_memory_occupation", {"tags": asked.tags})

    async def _try(self, path: str, body: dict[str, Any]) -> tuple[bool, str]:
        async with self._session.post(self.url + path, json=body) as answer:
            text = await answer.text()
            try:
                found = json.loads(text)
                return bool(found["success"]), str(found["message"])
            except (ValueError, KeyError, TypeError):
                return False, f"{path}: HTTP {answer.status}: {text[:500]}"

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> str:
        try:
            async with self._session.request(method, self.url + path, json=body) as answer:
                text: str = await answer.text()
        except aiohttp.ClientError as error:
            raise RlsdkError(
                f"rollout.sglang.url {self.url!r} does not answer: {error}. Start a server there: {START}"
            ) from error
        if answer.status != 200:
            raise RlsdkError(f"SGLang's server refused {path}: HTTP {answer.status}: {text[:500]}")
        return text
