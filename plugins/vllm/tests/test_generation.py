"""What is vLLM's own: requests of every kind in one batch, what it refuses, other models, other dtypes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cases import InProcess, make_engine

from rlsdk.interfaces import Box, ConfigError, fingerprint
from rlsdk.testing.process.models import write_tiny_model
from rlsdk.testing.rollout.lab import RolloutLab, whole_shards

KINDS = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.5, "top_p": 0.7, "top_k": 30},
    {"min_p": 0.05, "temperature": 2.0},
    {"temperature": 0.0},
    {"top_k": 1},
]


def test_requests_of_every_kind_share_a_batch(lab: RolloutLab) -> None:
    requests = [lab.ask(str(at), [5, 6, at + 7], 2, max_tokens=20, **kind) for at, kind in enumerate(KINDS)]
    outputs = lab.run(requests)
    assert lab.worst(requests, outputs) < lab.suite.tolerance
    for output in outputs:
        if output.request_id in ("4", "5"):
            tokens = output.token_ids.tolist()
            likeliest = lab.plain.logits(requests[int(output.request_id)].prompt_ids, tokens).argmax(-1)
            assert likeliest.tolist() == tokens


@pytest.mark.parametrize(
    ("temperature", "fault"),
    [
        (0.005, "'x': vLLM refuses it: temperature 0.005: expected 0, or 0.01 or more"),
        (3.0, r"'x': vLLM refuses it: temperature must be in \[0, 2\]"),
    ],
)
def test_requests_that_vllm_refuses_leave_nothing_behind(lab: Any, temperature: float, fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        lab.run([lab.ask("fine", [5]), lab.ask("x", [5], temperature=temperature)])
    assert not lab.inner.samples
    assert len(lab.run([lab.ask("x", [5], 2)])) == 2


VARIANTS = {
    "tied qwen3, padded vocabulary": {"architecture": "qwen3", "vocab_size": 131, "tied": True, "seed": 4},
    "llama with biases": {"architecture": "llama", "attention_bias": True, "mlp_bias": True, "seed": 5},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_other_models_are_exact_before_and_after_an_update(tmp_path: Path, variant: str) -> None:
    (tmp_path / "scratch").mkdir()
    lab = RolloutLab(InProcess, write_tiny_model(tmp_path / "model", **VARIANTS[variant]), tmp_path / "scratch")
    try:
        requests = [lab.ask(str(at), [5, 6, at + 7], 3, max_tokens=20) for at in range(3)]
        assert lab.worst(requests, lab.run(requests)) < lab.suite.tolerance
        state = lab.changed(1)
        lab.engine.update_weights(whole_shards(state), 1)
        assert lab.worst(requests, lab.run(requests), lab.plain.with_state(state)) < lab.suite.tolerance
    finally:
        lab.close()


def test_bfloat16_serves_what_it_was_sent_rounded(labs: Any) -> None:
    lab = labs(InProcess)
    state = lab.changed(1)
    rounded = {name: tensor.bfloat16() for name, tensor in state.items()}
    engine = make_engine(lab.folder, dtype="bfloat16")
    try:
        requests = [lab.ask(str(at), [5, 6, at + 7], 3, max_tokens=20) for at in range(3)]
        assert lab.worst(requests, lab.run(requests, engine)) < 0.2
        receipt = engine.update_weights(whole_shards(state), 1)
        assert receipt.fingerprints == {n: fingerprint(t, Box.whole(tuple(t.shape))) for n, t in rounded.items()}
        assert lab.worst(requests, lab.run(requests, engine), lab.plain.with_state(rounded)) < 0.2
    finally:
        engine.close()
