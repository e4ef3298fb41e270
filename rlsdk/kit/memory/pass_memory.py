"""Peak memory of passes through a model, measured by running it on meta tensors (shapes without memory)."""

from __future__ import annotations

import gc
import logging
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlsdk.interfaces import Head, ModelSpec, TrainSpec
from rlsdk.kit.model.chunked_head import log_probs, outputs_of_logits
from rlsdk.kit.model.hf import build_model
from rlsdk.kit.model.logit_chunks import chunk_tokens
from rlsdk.kit.model.outputs import head_numbers, vocabulary_head

SAMPLED = 2, 4
"""Numbers of layers that are run of a model with many equal layers; memory is linear in the number of layers."""
HEAD_CHUNKS = 2
"""Chunks of tokens whose log-probs are computed; no more are in memory at once."""
_log = logging.getLogger(__name__)
_REMEMBERED: ContextVar[dict[Any, list[int | None]] | None] = ContextVar("remembered passes", default=None)
"""See `remembered_passes`."""


def pass_bytes(
    spec: ModelSpec,
    *,
    dtype: torch.dtype | None = None,
    num_rows: int,
    row_tokens: int,
    gradient: bool,
    activation_checkpointing: bool = False,
    device: str = "cpu",
) -> int | None:
    """Peak bytes of a forward pass besides weights; with `gradient`, of forward and backward. See `passes_bytes`."""
    (peak,) = passes_bytes(
        spec,
        dtype=dtype,
        num_rows=num_rows,
        row_tokens=row_tokens,
        gradients=(gradient,),
        activation_checkpointing=activation_checkpointing,
        device=device,
    )
    return peak


def passes_bytes(
    spec: ModelSpec,
    *,
    dtype: torch.dtype | None = None,
    num_rows: int,
    row_tokens: int,
    gradients: Sequence[bool],
    activation_checkpointing: bool = False,
    device: str = "cpu",
) -> list[int | None]:
    """Peak bytes of each pass besides weights.

    The model's own code runs, layer by layer, on tensors without memory, so the count is exact for what torch allocates
    between operations; memory inside kernels is not counted. No weights are read.

    Args:
        spec: of the model.
        dtype: that passes run in; None: the model's.
        num_rows: rows of equal length; log-probs or values are computed on all tokens.
        row_tokens: tokens of each.
        gradients: one pass for each; True: forward and backward (counts only one weight gradient at a time).
        activation_checkpointing: recompute layers in backward passes.
        device: that passes run on, as in `RankContext.device`; sets how many logits are in memory at once.

    Returns:
        None if the model's operations depend on values (such as routing tokens to experts).
    """
    key = (repr(spec), dtype, num_rows, row_tokens, tuple(gradients), activation_checkpointing, device)
    known = _REMEMBERED.get()
    if known is not None and key in known:
        return known[key]
    found = _counted(spec, dtype, (num_rows, row_tokens), gradients, activation_checkpointing, device)
    if known is not None:
        known[key] = found
    return found


@contextmanager
def remembered_passes() -> Iterator[None]:
    """Counts equal passes once within: for plans of one run on different devices. Models must not change meanwhile."""
    token = _REMEMBERED.set({} if (known := _REMEMBERED.get()) is None else known)
    try:
        yield
    finally:
        _REMEMBERED.reset(token)


def _counted(
    spec: ModelSpec,
    dtype: torch.dtype | None,
    size: tuple[int, int],
    gradients: Sequence[bool],
    activation_checkpointing: bool,
    device: str,
) -> list[int | None]:
    try:
        model = build_model(spec, empty=True, dtype=dtype)
        with FakeTensorMode(allow_non_fake_inputs=True):
            model.to_empty(device="cpu")
            rows = torch.empty(size, dtype=torch.int64)
            count = _Count(model, spec.head, rows, activation_checkpointing, device)
            count.run_uncounted()
            return [count.peak(gradient=gradient) for gradient in gradients]
    except Exception as error:  # a model's own code may fail in any way on tensors without values
        _log.info("memory of a pass through %r is not known: %s: %s", spec.path, type(error).__name__, error)
        return [None for _ in gradients]


def equal_layers(model: nn.Module) -> list[int]:
    """Indices of the layers of the most frequent kind; empty if layers of one shape may do different work."""
    layers = _layers(model)
    kinds: dict[object, list[int]] = {}
    for at, layer in enumerate(layers):
        shape = (type(layer), tuple((name, p.shape) for name, p in layer.named_parameters()))
        kinds.setdefault(shape, []).append(at)
    config: Any = model.config
    named = set(getattr(config.get_text_config(), "layer_types", None) or ())
    counted = config.get_text_config().num_hidden_layers == len(layers)
    return max(kinds.values(), key=len, default=[]) if len(named) <= 1 and counted else []


