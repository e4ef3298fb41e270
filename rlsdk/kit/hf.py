"""Hugging Face models and tokenizers: building, loading, naming, writing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rlsdk.interfaces import ConfigError, Head, ModelSpec
from rlsdk.kit.packed import ATTENTION, register_attention

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

MAX_SHARD_BYTES = 4 << 30
"""Of one safetensors file of an export."""


def load_model_config(spec: ModelSpec) -> PretrainedConfig:
    """`config.json` of a model.

    Raises:
        ConfigError: there is none, or it cannot be read; says where it was looked for.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(spec.path, revision=spec.revision, trust_remote_code=spec.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"model.path {spec.path!r}: no model configuration could be read: {error}. Give a folder with config.json, "
            "or a name on the hub"
        ) from error


def load_tokenizer(
    path: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or hub name.

    Raises:
        ConfigError: there is none.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            path, revision=revision, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"model.tokenizer {path!r}: no tokenizer could be loaded: {error}. Name one in model.tokenizer"
        ) from error
    return tokenizer


def build_model(
    spec: ModelSpec,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    seed: int = 0,
    init_from_config: bool = False,
    empty: bool = False,
) -> PreTrainedModel:
    """A transformers model with the head that `spec` asks for, in evaluation mode, with packed attention.

    Args:
        spec: where it comes from.
        device: where its parameters live.
        dtype: of its parameters; None: `spec.dtype`.
        seed: of random weights (a new head's, or all with `init_from_config`); equal seeds give equal weights.
        init_from_config: random weights in place of the checkpoint's.
        empty: structure only, parameters on the meta device.
    """
    register_attention()
    config = load_model_config(spec)
    kind: Any = _auto_class(spec.head)
    options: dict[str, Any] = {"dtype": dtype or getattr(torch, spec.dtype), "attn_implementation": ATTENTION}
    if spec.head is not Head.LM:
        config.num_labels = 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if empty:
            with torch.device("meta"):
                return _finish(kind.from_config(config, trust_remote_code=spec.trust_remote_code, **options))
        if init_from_config:
            model = kind.from_config(config, trust_remote_code=spec.trust_remote_code, **options)
        else:
            model = _from_checkpoint(kind, spec, config, options)
    return _finish(model.to(device))


def _finish(model: PreTrainedModel) -> PreTrainedModel:
    # Dropout would make log-probs of one batch differ from call to call; policy gradients need them exact.
    model.eval()
    model.config.use_cache = False
    return model


def _from_checkpoint(kind: Any, spec: ModelSpec, config: Any, options: Mapping[str, Any]) -> PreTrainedModel:
    try:
        model: PreTrainedModel = kind.from_pretrained(
            spec.path,
            config=config,
            revision=spec.revision,
            trust_remote_code=spec.trust_remote_code,
            use_safetensors=True,
            **options,
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model.path {spec.path!r}: weights could not be loaded: {error}") from error
    return model


def _auto_class(head: Head) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

    return AutoModelForCausalLM if head is Head.LM else AutoModelForTokenClassification


def canonical_parameters(model: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, str]]:
    """Parameters by their name in the checkpoint, and tied names with the name that holds their one copy."""
    owner: dict[int, str] = {}
    tied: dict[str, str] = {}
    parameters: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = owner.setdefault(id(parameter), name)
        if first == name:
            parameters[name] = parameter
        else:
            tied[name] = first
    return parameters, tied


def save_hf_folder(path: Path, config: PretrainedConfig, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Writes `config.json` and safetensors that `from_pretrained` reads; one file's worth is in memory at a time.

    Args:
        path: an existing folder.
        config: of the model.
        tensors: canonical names and values, tied copies left out.
    """
    from safetensors.torch import save_file

    config.save_pretrained(path)
    index: dict[str, str] = {}
    files: list[str] = []
    total = 0
    for group in _groups(tensors):
        files.append(f"part-{len(files)}.safetensors")
        save_file({name: t.contiguous() for name, t in group.items()}, path / files[-1], metadata={"format": "pt"})
        index |= dict.fromkeys(group, files[-1])
        total += sum(t.numel() * t.element_size() for t in group.values())
    if len(files) == 1:
        os.replace(path / files[0], path / "model.safetensors")
        return
    names = {old: f"model-{n:05d}-of-{len(files):05d}.safetensors" for n, old in enumerate(files, 1)}
    for old, new in names.items():
        os.replace(path / old, path / new)
    import json

    weight_map = {name: names[file] for name, file in index.items()}
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1)
    (path / "model.safetensors.index.json").write_text(text)


def copy_tokenizer_files(source: str, target: Path) -> None:
    """Copies the tokenizer's files of a local model folder."""
    for pattern in ("tokenizer*", "special_tokens_map.json", "vocab*", "merges.txt", "chat_template*"):
        for file in Path(source).glob(pattern):
            shutil.copy(file, target / file.name)


def _groups(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    group: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        if group and size + num_bytes > MAX_SHARD_BYTES:
            yield group
            group, size = {}, 0
        group[name] = tensor
        size += num_bytes
    if group:
        yield group
