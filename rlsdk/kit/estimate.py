"""What passes through a model take in memory: counted by running it on tensors that have shapes and no memory."""

from __future__ import annotations

import functools
import logging
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlsdk.interfaces import DTYPE_BYTES, Head, ModelSpec, TrainSpec
from rlsdk.kit.hf import build_model
from rlsdk.kit.outputs import token_log_probs

SAMPLED = 2, 4
"""Layers of a model of many like ones that are run; memory grows evenly with the rest."""
_log = logging.getLogger(__name__)


def pass_bytes(
    spec: ModelSpec,
    *,
    dtype: torch.dtype | None = None,
    num_rows: int,
    row_tokens: int,
    gradient: bool,
    activation_checkpointing: bool = False,
) -> int | None:
    """Most bytes that a forward pass takes besides weights, with `gradient` a backward pass as well (gradients of
    weights left out, but for one at a time).

    The model's own code runs, layer by layer, on tensors without memory, so the count is exact for what torch allocates
    between operations; what a kernel takes inside is not seen. No weights are read.

    Args:
        spec: of the model, with head `lm`.
        dtype: that passes run in; None: the model's.
        num_rows: rows of equal length; log-probs are computed on all tokens.
        row_tokens: tokens of each.
        gradient: run backward too.
        activation_checkpointing: recompute layers in the backward pass.

    Returns:
        None where the model does what depends on values (such as routing tokens to experts), and for other heads.
    """
    if spec.head is not Head.LM:
        return None
    run = functools.partial(
        _count,
        spec,
        dtype,
        num_rows=num_rows,
        row_tokens=row_tokens,
        gradient=gradient,
        recompute=activation_checkpointing and gradient,
    )
    try:
        alike = layers_alike(build_model(spec, empty=True))
        if alike <= SAMPLED[1]:
            return run()
        few, more = run(num_layers=SAMPLED[0]), run(num_layers=SAMPLED[1])
        return more + (alike - SAMPLED[1]) * (more - few) // (SAMPLED[1] - SAMPLED[0])
    except Exception as error:  # whatever a model's own code does to tensors without values
        _log.info("memory of a pass through %r is not known: %s: %s", spec.path, type(error).__name__, error)
        return None


def layers_alike(model: nn.Module) -> int:
    """Number of a model's layers where all are of one kind, and no different work is done by any; else 0."""
    layers = _layers(model)
    kinds = {(type(layer), tuple((name, p.shape) for name, p in layer.named_parameters())) for layer in layers}
    config: Any = model.config
    named = set(getattr(config.get_text_config(), "layer_types", None) or ())
    counted = config.get_text_config().num_hidden_layers == len(layers)
    return len(layers) if len(kinds) == 1 and len(named) <= 1 and counted else 0


def _layers(model: nn.Module) -> nn.ModuleList:
    """The longest list of modules."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=nn.ModuleList())


def _count(
    spec: ModelSpec,
    dtype: torch.dtype | None,
    *,
    num_rows: int,
    row_tokens: int,
    gradient: bool,
    recompute: bool,
    num_layers: int | None = None,
) -> int:
    """Runs the model, or the first layers of it."""
    model: Any = build_model(spec, empty=True, dtype=dtype).requires_grad_(gradient)
    if num_layers is not None:
        del _layers(model)[num_layers:]
        model.config.get_text_config().num_hidden_layers = num_layers
    if recompute:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of the name, which transformers will change in version 6
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    counted = _Live()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        input_ids = torch.empty(num_rows, row_tokens, dtype=torch.int64)
        for parameter in model.parameters() if gradient else ():
            parameter.register_post_accumulate_grad_hook(_drop)
        with counted, torch.set_grad_enabled(gradient):
            log_probs = _run(model, input_ids)
            if gradient:
                log_probs.sum().backward()  # type: ignore[no-untyped-call]
    return counted.peak


def _run(model: Any, input_ids: Tensor) -> Tensor:
    hidden = getattr(model, model.base_model_prefix)(input_ids=input_ids, use_cache=False).last_hidden_state
    log_probs, _ = token_log_probs(model, hidden.flatten(0, 1), input_ids.flatten(), temperature=1.0)
    return log_probs


def _drop(parameter: Tensor) -> None:
    parameter.grad = None


class _Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the storages that operations make, for as long as each lives."""

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
    `kit.microbatch` does."""
    if spec.micro_batch_rows is not None:
        limit = spec.micro_batch_rows
    else:
        limit = max((spec.micro_batch_tokens or row_tokens) // row_tokens, 1)
    rows = max(min(limit, num_rows), 1)
    return rows, max(-(-num_rows // rows), 1)


def key_value_bytes(config: Any, dtype: str) -> int:
    """Of the keys and values of one token, over all layers of a transformers model."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(2 * text.num_hidden_layers * heads * size * DTYPE_BYTES[dtype])
