"""Requirements: log-probs of the tokens that a sample started from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from rlsdk.interfaces import Capability, ConfigError, GenerationOutput, GenerationRequest, RolloutEngine
from rlsdk.testing.rollout.lab import RolloutLab
from rlsdk.testing.suites.requirements import Measured, requirement

MOST_PROBABLE = 5
"""How many of the most probable tokens are asked for."""


class PromptLogProbRequirements:
    """Mixed into `RolloutConformance`."""

    @requirement("prompt_log_probs", needs=Capability.PROMPT_LOG_PROBS, since=(2, 1), basic=True)
    def test_prompt_log_probs(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """Log-probs of prompt tokens, and of the most probable tokens in their places, are the plain model's at
        temperature 1, whatever the request samples with, beside other requests, and when the prompt comes again. The
        samples are those that come without."""
        plain = [*_requests(lab), lab.ask("other", lab.prompt(21, 45), 2, temperature=1.7)]
        asked = [*(replace(one, prompt_log_probs=count) for one, count in zip(plain, COUNTS, strict=False)), plain[-1]]
        without = {(one.request_id, one.sample_index): one.token_ids.tolist() for one in lab.run(plain)}
        for again in ("", ", again"):
            outputs = lab.run(asked)
            wrong = [fault for output in outputs for fault in _wrong_form(asked, output)]
            measured.none(f"wrong forms{again}", wrong)
            worst = max(_worst(lab, asked, output) for output in outputs if output.prompt_log_probs is not None)
            measured.at_most(f"largest difference{again}", worst, lab.suite.tolerance)
            if Capability.SEED in lab.spec.capabilities:
                changed = [
                    f"{one.request_id}/{one.sample_index}"
                    for one in outputs
                    if one.token_ids.tolist() != without[one.request_id, one.sample_index]
                ]
                measured.none(f"other samples{again}", changed)

    @requirement("prompt_log_probs.refusals", needs=Capability.PROMPT_LOG_PROBS, since=(2, 1))
    def test_prompt_log_probs_refusals(self, engine: RolloutEngine, lab: RolloutLab, measured: Measured) -> None:
        """More tokens than the vocabulary has, or fewer than none, are a ConfigError; all of them are given."""
        request, accepted = lab.ask("r", lab.prompt(6, 46), max_tokens=1), []
        for count in (-1, lab.vocabulary + 1):
            try:
                lab.run([replace(request, prompt_log_probs=count)])
            except ConfigError:
                continue
            accepted.append(str(count))
        measured.none("accepted", accepted)
        whole = [replace(request, prompt_log_probs=lab.vocabulary)]
        outputs = lab.run(whole)
        measured.none("wrong forms", [fault for output in outputs for fault in _wrong_form(whole, output)])
        measured.at_most("largest difference", _worst(lab, whole, outputs[0]), lab.suite.tolerance)


COUNTS = (0, MOST_PROBABLE, 1)


def _requests(lab: RolloutLab) -> Iterator[GenerationRequest]:
    yield lab.ask("alone", lab.prompt(9, 41), max_tokens=1, temperature=0.6, top_k=3)
    yield lab.ask("with others", lab.prompt(17, 42), 2, temperature=1.4, top_p=0.7)
    yield replace(lab.ask("continued", lab.prompt(5, 43), max_tokens=9), response_ids=tuple(lab.prompt(4, 44)))


def _wrong_form(requests: Sequence[GenerationRequest], output: GenerationOutput) -> Iterator[str]:
    request = next(one for one in requests if one.request_id == output.request_id)
    count, given = request.prompt_log_probs, output.prompt_log_probs
    if (count is None) != (given is None):
        yield f"{request.request_id!r} asked for {count}, and has {given}"
    if count is None or given is None:
        return
    size = len(request.prompt_ids) + len(request.response_ids) - 1
    forms = {"log_probs": ((size,), "float32"), "top_ids": ((size, count), "int64")}
    forms["top_log_probs"] = ((size, count), "float32")
    for name, form in forms.items():
        found = getattr(given, name)
        if (found.shape, str(found.dtype)) != form:
            yield f"{name} of {request.request_id!r} is {found.shape} {found.dtype}, expected {form}"


def _worst(lab: RolloutLab, requests: Sequence[GenerationRequest], output: GenerationOutput) -> float:
    """Largest difference from the plain model of any log-prob; of the most probable tokens also from the best ones."""
    request = next(one for one in requests if one.request_id == output.request_id)
    ids, given = [*request.prompt_ids, *request.response_ids], output.prompt_log_probs
    assert given is not None
    logs = lab.plain.logits(ids[:1], ids[1:]).log_softmax(-1)
    chosen = torch.from_numpy(given.log_probs).double() - logs.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    top_ids, top = torch.from_numpy(given.top_ids), torch.from_numpy(given.top_log_probs).double()
    apart = [chosen, *(top - logs.gather(-1, top_ids)), *(top - logs.topk(top.shape[1], dim=-1).values)]
    if any(len(set(row)) < len(row) for row in top_ids.tolist()):
        return float("inf")
    return max(float(one.abs().max()) for one in apart if one.numel())
