"""Reference for rollout engines: plain transformers, and the distribution that a request asks to sample from."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlsdk.interfaces import LogProbKind, SamplingParams
from rlsdk.kit.model.hf import canonical_tensors
from rlsdk.testing.process.reference import load_plain_model


class PlainModel:
    """A plain transformers model with replaceable weights."""

    def __init__(self, model: Any) -> None:
        self.model = model.requires_grad_(False)

    @classmethod
    def load(cls, folder: Path) -> PlainModel:
        """The model of a folder; the caller owns it."""
        return cls(copy.deepcopy(_as_read(str(folder))))

    @property
    def state(self) -> dict[str, Tensor]:
        """Canonical name -> parameter or buffer of the checkpoint; tied tensors appear once."""
        return {name: tensor.detach() for name, tensor in canonical_tensors(self.model)[0].items()}

    def with_state(self, state: Mapping[str, Tensor]) -> PlainModel:
        """A copy with these weights."""
        other = PlainModel(copy.deepcopy(self.model))
        for name, parameter in other.state.items():
            parameter.copy_(state[name])
        return other

    def logits(self, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """`[L, V]` float64: the logits from which each token of a response was chosen, in one pass over the row."""
        row = torch.tensor([[*prompt, *tokens]])
        found: Tensor = self.model(row).logits[0, len(prompt) - 1 : row.shape[1] - 1]
        return found.double()

    def next_logits(self, prompt: Sequence[int]) -> Tensor:
        """`[V]` float64: the logits after a prompt."""
        found: Tensor = self.model(torch.tensor([list(prompt)])).logits[0, -1]
        return found.double()


@functools.lru_cache(maxsize=4)
def _as_read(path: str) -> Any:
    """The model as read from disk. It is cached: suites of one process share folders, and reading takes longer than
    most requirements."""
    return load_plain_model(path)


def kept(probabilities: Tensor, sampling: SamplingParams, slack: float = 0.0) -> Tensor:
    """`[..., V]` bool: the tokens that top-k, then top-p, then min-p keep.

    Args:
        probabilities: `[..., V]` after temperature.
        sampling: has the filters.
        slack: relative tolerance: tokens this close to a border are kept, because rounding may decide either way.
    """
    ordered, index = probabilities.sort(dim=-1, descending=True, stable=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if sampling.top_k:
        border = ordered[..., min(sampling.top_k, ordered.shape[-1]) - 1 :][..., :1]
        keep &= ordered >= border * (1 - slack)
    if sampling.top_p < 1:
        inside = torch.where(keep, ordered, 0.0)
        before = inside.cumsum(-1) - inside
        keep &= before < (sampling.top_p + slack) * inside.sum(-1, keepdim=True)
    if sampling.min_p > 0:
        keep &= ordered >= sampling.min_p * ordered[..., :1] * (1 - slack)
    keep[..., 0] = True
    return torch.zeros_like(keep).scatter(-1, index, keep)


def distribution(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """`[..., V]`: the probabilities from which tokens are drawn."""
    probabilities = (logits / (sampling.temperature or 1.0)).softmax(-1)
    left = torch.where(kept(probabilities, sampling), probabilities, 0.0)
    return left / left.sum(-1, keepdim=True)


def contract_log_probs(logits: Tensor, sampling: SamplingParams, kind: LogProbKind) -> Tensor:
    """`[..., V]`: the log-prob of each token that a backend with log-probs of this kind must return."""
    if kind is LogProbKind.RAW:
        return logits.log_softmax(-1)
    if kind is LogProbKind.PROCESSED:
        return distribution(logits, sampling).log()
    return (logits / (sampling.temperature or 1.0)).log_softmax(-1)
