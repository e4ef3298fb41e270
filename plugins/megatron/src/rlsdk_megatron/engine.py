"""`megatron`: a TrainEngine on Megatron-Core."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor

from rlsdk.interfaces import (
    Batch,
    ForwardBackwardResult,
    Objective,
    OptimSpec,
    OptimStepResult,
    Parallel,
    RankContext,
    TensorMeta,
    TrainSpec,
    WeightLayout,
    WeightPart,
    WeightShard,
)
from rlsdk.kit.files.export import in_dtype, write_model
from rlsdk.kit.memory.memory_parts import TRAIN_PARTS
from rlsdk.kit.memory.offload import HostOffload
from rlsdk.kit.model.adapter_engine import AdapterEngine
from rlsdk.kit.model.device_copies import send_batch
from rlsdk.kit.model.hf import load_model_config
from rlsdk.kit.model.microbatch import cut_passes, groups_to_keep
from rlsdk.kit.model.optim import learning_rate
from rlsdk.kit.model.sharded_adapter import RankAdapter
from rlsdk.kit.ranks.error_agreement import raise_objective_errors, raise_on_all_ranks
from rlsdk.kit.ranks.metric_sums import MetricSums
from rlsdk.kit.ranks.progress import advance
from rlsdk.kit.ranks.rendezvous import destroy_process_group, init_process_group
from rlsdk_megatron import checkpoint, groups
from rlsdk_megatron.building import build, check, options_of
from rlsdk_megatron.cpu_shim import device_scope
from rlsdk_megatron.inputs import Inputs
from rlsdk_megatron.modeling import Stage, buffers_of, finish_gathers, packs_rows
from rlsdk_megatron.optimizer import Slot, optimizers, settings_of, slot_of
from rlsdk_megatron.outputs import check_names, last_stage_outputs
from rlsdk_megatron.parts import Held, Part, all_parts
from rlsdk_megatron.passes import STAND_IN, run_passes


class MegatronTrainEngine(AdapterEngine):
    """Ranks are split into tensor, context, data and pipeline parallel groups in Megatron's order: tensor-parallel
    ranks are neighbours, pipeline stages are furthest apart.

    Weights are stored in `ModelSpec.dtype`; with bfloat16 the optimizer keeps float32 copies. All ranks run the same
    number of micro-batches; a rank with fewer rows runs a token without weight instead.
    """

    def initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        try:
            self._initialize(ctx, spec)
        except BaseException:
            self.close()  # leaves the groups that were joined, so that another engine of this process can join
            raise

    def _initialize(self, ctx: RankContext, spec: TrainSpec) -> None:
        self.ctx, self.spec = ctx, spec
        self.options = options_of(spec)
        self.device = torch.device(ctx.device)
        self.hf_config = load_model_config(spec.model)
        check(ctx, spec, self.options, self.hf_config.to_dict())
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        init_process_group(ctx, "gloo" if self.device.type == "cpu" else "cpu:gloo,cuda:nccl")
        with device_scope(self.device):
            groups.join(ctx, self.options)
            self.place = groups.here()
            # A head without weights in the checkpoint draws its first ones.
            with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
                built = build(ctx, spec, self.options, self.hf_config, self.device)
        self.stages, self.modules, self.exported = built.stages, built.modules, built.exported
        self.held, self.shapes, self.tied, self.adapter = built.held, built.shapes, built.tied, built.adapter
        # What is trained, and what checkpoints hold.
        self.trained, self.trained_shapes = self.held, self.shapes
        if self.adapter is not None:
            self.trained, self.trained_shapes = self.adapter.held, self.adapter.shapes
        self.packs = packs_rows(self.options)
        self.host_offload = HostOffload()
        self.num_steps = 0
        self.has_gradient = False
        self.optim: OptimSpec | None = None
        self.optimizer: Any = None
        if spec.optim is not None:
            self.reset_optimizer(spec.optim)

    @property
    def parallel(self) -> Parallel:
        return self.place

    def settled_adapter(self) -> RankAdapter:
        self._finish_gathers()
        return super().settled_adapter()

    def forward(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Tensor]:
        check_names(outputs, self.spec.model.head)
        found = {name: torch.zeros(batch.num_rows if name == "scores" else batch.num_tokens) for name in outputs}
        cut = self._cut(batch)
        remaining = iter(cut)

        def at_end(stage: Stage, hidden: Tensor, given: Inputs) -> Tensor:
            rows = next(remaining)
            values = self._outputs(stage, hidden, given, outputs)
            if len(rows):
                for name, value in values.items():
                    found[name][rows if name == "scores" else batch.token_index(rows)] = value.cpu()
            return hidden

        with torch.no_grad(), device_scope(self.device):
            run_passes(self.stages, self._parts(batch, cut), at_end, backward=False, packs=self.packs)
        return found if self.place.is_collector else {}

    def forward_backward(self, batch: Batch, objective: Objective) -> ForwardBackwardResult:
        """See `TrainEngine`. If the objective raises on any rank, all gradients are dropped and every rank raises."""
        check_names(objective.outputs, self.spec.model.head)
        cut, metrics, failures = self._cut(batch, objective), MetricSums(), list[Exception]()
        remaining = iter(cut)

        def at_end(stage: Stage, hidden: Tensor, given: Inputs) -> Tensor:
            rows = next(remaining)
            values = self._outputs(stage, hidden, given, objective.outputs)
            # No rows here, but the other ranks wait for this one in every reduction: it contributes zeros.
            nothing = torch.stack([value.sum() for value in values.values()]).sum() * 0.0
            if not len(rows) or failures:
                return nothing
            try:
                result = objective(values, given.batch)
            except Exception as error:  # raised after all stages have finished the schedule
                failures.append(error)
                return nothing
            if self.place.is_collector:
                metrics.add(result)
            return result.loss

        with device_scope(self.device):
            earlier = self._set_gradient_aside()
            run_passes(self.modules, self._parts(batch, cut), at_end, backward=True, packs=self.packs)
            for buffer, values in earlier:
                buffer += values
        self.has_gradient = True
        self._agree(failures)
        return metrics.reduce(len(cut))

    def optim_step(self) -> OptimStepResult:
        optimizer, spec = self._stepped()
        self._finish_gathers()
        lr = learning_rate(self.num_steps, spec)
        with device_scope(self.device), torch.no_grad():
            optimizer.prepare_grads()
            norm = float(optimizer.get_grad_norm())
            finite = math.isfinite(norm)
            if finite:
                self._clip(norm, spec.max_grad_norm)
                for group in optimizer.param_groups:
                    group["lr"], group["weight_decay"] = lr, spec.weight_decay * group["wd_mult"]
                optimizer.step_with_ready_grads()
                self.num_steps += 1
                if self.options.overlap_param_gather:
                    for module in self.modules:
                        module.start_param_sync()  # a layer or a reader of weights waits for it
            self._drop_gradients()
        return OptimStepResult(grad_norm=norm, lr=lr, skipped=not finite)

    def layout(self) -> WeightLayout:
        return self._layout_of(self.held, self.shapes, self.tied)

    def shards(self) -> Iterator[WeightShard]:
        self._finish_gathers()
        for part, parameter in all_parts(self.held):
            yield WeightShard(name=part.name, box=part.box, tensor=self._served(part, parameter))

    def part_layout(self, part: WeightPart) -> WeightLayout:
        return self._layout_of(self.trained, self.trained_shapes, {}) if part is WeightPart.ADAPTER else self.layout()

    def part_shards(self, part: WeightPart) -> Iterator[WeightShard]:
        self._finish_gathers()
        for box, parameter in all_parts(self.trained if part is WeightPart.ADAPTER else self.held):
            yield WeightShard(name=box.name, box=box.box, tensor=box.view(parameter))

    def _layout_of(
        self, held: Sequence[Held], shapes: Mapping[str, tuple[int, ...]], tied: Mapping[str, str]
    ) -> WeightLayout:
        dtypes = {part.name: str(p.dtype).removeprefix("torch.") for part, p in all_parts(held)}
        return WeightLayout(
            rank=self.ctx.rank,
            node=self.ctx.node,
            device=self.ctx.device,
            process=f"{self.ctx.node}:{os.getpid()}",
            tensors=tuple(TensorMeta(name=n, shape=shapes[n], dtype=dtype) for n, dtype in dtypes.items()),
            boxes=tuple((part.name, part.box) for part, _ in all_parts(held)),
            tied=tied,
        )

    def _served(self, part: Part, parameter: Tensor) -> Tensor:
        """A box of a weight, with the adapter added if it has one."""
        return part.view(parameter) if self.adapter is None else self.adapter.merged(part, parameter)

    def save_checkpoint(self, path: Path) -> None:
        """See `TrainEngine`. Gradients are not part of a checkpoint: save after `optim_step`."""
        self._finish_gathers()
        with device_scope(self.device):
            base, reference = self.below_adapter()
            checkpoint.save(
                path,
                self.trained,
                self.trained_shapes,
                self.optimizer,
                self.num_steps,
                shared=self.options.distributed_optimizer,
                base=base,
                reference=reference,
            )

    def load_checkpoint(self, path: Path) -> None:
        self._finish_gathers()
        base, _ = self.below_adapter()
        with device_scope(self.device):
            self.num_steps, reference = checkpoint.load(
                path, self.trained, self.trained_shapes, self.optimizer, base=base
            )
            if self.optimizer is not None:
                self._drop_gradients()
        if self.adapter is not None:
            self.adapter.reference.values = reference

    def save_pretrained(self, path: Path) -> None:
        """See `TrainEngine`. Ranks write files concurrently; each tensor is gathered only on its writer."""
        self._finish_gathers()
        if self.adapter is not None and self.adapter.adapter.spec.export == "adapter":
            self.adapter.save(path, self.adapter.model, self.spec.model)
            return
        gathering = checkpoint.Gathering(self.held, self.shapes, self._served)
        tensors = in_dtype(self.shapes, getattr(torch, self.spec.model.dtype))
        with raise_on_all_ranks(f"{path} cannot be written"):
            write_model(
                path,
                self.exported,
                tensors,
                lambda tensor, writer: gathering.fetch(tensor.name, writer, tensor.dtype),
                rank=self.ctx.rank,
                world_size=self.ctx.world_size,
                source=self.spec.model.path,
            )

    def offload(self, parts: Sequence[str] = TRAIN_PARTS) -> None:
        """Moves `parts` to the host. On `cpu` they are already there and stay."""
        self._finish_gathers()
        for part in parts if self.device.type == "cuda" else ():
            self.host_offload.offload(part, self._tensors_of(part))
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def onload(self, parts: Sequence[str] = TRAIN_PARTS) -> None:
        for part in parts:
            self.host_offload.onload(part)

    def reset_optimizer(self, optim: OptimSpec) -> None:
        self._finish_gathers()
        learning_rate(0, optim)
        dtype = torch.float32 if self.adapter is not None else getattr(torch, self.spec.model.dtype)
        settings = OptimizerConfig(
            **settings_of(optim),
            bf16=dtype is torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=self.options.distributed_optimizer,
            overlap_param_gather=self.options.overlap_param_gather,
        )
        precise = [(one.parameter, slot.main) for one, slot in self._slots()]
        with device_scope(self.device):
            self.optimizer = get_megatron_optimizer(settings, list(self.modules), use_gloo_process_groups=False)
        for parameter, main in precise:  # a new copy of the bfloat16 weights would have lost precision
            if slot := slot_of(self.optimizer, parameter):
                slot.main.data.copy_(main)
        self.optim, self.num_steps = optim, 0

    def close(self) -> None:
        if "ctx" in vars(self):
            groups.leave(self.ctx)
            destroy_process_group(self.ctx)
        # Hooks lead from parameters back to their modules: weights, and the groups' threads, would live until Python
        # looks for such circles.
        for part in [part for module in vars(self).get("modules", ()) for part in module.modules()]:
            vars(part).clear()
        vars(self).clear()  # frees model, optimizer and graphs, which lose their last reference

    def _stepped(self) -> tuple[Any, OptimSpec]:
        """Parts of a model that is trained."""
        assert self.optimizer is not None
        assert self.optim is not None
        return self.optimizer, self.optim

    def _cut(self, batch: Batch, objective: Objective | None = None) -> list[Tensor]:
        """Rows of each micro-batch. All ranks get the same number of micro-batches: at least one, and a multiple of the
        stages if these are interleaved."""
        groups = groups_to_keep(batch, objective)
        mine = cut_passes(self.spec, batch.lengths, groups=groups)
        most = torch.tensor(len(mine))
        dist.all_reduce(most, dist.ReduceOp.MAX)
        round_size = self.place.pp_size if self.options.virtual_stages > 1 else 1
        count = -(-int(most) // round_size) * round_size
        if len(mine) == count:
            return mine
        return cut_passes(self.spec, batch.lengths, min_count=count, groups=groups)

    def _parts(self, batch: Batch, cut: Sequence[Tensor]) -> list[Batch]:
        """Micro-batches on the device; one without rows gets a placeholder row."""
        found = [batch.select(rows) if len(rows) else Batch.from_rows(STAND_IN) for rows in cut]
        return [send_batch(part, self.device) for part in found]

    def _outputs(self, stage: Stage, hidden: Tensor, given: Inputs, names: Sequence[str]) -> dict[str, Tensor]:
        advance()
        self._finish_gathers()  # the vocabulary's weight is read directly, without the module hook that would wait
        return last_stage_outputs(stage, hidden, given, names, self.spec.model.head, int(self.hf_config.vocab_size))

    def _buffers(self) -> Iterator[Tensor]:
        """Megatron's gradient buffers."""
        for module in self.modules:
            for buffer in buffers_of(module):
                yield buffer.grad_data

    def _set_gradient_aside(self) -> list[tuple[Tensor, Tensor]]:
        """Clears the gradient buffers for the next passes and returns copies of their content: gradients are reduced
        over ranks at the end of each call, and must be reduced only once."""
        kept = [(buffer, buffer.clone()) for buffer in self._buffers()] if self.has_gradient else []
        self._drop_gradients()
        return kept

    def _drop_gradients(self) -> None:
        for module in self.modules:
            module.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.has_gradient = False

    def _clip(self, norm: float, limit: float | None) -> None:
        for one in optimizers(self.optimizer) if limit is not None else ():
            clip_grad_by_total_norm_fp32(one.get_parameters(), limit, norm)

    def _finish_gathers(self) -> None:
        """Waits for the gathers of weights that the last step started."""
        if self.options.overlap_param_gather and self.optimizer is not None:
            with device_scope(self.device):
                for module in self.modules:
                    finish_gathers(module)

    def _tensors_of(self, part: str) -> list[Tensor]:
        """Device memory of a part. Parameters are views of buffers; the optimizer steps float32 parameters directly."""
        if part == "weights":
            low = [] if self.adapter is None else self.adapter.tensors()
            return [*(one.parameter.detach() for one in self.held), *low]
        if self.optimizer is None:
            return []
        if part == "gradients":
            return list(self._buffers())
        moments = [tensor for _, slot in self._slots() for tensor in slot.moments().values()]
        copies = [slot.main for one, slot in self._slots() if not _share_memory(one.parameter, slot.main)]
        return moments + copies

    def _slots(self) -> Iterator[tuple[Held, Slot]]:
        """The parameters that this rank's optimizer steps, with their state."""
        for one in self.trained if self.optimizer is not None else ():
            if slot := slot_of(self.optimizer, one.parameter):
                yield one, slot

    def _agree(self, failures: Sequence[Exception]) -> None:
        """Raises an objective's error on every rank if it was raised on one."""
        try:
            raise_objective_errors(failures)
        except Exception:
            with device_scope(self.device):
                self._drop_gradients()
            raise


def _share_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
