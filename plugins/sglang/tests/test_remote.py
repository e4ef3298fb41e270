"""A server that runs already, asked over HTTP: as surely updated as an engine of one's own; and in bfloat16."""

from __future__ import annotations

import os
import random
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
from cases import make_engine

from rlsdk.interfaces import Box, ConfigError, FinishReason, fingerprint
from rlsdk.testing.rollout.lab import RolloutLab, pieces, whole_shards
from rlsdk_sglang.config import SglangOptions


def free_port() -> int:
    """Below the range that systems hand out by themselves: nobody takes it while the server starts."""
    for port in random.sample(range(20_000, 30_000), 100):
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue
    raise RuntimeError("no free port between 20000 and 30000")


@pytest.fixture(scope="module")
def url(qwen2: Path) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "rlsdk_sglang.server", "--model-path", str(qwen2), "--port", str(port)]
    command += ["--device", "cpu", "--dtype", "bfloat16", "--attention-backend", "torch_native", "--disable-cuda-graph"]
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
        psutil.wait_procs(family, timeout=60)
        server.wait(timeout=20)


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/server_info", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@pytest.fixture(scope="module")
def remote(url: str, qwen2: Path) -> Iterator[Any]:
    engine = make_engine(qwen2, dtype="bfloat16", options=SglangOptions(url=url))
    yield engine
    engine.close()


def test_a_server_serves_what_it_was_sent_in_its_own_dtype(remote: Any, shared: RolloutLab) -> None:
    requests = [shared.ask(str(at), range(5, 20 + at), 3, max_tokens=12, seed=at) for at in range(3)]
    for version in range(1, 4):
        state = shared.changed(version)
        receipt = remote.update_weights(iter(pieces(state)), version)
        rounded = {name: tensor.bfloat16() for name, tensor in state.items()}
        assert receipt.fingerprints == {n: fingerprint(t, Box.whole(tuple(t.shape))) for n, t in rounded.items()}
        outputs = shared.run(requests, remote)
        assert shared.worst(requests, outputs, shared.plain.with_state(rounded)) < 0.2
        assert {(o.policy_version, o.last_policy_version) for o in outputs} == {(version, version)}


def test_abort_and_pause_reach_a_server(remote: Any, shared: RolloutLab) -> None:
    remote.update_weights(whole_shards(shared.base), 10)

    async def with_update() -> list[Any]:
        task = await shared.paused_midway([shared.ask(name, [5, 6], 3, max_tokens=110) for name in "ab"], remote)
        remote.abort(["a"])
        remote.update_weights(whole_shards(shared.base), 11)
        remote.resume()
        return await task

    outputs = shared.wait(with_update())
    assert len(outputs) == 6
    for output in outputs:
        aborted = output.finish_reason is FinishReason.ABORT
        assert aborted == (output.request_id == "a")
        assert output.last_policy_version == (10 if aborted else 11)
    assert not remote.engine.samples


def test_a_server_outlives_the_engine(url: str, remote: Any, shared: RolloutLab) -> None:
    engine = make_engine(shared.folder, dtype="bfloat16", options=SglangOptions(url=url))
    engine.close()
    assert len(shared.run([shared.ask("x", [5], 3)], remote)) == 3


def test_servers_of_another_kind_are_refused(url: str, shared: RolloutLab) -> None:
    with pytest.raises(ConfigError, match=r"its dtype is 'bfloat16', the run's 'float32'\. Start one by: python -m"):
        make_engine(shared.folder, options=SglangOptions(url=url))
