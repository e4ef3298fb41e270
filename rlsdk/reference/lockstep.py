"""Lockstep decoding, for models with a cache of their own; and the choice of the kind of rows for a model."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlsdk.interfaces import ConfigError
from rlsdk.kit.model.packed import can_pack
from rlsdk.reference.rows import PositionedRows

TOLERANCE = {torch.float32: 0.01, torch.float64: 0.01}
"""Tolerance of logits in a trial, relative to their standard deviation; other dtypes: `HALF_TOLERANCE`."""
HALF_TOLERANCE = 0.25


class Rows(Protocol):
    """The cache of the rows being decoded, and the forward passes that use it."""

    model: Any
    lockstep: bool
    """Whether all rows must have the same length and start together."""
    count: int

    def prefill(self, prompts: Sequence[Tensor]) -> tuple[Tensor, Any]: ...
    def add(self, states: Any, owner: Tensor, *, capacity: int, most: int) -> None: ...
    def step(self, tokens: Tensor, positions: NDArray[np.int64], *, most: int) -> Tensor: ...
    def keep(self, order: Tensor) -> None: ...
    def clear(self) -> None: ...


class LockstepRows:
    """Rows of equal length, in transformers' own cache: correct for every model with such a cache, also recurrent
    ones."""

    lockstep = True

    def __init__(self, model: Any) -> None:
        model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
        self.model = model
        takes = inspect.signature(model.forward).parameters
        self.options: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
        self.clear()

    def clear(self) -> None:
        self.count = 0
        self.cache: Any = None

    def prefill(self, prompts: Sequence[Tensor]) -> tuple[Tensor, Any]:
        """As `PositionedRows.prefill`; all prompts have one length."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config)
        return self._run(torch.stack(list(prompts)).to(self.model.device), cache), cache

    def add(self, states: Any, owner: Tensor, *, capacity: int, most: int) -> None:
        """As `PositionedRows.add`; there must be no rows yet."""
        self.cache = copy.deepcopy(states)
        self.keep(owner)

    def step(self, tokens: Tensor, positions: NDArray[np.int64], *, most: int) -> Tensor:
        """As `PositionedRows.step`."""
        return self._run(tokens[:, None], self.cache)

    def keep(self, order: Tensor) -> None:
        """As `PositionedRows.keep`."""
        self.cache.reorder_cache(order)
        self.count = len(order)

    def _run(self, input_ids: Tensor, cache: Any) -> Tensor:
        found = self.model(input_ids=input_ids, past_key_values=cache, use_cache=True, **self.options)
        logits: Tensor = found.logits[:, -1]
        return logits


@torch.inference_mode()
def rows_for(model: Any) -> Rows:
    """Chooses the fastest kind of rows whose logits match the plain model's in a trial of a few tokens.

    Raises:
        ConfigError: no kind matches; says what was tried.
    """
    faults = []
    for kind in (PositionedRows, LockstepRows) if can_pack(model) else (LockstepRows,):
        try:
            rows: Rows = kind(model)
            difference = _trial(model, rows)
        except Exception as error:  # a model's own code: whatever it raises, it cannot be run this way
            faults.append(f"{kind.__name__}: {type(error).__name__}: {error}")
            continue
        if difference <= TOLERANCE.get(model.dtype, HALF_TOLERANCE):
            rows.clear()
            return rows
        faults.append(f"{kind.__name__}: logits differ by {difference:.2g} of their spread")
    raise ConfigError(
        f"{type(model).__name__} cannot be decoded with a cache: {'; '.join(faults)}. Use another rollout backend"
    )


def _trial(model: Any, rows: Rows) -> float:
    """Largest difference from the plain model, over its standard deviation: after prompts, and after two steps."""
    vocabulary, lengths = model.config.get_text_config().vocab_size, (6, 6) if rows.lockstep else (6, 4)
    texts = [(torch.arange(length + 2) * 7 + 3 * at + 1) % vocabulary for at, length in enumerate(lengths)]
    texts = [text.to(model.device) for text in texts]
    logits, states = rows.prefill([text[:-2].cpu() for text in texts])
    pairs = [(logits[at], texts[at][:-2]) for at in (0, 1)]
    owner = [0, 1, 1]
    rows.add(states, torch.tensor(owner, device=model.device), capacity=3, most=max(lengths) + 2)
    for back in (2, 1):
        fed = torch.stack([texts[at][-back] for at in owner])
        positions = np.array([len(texts[at]) - back for at in owner])
        logits = rows.step(fed, positions, most=max(lengths) + 2)
    pairs += [(logits[row], texts[at]) for row, at in enumerate(owner)]
    worst = 0.0
    for found, text in pairs:
        expected = model(input_ids=text[None], use_cache=False).logits[0, -1].float()
        worst = max(worst, float((found.float() - expected).abs().max() / expected.std().clamp(min=1e-6)))
    return worst
