"""Common parts of rollout engines that serve the whole model in one process, several samples at a time."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from rlsdk.interfaces import (
    BlockScales,
    Box,
    ConfigError,
    FinishReason,
    GenerationOutput,
    GenerationRequest,
    Head,
    PromptLogProbs,
    RankContext,
    RlsdkError,
    RolloutSpec,
    TensorMeta,
    VersionRun,
    WeightLayout,
)
from rlsdk.interfaces.settings import ReplicaSize
from rlsdk.kit.weights.block_scales import DTYPE_NAME


def check_rollout_spec(spec: RolloutSpec, options: type | None = None) -> None:
    """Refuses specifications that no engine that samples tokens supports.

    Args:
        spec: as `RolloutEngine.initialize` gets it.
        options: class of the backend's options; `spec.options` may also be None.

    Raises:
        ConfigError: names the field, its value and what was expected.
    """
    if spec.model.head is not Head.LM:
        raise ConfigError(f"a rollout engine serves a model with head 'lm', not {spec.model.head.value!r}")
    if options is not None and spec.options is not None and not isinstance(spec.options, options):
        raise ConfigError(
            f"RolloutSpec.options is a {type(spec.options).__name__}; expected {options.__name__}, or None"
        )
    sizes = dict.fromkeys((size.name for size in fields(ReplicaSize)), 1)
    for name, least in {**sizes, "max_running": 1, "max_model_tokens": 2, "adapter_versions": 1}.items():
        if (value := getattr(spec, name)) < least:
            raise ConfigError(f"{name} {value}: expected {least} or more")
    if (problem := spec.expert_problem()) is not None:
        raise ConfigError(f"ep_size {spec.ep_size}: {problem}")


def count_adapter_slots(spec: RolloutSpec, max_adapters: int | None, field: str) -> int:
    """Adapters that an engine has memory for: one more than requests may name, for samples of the one that goes.

    Args:
        spec: as `RolloutEngine.initialize` gets it.
        max_adapters: the option; None: as many as are needed.
        field: its name in messages.

    Raises:
        ConfigError: fewer than `spec.adapter_versions` need.
    """
    needed = spec.adapter_versions + 1
    least = needed if spec.adapter_versions > 1 else 1
    if max_adapters is not None and max_adapters < least:
        raise ConfigError(
            f"{field} {max_adapters}: expected {least} or more, as {spec.adapter_versions} versions of the adapter are "
            "served side by side, and samples of an older one may still run when the next arrives; leave it out, or "
            "lower schedule.max_staleness"
        )
    return needed if max_adapters is None else max_adapters


def tensor_metas(
    shapes: Mapping[str, tuple[int, ...]], dtype: str, dtypes: Mapping[str, str], scales: Mapping[str, BlockScales]
) -> tuple[TensorMeta, ...]:
    """Metadata of all tensors, in one dtype except those that keep their own, and those with block scales."""
    own = {**dtypes, **dict.fromkeys(scales, DTYPE_NAME)}
    return tuple(
        TensorMeta(name=name, shape=shape, dtype=own.get(name, dtype), scales=scales.get(name))
        for name, shape in shapes.items()
    )


def whole_layout(
    ctx: RankContext,
    dtype: str,
    shapes: Mapping[str, tuple[int, ...]],
    tied: Mapping[str, str],
    *,
    dtypes: Mapping[str, str] | None = None,
    on_host: bool = False,
    scales: Mapping[str, BlockScales] | None = None,
) -> WeightLayout:
    """The layout of an engine that receives every tensor whole, in this process.

    Args:
        ctx: of the engine.
        dtype: of every tensor that `dtypes` does not name.
        shapes: by canonical name.
        tied: see `WeightLayout.tied`.
        dtypes: of tensors that keep their own dtype, such as buffers.
        on_host: tensors are received in main memory, wherever they are served: for engines with workers in other
            processes.
        scales: of tensors that are served as float8 with block scales.
    """
    return WeightLayout(
        rank=0,
        node=ctx.node,
        device="cpu" if on_host else ctx.device,
        process=f"{ctx.node}:{os.getpid()}",
        tensors=tensor_metas(shapes, dtype, dtypes or {}, scales or {}),
        boxes=tuple((name, Box.whole(shape)) for name, shape in shapes.items()),
        tied=tied,
    )


def worker_layouts(
    ctx: RankContext,
    workers: Sequence[Mapping[str, Any]],
    shapes: Mapping[str, tuple[int, ...]],
    tied: Mapping[str, str],
    *,
    spans_nodes: bool = False,
) -> list[WeightLayout]:
    """The layouts of an engine whose workers receive their own parts.

    Args:
        ctx: of the engine.
        workers: description of each (`rlsdk.kit.weights.delivery.describe_worker`).
        shapes: by canonical name.
        tied: see `WeightLayout.tied`.
        spans_nodes: worker i is on `ctx.device_nodes[i]` with the device `ctx.accelerators[i]`. False: all are on this
            node.
    """
    layouts = []
    for rank, worker in enumerate(workers):
        node, device = ctx.node, worker["device"]
        if spans_nodes:
            # `cuda:N` numbers the devices of the replica: numbers per node would be ambiguous.
            node, kind = ctx.device_nodes[rank], device.partition(":")[0]
            device = kind if kind == "cpu" else f"{kind}:{rank}"
        dtypes = {name: dtype for name, _, _, dtype in worker["boxes"]}
        layouts.append(
            WeightLayout(
                rank=rank,
                node=node,
                device=device,
                process=f"{node}:{worker['process']}",
                tensors=tuple(TensorMeta(name=n, shape=shapes[n], dtype=d) for n, d in dtypes.items()),
                boxes=tuple((name, Box(tuple(start), tuple(size))) for name, start, size, _ in worker["boxes"]),
                tied=tied,
                worker=worker["worker"],
                host=f"{ctx.node}:{os.getpid()}",
                is_apart=node != ctx.node,
            )
        )
    return layouts


@dataclass(kw_only=True)
class RunningSample:
    """One running sample of one request."""

    key: str
    """Its name in the engine."""
    request: GenerationRequest
    index: int
    """`sample_index` of its output."""
    seed: int
    limit: int
    """Most new tokens."""
    version: int = 0
    """Version that was served when it was added, or that its request names."""
    adapter: int | None = None
    """Number of the adapter that samples it, from its first token to its last; None: the model alone."""
    token_ids: list[int] = field(default_factory=list)
    """New tokens, without the request's `response_ids`."""
    log_probs: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    """Runs of (version, tokens), as in `GenerationOutput.versions`."""
    prompt_log_probs: PromptLogProbs | None = None
    """Of the given tokens, once they are known."""

    def extend(self, token_ids: Sequence[int], log_probs: Sequence[float], version: int) -> None:
        """Adds tokens, and the version of the weights with which they were sampled."""
        if not token_ids:
            return
        self.token_ids.extend(token_ids)
        self.log_probs.extend(log_probs)
        if self.versions and self.versions[-1][0] == version:
            self.versions[-1] = version, self.versions[-1][1] + len(token_ids)
        else:
            self.versions.append((version, len(token_ids)))

    def check_finite(self) -> None:
        """Raises `RlsdkError` if a log-prob is not finite."""
        given = self.prompt_log_probs
        scored = given is None or (np.isfinite(given.log_probs).all() and np.isfinite(given.top_log_probs).all())
        if not scored or not all(map(math.isfinite, self.log_probs)):
            versions = ", ".join(str(version) for version, _ in self.versions)
            raise RlsdkError(
                f"the model gives logits that are not finite, with the weights of version {versions}: training has "
                "diverged, or the weights are damaged"
            )

    def output(self, reason: FinishReason, version: int) -> GenerationOutput:
        """The output for `generate`. `version` is that of a sample without any token."""
        return GenerationOutput(
            request_id=self.request.request_id,
            sample_index=self.index,
            token_ids=np.array(self.token_ids, np.int64),
            log_probs=np.array(self.log_probs, np.float32),
            finish_reason=reason,
            versions=tuple(VersionRun(*run) for run in self.versions or [(version, 0)]),
            prompt_log_probs=self.prompt_log_probs,
        )
