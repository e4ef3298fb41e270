"""Tensors as stored in the files of a checkpoint, for models whose tensors transformers fuses when it loads them.

transformers 5 keeps the experts of a layer in one tensor, and files have one for each expert; engines' own loaders know
the names of the files. transformers' rules for writing a model are run once, on tensors without values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from rlsdk.kit.tensor_origins import Source
from rlsdk.kit.weight_tracing import Recorder

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def file_tensors(model: PreTrainedModel, shapes: Mapping[str, Sequence[int]]) -> list[Source] | None:
    """The tensors that transformers writes, each with what it is of the canonical ones; None where it writes those.

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
        found = revert_weight_conversion(model, {source.name: recorder.stand_in(source) for source in whole})
    written = [Source(name=name, shape=tuple(t.shape), parts=recorder.parts(t)) for name, t in found.items()]
    return None if set(written) == set(whole) else written
