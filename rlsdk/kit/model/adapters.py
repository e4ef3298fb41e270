"""Low-rank adapters beside the linear layers of a transformers model, by PEFT (`pip install 'rlsdk[lora]'`).

Names: a layer `NAME` (`model.layers.0.self_attn.q_proj`) with weight `NAME.weight` has the adapter's tensors
`NAME.lora_A.weight` `[rank, in]` and `NAME.lora_B.weight` `[out, rank]`, as in PEFT's files without their prefix.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from rlsdk.interfaces import FINGERPRINT_MODULUS, AdapterSpec, CheckpointError, ConfigError, Head, ModelSpec, nearest
from rlsdk.kit.model.hf import BASE_LAYER, canonical_parameters

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ALL_LINEAR = "all-linear"
ROUTERS = ("gate", "router", "shared_expert_gate")
"""Last parts of names of layers that choose experts: `all-linear` leaves them as they are."""
EXPERT_NAMES = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Last parts of names that PEFT's loader takes for those of stacked experts, in a model that has such."""
INSTALL = "pip install 'rlsdk[lora]'"
_PEFT_NAME = "default"
"""PEFT's name of a model's only adapter."""
_HOLDER = "model"


@dataclass(frozen=True)
class ModelAdapter:
    """The adapter of one model."""

    spec: AdapterSpec
    layers: Mapping[str, Any]
    """Name of each adapted module -> PEFT's layer in its place."""

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """A and B by name."""
        return {
            f"{name}.{kind}.weight": getattr(layer, kind)[_PEFT_NAME].weight
            for name, layer in self.layers.items()
            for kind in ("lora_A", "lora_B")
        }

    def module_of(self, weight: str) -> str | None:
        """The adapted module whose weight has this canonical name; None: it has no adapter."""
        name = weight.removesuffix(".weight")
        return name if name != weight and name in self.layers else None

    def merged(self, weight: str, rows: Tensor, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor:
        """Rows of a weight with the adapter added, if it has one: in float32, and then rounded to the weight's dtype.

        Args:
            weight: its canonical name.
            rows: `[rows, in]` of an adapted weight; any other tensor is returned as it is.
            a, b: by name: A whole, `[rank, in]`, and the same rows of B, `[rows, rank]`.
        """
        module = self.module_of(weight)
        if module is None:
            return rows.detach()
        return merged(rows, a[f"{module}.lora_A.weight"], b[f"{module}.lora_B.weight"], self.spec.scale)

    @contextmanager
    def switched_off(self) -> Iterator[None]:
        """The model computes as if it had no adapter, bit for bit."""
        for layer in self.layers.values():
            # `enable_adapters(False)` would also freeze A and B, and FSDP remembers that from a first pass.
            layer._disable_adapters = True
        try:
            yield
        finally:
            for layer in self.layers.values():
                layer._disable_adapters = False


PROBE_TOKENS = 16


def probe_tokens(vocabulary: int) -> list[int]:
    """Tokens over the whole vocabulary, on which an engine measures the effect of an adapter (`SyncReceipt.effect`)."""
    return [(2 * at + 1) * vocabulary // (2 * PROBE_TOKENS) for at in range(PROBE_TOKENS)]


def add_adapter(model: PreTrainedModel, spec: ModelSpec, *, trained: bool) -> ModelAdapter | None:
    """Puts the adapter of `spec` into a model, in place, and freezes everything else; None if there is none.

    Args:
        model: from `build_model`; may be on the meta device.
        spec: names the adapter.
        trained: whether A and B require a gradient.

    Returns:
        Its tensors, float32 on the model's device, without values: `initial_values` has them.

    Raises:
        ConfigError: PEFT is not installed; a target that does not exist, or that cannot have an adapter; a model with
            another head than its vocabulary's.
    """
    if spec.adapter is None:
        return None
    if spec.head is not Head.LM:
        raise ConfigError(
            f"model.lora.rank {spec.adapter.rank}: a model with a {spec.head.value} head trains its new head, which an "
            "adapter does not hold; leave model.lora out to train all weights"
        )
    if spec.adapter.dropout:
        raise ConfigError(f"model.lora.dropout {spec.adapter.dropout}: expected 0; log-probs must not depend on chance")
    names = target_modules(model, spec.adapter)
    peft = import_peft()
    # Inside a module without a configuration, PEFT does not take `gate_proj` of a model with experts for theirs.
    holder = nn.ModuleDict({_HOLDER: model})
    targets = [f"{_HOLDER}.{name}" for name in names]
    # Not with `low_cpu_mem_usage`, which for its time lets every thread of the process create empty tensors.
    with torch.random.fork_rng(devices=[]):
        peft.inject_adapter_in_model(peft_config(spec.adapter, targets), holder)
    model.requires_grad_(False)
    adapter = ModelAdapter(spec.adapter, {name: model.get_submodule(name) for name in names})
    for layer in adapter.layers.values():
        device = layer.get_base_layer().weight.device
        for part in (layer.lora_A, layer.lora_B):
            linear = part[_PEFT_NAME]
            values = torch.empty(linear.weight.shape, dtype=torch.float32, device=device)
            linear.weight = nn.Parameter(values, requires_grad=trained)
    return adapter


def import_peft() -> Any:
    """The package PEFT, which takes seconds to import.

    Raises:
        ConfigError: it is not installed; says how to install it.
    """
    if find_spec("peft") is None:
        raise ConfigError(f"model.lora.rank: adapters need the package peft in this environment: run `{INSTALL}`")
    import peft

    return peft


def peft_config(spec: AdapterSpec, modules: list[str], **more: Any) -> Any:
    """PEFT's configuration of the same adapter."""
    return import_peft().LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,
        lora_dropout=spec.dropout,
        use_rslora=spec.scaling == "rslora",
        target_modules=modules,
        init_lora_weights="gaussian" if spec.init == "gaussian" else True,
        bias="none",
        **more,
    )


def target_modules(model: PreTrainedModel, spec: AdapterSpec) -> list[str]:
    """Names of the modules that `spec.targets` means, in the model's order. In a model with stacked experts, the MLPs
    beside them cannot be targets: PEFT would read their adapters as those of experts.

    Raises:
        ConfigError: a target that no module has, that is no linear layer, or whose weight is tied to another.
    """
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    output = model.get_output_embeddings()
    if any(parameter.dim() == 3 for parameter in model.parameters()):
        linears = {name: module for name, module in linears.items() if _last(name) not in EXPERT_NAMES}
    plain = [name for name, module in linears.items() if module is not output and _last(name) not in ROUTERS]
    chosen: set[str] = set()
    for target in spec.targets:
        found = plain if target == ALL_LINEAR else _named(target, list(linears))
        if not found:
            raise ConfigError(_no_target(model, target, plain))
        chosen.update(found)
    if not chosen:
        raise ConfigError(f"model.lora.targets: is empty; give names of layers, or {ALL_LINEAR!r}")
    tied = canonical_parameters(model)[1]
    for name in chosen:
        if f"{name}.weight" in {*tied, *tied.values()}:
            raise ConfigError(
                f"model.lora.targets {_last(name)!r}: the weight of {name!r} is tied to that of another layer "
                f"({', '.join(sorted({*tied, *tied.values()}))}): an adapter would change one side only, and no engine "
                f"could serve it; leave it out, {ALL_LINEAR!r} does"
            )
    return [name for name in linears if name in chosen]


def adapter_shapes(model: PreTrainedModel, spec: AdapterSpec) -> dict[str, tuple[int, ...]]:
    """Shapes of an adapter's tensors by name, for a model without one; needs no PEFT."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name in target_modules(model, spec):
        linear: Any = model.get_submodule(name)
        shapes[f"{name}.lora_A.weight"] = (spec.rank, linear.in_features)
        shapes[f"{name}.lora_B.weight"] = (linear.out_features, spec.rank)
    return shapes


def _named(target: str, names: list[str]) -> list[str]:
    return [name for name in names if name == target or name.endswith(f".{target}")]


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _no_target(model: PreTrainedModel, target: str, plain: list[str]) -> str:
    """Why no layer is meant by a target."""
    known = list(dict.fromkeys(map(_last, plain)))
    others = [*_named(target, [name for name, _ in model.named_modules()])]
    stacked = _named(target, [name for name, p in model.named_parameters() if p.dim() == 3])
    if target == ALL_LINEAR:
        said = f"{type(model).__name__} has no linear layers of its own that could have an adapter"
    elif stacked:
        said = f"{stacked[0]!r} holds the stacked experts, which have no adapters here"
    elif others and _last(others[0]) in EXPERT_NAMES:
        said = f"{others[0]!r} stands beside stacked experts of the same name, for which PEFT would take its adapter"
    elif others:
        said = f"{others[0]!r} is a {type(model.get_submodule(others[0])).__name__}, and no linear layer"
    else:
        said = f"no layer of {type(model).__name__} has this name{nearest(target, [*known, ALL_LINEAR])}"
    return f"model.lora.targets {target!r}: {said}; expected names of {known}, or {ALL_LINEAR!r}"


@torch.no_grad()
def merged(base: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Rows of a weight with their adapter added in float32, and then rounded to the weight's dtype.

    Args:
        base: `[rows, in]`.
        a: `[rank, in]` float32.
        b: the same rows of B, `[rows, rank]` float32.
        scale: `AdapterSettings.scale`.
    """
    return torch.addmm(base.float(), b, a, alpha=scale).to(base.dtype)


def count_moved(pairs: Iterable[tuple[Tensor, Tensor]]) -> tuple[int, int]:
    """(elements that differ, all elements) of tensors and what they became."""
    moved = numel = 0
    for before, after in pairs:
        moved, numel = moved + int((before != after).sum()), numel + before.numel()
    return moved, numel


class Switch(Protocol):
    """An adapter that can be switched off, as `ModelAdapter` can."""

    def switched_off(self) -> AbstractContextManager[None]:
        """The model computes as if it had no adapter, bit for bit."""


@dataclass
class KeptReference:
    """The reference policy of a model with an adapter: the adapter as it was when `keep` was called, or before that the
    model without it."""

    adapter: Switch
    held: Mapping[str, Tensor]
    """A and B that the engine trains, by name."""
    values: dict[str, Tensor] = field(default_factory=dict)
    """Empty: nothing was kept."""
    filled: Callable[[], None] = lambda: None
    """Called after `held` got other values: for an engine whose passes compute with copies of them."""

    def keep(self) -> None:
        """Copies the current values."""
        self.values = {name: tensor.detach().clone() for name, tensor in self.held.items()}

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """The model computes as the reference; afterwards as before, bit for bit."""
        if not self.values:
            with self.adapter.switched_off():
                yield
            return
        own = {name: tensor.detach().clone() for name, tensor in self.held.items()}
        try:
            self._fill(self.values)
            yield
        finally:
            self._fill(own)

    @torch.no_grad()
    def _fill(self, values: Mapping[str, Tensor]) -> None:
        for name, tensor in self.held.items():
            tensor.copy_(values[name])
        self.filled()


def base_digest(fingerprints: Mapping[str, int], spec: AdapterSpec) -> str:
    """One text for all frozen weights, from the fingerprint of each whole tensor, and for the adapter's scale."""
    lines = [f"{name} {value % FINGERPRINT_MODULUS}\n" for name, value in sorted(fingerprints.items())]
    return f"{hashlib.sha256(''.join(lines).encode()).hexdigest()[:32]} scale {spec.scale:g}"


def check_base(path: object, there: object, here: str | None) -> None:
    """Checks that a checkpoint's adapter was trained on the frozen weights of this model, with the same scale.

    Args:
        path: of the checkpoint.
        there: its `base_digest`; None: it holds a model whose weights are all trained.
        here: that of this model; None: it has no adapter.

    Raises:
        CheckpointError: they differ.
    """
    if there == here:
        return
    if there is None:
        said = "holds a model whose weights are all trained: resume it without an adapter (model.lora.rank 0)"
    elif here is None:
        said = "holds an adapter alone: resume it with the model.lora that it was trained with"
    else:
        said = (
            f"holds an adapter of another model: the fingerprint of its frozen weights is {there}, that of this model "
            f"{here}; resume it with the model.path, model.dtype and model.lora that it was trained with"
        )
    raise CheckpointError(f"{path} {said}")


def short_targets(model: nn.Module, modules: list[str]) -> list[str]:
    """The shortest names by which PEFT and engines find exactly these modules: last parts, or else whole names."""
    lasts = {_last(name) for name in modules}
    linears = [
        name.removesuffix(BASE_LAYER)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and ".lora_" not in name
    ]
    return sorted(lasts) if {n for n in linears if _last(n) in lasts} == set(modules) else sorted(modules)
