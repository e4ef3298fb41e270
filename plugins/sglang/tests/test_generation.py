"""What is SGLang's own: requests of every kind in one batch, other models, and models that it serves in part."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cases import make_engine
from sglang.srt.sampling.sampling_params import TOP_K_ALL

from rlsdk.interfaces import ConfigError
from rlsdk.testing.process.models import write_tiny_model
from rlsdk.testing.rollout.lab import RolloutLab, whole_shards
from rlsdk_sglang.sampler import row_sampling

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


def test_tied_weights_padded_vocabularies_and_other_models_are_exact(other: RolloutLab) -> None:
    requests = [other.ask(str(at), [5, 6, at + 7], 3, max_tokens=20) for at in range(3)]
    assert other.worst(requests, other.run(requests)) < other.suite.tolerance
    state = other.changed(1)
    other.engine.update_weights(whole_shards(state), 1)
    assert other.worst(requests, other.run(requests), other.plain.with_state(state)) < other.suite.tolerance


def test_a_model_that_sglang_would_serve_without_some_of_its_tensors_is_refused(tmp_path: Path) -> None:
    """Of its Llama it loads no biases, and says nothing."""
    folder = write_tiny_model(tmp_path / "model", architecture="llama", attention_bias=True, mlp_bias=True)
    with pytest.raises(ConfigError, match=r"no memory of SGLang's model was found for canonical tensor '.*bias'"):
        make_engine(folder)


def test_a_step_without_filters_sorts_no_vocabulary() -> None:
    """SGLang's "all tokens" is a limit like others, and a greedy row's is 1."""
    rows = len(KINDS)
    plain = SimpleNamespace(
        temperatures=torch.ones(rows, 1),
        top_ks=torch.tensor([TOP_K_ALL] * (rows - 1) + [1], dtype=torch.int32),
        top_ps=torch.ones(rows),
        min_ps=torch.zeros(rows),
    )
    assert not row_sampling(plain).is_cut
    plain.top_ks[0] = 3
    assert row_sampling(plain).is_cut
