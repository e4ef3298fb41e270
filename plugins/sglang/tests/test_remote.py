"""A server that runs already, asked over HTTP: as exact, and as surely updated, as an engine of one's own."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from cases import EXACT, adopt, ask, changed, collect, halves, make_engine, plain_model, run, state_of, worst

from rlsdk.interfaces import Box, ConfigError, FinishReason, fingerprint
from rlsdk_sglang.config import SglangOptions


@pytest.fixture(scope="module")
def url(qwen2: Path) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "rlsdk_sglang.server", "--model-path", str(qwen2), "--port", str(port)]
    command += ["--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native", "--disable-cuda-graph"]
    command += ["--max-total-tokens", "20000", "--max-running-requests", "16", "--context-length", "144"]
    command += ["--grammar-backend", "none", "--mem-fraction-static", "0.5", "--skip-server-warmup"]
    server = psutil.Popen(command, env={**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"})
    address, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 240
    try:
        while not _answers(address):
            assert server.poll() is None, "the server ended"
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.5)
        yield address
    finally:
        family = [*server.children(recursive=True), server]
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family, timeout=20)
        server.wait(timeout=20)


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/server_info", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@pytest.fixture(scope="module")
def remote(url: str, qwen2: Path) -> Iterator[Any]:
    engine = make_engine(qwen2, options=SglangOptions(url=url))
    yield engine
    engine.close()


def test_a_server_is_exact_through_updates(remote: Any, qwen2: Path) -> None:
    plain = plain_model(qwen2)
    requests = [ask(str(at), range(5, 20 + at), 3, max_tokens=12, seed=at, temperature=0.8) for at in range(3)]
    for version in range(4):
        if version:
            state = changed(state_of(plain), version)
            receipt = remote.update_weights(iter(halves(state)), version)
            assert receipt.fingerprints == {n: fingerprint(t, Box.whole(tuple(t.shape))) for n, t in state.items()}
            adopt(plain, state)
        outputs = run(remote, requests)
        assert worst(plain, requests, outputs) < EXACT
        assert {(o.policy_version, o.last_policy_version) for o in outputs} == {(version, version)}


def test_abort_and_pause_reach_a_server(remote: Any, qwen2: Path) -> None:
    remote.update_weights(iter(halves(state_of(plain_model(qwen2)))), 10)

    async def with_update() -> list[Any]:
        task = asyncio.create_task(collect(remote, [ask(name, [5, 6], 3, max_tokens=110) for name in "ab"]))
        while not any(len(sample.token_ids) > 2 for sample in list(remote.samples.values())):
            await asyncio.sleep(0.001)
        remote.pause()
        remote.abort(["a"])
        remote.update_weights(iter(halves(state_of(plain_model(qwen2)))), 11)
        remote.resume()
        return await task

    outputs = asyncio.run(with_update())
    assert len(outputs) == 6
    assert all(o.finish_reason is FinishReason.ABORT for o in outputs if o.request_id == "a" and len(o.token_ids) < 110)
    assert {o.last_policy_version for o in outputs} <= {10, 11}
    assert not remote.samples


def test_a_server_outlives_the_engine(url: str, remote: Any, qwen2: Path) -> None:
    engine = make_engine(qwen2, options=SglangOptions(url=url))
    engine.close()
    assert len(run(remote, [ask("x", [5], 3)])) == 3


def test_servers_of_another_kind_are_refused(url: str, qwen2: Path) -> None:
    with pytest.raises(ConfigError, match=r"its dtype is 'float32', the run's 'bfloat16'\. Start one by: python -m"):
        make_engine(qwen2, dtype="bfloat16", options=SglangOptions(url=url))
