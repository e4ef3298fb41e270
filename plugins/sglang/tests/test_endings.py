"""However an engine ends, its host goes on, or is gone by its own will, and nothing of SGLang's is left behind."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from rlsdk.interfaces import GenerationRequest, RlsdkError, SamplingParams
from rlsdk.testing.rollout.lab import collect
from rlsdk_sglang.named_resources import SHARED, NamedResources, clear_leftovers

KILLED = """
import os, signal
from rlsdk_sglang.named_resources import SHARED, NamedResources
found = NamedResources()
found.note([os.getpid()])
(SHARED / f"sgl_shm_mq_{os.getpid()}_x").touch()
print(found.folder, os.getpid(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


LISTENING = """
import psutil, socket
import torch.distributed as dist
from rlsdk_sglang import scheduler_process
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
scheduler_process._listen_on_given_address()
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
found = [c.laddr for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
print(*(f"{address.ip} {address.port == port}" for address in found))
"""


def test_torchs_store_listens_on_the_address_that_it_is_given() -> None:
    """It listens on all interfaces by itself."""
    done = subprocess.run([sys.executable, "-c", LISTENING], capture_output=True, text=True, check=True)
    assert "127.0.0.1 True" in done.stdout
    assert "::" not in done.stdout
    assert "0.0.0.0" not in done.stdout


def test_no_process_of_an_engine_listens_to_other_machines(other: Any) -> None:
    """torch's key-value store did, on all interfaces."""
    (scheduler,) = other.engine.engine.engine._home._engine.processes
    listening = [
        connection.laddr
        for process in (psutil.Process(), psutil.Process(scheduler.pid))
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert listening, "the schedulers' key-value store"
    assert [address for address in listening if address.ip not in ("127.0.0.1", "::1")] == []


def test_what_dies_inside_an_engine_is_an_error_and_its_host_lives(other: Any) -> None:
    engine = other.engine
    quiet = engine.engine.engine._home._engine
    contexts = [quiet._engine.send_to_rpc.context, quiet.front.recv_from_detokenizer.context]
    (scheduler,) = quiet.processes
    request = GenerationRequest(request_id="x", prompt_ids=(5, 6), n=4, sampling=SamplingParams(max_tokens=120))

    async def killed_midway() -> None:
        task = asyncio.create_task(collect(engine, [request]))
        os.kill(scheduler.pid, signal.SIGSTOP)  # It cannot be quicker than what follows.
        while not engine.engine.samples:
            await asyncio.sleep(0.001)
        os.kill(scheduler.pid, signal.SIGKILL)
        await task

    try:
        with pytest.raises(RlsdkError, match=rf"a scheduler of SGLang \(process {scheduler.pid}\) ended"):
            other.wait(killed_midway())
        with pytest.raises(RlsdkError, match="a scheduler of SGLang"):
            other.wait(collect(engine, [request]))
        with pytest.raises(RlsdkError, match="a scheduler of SGLang"):
            engine.sleep()
        # SGLang's own way with an answer that it cannot read is to kill its process, with all its children.
        with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
            socket.connect(quiet._engine.port_args.tokenizer_ipc_name)
            socket.send(pickle.dumps("no answer"))
            deadline = time.monotonic() + 60
            while quiet.failure is None:
                assert time.monotonic() < deadline
                time.sleep(0.01)
    finally:
        other.drop()
    assert all(context.closed for context in contexts), "each has threads of its own"
    assert left_in(quiet.named_resources.folder, [scheduler.pid]) == []


def test_what_a_killed_host_left_is_cleared_by_the_next_and_what_is_in_use_stays() -> None:
    host = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True, check=False)
    folder, pid = host.stdout.split()
    assert len(left_in(Path(folder), [int(pid)])) == 2
    living = NamedResources()
    try:
        assert left_in(Path(folder), [int(pid)]) == []
        clear_leftovers()
        assert living.folder.exists()
    finally:
        living.clear()
    assert not living.folder.exists()


def left_in(folder: Path, schedulers: list[int]) -> list[Path]:
    """Of what hangs on an engine's folder."""
    names = [f"sgl_shm_*_{pid}_*" for pid in schedulers]
    return [path for path in (folder, *(found for name in names for found in SHARED.glob(name))) if path.exists()]
