"""What engines that serve a whole model share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from rlsdk.interfaces import (
    ConfigError,
    FinishReason,
    GenerationRequest,
    Head,
    ModelSpec,
    RankContext,
    RlsdkError,
    RolloutSpec,
    SamplingParams,
    VersionRun,
)
from rlsdk.kit.generation.serving import RunningSample, check_rollout_spec, whole_layout


@dataclass
class Options:
    """Of some backend."""


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"model": ModelSpec(path="x", head=Head.SCORE)}, "head 'lm', not 'score'"),
        ({"tp_size": 0}, "tp_size 0: expected 1 or more"),
        ({"options": 3}, "RolloutSpec.options is a int; expected Options, or None"),
    ],
)
def test_what_no_engine_could_serve_is_refused_by_name(given: dict[str, Any], fault: str) -> None:
    spec = RolloutSpec(**{"model": ModelSpec(path="x"), **given})
    with pytest.raises(ConfigError, match=fault):
        check_rollout_spec(spec, Options)


def test_a_layout_of_whole_tensors_holds_each_once() -> None:
    layout = whole_layout(RankContext(role="rollout"), "bfloat16", {"a": (2, 3), "b": ()}, {"c": "a"})
    assert [(meta.name, meta.shape, meta.dtype) for meta in layout.tensors] == [
        ("a", (2, 3), "bfloat16"),
        ("b", (), "bfloat16"),
    ]
    assert [(name, box.offset, box.size) for name, box in layout.boxes] == [("a", (0, 0), (2, 3)), ("b", (), ())]
    assert layout.tied == {"c": "a"}


def sample() -> RunningSample:
    request = GenerationRequest(request_id="r", prompt_ids=(1, 2), sampling=SamplingParams(), n=2)
    return RunningSample(key="k", request=request, index=1, seed=7, limit=4)


def test_a_sample_carries_the_version_of_every_token_as_runs() -> None:
    running = sample()
    running.extend([5], [-1.0], 3)
    running.extend([], [], 4)
    running.extend([6], [-2.0], 5)
    running.extend([7], [-0.5], 5)
    done = running.output(FinishReason.LENGTH, 9)
    assert (done.request_id, done.sample_index, done.finish_reason) == ("r", 1, FinishReason.LENGTH)
    assert done.versions == (VersionRun(3, 1), VersionRun(5, 2))
    assert (done.policy_version, done.last_policy_version) == (3, 5)
    assert done.token_ids.tolist() == [5, 6, 7]
    assert done.log_probs.dtype == np.float32
    assert done.log_probs.tolist() == [-1.0, -2.0, -0.5]


def test_a_sample_without_tokens_is_of_the_version_that_is_served() -> None:
    done = sample().output(FinishReason.ABORT, 9)
    assert (done.versions, len(done.token_ids)) == ((VersionRun(9, 0),), 0)


def test_log_probs_that_are_not_finite_are_an_error_with_their_version() -> None:
    running = sample()
    running.extend([5], [float("nan")], 3)
    with pytest.raises(RlsdkError, match="not finite, with the weights of version 3"):
        running.check_finite()
