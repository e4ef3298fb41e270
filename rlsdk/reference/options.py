"""Options of the built-in backends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class TransformersOptions:
    """Options of the backend `transformers`."""

    weights: Literal["model", "fp8_block"] = "model"
    """How linear layers are kept. `model`: in `model.dtype`. `fp8_block`: as float8_e4m3fn with a float32 scale for
    each block, quantized as weights arrive; every pass multiplies them out, so this saves memory and no time. The
    output layer, embeddings, norms, routers and stacked experts stay in `model.dtype`."""
    block_size: int = 128
    """Rows and columns of a block of `fp8_block`."""
