"""The configuration of a run: typed, loaded from YAML and the command line alike, refused with every problem named."""

from __future__ import annotations

from rlsdk.config.check import check_backend, check_run, rollout_requirements, train_requirements
from rlsdk.config.engines import (
    ModelConfig,
    OptimConfig,
    PlacementConfig,
    PoolConfig,
    RolloutConfig,
    ShardingConfig,
    TrainConfig,
)
from rlsdk.config.load import dump_config, load_config
from rlsdk.config.options import backend_options, build_options
from rlsdk.config.problem import Problem, config_error
from rlsdk.config.schema import (
    AlgorithmConfig,
    DataConfig,
    EvalConfig,
    MixtureConfig,
    RewardConfig,
    RewardLimitsConfig,
    RunConfig,
    SftConfig,
    TrackingConfig,
    TrainerConfig,
)

__all__ = [
    "AlgorithmConfig",
    "DataConfig",
    "EvalConfig",
    "MixtureConfig",
    "ModelConfig",
    "OptimConfig",
    "PlacementConfig",
    "PoolConfig",
    "Problem",
    "RewardConfig",
    "RewardLimitsConfig",
    "RolloutConfig",
    "RunConfig",
    "SftConfig",
    "ShardingConfig",
    "TrackingConfig",
    "TrainConfig",
    "TrainerConfig",
    "backend_options",
    "build_options",
    "check_backend",
    "check_run",
    "config_error",
    "dump_config",
    "load_config",
    "rollout_requirements",
    "train_requirements",
]
