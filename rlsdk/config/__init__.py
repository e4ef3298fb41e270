"""The configuration of a run: typed, loaded from YAML and the command line; an error lists every problem."""

from __future__ import annotations

from rlsdk.config.checks.check import check_backend, check_run
from rlsdk.config.checks.requirements import role_requirements
from rlsdk.config.derived.auto_values import samples_by_version, with_adapter_sync, with_checkpointing, with_dtype
from rlsdk.config.derived.pair_roles import PairTraining, pair_roles, preference_optim_spec
from rlsdk.config.derived.roles import Role, needed_roles, role_of, roles
from rlsdk.config.derived.specs import optim_spec, sft_optim_spec
from rlsdk.config.derived.step_passes import ForwardPass, StepPasses, step_passes
from rlsdk.config.introspection.options import backend_options, build_options
from rlsdk.config.loading.load import dump_config, load_config
from rlsdk.config.problem import Problem, config_error
from rlsdk.config.sections.algorithm import (
    AlgorithmConfig,
    CorrectionConfig,
    DistillationConfig,
    DynamicSamplingConfig,
    LengthConfig,
)
from rlsdk.config.sections.data import DataConfig, MixtureConfig
from rlsdk.config.sections.engines import (
    ModelConfig,
    OptimConfig,
    PlacementConfig,
    PoolConfig,
    RolloutConfig,
    ShardingConfig,
    TrainConfig,
)
from rlsdk.config.sections.evaluation import (
    CheckpointConfig,
    EarlyStoppingConfig,
    EvalConfig,
    EvalSetConfig,
    Measure,
    WatchConfig,
)
from rlsdk.config.sections.faults import FaultsConfig
from rlsdk.config.sections.old_log_probs import OldLogProbs, choose_old_log_probs, comparable_log_probs
from rlsdk.config.sections.preferences import PreferencesConfig
from rlsdk.config.sections.rewards import (
    JudgeConfig,
    JudgeEngineConfig,
    RemoteRewardConfig,
    RewardConfig,
    RewardLimitsConfig,
)
from rlsdk.config.sections.role_sections import CriticConfig, RefConfig, RewardModelConfig, TeacherConfig
from rlsdk.config.sections.schedule import ScheduleConfig
from rlsdk.config.sections.schema import DeadlinesConfig, RunConfig, TrackingConfig
from rlsdk.config.sections.supervised import SftConfig
from rlsdk.config.sections.training_loop import TrainerConfig

__all__ = [
    "AlgorithmConfig",
    "CheckpointConfig",
    "CorrectionConfig",
    "CriticConfig",
    "DataConfig",
    "DeadlinesConfig",
    "DistillationConfig",
    "DynamicSamplingConfig",
    "EarlyStoppingConfig",
    "EvalConfig",
    "EvalSetConfig",
    "FaultsConfig",
    "ForwardPass",
    "JudgeConfig",
    "JudgeEngineConfig",
    "LengthConfig",
    "Measure",
    "MixtureConfig",
    "ModelConfig",
    "OldLogProbs",
    "OptimConfig",
    "PairTraining",
    "PlacementConfig",
    "PoolConfig",
    "PreferencesConfig",
    "Problem",
    "RefConfig",
    "RemoteRewardConfig",
    "RewardConfig",
    "RewardLimitsConfig",
    "RewardModelConfig",
    "Role",
    "RolloutConfig",
    "RunConfig",
    "ScheduleConfig",
    "SftConfig",
    "ShardingConfig",
    "StepPasses",
    "TeacherConfig",
    "TrackingConfig",
    "TrainConfig",
    "TrainerConfig",
    "WatchConfig",
    "backend_options",
    "build_options",
    "check_backend",
    "check_run",
    "choose_old_log_probs",
    "comparable_log_probs",
    "config_error",
    "dump_config",
    "load_config",
    "needed_roles",
    "optim_spec",
    "pair_roles",
    "preference_optim_spec",
    "role_of",
    "role_requirements",
    "roles",
    "samples_by_version",
    "sft_optim_spec",
    "step_passes",
    "with_adapter_sync",
    "with_checkpointing",
    "with_dtype",
]
