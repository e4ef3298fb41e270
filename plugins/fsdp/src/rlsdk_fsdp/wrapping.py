"""The only module that depends on torch's FSDP2: it sets what is sharded, in which groups, over which mesh and in which
precision."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from rlsdk.interfaces import ConfigError, RankContext, TrainSpec, nearest
from rlsdk.kit.model.context_parallel import ContextSplit
from rlsdk.kit.model.hf import torch_dtype
from rlsdk.kit.ranks.shared_memory import share
from rlsdk_fsdp.config import FsdpOptions

OWN_SETTINGS = ("module", "mesh", "dp_mesh_dims")
"""Arguments of `fully_shard` that only the engine sets."""


def check_sizes(ctx: RankContext, options: FsdpOptions) -> None:
    """Raises `ConfigError` if the ranks cannot be split as the options say."""
    for name, problem in options.place_problems(num_ranks=ctx.world_size, device=ctx.device, model={}):
        raise ConfigError(f"train.fsdp.{name}: {problem}")


def dtypes_of(spec: TrainSpec, options: FsdpOptions) -> tuple[torch.dtype, torch.dtype]:
    """Dtype of the model's stored weights, and of passes. Weights below an adapter are frozen.

    Raises:
        ConfigError: no dtype of a model; or training in float16, whose gradients underflow without loss scaling.
    """
    dtype = torch_dtype(spec.model)
    computed = torch.bfloat16 if options.mixed_precision == "bfloat16" else dtype
    if spec.optim is None:
        return computed, computed
    if computed is torch.float16:
        raise ConfigError(
            "model.dtype 'float16': backend 'fsdp' trains in 'float32' or 'bfloat16'; float16 gradients underflow "
            "without loss scaling"
        )
    if spec.model.adapter is not None:
        return computed, computed
    return (dtype if options.mixed_precision == "none" else torch.float32), computed


def make_mesh(ctx: RankContext, options: FsdpOptions) -> DeviceMesh:
    """A mesh with one dimension, or with one row per replica. Collective: every rank must call."""
    device = torch.device(ctx.device).type
    if options.replicate_size == 1:
        return init_device_mesh(device, (ctx.world_size,), mesh_dim_names=("shard",))
    shape = (options.replicate_size, ctx.world_size // options.replicate_size)
    return init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))


def make_context(ctx: RankContext, options: FsdpOptions) -> ContextSplit | None:
    """The neighbours that run this rank's rows with it. Collective: every rank must call."""
    size = options.context_parallel
    if size == 1:
        return None
    group, _ = dist.new_subgroups(size, timeout=timedelta(seconds=ctx.timeout_s))  # type: ignore[no-untyped-call]
    return ContextSplit(ctx.rank % size, size, group)


def forget_group(mesh: DeviceMesh) -> None:
    """Removes a mesh's references to process groups that have ended, and to the ports on which they listen.

    torch's caches of sharded operations keep the first mesh of a process forever. From torch 2.11 on a mesh also keeps
    its groups, which only compiled graphs use; all other code looks them up by name.
    """
    getattr(mesh, "_pg_registry", {}).clear()


def shard(outputs: nn.Module, model: nn.Module, spec: TrainSpec, mesh: DeviceMesh) -> None:
    """Shards every layer, then the rest (embeddings, last norm, head) as one group; allocates each rank's memory.

    Args:
        outputs: the root, whose forward pass runs `model`. Its parameters are on the meta device, and are then
            allocated on the mesh's device, without values.
        model: the transformers model inside.
        spec: its `options` are `FsdpOptions`; its `engine_kwargs` go to `fully_shard` as they are.
        mesh: from `make_mesh`.
    """
    options = spec.options if isinstance(spec.options, FsdpOptions) else FsdpOptions()
    held, computed = dtypes_of(spec, options)
    pinned = mesh.device_type == "cuda"
    settings: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=None if held is computed else computed,
            reduce_dtype=torch.float32 if torch.bfloat16 in (held, computed) else None,
        ),
        "offload_policy": CPUOffloadPolicy(pin_memory=pinned) if options.cpu_offload else OffloadPolicy(),
        "reshard_after_forward": options.reshard_after_forward,
        **_checked(spec.engine_kwargs),
    }
    for layer in layers_of(model) if options.wrap == "layers" else ():
        fully_shard(layer, **settings)
    # The root is needed again as soon as the backward pass begins, so it stays gathered.
    fully_shard(outputs, **{**settings, "reshard_after_forward": False})
    for group in _groups(outputs):
        # The contract requires the sum over ranks, but FSDP averages. gloo supports plain sums (it has no PREMUL_SUM).
        group.set_gradient_divide_factor(1.0)
        group.set_force_sum_reduction_for_comms(True)
    outputs.to_empty(device="cpu" if options.cpu_offload else mesh.device_type)
    for module in outputs.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty_like(buffer, device=mesh.device_type))  # also with offload


