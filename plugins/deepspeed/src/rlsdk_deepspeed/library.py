"""The only module that depends on DeepSpeed's insides: how it is started, what it holds, what it leaves behind."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed import comm, zero
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.config import ZERO_OPTIMIZATION, DeepSpeedZeroConfig
from deepspeed.runtime.zero.muon import muon_optimizer  # noqa: F401 - every start imports it, and torch's compiler with it
from deepspeed.utils import groups
from torch import Tensor, nn

from rlsdk.interfaces import ConfigError, RankContext, TrainSpec, nearest
from rlsdk.kit.ranks.shared_memory import share
from rlsdk_deepspeed.config import DeepSpeedOptions
from rlsdk_deepspeed.shards import Group

# torch says in every pass of ZeRO 3 that what DeepSpeed calls has another name now.
warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)

OWN_SETTINGS = ("stage", "offload_optimizer", "offload_param", "overlap_comm")
"""Settings of `zero_optimization` that only the engine sets."""


@contextmanager
def launcher_variables(ctx: RankContext) -> Iterator[None]:
    """DeepSpeed asks for the variables of its own launcher, even where a process group exists."""
    given = {"RANK": ctx.rank, "WORLD_SIZE": ctx.world_size, "LOCAL_RANK": ctx.local_rank}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update({name: str(value) for name, value in given.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def check_kwargs(spec: TrainSpec) -> None:
    """Raises `ConfigError` if `engine_kwargs` has a setting that `zero_optimization` lacks, or that only the engine
    sets."""
    known = [
        field.alias or name for name, field in DeepSpeedZeroConfig.model_fields.items() if name not in OWN_SETTINGS
    ]
    for name in spec.engine_kwargs:
        if name not in known:
            raise ConfigError(
                f"train.engine_kwargs {name!r}{nearest(name, known)}: backend 'deepspeed' passes them to DeepSpeed's "
                f"zero_optimization, which takes {sorted(known)}"
            )


def settings(spec: TrainSpec, options: DeepSpeedOptions, *, bfloat16: bool, num_values: int) -> dict[str, Any]:
    """DeepSpeed's configuration."""
    section: dict[str, Any] = {
        "stage": options.zero_stage,
        "overlap_comm": False,
        # The buffers are allocated in every pass; the defaults are for models of billions of weights.
        "reduce_bucket_size": min(num_values, 500_000_000),
        **spec.engine_kwargs,
    }
    if options.offload_optimizer:
        section["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    if options.offload_param:
        section["offload_param"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        # Any number of backward passes before a step.
        "managed_gradient_accumulation": False,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": section,
        "bf16": {"enabled": bfloat16},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "steps_per_print": None,
    }


def start(
    ctx: RankContext, outputs: nn.Module, optimizer: torch.optim.Optimizer | None, config: Mapping[str, Any]
) -> Any:
    """A DeepSpeed engine around the module. Collective: every rank must call."""
    with launcher_variables(ctx):
        join()
        known = DeepSpeedConfig(dict(config))
        return _Engine(
            args=None,
            model=outputs,
            optimizer=optimizer,
            config=dict(config),
            config_class=known,
            dist_init_required=False,
        )


def keep_gathered(engine: Any, layers: Iterable[nn.Module]) -> None:
    """Lets the root gather the weights of these layers, once in a forward pass and once in its backward pass (ZeRO 3).

    Layers with hooks of their own gather in every call: ranks that call them different numbers of times would wait for
    each other forever.
    """
    for layer in layers:
        for parameter in layer.parameters():
            zero.register_external_parameter(engine.module, parameter)
        for module in layer.modules():
            module._forward_pre_hooks.clear()
            module._forward_hooks.clear()


def joined(outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The outputs of a pass, such that a loss of some of them reaches all, with gradients of zero: ZeRO 3 counts those
    that it reaches, and refuses counts that differ between ranks. A rank without rows uses all, an objective maybe
    not."""
    names = [name for name, value in outputs.items() if value.requires_grad]
    values = _Joined.apply(*(outputs[name] for name in names)) if names else ()  # type: ignore[no-untyped-call]
    return {**outputs, **dict(zip(names, values, strict=True))}


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *values: Tensor) -> tuple[Tensor, ...]:
        return tuple(value.view_as(value) for value in values)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, ...]:
        return slopes


class _Engine(DeepSpeedEngine):  # type: ignore[misc]
    """As `deepspeed.initialize` makes it, but with the same optimizer for all stages and dtypes."""

    def _do_optimizer_sanity_check(self, basic_optimizer: Any) -> Any:
        # For ZeRO 1 in bfloat16 it would choose another class, which cannot skip a step.
        super()._do_optimizer_sanity_check(basic_optimizer)
        return ZERO_OPTIMIZATION


def join() -> None:
    """Lets DeepSpeed use the default process group of torch as it is now."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    if not _is_alive(groups._WORLD_GROUP):
        forget_group()
    # Its all-reduce through shared memory would be compiled first, under a lock that outlives a killed process.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if comm.comm.cdb is None:
        comm.init_distributed(get_accelerator().communication_backend_name(), dist_init_required=False)


def _is_alive(group: Any) -> bool:
    """Whether a process group belongs to the default group of now, and not to one that has ended."""
    try:
        return group is not None and bool(dist.get_process_group_ranks(group))
    except (KeyError, ValueError):
        return False


def forget_group() -> None:
    """Removes DeepSpeed's references to process groups that have ended."""
    comm.comm.cdb = None
    for name, value in vars(groups).items():
        if name.startswith("_") and name.endswith(("_GROUP", "_RANKS", "_SIZE", "_RANK")):
            setattr(groups, name, {} if isinstance(value, dict) else None)
    groups.mesh_device = None


class Partitioner:
    """Splits single parameters over ranks (ZeRO 3), so that no rank ever has the whole model."""

    def __init__(self, ctx: RankContext, config: Mapping[str, Any], dtype: torch.dtype) -> None:
        self.ctx = ctx
        with launcher_variables(ctx):
            join()
            self.init = zero.Init(config_dict_or_path=dict(config), dtype=dtype, enabled=True)

    def split(self, parameter: nn.Parameter) -> None:
        with launcher_variables(self.ctx):
            self.init._convert_to_zero_parameters([parameter])


def frozen_groups(parameters: Iterable[nn.Parameter], *, split: bool) -> list[Group]:
    """Parameters that no optimizer steps, each a group of its own: split over ranks (ZeRO 3), or whole on each."""
    return [Group(p.ds_tensor.data if split else p.data.view(-1), [p]) for p in parameters]  # type: ignore[attr-defined]


def groups_of(engine: Any, stage: int) -> list[Group]:
    """What DeepSpeed flattened to step it: this rank's part of each group, and the parameters in it."""
    inner = engine.optimizer
    if stage == 3:
        return [
            Group(flat, list(g)) for flat, g in zip(inner.fp32_partitioned_groups_flat, inner.fp16_groups, strict=True)
        ]
    return [
        Group(flat, list(members))
        for flat, members in zip(inner.single_partition_of_fp32_groups, inner.round_robin_bit16_groups, strict=True)
    ]


def refresh(engine: Any, stage: int) -> None:
    """Copies the float32 weights that the optimizer steps to those that passes run on. Collective."""
    inner = engine.optimizer
    if stage < 3:
        inner.update_lp_params()
        return
    for number in range(len(getattr(inner, "fp16_groups", ()))):
        inner._reassign_or_swap_out_partitioned_parameters(number)
    persistent = inner.persistent_parameters
    if persistent:
        for parameter in persistent:
            parameter.partition()
        persistent[0].all_gather(persistent)


def drop_gradients(engine: Any, stage: int) -> None:
    """Drops all gradients, and what DeepSpeed counts of the passes that made them."""
    inner = engine.optimizer
    inner.zero_grad()
    for kept in (inner.averaged_gradients, getattr(inner, "all_grad_tensors", {})):
        kept.clear()
    if stage == 3:
        for buffer in gradients_of(engine, stage):
            buffer.zero_()
        return
    inner.micro_step_id = -1
    inner._epilogue_ran_this_backward = False


def gradients_of(engine: Any, stage: int) -> list[Tensor]:
    """Memory of gradients."""
    inner = engine.optimizer
    if stage == 3:
        return list(inner._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition.values())
    kept = [t for group in getattr(inner, "all_grad_tensors", {}).values() for t in group or ()]
    grads = [g for p in engine.module.parameters() for g in (p.grad, getattr(p, "grad_accum", None)) if g is not None]
    return kept + grads


def weights_of(engine: Any, stage: int) -> list[Tensor]:
    """Memory of weights besides the float32 ones that the optimizer steps."""
    inner = engine.optimizer
    if stage < 3:
        return list(inner.bit16_groups_flat)
    held = [p.ds_tensor.data for p in engine.module.parameters()]
    return held + [p.data for p in inner.persistent_parameters]


def keep_whole(engine: Any, parameters: Iterable[nn.Parameter]) -> None:
    """Lets each rank hold these parameters whole after a step and after `refresh`, however large they are (ZeRO 3)."""
    persistent = engine.optimizer.persistent_parameters
    known = set(map(id, persistent))
    for parameter in parameters:
        parameter.ds_persist = True  # type: ignore[attr-defined]
        if id(parameter) not in known:
            persistent.append(parameter)


def gather(parameters: Iterable[nn.Parameter]) -> None:
    """Gathers those of these parameters that a pass has split again, as the first ones do even with `keep_whole` (ZeRO
    3). Collective."""
    held: list[Any] = list(parameters)
    held[0].all_gather(held)


def keep_shared(engine: Any, stage: int, frozen: Iterable[nn.Parameter]) -> None:
    """Moves the float32 weights that the optimizer steps, and the frozen ones, on a CPU, to shared memory that other
    processes of the node can read (`kit.ranks.shared_memory`)."""
    inner = engine.optimizer
    held: list[Any] = [parameter.ds_tensor if stage == 3 else parameter for parameter in frozen]  # type: ignore[attr-defined]
    for tensor, shared in zip(held, share([tensor.data for tensor in held]), strict=True):
        tensor.data = shared
    if stage < 3:
        flats = inner.single_partition_of_fp32_groups
        for flat, shared in zip(flats, share([flat.data for flat in flats]), strict=True):
            flat.data = shared
        inner._link_all_hp_params()
        return
    flats, halves = inner.fp32_partitioned_groups_flat, inner.fp16_partitioned_groups_flat
    for number, shared in enumerate(share([flat.data for flat in flats])):
        alias = flats[number] is halves[number]
        flats[number].data = shared
        if alias:
            inner._unflatten_partitioned_parameters(number)


def finish(engine: Any) -> None:
    """Removes DeepSpeed's hooks, and its lists of modules that would keep the model alive."""
    engine.destroy()
    mine = set(engine.module.modules())
    parameter_offload.FWD_MODULE_STACK[:] = [m for m in parameter_offload.FWD_MODULE_STACK if m not in mine]


def materialise(
    module: nn.Module,
    device: torch.device,
    dtype: torch.dtype,
    partitioner: Partitioner | None,
    adapter: Iterable[nn.Parameter] = (),
) -> None:
    """Allocates parameters (zeros, of one dtype, as DeepSpeed flattens them, but those of an adapter float32) and
    buffers (no values, of their own dtypes) of a module on the meta device; shared ones stay shared."""
    low = {id(parameter) for parameter in adapter}
    made: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for key, parameter in part._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                own = torch.float32 if id(parameter) in low else dtype
                values = torch.zeros(parameter.shape, dtype=own, device=device)
                made[id(parameter)] = nn.Parameter(values, requires_grad=parameter.requires_grad)
                if partitioner is not None:
                    partitioner.split(made[id(parameter)])
            part._parameters[key] = made[id(parameter)]
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, torch.empty_like(buffer, device=device))
