"""Processes of an engine end with the one that it belongs to, however that ends; and nobody waits for one for ever."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil

HOST = """
import json, re, sys
from asyncio import run
from pathlib import Path
import psutil
sys.path.insert(0, sys.argv[1])
from cases import Asynchronous, make_engine
from rlsdk.interfaces import DeadlineError, GenerationRequest, SamplingParams
from rlsdk.testing.rollout_lab import PlainModel, collect, whole_shards

model = Path(sys.argv[2])
engine = make_engine(model, options=Asynchronous.options, tp_size=2)
request = GenerationRequest(request_id="x", prompt_ids=(5, 6), n=2, sampling=SamplingParams(max_tokens=8))
assert len(run(collect(engine, [request]))) == 2
processes = psutil.Process().children(recursive=True)
maps = [Path(f"/proc/{process.pid}/maps").read_text() for process in (psutil.Process(), *processes)]
shared = {name for text in maps for name in re.findall("/dev/shm/.*", text)}
(core,) = (process for process in processes if "EngineCore" in process.cmdline()[0])
core.suspend()
# However slow the machine is: a process that stands still answers never.
engine.engine._timeout_s = 2.0

def said(work):
    try:
        return work() and "nothing"
    except DeadlineError as error:
        return str(error)

found = {
    "generate": said(lambda: run(collect(engine, [request]))),
    "update": said(lambda: engine.update_weights(whole_shards(PlainModel.load(model).state), 1)),
}
core.resume()
print(json.dumps([[process.pid for process in processes], sorted(shared), found]), flush=True)
sys.stdin.read()
"""


def test_a_core_that_hangs_is_an_error_and_one_whose_host_is_killed_leaves_nothing(qwen2: Path) -> None:
    command = [sys.executable, "-c", HOST, str(Path(__file__).parent), str(qwen2)]
    host = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert host.stdout is not None
        pids, shared, found = json.loads(host.stdout.readline())
        processes = [psutil.Process(pid) for pid in pids]
    finally:
        host.kill()
        host.communicate(timeout=60)
    _, alive = psutil.wait_procs(processes, timeout=60)
    for process in alive:
        process.kill()
    assert not alive
    assert len(processes) >= 3
    assert shared
    assert [name for name in shared if not name.endswith(" (deleted)")] == []
    assert "brought no token of 2 samples that run within 2 s" in found["generate"]
    assert "brought no answer (rlsdk_take) within 2 s" in found["update"]


SLOW = """
import json, sys
import psutil
from rlsdk.interfaces import DeadlineError, ModelSpec, RankContext, RolloutSpec
from rlsdk_vllm.config import VllmOptions
from rlsdk_vllm.engine import VllmRolloutEngine

engine = VllmRolloutEngine()
# No process of Python's begins and imports vLLM in so short a time.
ctx = RankContext(role="rollout", timeout_s=0.05)
options = VllmOptions(asynchronous=True, kv_cache_mb=64)
model = ModelSpec(path=sys.argv[1], dtype="float32")
try:
    engine.initialize(ctx, RolloutSpec(model=model, max_model_tokens=128, options=options))
except DeadlineError as error:
    engine.close()
    names = [" ".join(process.cmdline()) for process in psutil.Process().children(recursive=True)]
    print(json.dumps([str(error), [name for name in names if "resource_tracker" not in name]]))
"""


def test_a_start_that_takes_too_long_is_an_error_and_leaves_no_process(qwen2: Path) -> None:
    command = [sys.executable, "-c", SLOW, str(qwen2)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=True)
    message, left = json.loads(done.stdout.splitlines()[-1])
    assert "vLLM's processes did not start within 0.05 s and were killed" in message
    assert left == []
