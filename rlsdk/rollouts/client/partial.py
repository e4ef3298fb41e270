"""Interrupted samples: the request for the remaining tokens, and joining the parts. Pure."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rlsdk.interfaces import GenerationOutput, GenerationRequest, VersionRun


def unfinished(request: GenerationRequest, output: GenerationOutput) -> GenerationRequest:
    """The request for the rest of one sample, after the tokens of `output`, which are all it has. It keeps the id."""
    return replace(
        request,
        n=1,
        first_sample=output.sample_index,
        response_ids=tuple(output.token_ids.tolist()),
    )


def joined(partial: GenerationOutput, rest: GenerationOutput) -> GenerationOutput:
    """Joins the two parts of one sample: tokens, log-probs and versions of both, and the end of the second."""
    return replace(
        rest,
        token_ids=np.concatenate([partial.token_ids, rest.token_ids]),
        log_probs=np.concatenate([partial.log_probs, rest.log_probs]),
        versions=_runs(partial.versions, rest.versions),
        # The rest started from more tokens.
        prompt_log_probs=rest.prompt_log_probs if partial.prompt_log_probs is None else partial.prompt_log_probs,
    )


def _runs(first: tuple[VersionRun, ...], rest: tuple[VersionRun, ...]) -> tuple[VersionRun, ...]:
    """Merges neighbouring runs of one version; a run without tokens is kept only if it is the only one."""
    runs: list[VersionRun] = []
    for run in (*first, *rest):
        if runs and (runs[-1].version == run.version or not run.num_tokens or not runs[-1].num_tokens):
            last = runs[-1]
            version = run.version if run.num_tokens else last.version
            runs[-1] = VersionRun(version, last.num_tokens + run.num_tokens)
        else:
            runs.append(run)
    return tuple(runs)
