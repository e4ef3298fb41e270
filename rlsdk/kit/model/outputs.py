"""Model outputs for training: log-probs, entropy, values and scores, flat, each at its token."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from rlsdk.interfaces import OUTPUTS, Batch, ConfigError, Head, nearest
from rlsdk.kit.model.chunked_head import OfLogits, Product, VocabularyHead, log_probs, outputs_of_logits
from rlsdk.kit.model.context_parallel import ContextSplit
from rlsdk.kit.model.divergence import divergence, most_probable, top_divergence
from rlsdk.kit.model.logit_chunks import chunk_tokens
from rlsdk.kit.model.packed import ATTENTION
from rlsdk.kit.model.pass_plan import PassPlan, plan_pass, send
from rlsdk.kit.ranks.progress import advance

TOP_FIELDS = ("teacher_top_ids", "teacher_top_log_probs")
_TOP = ("top_ids", "top_log_probs")
_OF_LOGITS = ("log_probs", "entropy", "divergence", *_TOP)
"""Outputs that are made of logits, in the order in which they are computed."""


NO_TEACHERS: Mapping[int, TeacherHead] = MappingProxyType({})


class OutputModel(nn.Module):
    """A transformers model whose forward pass computes `OUTPUTS`. A single module, so that wrappers (FSDP, compile)
    apply to all of it."""

    def __init__(
        self, model: nn.Module, head: Head = Head.LM, split: ContextSplit | None = None, *, steady: bool = False
    ) -> None:
        """`split`: ranks that run a stretch each of the passes that `send` plans. `steady`: see `VocabularyHead`."""
        super().__init__()
        self.model = model
        self.head = head
        self.split = split
        self.steady = steady
        self.teachers: dict[int, TeacherHead] = {}
        """Heads of the teachers of the output `divergence`, by number; not a part of this module."""

    def forward(
        self, batch: Batch, names: Sequence[str], packed: bool | None = None, *, plan: PassPlan | None = None
    ) -> dict[str, Tensor]:
        """See `compute_outputs`."""
        assert plan is not None or self.split is None, "ranks that split a pass need its plan"
        return compute_outputs(
            self.model,
            self.head,
            batch,
            names,
            plan=plan,
            packed=packed,
            teachers=self.teachers,
            steady=self.steady,
        )

    def send(self, batch: Batch, device: torch.device, *, packed: bool | None = None) -> tuple[Batch, PassPlan]:
        """A micro-batch and the plan of its pass on a device, without a wait for the device.

        Args:
            batch: `input_ids`, on the CPU.
            device: the model's.
            packed: see `compute_outputs`.
        """
        batch = batch.with_places()
        return send(batch, _plan(self.model, self.head, batch, device.type, packed, self.split), device)


@dataclass(frozen=True)
class TeacherHead:
    """The head of a teacher (`kit.model.divergence.load_teacher_head`)."""

    model: nn.Module

    @property
    def width(self) -> int:
        """H: size of its hidden states."""
        return int(self.model.config.get_text_config().hidden_size)  # type: ignore[union-attr, operator]

    def logits(self, hidden: Tensor, temperature: float) -> Tensor:
        """`[m, V]` float32, divided by the temperature, of hidden states `[m, W]`: the teacher's `[m, H]`, and zeros
        where others are wider."""
        head, hidden = vocabulary_head(self.model, temperature), hidden[:, : self.width]
        return head.logits(hidden if head.weight is None else hidden.to(head.weight.dtype))


def compute_outputs(
    model: nn.Module,
    head: Head,
    batch: Batch,
    names: Sequence[str],
    *,
    plan: PassPlan | None = None,
    packed: bool | None = None,
    teachers: Mapping[int, TeacherHead] = NO_TEACHERS,
    steady: bool = False,
) -> dict[str, Tensor]:
    """Computes `names` of `OUTPUTS`; differentiable.

    Log-probs and entropy are in nats, of logits / `batch.temperature`, in float32 for every model dtype. If the batch
    has a `response_mask`, they are computed only on its tokens and are 0 elsewhere. Memory does not grow with tokens
    times vocabulary (`kit.model.chunked_head`).

    Args:
        model: from `kit.model.hf.build_model`.
        head: the model's head.
        batch: `input_ids`, on the model's device.
        names: of `OUTPUTS`.
        plan: of the pass over this batch, on the model's device. None: made here, which waits for an accelerator.
        packed: without a plan: whether to pack; None: the cheaper form.
        teachers: of the output `divergence`, by number, where the batch has their states.
        steady: see `VocabularyHead`.

    Returns:
        `log_probs`, `entropy`, `values`, `divergence`: `[N]` float32; `hidden_states`: `[N, H]` float32, without
        gradient; `top_ids` int64 and `top_log_probs`: `[N, k]`; `scores`: `[B]` float32.

    Raises:
        ConfigError: an output that the head does not compute, a temperature that is not above 0, a divergence without a
            teacher, or `packed` is True for a model that cannot pack.
    """
    advance()
    _check_names(names, head)
    if not batch.temperature > 0:
        raise ConfigError(f"temperature {batch.temperature} of the batch: log-probs need one above 0")
    if "divergence" in names and not teachers and "teacher_top_ids" not in batch:
        raise ConfigError("output 'divergence': no teacher was loaded (`load_teacher`)")
    if plan is None:
        device = batch.lengths.device
        plan = _plan(model, head, batch.to("cpu"), device.type, packed).to(device)
    backbone = _backbone(model)[1]
    hidden = backbone(input_ids=plan.input_ids, use_cache=False, **_packing(plan)).last_hidden_state
    # By `index_select`, whose gradient adds in a fixed order. That of `hidden[index]` adds in whatever order threads
    # come on a CPU, so that two runs of the same seeds differ in their last bits, and it takes four times as long.
    states = hidden.flatten(0, 1).index_select(0, plan.states)
    if head is Head.LM:
        outputs = _of_tokens(model, batch, plan, names, states, teachers, steady=steady)
    elif head is Head.SCORE:
        outputs = {"scores": plan.outputs(head_numbers(model, states))}
    else:
        outputs = {"values": _at(plan, plan.outputs(head_numbers(model, states)))}
    if batch.num_tokens == 0:
        return {name: values[:0].clone() for name, values in outputs.items()}
    return outputs


def _packing(plan: PassPlan) -> dict[str, object]:
    """Arguments with which a backbone runs a packed row."""
    if plan.rows is None:
        return {}
    # A mask of ones changes nothing. Without one, transformers reads from the positions whether rows are packed, and
    # waits for the device.
    ones = torch.ones_like(plan.input_ids, dtype=torch.bool)
    return {"position_ids": plan.position_ids, "attention_mask": ones, "packed_rows": plan.rows}


def _plan(
    model: nn.Module,
    head: Head,
    batch: Batch,
    device: str,
    packed: bool | None,
    split: ContextSplit | None = None,
) -> PassPlan:
    """The plan of a pass over a batch on the CPU. Without tokens the model still runs, on a dummy token with no effect:
    collectives of a wrapped model then take place on every rank, and gradients are zero instead of missing."""
    backbone = _backbone(model)[1]
    able = backbone.config._attn_implementation == ATTENTION  # type: ignore[union-attr]
    if (packed or split) and not able:
        raise ConfigError(f"{type(backbone).__name__} cannot run packed rows: leave `packed` at None")
    batch = batch if batch.num_tokens else Batch.from_rows([[0]])
    return plan_pass(batch, head, can_pack=able, device=device, packed=packed, split=split)


def _of_tokens(
    model: nn.Module,
    batch: Batch,
    plan: PassPlan,
    names: Sequence[str],
    states: Tensor,
    teachers: Mapping[int, TeacherHead],
    *,
    steady: bool,
) -> dict[str, Tensor]:
    """The outputs `names` of a language model, of the hidden states that its head reads."""
    index, places, targets = plan.index, plan.places, plan.targets
    assert index is not None
    assert places is not None
    assert targets is not None  # language models have all three
    found, given = {"hidden_states": states.detach().float()}, [targets]
    if "divergence" in names:
        # Rows that share a prefix have the same teacher (`distinct_prefixes`), and so its hidden states: any will do.
        at = plan.own(places.new_zeros(plan.num_states).scatter(0, index, places))
        several = ("teacher_index",) if len(teachers) > 1 else ()
        fields = TOP_FIELDS if TOP_FIELDS[0] in batch else ("teacher_states", *several)
        given += [batch[field].index_select(0, at) for field in fields]
    if set(names) - found.keys():
        asked = [name for name in _OF_LOGITS if name == "log_probs" or name in names]
        compute = functools.partial(_of_logits, asked, teachers, batch.meta)
        values = head_outputs(model, compute, states, given, batch.temperature, steady=steady)
        found |= dict(zip(asked, values, strict=True))
    return {name: _at(plan, plan.outputs(found[name])) for name in names}


def _of_logits(
    names: Sequence[str],
    teachers: Mapping[int, TeacherHead],
    meta: Mapping[str, float],
    logits: Tensor,
    targets: Tensor,
    *of_teacher: Tensor,
) -> tuple[Tensor, ...]:
    """What is needed of the logits of a chunk of tokens; an `OfLogits`. `of_teacher`: its states, with its number
    where there are several teachers, or `TOP_FIELDS`."""
    found = log_probs(logits, targets, entropy="entropy" in names)
    if "divergence" in names:
        found = *found, _divergence_of(teachers, meta, logits, *of_teacher)
    if "top_ids" in names or "top_log_probs" in names:
        ids, log_probs_of = most_probable(logits, int(meta["top_k"]))
        found = *found, *(one for name, one in zip(_TOP, (ids, log_probs_of), strict=True) if name in names)
    return found


def _divergence_of(
    teachers: Mapping[int, TeacherHead], meta: Mapping[str, float], logits: Tensor, *given: Tensor
) -> Tensor:
    beta = meta["divergence_beta"]
    if not given[0].is_floating_point():
        ids, top = given
        return top_divergence(logits, ids, top, beta)
    if len(given) == 1:
        ((number, teacher),) = teachers.items()
        with torch.no_grad():
            others = teacher.logits(given[0], _temperature(meta, number))
        return divergence(logits, others, beta)
    states, numbers = given
    found = logits.new_zeros(len(logits))
    for number, teacher in teachers.items():
        # Teachers differ in width and in vocabulary, so that each reads its own tokens.
        mine = (numbers == number).nonzero()[:, 0]
        with torch.no_grad():
            others = teacher.logits(states[mine], _temperature(meta, number))
        found = found.index_add(0, mine, divergence(logits.index_select(0, mine), others, beta))
    return found


def _temperature(meta: Mapping[str, float], number: int) -> float:
    return meta[f"teacher_temperature.{number}" if number else "teacher_temperature"]


def head_outputs(
    model: nn.Module,
    compute: OfLogits,
    hidden: Tensor,
    given: Sequence[Tensor],
    temperature: float,
    *,
    steady: bool = False,
) -> tuple[Tensor, ...]:
    """What `compute` makes of the logits of `[M, H]` last hidden states, and of the `[M, ...]` tensors `given`; see
    `outputs_of_logits`."""
    size = int(model.config.get_text_config().vocab_size)  # type: ignore[union-attr, operator]
    chunk = chunk_tokens(size, hidden.device.type)
    vocabulary = replace(vocabulary_head(model, temperature), steady=steady)
    return outputs_of_logits(vocabulary, compute, hidden, given, chunk)


def vocabulary_head(model: nn.Module, temperature: float) -> VocabularyHead:
    """The layers of a transformers model above its backbone."""
    name = _output_embedding(model)
    product: Any = model._modules.get(name)
    others = (p for module in layers_above(model) if module is not product for p in module.parameters())
    return VocabularyHead(
        weight=getattr(product, "weight", None),
        bias=getattr(product, "bias", None),
        project=functools.partial(output_logits, model),
        others=(*model.parameters(recurse=False), *others),
        temperature=temperature,
    )


def layers_above(model: nn.Module) -> list[nn.Module]:
    """Modules of a transformers model above its backbone, which compute its logits. They run once for each chunk of
    tokens, so that ranks may run them different numbers of times."""
    return [module for name, module in model._modules.items() if module is not None and name != _backbone(model)[0]]


def _output_embedding(model: nn.Module) -> str:
    """The attribute with the layer that multiplies by the vocabulary; empty unless it is a plain linear layer."""
    layer: Any = model.get_output_embeddings()  # type: ignore[operator]
    plain = type(layer) is nn.Linear and not layer._forward_hooks and not layer._forward_pre_hooks
    return next((name for name, module in model._modules.items() if plain and module is layer), "")


def _at(plan: PassPlan, values: Tensor) -> Tensor:
    """`[N, ...]`: `values` at the places of the plan, 0 elsewhere; in the autograd graph even if there are no
    values."""
    assert plan.places is not None
    return values.new_zeros(plan.num_results, *values.shape[1:]).index_put((plan.places,), values)


def output_logits(model: nn.Module, hidden: Tensor, product: Product | None = None) -> Tensor:
    """`[M, V]` logits of `[M, H]` last hidden states.

    Computed by the model's own forward pass, on a shallow copy whose backbone is replaced: model families scale and cap
    their logits in different ways, which need not be reimplemented here. `product` replaces the output embedding.
    """
    name, backbone = _backbone(model)
    modules: dict[str, Any] = {**model._modules, name: _StandIn(backbone, hidden[None])}
    if product is not None:
        modules[_output_embedding(model)] = _ProductLayer(product, hidden.new_empty(0))
    head = copy.copy(model)
    head.__dict__ = {**model.__dict__, "_modules": modules}
    logits: Tensor = head.forward(inputs_embeds=hidden[None], use_cache=False).logits
    return logits[0]


class _ProductLayer:
    """Replaces an output embedding. A few families read its weight's dtype; the weight itself is not there to be used
    without its gradient."""

    def __init__(self, product: Product, weight: Tensor) -> None:
        self._product, self.weight = product, weight

    def __call__(self, hidden: Tensor) -> Tensor:
        return self._product(hidden)


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


def empty_outputs(model: nn.Module, batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
    """Zeros on the CPU in the shapes of these outputs, to be filled micro-batch by micro-batch."""
    size = int(model.config.get_text_config().hidden_size) if "hidden_states" in names else 0  # type: ignore[union-attr, operator]
    shapes = {"scores": (batch.num_rows,), "hidden_states": (batch.num_tokens, size)}
    shapes |= {name: (batch.num_tokens, int(batch.meta["top_k"])) for name in _TOP if name in names}
    dtypes = {"top_ids": torch.int64}
    return {name: torch.zeros(shapes.get(name, (batch.num_tokens,)), dtype=dtypes.get(name)) for name in names}


def _check_names(names: Sequence[str], head: Head) -> None:
    of_tokens = ("hidden_states", *_OF_LOGITS)
    gives = {Head.LM: of_tokens, Head.VALUE: ("values",), Head.SCORE: ("scores",)}[head]
    for name in names:
        if name not in gives:
            known = f"a model with head {head.value!r} gives {list(gives)}"
            raise ConfigError(f"output {name!r}{nearest(name, OUTPUTS)}: {known}")
