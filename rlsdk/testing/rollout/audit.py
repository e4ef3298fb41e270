"""Checks individual samples against plain transformers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rlsdk.interfaces import (
    BackendSpec,
    FinishReason,
    GenerationOutput,
    GenerationRequest,
    LogProbKind,
    SamplingParams,
    VersionRun,
)
from rlsdk.kit.model.hf import load_tokenizer
from rlsdk.testing.rollout.outputs import wrong_identities
from rlsdk.testing.rollout.plain_model import PlainModel, contract_log_probs, distribution, kept
from rlsdk.testing.rollout.settings import RolloutSettings

BORDER = 1e-3
"""Relative distance from a filter's border within which tokens may be kept or not."""
ROWS_AT_ONCE = 16
"""Number of rows of one length that the plain model runs together."""


class Subject(Protocol):
    """What samples are compared with: a `RolloutLab`, of which this is read."""

    suite: type[RolloutSettings]
    spec: BackendSpec
    kind: LogProbKind
    folder: Path
    """Of the model."""
    plain: PlainModel
    base: dict[str, Tensor]
    """The model's own weights."""
    vocabulary: int


@dataclass(frozen=True)
class Sample:
    """One output, its request, and the reference logits of its tokens."""

    request: GenerationRequest
    output: GenerationOutput
    logits: Tensor
    """`[L, V]` float64, from the plain model."""

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    @property
    def name(self) -> str:
        return f"{self.request.request_id!r}/{self.output.sample_index}"

    @cached_property
    def tokens(self) -> Tensor:
        """`[L]` int64."""
        return torch.as_tensor(self.output.token_ids)

    @cached_property
    def probabilities(self) -> Tensor:
        """`[L, V]`: probabilities after temperature."""
        return (self.logits / (self.sampling.temperature or 1.0)).softmax(-1)

    @cached_property
    def chances(self) -> Tensor:
        """`[L, V]`: probabilities after temperature and filters."""
        return distribution(self.logits, self.sampling)

    @cached_property
    def allowed(self) -> Tensor:
        """`[L, V]` bool: tokens that may be drawn, with tolerance for rounding at a filter's border."""
        return kept(self.probabilities, self.sampling, BORDER)


def samples_with_logits(
    lab: Subject,
    requests: Sequence[GenerationRequest],
    outputs: Sequence[GenerationOutput],
    plain: PlainModel | None = None,
) -> list[Sample]:
    """Every well-formed output of these requests, with the plain model's logits."""
    asked = {request.request_id: request for request in requests}
    known = [output for output in outputs if output.request_id in asked and _is_readable(lab, output)]
    rows = [(*_text(asked[output.request_id]), *output.token_ids.tolist()) for output in known]
    by_length: dict[int, list[int]] = {}
    for at, row in enumerate(rows):
        by_length.setdefault(len(row), []).append(at)
    found: dict[int, Tensor] = {}
    for same in by_length.values():
        for first in range(0, len(same), ROWS_AT_ONCE):
            part = same[first : first + ROWS_AT_ONCE]
            logits = (plain or lab.plain).model(torch.tensor([rows[at] for at in part])).logits
            found |= dict(zip(part, logits, strict=True))
    samples = []
    for at, output in enumerate(known):
        request = asked[output.request_id]
        start = len(_text(request)) - 1
        logits = found[at][start : start + len(output.token_ids)].double()
        samples.append(Sample(request, output, logits))
    by_request: dict[str, list[Sample]] = {}
    for sample in samples:
        by_request.setdefault(sample.request.request_id, []).append(sample)
    for of_one in by_request.values():
        _compute_distributions(of_one)
    return samples


def _compute_distributions(samples: Sequence[Sample]) -> None:
    """Computes the distributions of one request's samples at once: one by one this would take most of a suite's
    time."""
    sampling, lengths = samples[0].sampling, [len(sample.tokens) for sample in samples]
    logits = torch.cat([sample.logits for sample in samples])
    found = {
        "probabilities": (logits / (sampling.temperature or 1.0)).softmax(-1),
        "chances": distribution(logits, sampling),
    }
    found["allowed"] = kept(found["probabilities"], sampling, BORDER)
    for name, values in found.items():
        for sample, part in zip(samples, torch.split(values, lengths), strict=True):
            sample.__dict__[name] = part


