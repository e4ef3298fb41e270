"""Tensors as stored in the files of a checkpoint, for models whose tensors transformers fuses on loading.

transformers 5 keeps the experts of a layer in one tensor, while files have one tensor per expert; loaders of engines
expect the names in the files. This module runs transformers' rules for writing a model once, on tensors without values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from rlsdk.kit.weights.tensor_origins import Source
from rlsdk.kit.weights.weight_tracing import Recorder

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def file_tensors(model: PreTrainedModel, shapes: Mapping[str, Sequence[int]]) -> list[Source] | None:
    """The tensors that transformers would write, each with its origin in canonical tensors; None if these are the
    canonical tensors.

    Args:
        model: its parameters may be empty.
        shapes: of the canonical tensors, by name.
    """
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # a version that loads a model as its files have it
        return None
    recorder = Recorder()
    whole = [Source.whole(name, shape) for name, shape in shapes.items()]
    with torch.no_grad(), recorder:
        tensors = revert_weight_conversion(model, {source.name: recorder.stand_in(source) for source in whole})
    written = [Source(name=name, shape=tuple(t.shape), parts=recorder.parts(t)) for name, t in tensors.items()]
    return None if set(written) == set(whole) else written