def keep_shared(outputs: nn.Module) -> None:
    """Moves this rank's memory, on a CPU, to shared memory that other processes of the node can read
    (`kit.ranks.shared_memory`).

    torch has no public access to the padded memory of a shard, from which FSDP gathers.
    """
    parameters = [p for module in _groups(outputs) for group in _param_groups(module) for p in group.fsdp_params]
    for parameter, padded in zip(parameters, share([p._sharded_param_data for p in parameters]), strict=True):
        held: Any = parameter.sharded_param
        parameter._sharded_param_data = padded.view(-1)
        held._local_tensor = padded.view(-1)[: held._local_tensor.numel()].view(held._local_tensor.shape)


def set_reduction(outputs: nn.Module, options: FsdpOptions, *, sharded: bool, last: bool) -> None:
    """Sets what the next backward pass does with gradients and gathered weights.

    Args:
        outputs: the root.
        options: with `reshard_after_forward` off, weights stay gathered until the last micro-batch.
        sharded: gradients are reduced to shards now, instead of kept whole until the last micro-batch.
        last: this is the last micro-batch before gradients are read.
    """
    root = next(_groups(outputs))
    root.set_requires_gradient_sync(sharded or last)
    root.set_requires_all_reduce(last)
    root.set_reshard_after_backward(last or options.reshard_after_forward)


def release(outputs: nn.Module) -> None:
    """Frees gathered weights, so that the next pass gathers the updated ones."""
    for module in _groups(outputs):
        module.reshard()


def regain(outputs: nn.Module) -> None:
    """Resets FSDP after a failed pass, so that a pass may begin; whole gradients are dropped."""
    root = next(_groups(outputs))
    if hasattr(root, "reset_iter_state"):  # torch before 2.13 has no such method, and may reject the next pass
        root.reset_iter_state()
    release(outputs)
    for module in _groups(outputs):
        # torch 2.13 keeps them, contrary to the docstring of `reset_iter_state`, and has no public access to them.
        for group in _param_groups(module):
            group._partial_reduce_output = None
            for parameter in group.fsdp_params:
                if not hasattr(type(parameter), "unsharded_accumulated_grad"):  # torch 2.15: a view of `grad` below
                    parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter.unsharded_param.grad = None


def _groups(outputs: nn.Module) -> Iterator[FSDPModule]:
    """Root first."""
    return (module for module in outputs.modules() if isinstance(module, FSDPModule))


def _param_groups(module: FSDPModule) -> list[Any]:
    state: Any = module._get_fsdp_state()
    found: list[Any] = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in found if group is not None]


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Layers, as declared by transformers (modules not to split over devices); if a model declares none, the members of
    its longest module list."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    if layers := [module for module in model.modules() if type(module).__name__ in names]:
        return layers
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=len, default=()))


def _checked(engine_kwargs: Mapping[str, object]) -> Mapping[str, object]:
    known = [name for name in inspect.signature(fully_shard).parameters if name not in OWN_SETTINGS]
    for name in engine_kwargs:
        if name not in known:
            raise ConfigError(
                f"train.engine_kwargs {name!r}{nearest(name, known)}: backend 'fsdp' passes them to torch's "
                f"fully_shard, which takes {sorted(known)}"
            )
    return engine_kwargs
