"""float8 with block scales: what a target quantizes is what vLLM itself would."""

from __future__ import annotations

import torch
from vllm.utils import deep_gemm

from rlsdk.interfaces import Box
from rlsdk.kit.weights.block_scales import block_maxima, quantize, scales_of

BLOCK = (128, 128)


def test_vllm_quantizes_to_the_same_bits() -> None:
    values = torch.randn(256, 384, generator=torch.Generator().manual_seed(9)).to(torch.bfloat16)
    whole = Box.whole((256, 384))
    found, scales = deep_gemm.per_block_cast_to_fp8(values, list(BLOCK), use_ue8m0=False)
    own = scales_of(block_maxima(values, whole, BLOCK))
    assert torch.equal(scales, own)
    assert torch.equal(found.view(torch.uint8), quantize(values, own, whole, BLOCK).view(torch.uint8))
