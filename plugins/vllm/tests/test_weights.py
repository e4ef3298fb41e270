"""What lies behind an update: the memory that serves, and what the engine refuses while it has no whole weights."""

from __future__ import annotations

import asyncio
import hashlib
import time
from dataclasses import replace
from typing import Any

import cases
import pytest
import torch
from cases import worker_of

from rlsdk.interfaces import ConfigError, RlsdkError, WeightSyncError
from rlsdk.kit.weights.weight_updates import join_fingerprints
from rlsdk.testing.rollout.lab import collect, whole_shards
from rlsdk.testing.rollout.outputs import tokens_of
from rlsdk_vllm.samples import Call
from rlsdk_vllm.worker import WorkerExtension


def test_fingerprints_are_of_the_memory_that_serves(in_process: Any) -> None:
    """Half of a fused parameter is overwritten behind the engine's back: its tensors alone look different."""
    lab, engine = in_process, in_process.engine
    before = join_fingerprints(lab.inner.engine.fingerprints(), 0)
    parameter = dict(worker_of(engine).model_runner.get_model().named_parameters())[
        "model.layers.0.self_attn.qkv_proj.weight"
    ]
    parameter.data[:128].add_(1.0)
    after = join_fingerprints(lab.inner.engine.fingerprints(), 0)
    assert {name for name in before if before[name] != after[name]} == {"model.layers.0.self_attn.q_proj.weight"}


def test_an_update_is_refused_while_samples_run_and_changes_nothing(lab: Any) -> None:
    request = lab.ask("x", [5, 6], 3, max_tokens=20)
    expected = tokens_of(lab.run([request]))
    engine = lab.engine

    async def update_midway() -> list[Any]:
        # Samples of a call that has come in, and that cannot be finished before the update is tried.
        lab.inner.engine.pause()
        task = asyncio.create_task(collect(engine, [request]))
        await asyncio.sleep(0)
        with pytest.raises(
            WeightSyncError, match="version 7 arrived while 3 samples are running; finish, abort or pause them first"
        ):
            engine.update_weights(whole_shards(lab.changed(3)), 7)
        with pytest.raises(RlsdkError, match=r"sleep\(\) was called while 1 calls of generate\(\) are running"):
            engine.sleep()
        lab.inner.engine.resume()
        return await task

    outputs = lab.wait(update_midway())
    assert tokens_of(outputs) == expected
    assert {o.policy_version for o in outputs} == {0}


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_gives_memory_back_and_wake_restores_service(in_process: Any, level: int) -> None:
    lab, engine = in_process, in_process.engine
    request = lab.ask("x", [5, 6], 3)
    before = tokens_of(lab.run([request]))
    keys_and_values = [tensor.untyped_storage() for tensor in worker_of(engine)._rlsdk_tensors("kv_cache")]
    weights = [tensor.untyped_storage() for tensor in worker_of(engine)._rlsdk_tensors("weights")]
    engine.sleep(level)
    assert sum(storage.nbytes() for storage in keys_and_values) == 0
    assert (sum(storage.nbytes() for storage in weights) == 0) == (level == 2)
    with pytest.raises(RlsdkError, match="asleep: call wake"):
        lab.restore()
    engine.wake(("weights",))
    if level == 2:
        lab.restore()
    with pytest.raises(RlsdkError, match=r"asleep: call wake\(\['kv_cache'\]\)"):
        lab.run([request])
    engine.wake(("kv_cache",))
    assert tokens_of(lab.run([request])) == before


def test_logits_that_are_not_finite_are_an_error_and_not_a_sample(lab: Any) -> None:
    engine = lab.engine
    engine.update_weights(whole_shards({n: torch.full_like(t, torch.nan) for n, t in lab.base.items()}), 1)
    with pytest.raises(RlsdkError, match="not finite, with the weights of version 1"):
        lab.run([lab.ask("x", [5, 6], 3)])
    assert not lab.inner.samples
    # vLLM's attention on a CPU multiplies whole blocks, with 0 where nothing is to be read.
    lab.restore()
    requests = [lab.ask(f"r{at}", lab.prompt(3 + 5 * at, 40), 3, max_tokens=20) for at in range(6)]
    assert lab.worst(requests, lab.run(requests)) < lab.suite.tolerance


def test_a_cache_that_may_hold_nan_is_overwritten_though_nobody_took_a_token(lab: Any) -> None:
    """The asynchronous engine's process samples tokens that no caller collects any more."""
    inner = lab.inner
    lab.engine.update_weights(whole_shards({n: torch.full_like(t, torch.nan) for n, t in lab.base.items()}), 1)
    inner._admit(Call(), [lab.ask("x", lab.prompt(30, 41), 6, max_tokens=60)])
    deadline = time.monotonic() + 60
    while not inner.engine.step() and time.monotonic() < deadline:
        time.sleep(0.01)
    inner._withdraw(list(inner.samples))
    lab.restore()
    requests = [lab.ask(f"r{at}", lab.prompt(3 + 5 * at, 40), 3, max_tokens=20) for at in range(6)]
    assert lab.worst(requests, lab.run(requests)) < lab.suite.tolerance


def test_an_engine_without_weights_serves_the_first_that_come_until_it_is_closed(in_process: Any) -> None:
    """The other mode's beginning is in `test_processes`, its end in `test_conformance`: each start takes seconds."""
    lab = in_process
    engine = lab.start(load_weights=False)
    try:
        with pytest.raises(WeightSyncError, match="no weights have arrived yet"):
            lab.run([lab.ask("x", [5])], engine)
        engine.update_weights(whole_shards(lab.base), 4)
        requests = [lab.ask("x", [5, 6], 3, max_tokens=20)]
        outputs = lab.run(requests, engine)
        assert lab.worst(requests, outputs) < lab.suite.tolerance
        assert {o.policy_version for o in outputs} == {4}
        cases.ends_what_runs(lab, engine)
    finally:
        engine.close()


def test_vllms_own_version_and_checksums_go_with_an_update(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = lab.engine
    monkeypatch.setattr(lab.inner, "wants_checksum", True)
    found = {}
    for version, state in ((5, lab.changed(3)), (6, lab.base), (7, lab.changed(3))):
        found[version] = engine.update_weights(whole_shards(state), version).engine_checksum
        own = lab.inner.engine
        kept = own._engine.get_weight_version()
        assert (own._run(kept, "asking for the version") if hasattr(own, "_run") else kept) == str(version)
    assert found[5] == found[7] != found[6]
    engine.sleep(2)  # vLLM's own way to a checksum leaves memory that a CPU cannot give back
    engine.wake()
    assert engine.update_weights(whole_shards(lab.changed(3)), 7).engine_checksum == found[7]
    if not lab.inner.engine.is_spread:
        parameters = worker_of(engine).model_runner.get_model().named_parameters()
        lines = [
            f"dp0:pp0:pcp0:tp0:{name} {hashlib.sha256(p.detach().contiguous().view(torch.uint8).numpy()).hexdigest()}\n"
            for name, p in parameters
        ]
        assert found[7] == hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()


def test_checksums_that_a_version_does_not_have_are_refused_at_the_start(
    qwen2: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WorkerExtension, "rlsdk_checksums", lambda self: None)
    with pytest.raises(ConfigError, match=r"engine_checksums true: this version of vLLM computes no checksums"):
        cases.make_engine(qwen2, options=replace(cases.InProcess.options, engine_checksums=True))
