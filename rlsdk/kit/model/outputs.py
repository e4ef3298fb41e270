"""Model outputs for training: log-probs, entropy, values and scores, flat, each at its token."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rlsdk.interfaces import OUTPUTS, Batch, ConfigError, Head, nearest
from rlsdk.kit.model.packed import HiddenStates, run_backbone
from rlsdk.kit.model.prefixes import Prefixes, distinct_prefixes
from rlsdk.kit.ranks.progress import advance

CHUNK_ELEMENTS = 1 << 25
"""Most float32 logits in memory at once; with gradients, each chunk is recomputed in the backward pass."""


class OutputModel(nn.Module):
    """A transformers model whose forward pass computes `OUTPUTS`. A single module, so that wrappers (FSDP, compile)
    apply to all of it."""

    def __init__(self, model: nn.Module, head: Head = Head.LM) -> None:
        super().__init__()
        self.model = model
        self.head = head

    def forward(self, batch: Batch, names: Sequence[str], packed: bool | None = None) -> dict[str, Tensor]:
        """See `compute_outputs`."""
        return compute_outputs(self.model, self.head, batch, names, packed=packed)


def compute_outputs(
    model: nn.Module, head: Head, batch: Batch, names: Sequence[str], *, packed: bool | None = None
) -> dict[str, Tensor]:
    """Computes `names` of `OUTPUTS`; differentiable.

    Log-probs and entropy are in nats, of logits / `batch.temperature`, in float32 for every model dtype. If the batch
    has a `response_mask`, they are computed only on its tokens and are 0 elsewhere. At most `CHUNK_ELEMENTS` logits are
    in memory at a time, so memory does not grow with tokens times vocabulary.

    Args:
        model: from `kit.model.hf.build_model`.
        head: the model's head.
        batch: `input_ids`, on the model's device.
        names: of `OUTPUTS`.
        packed: see `kit.model.packed.run_backbone`.

    Returns:
        `log_probs`, `entropy`, `values`: `[N]` float32; `scores`: `[B]` float32.

    Raises:
        ConfigError: an output that the head does not compute, or a temperature that is not above 0.
    """
    advance()
    _check_names(names, head)
    if not batch.temperature > 0:
        raise ConfigError(f"temperature {batch.temperature} of the batch: log-probs need one above 0")
    if batch.num_tokens == 0:
        return _of_nothing(model, head, batch, names)
    prefixes = distinct_prefixes(batch)
    states = run_backbone(_backbone(model)[1], batch, prefixes, packed=packed, need_last=head is Head.SCORE)
    if head is Head.LM:
        return _token_outputs(model, batch, prefixes, names, states)
    if head is Head.SCORE:
        return {"scores": head_numbers(model, states.at(batch.offsets[1:] - 1))}
    tokens = (batch.position_ids > 0).nonzero()[:, 0]
    # The value at t is that of the state before token t: it is read from the hidden state at t - 1.
    return {"values": _at(tokens, head_numbers(model, states.at(tokens - 1)), batch)}


def _token_outputs(
    model: nn.Module, batch: Batch, prefixes: Prefixes, names: Sequence[str], states: HiddenStates
) -> dict[str, Tensor]:
    wanted = batch.position_ids > 0
    if "response_mask" in batch:
        wanted = wanted & batch["response_mask"]
    tokens = wanted.nonzero()[:, 0]
    # Computed once per prefix, for all rows that share it.
    needed = torch.zeros_like(prefixes.first, dtype=torch.bool).index_fill(0, prefixes.index[tokens], True)
    ends = prefixes.first[needed]
    hidden, targets = states.at(ends - 1), batch["input_ids"][ends]
    want_entropy = "entropy" in names
    log_probs, entropy = token_log_probs(model, hidden, targets, batch.temperature, entropy=want_entropy)
    which = (needed.cumsum(0) - 1)[prefixes.index[tokens]]
    results = {"log_probs": _at(tokens, log_probs.index_select(0, which), batch)}
    if want_entropy:
        results["entropy"] = _at(tokens, entropy.index_select(0, which), batch)
    return {name: results[name] for name in names}


def token_log_probs(
    model: nn.Module, hidden: Tensor, targets: Tensor, temperature: float, *, entropy: bool = False
) -> tuple[Tensor, Tensor]:
    """(log-prob of each target, entropy of its distribution), both `[M]` float32, from `[M, H]` last hidden states, in
    chunks to bound the logits in memory. Without `entropy` the second equals the first."""
    size = chunk_tokens(model)
    chunks = [
        _chunk_outputs(model, h, t, temperature, entropy, len(targets) > size)
        for h, t in zip(torch.split(hidden, size), torch.split(targets, size), strict=True)
    ]
    return torch.cat([c[0] for c in chunks]), torch.cat([c[1] for c in chunks])


def chunk_tokens(model: nn.Module) -> int:
    """Number of tokens whose logits are in memory at once."""
    return max(CHUNK_ELEMENTS // int(model.config.get_text_config().vocab_size), 1)  # type: ignore[union-attr, operator]


def _at(tokens: Tensor, values: Tensor, batch: Batch) -> Tensor:
    """`[N]` float32: `values` at these tokens, 0 elsewhere. Part of the autograd graph even if there are none."""
    return values.new_zeros(batch.num_tokens).index_put((tokens,), values)


def _chunk_outputs(
    model: nn.Module, hidden: Tensor, targets: Tensor, temperature: float, entropy: bool, recompute: bool
) -> tuple[Tensor, Tensor]:
    if recompute and torch.is_grad_enabled():
        result: tuple[Tensor, Tensor] = checkpoint(
            _log_probs, model, hidden, targets, temperature, entropy, use_reentrant=False
        )
        return result
    return _log_probs(model, hidden, targets, temperature, entropy)


def _log_probs(
    model: nn.Module, hidden: Tensor, targets: Tensor, temperature: float, entropy: bool
) -> tuple[Tensor, Tensor]:
    logits = output_logits(model, hidden).float()
    if temperature != 1.0:
        logits = logits / temperature
    logs = F.log_softmax(logits, dim=-1)
    chosen = logs.gather(1, targets[:, None])[:, 0]
    return chosen, -(logs.exp() * logs).sum(-1) if entropy else chosen


def output_logits(model: nn.Module, hidden: Tensor) -> Tensor:
    """`[M, V]` logits of `[M, H]` last hidden states.

    Computed by the model's own forward pass, on a shallow copy whose backbone is replaced: model families scale and cap
    their logits in different ways, which need not be reimplemented here.
    """
    name, backbone = _backbone(model)
    head = copy.copy(model)
    head.__dict__ = {**model.__dict__, "_modules": {**model._modules, name: _StandIn(backbone, hidden[None])}}
    logits: Tensor = head.forward(inputs_embeds=hidden[None], use_cache=False).logits
    return logits[0]


class _StandIn:
    """Replaces a backbone, or the stack of layers in it, and returns hidden states that are already known."""

    def __init__(self, backbone: nn.Module, hidden: Tensor) -> None:
        self._backbone = backbone
        self._found = _Found(hidden)

    def __call__(self, *args: object, **kwargs: object) -> _Found:
        return self._found

    def __getattr__(self, name: str) -> object:
        value = getattr(self._backbone, name)
        return self if isinstance(value, nn.Module) else value


class _Found:
    """Outputs of a backbone with hidden states only."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, at: int | slice) -> Tensor | tuple[()]:
        return self.last_hidden_state if at == 0 else ()

    def __getattr__(self, name: str) -> None:
        """All other outputs (caches, attentions, router logits) are None."""


