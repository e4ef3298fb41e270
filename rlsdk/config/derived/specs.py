"""Specifications of models, adapters and optimizers, from the configuration."""

from __future__ import annotations

import math
from dataclasses import replace

from rlsdk.config.derived.auto_values import with_dtype
from rlsdk.config.sections.engines import OptimConfig
from rlsdk.config.sections.preferences import PreferencesConfig
from rlsdk.config.sections.schema import RunConfig
from rlsdk.config.sections.supervised import SftConfig
from rlsdk.interfaces import AdapterSpec, ModelSpec, OptimSpec
from rlsdk.interfaces.settings import AdapterSettings, OptimSettings, shared


def model_spec(config: RunConfig) -> ModelSpec:
    """The policy."""
    config = with_dtype(config, None)
    return ModelSpec(
        path=config.model.path or "",
        revision=config.model.revision,
        dtype=config.model.dtype,
        trust_remote_code=config.model.trust_remote_code,
    )


def adapter_spec(config: RunConfig) -> AdapterSpec | None:
    """The adapter that is trained; None: all weights are."""
    lora = config.model.lora
    return AdapterSpec(**shared(lora, AdapterSettings)) if lora.rank else None


def optim_spec(optim: OptimConfig, total_steps: int) -> OptimSpec:
    """Optimizer specification whose schedule ends after `total_steps` optimizer steps."""
    spec = OptimSpec(**shared(optim, OptimSettings), total_steps=max(total_steps, 1))
    if optim.warmup_ratio is None:
        return spec
    return replace(spec, warmup_steps=math.ceil(optim.warmup_ratio * total_steps))


def sft_optim_spec(config: RunConfig) -> OptimSpec:
    """Optimizer specification of supervised training: that of the run with its own learning rate and schedule."""
    return optim_spec(with_own_rate(config.train.optim, config.sft), config.sft.steps)


def with_own_rate(optim: OptimConfig, own: SftConfig | PreferencesConfig) -> OptimConfig:
    """The run's optimizer with the learning rate and schedule of another training."""
    names = ("lr", "warmup_steps", "warmup_ratio", "schedule")
    return optim.model_copy(update={name: getattr(own, name) for name in names})