def _replace(layers: nn.ModuleList, by: Sequence[nn.Module]) -> None:
    del layers[:]
    layers.extend(by)


def _layers(model: nn.Module) -> nn.ModuleList:
    """The longest list of modules."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=nn.ModuleList())


@dataclass(frozen=True)
class _Count:
    """Runs a model on meta tensors, or only its first layers."""

    model: Any
    head: Head
    input_ids: Tensor
    recompute: bool
    device: str

    def peak(self, *, gradient: bool) -> int:
        """Peak of all layers, extrapolated from a few if many have the same parameters."""
        equal = equal_layers(self.model)
        if len(equal) <= SAMPLED[1]:
            return self._run(gradient)
        few, more = (self._run_without(gradient, equal[num_kept:]) for num_kept in SAMPLED)
        return more + (len(equal) - SAMPLED[1]) * (more - few) // (SAMPLED[1] - SAMPLED[0])

    def run_uncounted(self) -> None:
        """Runs once without counting: imports during a model's first run can keep that pass's tensors alive for a while
        (in frames of an import), so that the first of two passes would seem to need more than the second, which has
        more layers."""
        if len(equal := equal_layers(self.model)) > SAMPLED[1]:
            self._run_without(False, equal[1:])

    def _run_without(self, gradient: bool, left_out: Sequence[int]) -> int:
        layers, config = _layers(self.model), self.model.config.get_text_config()
        every = list(layers)
        _replace(layers, [layer for at, layer in enumerate(every) if at not in set(left_out)])
        config.num_hidden_layers = len(layers)
        try:
            return self._run(gradient)
        finally:
            _replace(layers, every)
            config.num_hidden_layers = len(layers)

    def _run(self, gradient: bool) -> int:
        self.model.requires_grad_(gradient)
        self._set_recompute(self.recompute and gradient)
        hooks = [p.register_post_accumulate_grad_hook(_drop) for p in self.model.parameters() if gradient]
        counted = LiveBytes()
        with _no_collection(), counted, torch.set_grad_enabled(gradient):
            outputs = self._outputs()
            if gradient:
                outputs.sum().backward()  # type: ignore[no-untyped-call]
        for hook in hooks:
            hook.remove()
        return counted.peak

    def _outputs(self) -> Tensor:
        model = self.model
        hidden = getattr(model, model.base_model_prefix)(input_ids=self.input_ids, use_cache=False).last_hidden_state
        if self.head is not Head.LM:
            return head_numbers(model, hidden.flatten(0, 1) if self.head is Head.VALUE else hidden[:, -1])
        # Chunks are equal, and only one has its logits in memory at a time.
        chunk = chunk_tokens(int(model.config.get_text_config().vocab_size), self.device)
        shown = HEAD_CHUNKS * chunk
        states, targets = hidden.flatten(0, 1)[:shown], self.input_ids.flatten()[:shown]
        return outputs_of_logits(vocabulary_head(model, 1.0), log_probs, states, (targets,), chunk)[0]

    def _set_recompute(self, on: bool) -> None:
        if on:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # about the name, which transformers 6 changes
                self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        elif any(getattr(module, "gradient_checkpointing", False) for module in self.model.modules()):
            self.model.gradient_checkpointing_disable()
        self.model.train(on)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Disables garbage collection: reference cycles would be freed at arbitrary times, so peaks would vary, and a
    layer's share, the difference of two peaks, could be negative."""
    gc.collect()
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _drop(parameter: Tensor) -> None:
    parameter.grad = None


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sums the sizes of the live storages that operations allocate."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        before = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage(), before)
        return out

    def _count(self, storage: Any, before: set[int]) -> None:
        key = storage._cdata
        if key in self._sizes or key in before:
            return
        self._sizes[key] = storage.nbytes()
        self.now += self._sizes[key]
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, key).atexit = False

    def _free(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


def rows_of_pass(spec: TrainSpec, *, row_tokens: int, num_rows: int) -> tuple[int, int]:
    """(rows of the largest pass, number of passes) where a rank cuts `num_rows` rows of `row_tokens` tokens as
    `kit.model.microbatch` does."""
    if spec.micro_batch_rows is not None:
        limit = spec.micro_batch_rows
    else:
        limit = max((spec.micro_batch_tokens or row_tokens) // row_tokens, 1)
    rows = max(min(limit, num_rows), 1)
    return rows, max(-(-num_rows // rows), 1)
