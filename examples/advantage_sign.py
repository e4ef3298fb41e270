"""An advantage estimator of your own, found through a hook: the sign of the group-centred reward.

Run it without installing anything: `python examples/advantage_sign.py`. To make it available to everybody as
`--algorithm.advantage sign`, put the hook into a distribution with an entry point in the group `rlsdk`
(docs/plugins.md).
"""

from __future__ import annotations

import sys

import torch

from rlsdk.algorithms import grpo
from rlsdk.interfaces import Batch, RegisterComponent, hookimpl
from rlsdk.registry import ComponentKind, Registry


def sign(batch: Batch) -> Batch:
    """+1 above the mean of the prompt's samples, -1 below, 0 at the mean."""
    centred = grpo(batch, normalize_std=False)
    return centred.with_tokens(advantages=centred["advantages"].sign())


@hookimpl
def rlsdk_register_advantages(register: RegisterComponent) -> None:
    register("sign", sign, "Sign of the reward less the group's mean.")


def main() -> None:
    registry = Registry.discover()
    registry.register_module(sys.modules[__name__])
    estimator = registry.component(ComponentKind.ADVANTAGE, "sign")
    batch = Batch.from_rows([[1, 2], [1, 3], [1, 4]], uid=torch.zeros(3, dtype=torch.int64))
    batch = batch.with_tokens(
        response_mask=batch.position_ids > 0, token_level_rewards=torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0, 0.4])
    ).with_rows(scores=torch.tensor([1.0, 0.0, 0.4]), valid=torch.ones(3, dtype=torch.bool))
    print(estimator(batch)["advantages"].tolist())


if __name__ == "__main__":
    main()
