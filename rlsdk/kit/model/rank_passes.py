"""What passes of several ranks share: equal numbers of micro-batches, ranks without rows, errors of one rank."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rlsdk.interfaces import Batch, Objective, TrainSpec
from rlsdk.kit.model.device_copies import to_host
from rlsdk.kit.model.microbatch import cut_passes, groups_to_keep, rows_that_belong_together
from rlsdk.kit.ranks.metric_sums import MetricSums


def cut_alike(batch: Batch, spec: TrainSpec, objective: Objective | None = None) -> list[Tensor]:
    """Rows of each micro-batch; the same number of micro-batches on every rank, at least one. Collective."""
    cut = functools.partial(
        cut_passes,
        spec,
        batch.lengths,
        groups=groups_to_keep(batch, objective),
        near=rows_that_belong_together(batch),
    )
    mine = cut()
    most = torch.tensor(len(mine))
    dist.all_reduce(most, dist.ReduceOp.MAX)
    if len(mine) == int(most):
        return mine
    return cut(min_count=int(most))


def collect_outputs(
    batch: Batch, cut: Sequence[Tensor], names: Sequence[str], run: Callable[[Batch], Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """Outputs of all rows, on the CPU, in the batch's order; `run` computes those of a micro-batch, also without
    rows."""
    outputs: dict[str, Tensor] = {}
    for rows in cut:
        for name, values in to_host(run(batch.select(rows))).items():
            size = batch.num_rows if name == "scores" else batch.num_tokens
            outputs.setdefault(name, values.new_zeros(size, *values.shape[1:]))
            outputs[name][rows if name == "scores" else batch.token_index(rows)] = values
    return {name: outputs[name] for name in names}


def loss_of(
    objective: Objective, values: Mapping[str, Tensor], part: Batch, metrics: MetricSums, failures: list[Exception]
) -> Tensor:
    """Loss of a micro-batch, whose metrics are added to `metrics`. Zero, with a graph, where there are no rows or the
    objective raised: other ranks wait for this one in every reduction. The error is added to `failures`, for
    `raise_objective_errors` after the passes."""
    nothing = torch.stack([value.sum() for value in values.values()]).sum() * 0.0
    if not part.num_rows or failures:
        return nothing
    try:
        result = objective(values, part)
    except Exception as error:
        failures.append(error)
        return nothing
    metrics.add(result)
    return result.loss
