"""Prompts to samples, over all replicas of a rollout engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlsdk.interfaces import SamplingParams
from rlsdk.kit.balance import balanced_partition
from rlsdk.trainer.experience import make_requests
from rlsdk.trainer.hosts import Samples

if TYPE_CHECKING:
    from rlsdk.trainer.groups import RoleGroup


def sample(
    rollout: RoleGroup, prompts: Sequence[Sequence[int]], sampling: SamplingParams, *, n: int, seed: Sequence[int | str]
) -> Samples:
    """`n` responses to each prompt. Replicas get shares of equal cost; the shares do not change what is sampled."""
    requests = make_requests(prompts, sampling, n=n, seed=seed)
    costs = [len(request.prompt_ids) + n * sampling.max_tokens for request in requests]
    shares = balanced_partition(costs, rollout.world_size)
    done = rollout.run_each("generate", [([requests[at] for at in share],) for share in shares])
    return Samples.merge(done, shares)
