"""What can be refused before a process group exists."""

from __future__ import annotations

import torch

from rlsdk.interfaces import ConfigError, TrainSpec
from rlsdk.kit.model.hf import torch_dtype
from rlsdk_deepspeed.config import DeepSpeedOptions


def options_of(spec: TrainSpec) -> DeepSpeedOptions:
    """The options of a specification; defaults if it has none."""
    if spec.options is None:
        return DeepSpeedOptions()
    if not isinstance(spec.options, DeepSpeedOptions):
        raise ConfigError(
            f"TrainSpec.options is a {type(spec.options).__name__}; backend 'deepspeed' expects an "
            "rlsdk_deepspeed.config:DeepSpeedOptions, or None for its defaults"
        )
    return spec.options


def check_options(options: DeepSpeedOptions) -> None:
    """Raises `ConfigError` for a stage that does not exist, or an offload that the stage has not."""
    if options.zero_stage not in (1, 2, 3):
        raise ConfigError(f"train.deepspeed.zero_stage: {options.zero_stage!r}; expected 1, 2 or 3")
    if options.offload_param and options.zero_stage != 3:
        raise ConfigError(
            f"train.deepspeed.offload_param: true with zero_stage {options.zero_stage}, which keeps whole weights on "
            "each device; use train.deepspeed.zero_stage 3, or offload_optimizer alone"
        )


def dtype_of(spec: TrainSpec) -> torch.dtype:
    """Dtype of passes; the optimizer steps float32 weights.

    Raises:
        ConfigError: no dtype of a model; or training in float16, whose gradients underflow without loss scaling.
    """
    dtype = torch_dtype(spec.model)
    if spec.optim is not None and dtype is torch.float16:
        raise ConfigError(
            "model.dtype 'float16': backend 'deepspeed' trains in 'float32' or 'bfloat16'; float16 gradients underflow "
            "without loss scaling"
        )
    return dtype