def audit(
    lab: Subject,
    requests: Sequence[GenerationRequest],
    outputs: Sequence[GenerationOutput],
    plain: PlainModel | None = None,
    *,
    version: int = 0,
    may_abort: Sequence[str] = (),
    room: int | None = None,
) -> tuple[list[str], list[Sample]]:
    """Checks all samples of a call against their requests.

    Args:
        lab: the engine's lab.
        requests: requests of the call.
        outputs: outputs of the call.
        plain: plain model with the weights that were served.
        version: their version.
        may_abort: ids of requests whose samples `abort` may have ended.
        room: the engine's `max_model_tokens`; None: the suite's.

    Returns:
        Descriptions of the faults, and the samples.
    """
    samples = samples_with_logits(lab, requests, outputs, plain)
    faults = wrong_identities(requests, outputs)
    asked = {request.request_id: request for request in requests}
    faults += [fault for output in outputs if (fault := unreadable(lab, output)) and output.request_id in asked]
    for sample in samples:
        aborted = sample.request.request_id in may_abort
        faults += faults_of(lab, sample, aborted=aborted, room=room)
        faults += [f"sample {sample.name}: {fault}" for fault in [_wrong_versions(sample, version)] if fault]
    return faults, samples


def faults_of(lab: Subject, sample: Sample, *, aborted: bool = False, room: int | None = None) -> list[str]:
    """Faults of one sample, except those of its versions.

    Args:
        lab: the engine's lab.
        sample: the sample, with the logits of the weights that sampled it.
        aborted: `abort` may have ended it.
        room: the engine's `max_model_tokens`; None: the suite's.
    """
    checks = (
        wrong_end(lab, sample, aborted=aborted, room=room or lab.suite.max_model_tokens),
        _wrong_tokens(lab, sample),
        _wrong_log_probs(lab, sample),
    )
    return [f"sample {sample.name}: {fault}" for fault in checks if fault]


def limit_of(request: GenerationRequest, room: int) -> int:
    """Number of new tokens of a response that nothing stops, in an engine with room for `room` tokens."""
    return min(request.sampling.max_tokens, room - len(request.prompt_ids)) - len(request.response_ids)


def _text(request: GenerationRequest) -> tuple[int, ...]:
    return (*request.prompt_ids, *request.response_ids)


def _is_readable(lab: Subject, output: GenerationOutput) -> bool:
    return not unreadable(lab, output)


def unreadable(lab: Subject, output: GenerationOutput) -> str:
    """Describes the fault in the form of an output; empty: none."""
    said = f"sample {output.request_id!r}/{output.sample_index}"
    ids, logs = output.token_ids, output.log_probs
    for name, values, dtype in (("token_ids", ids, np.int64), ("log_probs", logs, np.float32)):
        form = f"{type(values).__name__} {getattr(values, 'dtype', '')} of shape {np.shape(values)}"
        if form != f"ndarray {np.dtype(dtype)} of shape ({len(values)},)":
            return f"{said}: {name} is {form}, expected [L] {np.dtype(dtype)}"
    if len(ids) != len(logs):
        return f"{said}: {len(ids)} tokens and {len(logs)} log-probs"
    if not all(0 <= token < lab.vocabulary for token in ids.tolist()):
        return f"{said}: tokens outside the vocabulary"
    if type(output.finish_reason) is not FinishReason:
        return f"{said}: finish reason {output.finish_reason!r} is no FinishReason"
    if type(output.versions) is not tuple or not all(type(run) is VersionRun for run in output.versions):
        return f"{said}: versions {output.versions!r} are no tuple of VersionRun"
    numbers = [output.sample_index, *(n for run in output.versions for n in (run.version, run.num_tokens))]
    if not all(type(number) is int for number in numbers):
        return f"{said}: sample_index and versions are {sorted({type(n).__name__ for n in numbers})}, expected int"
    return ""