def _backbone(model: nn.Module) -> tuple[str, nn.Module]:
    """The attribute with the backbone (the model below the head), and its module."""
    for name in (str(getattr(model, "base_model_prefix", "model")), "model"):
        if isinstance(module := getattr(model, name, None), nn.Module):
            return name, module
    raise ConfigError(f"{type(model).__name__} has no backbone of its own that could be run without its head")


def head_numbers(model: nn.Module, hidden: Tensor) -> Tensor:
    """`[M]` float32: output of a head with one label for hidden states `[M, H]`."""
    for name in ("score", "classifier"):
        if isinstance(head := getattr(model, name, None), nn.Module):
            # A sum over one element instead of a view: FSDP2 warns about views that leave a wrapped module.
            return head(hidden).float().sum(-1)  # type: ignore[no-any-return]
    raise ConfigError(f"{type(model).__name__} has no module 'score' or 'classifier' to read values from")


def _of_nothing(model: nn.Module, head: Head, batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
    """Outputs of a batch without tokens. The model still runs, on a dummy token with no effect: collectives of a
    wrapped model then take place on every rank, and gradients are zero instead of missing."""
    stand_in = Batch.from_rows([[0]]).to(batch.lengths.device)
    outputs = compute_outputs(model, head, stand_in, names)
    return {name: values[:0].clone() for name, values in outputs.items()}


def _check_names(names: Sequence[str], head: Head) -> None:
    gives = {Head.LM: ("log_probs", "entropy"), Head.VALUE: ("values",), Head.SCORE: ("scores",)}[head]
    for name in names:
        if name not in gives:
            known = f"a model with head {head.value!r} gives {list(gives)}"
            raise ConfigError(f"output {name!r}{nearest(name, OUTPUTS)}: {known}")
