"""The one module that speaks to torch's FSDP2: what is cut, in which groups, over which mesh, in which precision."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from rlsdk.interfaces import ConfigError, RankContext, TrainSpec, nearest
from rlsdk.kit.shared_memory import share
from rlsdk_fsdp.config import FsdpOptions

OWN_SETTINGS = ("module", "mesh", "dp_mesh_dims")
"""Arguments of `fully_shard` that are the engine's to give."""


def check_sizes(ctx: RankContext, options: FsdpOptions) -> None:
    """Raises `ConfigError` where the ranks cannot be cut into so many copies."""
    world, copies = ctx.world_size, options.replicate_size
    if copies < 1 or world % copies:
        valid = [n for n in range(1, world + 1) if world % n == 0]
        cut = f"{world} = {world // copies} x {copies} + {world % copies}" if copies > 0 else "it is below 1"
        raise ConfigError(
            f"train.fsdp.replicate_size: {copies} does not divide the {world} ranks of {ctx.role!r} ({cut}); expected "
            f"one of {valid}"
        )


def dtypes_of(spec: TrainSpec, options: FsdpOptions) -> tuple[torch.dtype, torch.dtype]:
    """In which type weights are held, and in which passes run.

    Raises:
        ConfigError: training in float16, whose gradients underflow without loss scaling.
    """
    dtype: torch.dtype = getattr(torch, spec.model.dtype)
    computed = torch.bfloat16 if options.mixed_precision == "bfloat16" else dtype
    if spec.optim is None:
        return computed, computed
    if computed is torch.float16:
        raise ConfigError(
            "model.dtype 'float16': backend 'fsdp' trains in 'float32' or 'bfloat16'; float16 gradients underflow "
            "without loss scaling"
        )
    return (dtype if options.mixed_precision == "none" else torch.float32), computed


def make_mesh(ctx: RankContext, options: FsdpOptions) -> DeviceMesh:
    """Ranks in one line, or in rows of one copy each. Every rank must call."""
    device = torch.device(ctx.device).type
    if options.replicate_size == 1:
        return init_device_mesh(device, (ctx.world_size,), mesh_dim_names=("shard",))
    shape = (options.replicate_size, ctx.world_size // options.replicate_size)
    return init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))


def forget_group(mesh: DeviceMesh) -> None:
    """Lets a mesh go of process groups that have ended, and of the ports they listen on.

    torch's caches of sharded operations keep the first mesh of a process for good. From torch 2.11 on a mesh keeps its
    groups as well, for compiled graphs alone; everything else looks them up by name.
    """
    getattr(mesh, "_pg_registry", {}).clear()


def shard(outputs: nn.Module, model: nn.Module, spec: TrainSpec, mesh: DeviceMesh) -> None:
    """Cuts every layer, then what is left (embeddings, last norm, head) as one group; gives each rank its memory.

    Args:
        outputs: the root, whose forward pass runs `model`. Its parameters are on the meta device, and end on the mesh's
            device without values.
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
    # The root is needed again as soon as the backward pass begins, so it stays gathered in between.
    fully_shard(outputs, **{**settings, "reshard_after_forward": False})
    for group in _groups(outputs):
        # The contract is the sum over ranks; FSDP averages. Plain sums are also what gloo knows (it has no PREMUL_SUM).
        group.set_gradient_divide_factor(1.0)
        group.set_force_sum_reduction_for_comms(True)
    outputs.to_empty(device="cpu" if options.cpu_offload else mesh.device_type)
    for module in outputs.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty_like(buffer, device=mesh.device_type))  # needed there, offload or not


def keep_shared(outputs: nn.Module) -> None:
    """Moves this rank's memory, on a CPU, to where other processes of the node can read it (`kit.shared_memory`).

    No public name of torch reaches the padded memory of a shard, which is what FSDP gathers from.
    """
    parameters = [p for module in _groups(outputs) for group in _param_groups(module) for p in group.fsdp_params]
    for parameter, padded in zip(parameters, share([p._sharded_param_data for p in parameters]), strict=True):
        held: Any = parameter.sharded_param
        parameter._sharded_param_data = padded.view(-1)
        held._local_tensor = padded.view(-1)[: held._local_tensor.numel()].view(held._local_tensor.shape)


def set_reduction(outputs: nn.Module, options: FsdpOptions, *, sharded: bool, last: bool) -> None:
    """Says what the next backward pass does with gradients and gathered weights.

    Args:
        outputs: the root.
        options: with `reshard_after_forward` off, weights stay gathered until the last micro-batch.
        sharded: gradients are added to the shards now, and not kept whole until the last micro-batch.
        last: this is the last micro-batch before gradients are read.
    """
    root = next(_groups(outputs))
    root.set_requires_gradient_sync(sharded or last)
    root.set_requires_all_reduce(last)
    root.set_reshard_after_backward(last or options.reshard_after_forward)


def release(outputs: nn.Module) -> None:
    """Frees everything gathered, so that the next pass gathers what a step has changed in the meantime."""
    for module in _groups(outputs):
        module.reshard()


def regain(outputs: nn.Module) -> None:
    """Puts FSDP back where a pass may begin, after one that failed; gradients that were kept whole are dropped."""
    root = next(_groups(outputs))
    if hasattr(root, "reset_iter_state"):  # torch before 2.13 has no such method, and may refuse the next pass
        root.reset_iter_state()
    release(outputs)
    for module in _groups(outputs):
        # torch 2.13 keeps them, against the docstring of `reset_iter_state`, and no public name reaches them.
        for group in _param_groups(module):
            group._partial_reduce_output = None
            for parameter in group.fsdp_params:
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
    """What transformers keeps on one device; where a model does not say, the members of its longest list."""
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