def wrong_end(lab: Subject, sample: Sample, *, aborted: bool, room: int) -> str:
    """Describes a wrong length or finish reason; empty: none."""
    tokens, reason, limit = sample.tokens.tolist(), sample.output.finish_reason, limit_of(sample.request, room)
    said = f"{len(tokens)} tokens, finish reason {reason}"
    if len(tokens) > limit:
        return f"{said}, its limit is {limit}"
    stops, strings = set(sample.sampling.stop_token_ids), sample.sampling.stop_strings
    if stops & set(tokens[:-1]):
        return f"{said}, goes on behind a stop token"
    stopped = bool(tokens) and tokens[-1] in stops
    if strings:
        decode = load_tokenizer(str(lab.folder)).decode
        behind = [*sample.request.response_ids, *tokens]
        if any(string in decode(behind[:-1]) for string in strings):
            return f"{said}, goes on behind a stop string"
        stopped |= any(string in decode(behind) for string in strings)
    if stopped:
        return "" if reason is FinishReason.STOP else f"{said}, where something stopped it"
    if reason is FinishReason.ABORT and aborted:
        return ""
    right = reason is FinishReason.LENGTH and len(tokens) == limit
    return "" if right else f"{said}, expected {limit} and 'length'"


def _wrong_tokens(lab: Subject, sample: Sample) -> str:
    """Describes a token that could not have been drawn; empty: none."""
    at = torch.arange(len(sample.tokens))
    if sample.sampling.temperature == 0:
        gap = sample.logits.amax(-1) - sample.logits[at, sample.tokens]
        wrong = gap > lab.suite.tolerance
        what = "is not the most probable"
    else:
        wrong = ~sample.allowed[at, sample.tokens]
        what = "is left out by the filters"
    return f"token {int(wrong.int().argmax())} of {len(at)} {what}" if bool(wrong.any()) else ""


def _wrong_log_probs(lab: Subject, sample: Sample) -> str:
    """Describes the first log-prob that differs from the plain model's; empty: none."""
    at = torch.arange(len(sample.tokens))
    expected = _contract(sample, lab.kind)[at, sample.tokens]
    if lab.kind is LogProbKind.PROCESSED:
        # After the filters, a token beyond a filter's border has no log-prob.
        expected = torch.where(expected.isfinite(), expected, torch.as_tensor(sample.output.log_probs).double())
    found = torch.as_tensor(sample.output.log_probs, dtype=torch.float64)
    # The rounding error of logits grows with their size.
    tolerance = lab.suite.tolerance / min(sample.sampling.temperature or 1.0, 1.0)
    wrong = ~((found - expected).abs() <= tolerance)
    if not bool(wrong.any()):
        return ""
    first = int(wrong.int().argmax())
    return f"log-prob {first} of {len(at)} is {float(found[first]):.6g}, expected {float(expected[first]):.6g}"


def _contract(sample: Sample, kind: LogProbKind) -> Tensor:
    if kind is LogProbKind.AFTER_TEMPERATURE:
        return sample.probabilities.log()
    return contract_log_probs(sample.logits, sample.sampling, kind)


def _wrong_versions(sample: Sample, version: int) -> str:
    """Describes versions other than that of these weights; empty: none."""
    if not adds_up(sample.output):
        return f"versions {sample.output.versions} do not add up to {len(sample.tokens)}"
    said = {run.version for run in sample.output.versions}
    return "" if said == {version} else f"versions {sorted(said)}, expected {version}"


def adds_up(output: GenerationOutput) -> bool:
    """True if the runs cover all tokens, neighbouring runs differ, and only a sample without tokens has an empty
    run."""
    runs = output.versions
    whole = sum(run.num_tokens for run in runs) == len(output.token_ids)
    distinct = all(a.version != b.version for a, b in itertools.pairwise(runs))
    return bool(runs) and whole and distinct and (len(runs) == 1 or all(run.num_tokens > 0 for run in runs))
