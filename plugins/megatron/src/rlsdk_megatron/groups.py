"""Megatron's process groups. They are global, so the engines of one process share them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

from rlsdk.interfaces import ConfigError, Parallel, RankContext
from rlsdk_megatron.config import MegatronOptions
from rlsdk_megatron.sizes import expert_tensor_size

Sizes = tuple[int, int, int, int, int]
"""Sizes: tensor, pipeline, virtual stages, context, expert."""


@dataclass
class _Users:
    """Roles of this process whose engines use the groups."""

    roles: set[str]
    sizes: Sizes


_users = _Users(set(), (1, 1, 1, 1, 1))


def join(ctx: RankContext, options: MegatronOptions) -> None:
    """Creates the groups, or shares existing ones. Needs torch's default group. Collective: every rank must call.

    Raises:
        ConfigError: another role of this process has groups of other sizes.
    """
    sizes = sizes_of(options)
    if _users.roles:
        if sizes != _users.sizes:
            raise ConfigError(
                f"{ctx.role} needs tensor, pipeline, virtual, context and expert parallel sizes {sizes}, but this "
                f"process has groups of sizes {_users.sizes} for {sorted(_users.roles)}: Megatron-Core has one set per "
                "process; give the roles the same sizes, or separate pools"
            )
    else:
        tensor, pipeline, virtual, context, expert = sizes
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tensor,
            pipeline_model_parallel_size=pipeline,
            virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
            context_parallel_size=context,
            expert_model_parallel_size=expert,
            expert_tensor_parallel_size=expert_tensor_size(options),
            distributed_timeout_minutes=max(1, round(ctx.timeout_s / 60)),
            create_gloo_process_groups=False,
        )
        with torch.random.fork_rng(devices=[]):
            tensor_parallel.model_parallel_cuda_manual_seed(ctx.seed + 1)
        _users.sizes = sizes
    _users.roles.add(ctx.role)


def leave(ctx: RankContext) -> None:
    """Leaves the groups; the last engine that leaves destroys them. Safe to call twice."""
    if ctx.role in _users.roles:
        _users.roles.discard(ctx.role)
        RotaryEmbedding.forward.cache_clear()  # the cache keeps modules, and with them their groups
        if not _users.roles:
            parallel_state.destroy_model_parallel()
            for name, value in list(vars(parallel_state).items()):
                if isinstance(value, dist.ProcessGroup):  # Megatron-Core 0.16 does not reset one of them
                    setattr(parallel_state, name, None)


def sizes_of(options: MegatronOptions) -> Sizes:
    return (
        options.tensor_parallel,
        options.pipeline_parallel,
        options.virtual_stages,
        options.context_parallel,
        options.expert_parallel,
    )


def here() -> Parallel:
    """Position of this rank."""
    return Parallel(
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=parallel_state.get_tensor_model_parallel_world_size(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pp_size=parallel_state.get_pipeline_model_parallel_world_size(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        cp_size=parallel_state.get_context_parallel_world_size(),
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        ep_size=parallel_state.get_expert_model_parallel_world_size(),
    )
