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
from rlsdk.interfaces import GenerationRequest, ModelSpec, RankContext, RlsdkError, RolloutSpec, SamplingParams
from rlsdk.testing.rollout.lab import collect, whole_shards
from rlsdk.testing.rollout.plain_model import PlainModel
from rlsdk_vllm.engine import VllmRolloutEngine

model = Path(sys.argv[2])

def said(work):
    try:
        return work() and "nothing"
    except RlsdkError as error:
        return str(error)

weights = PlainModel.load(model).state
request = GenerationRequest(request_id="x", prompt_ids=(5, 6), n=2, sampling=SamplingParams(max_tokens=8))
engine = make_engine(model, options=Asynchronous.options, tp_size=2, load_weights=False)
found = {"early": said(lambda: run(collect(engine, [request])))}
engine.update_weights(whole_shards(weights), 4)
found["versions"] = [output.policy_version for output in run(collect(engine, [request]))]
processes = psutil.Process().children(recursive=True)
maps = [Path(f"/proc/{process.pid}/maps").read_text() for process in (psutil.Process(), *processes)]
shared = {name for text in maps for name in re.findall("/dev/shm/.*", text)}
(core,) = (process for process in processes if "EngineCore" in process.cmdline()[0])

slow = VllmRolloutEngine()
# No process of Python's begins and imports vLLM in so short a time.
ctx = RankContext(role="rollout", timeout_s=0.05)
spec = RolloutSpec(
    model=ModelSpec(path=str(model), dtype="float32"), max_model_tokens=128, options=Asynchronous.options
)
found["start"] = said(lambda: slow.initialize(ctx, spec))
slow.close()
names = [" ".join(p.cmdline()) for p in psutil.Process().children(recursive=True) if p not in processes]
found["left"] = [name for name in names if "resource_tracker" not in name]

core.suspend()
# However slow the machine is: a process that stands still answers never.
engine.engine.engine._timeout_s = 2.0
found["generate"] = said(lambda: run(collect(engine, [request])))
found["update"] = said(lambda: engine.update_weights(whole_shards(weights), 5))
core.resume()
print(json.dumps([[process.pid for process in processes], sorted(shared), found]), flush=True)
sys.stdin.read()
"""


def test_cores_without_weights_too_slow_or_hanging_are_errors_and_what_a_killed_host_had_ends_with_it(
    qwen2: Path,
) -> None:
    """One host for all of it: most of its time goes by while it imports vLLM."""
    command = [sys.executable, "-c", HOST, str(Path(__file__).parent), str(qwen2)]
    host = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert host.stdout is not None
        # vLLM's workers tell on the same stream what they were asked and could not do.
        pids, shared, found = json.loads(next(line for line in host.stdout if line.startswith("[[")))
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
    assert "no weights have arrived yet" in found["early"]
    assert found["versions"] == [4, 4]
    assert "vLLM's processes did not start within 0.05 s and were killed" in found["start"]
    assert found["left"] == []
    assert "gave no token of 2 running samples within 2 s" in found["generate"]
    assert "gave no answer (start_weight_update) within 2 s" in found["update"]
