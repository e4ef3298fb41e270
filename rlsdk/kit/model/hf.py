"""Hugging Face models and tokenizers: building, loading, naming, writing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from rlsdk.interfaces import ConfigError, Head, ModelSpec, nearest
from rlsdk.kit.files.adapter_config import check_no_adapter
from rlsdk.kit.model.packed import ATTENTION, can_pack, register_attention
from rlsdk.kit.model.shapes import is_shape, shape_fields
from rlsdk.kit.weights.weight_fit import check_fits, check_unused, tie_error

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


def load_model_config(spec: ModelSpec) -> PretrainedConfig:
    """Loads `config.json` of a model, or makes that of a known shape.

    Raises:
        ConfigError: it is missing or cannot be read; the message says where it was looked for.
    """
    from transformers import AutoConfig

    if is_shape(spec.path):
        fields = shape_fields(spec.path)
        return AutoConfig.for_model(fields.pop("model_type"), **fields)
    check_no_adapter(Path(spec.path), "model.path")
    try:
        return AutoConfig.from_pretrained(spec.path, revision=spec.revision, trust_remote_code=spec.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"model.path {spec.path!r}: no model configuration could be read: {error}. Give a folder with config.json, "
            "or a name on the hub"
        ) from error


def model_vocabulary(spec: ModelSpec) -> int:
    """Number of token ids that a model knows, by its `config.json`."""
    return int(load_model_config(spec).get_text_config().vocab_size)


def torch_dtype(spec: ModelSpec) -> torch.dtype:
    """`ModelSpec.dtype`, as torch has it.

    Raises:
        ConfigError: torch has no such dtype, or one that no model computes in.
    """
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigError(f"model.dtype {spec.dtype!r}: expected 'float32', 'bfloat16' or 'float16'")
    return dtype


GENERIC_TOKENIZERS = ("TokenizersBackend", "PreTrainedTokenizerFast")
"""Class names of tokenizers that tokenizer.json describes completely."""


def load_tokenizer(
    path: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a model folder or hub name, exactly as its files describe it.

    Raises:
        ConfigError: there is none.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    try:
        # For some model types AutoTokenizer reads only the vocabulary and applies rules of the type: with a tokenizer
        # that tokenizer.json describes completely, characters are then lost silently.
        described = get_tokenizer_config(path, revision=revision).get("tokenizer_class") in GENERIC_TOKENIZERS
        kind = PreTrainedTokenizerFast if described else AutoTokenizer
        tokenizer: PreTrainedTokenizerBase = kind.from_pretrained(
            path, revision=revision, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"model.tokenizer {path!r}: no tokenizer could be loaded: {error}. Name one in model.tokenizer"
        ) from error
    # Without files, transformers makes a tokenizer of the model's type with an empty vocabulary.
    if len(tokenizer) <= len(tokenizer.get_added_vocab()):
        raise ConfigError(
            f"model.tokenizer {path!r}: no tokenizer could be loaded: no file. Name one in model.tokenizer"
        )
    return tokenizer


def stop_token_ids(
    tokenizer: Any,
    model_path: str | None,
    configured: Sequence[int | str] | None = None,
    *,
    turn_end: int | None = None,
    revision: str | None = None,
) -> tuple[int, ...]:
    """Ids of the tokens that end a response, each once: those of `configured`; if None, the one with which the chat
    template ends a turn, the tokenizer's end-of-sequence token, and those of the model's `generation_config.json`.

    Args:
        tokenizer: of the policy.
        model_path: folder or hub name of the model; None: no generation config is read.
        configured: ids, or tokens as strings of the tokenizer.
        turn_end: token with which the chat template ends an assistant's turn; None: there is none.
        revision: of a hub name.

    Raises:
        ConfigError: a name or id that the tokenizer does not have; or no stop token at all.
    """
    if configured is not None:
        ids = [_token_id(tokenizer, token) for token in configured]
        if not ids:
            raise ConfigError("rollout.stop_token_ids: is empty, so no response could ever end by itself; give null")
        return tuple(dict.fromkeys(ids))
    own = [int(token) for token in (turn_end, tokenizer.eos_token_id) if token is not None]
    # A generation config may list ids beyond this vocabulary (of an earlier model): they can never be sampled.
    listed = [token for token in generation_stops(model_path, revision) if 0 <= token < len(tokenizer)]
    if not own and not listed:
        raise ConfigError(
            "model.tokenizer: has no end-of-sequence token, and the model's generation_config.json names none, so no "
            "response could ever end by itself; name one in rollout.stop_token_ids"
        )
    return tuple(dict.fromkeys([*own, *listed]))


def _token_id(tokenizer: Any, token: int | str) -> int:
    if isinstance(token, int):
        if 0 <= token < len(tokenizer):
            return token
        raise ConfigError(
            f"rollout.stop_token_ids: {token} is not a token id; the tokenizer has ids 0 to {len(tokenizer) - 1}"
        )
    vocabulary = tokenizer.get_vocab()
    if token in vocabulary:
        return int(vocabulary[token])
    special = list(tokenizer.get_added_vocab())
    raise ConfigError(
        f"rollout.stop_token_ids: {token!r} is not a token of the tokenizer{nearest(token, special)}; it adds "
        f"{sorted(special)[:20]}. For a text of several tokens use rollout.stop_strings"
    )


def generation_stops(model_path: str | None, revision: str | None) -> list[int]:
    """`eos_token_id` of a model's generation config, as a list; empty if it has none.

    Raises:
        ConfigError: the file cannot be read, or holds something else there.
    """
    from transformers import GenerationConfig

    file = Path(model_path or "") / "generation_config.json"
    if not model_path or (file.parent.is_dir() and not file.exists()):
        return []
    try:
        stops = GenerationConfig.from_pretrained(model_path, revision=revision).eos_token_id
    except (OSError, ValueError, TypeError, AttributeError) as error:
        if isinstance(error, OSError) and not file.exists():  # a model of the hub without one
            return []
        raise ConfigError(f"model.path {model_path!r}: generation_config.json cannot be read: {error}") from error
    tokens = stops if isinstance(stops, list) else [] if stops is None else [stops]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in tokens):
        raise ConfigError(f"model.path {model_path!r}: generation_config.json has eos_token_id {stops!r}, expected ids")
    return tokens


def build_model(
    spec: ModelSpec,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    seed: int = 0,
    init_from_config: bool = False,
    empty: bool = False,
) -> PreTrainedModel:
    """Builds a transformers model with the head of `spec`, in evaluation mode, without dropout.

    It runs packed rows (`kit.model.packed`) if its layers allow it.

    Args:
        spec: folder or hub name, dtype and head.
        device: of its parameters.
        dtype: of its parameters; None: `spec.dtype`.
        seed: for random weights (of a new head, or all with `init_from_config`); equal seeds give equal weights on
            every device.
        init_from_config: random weights in place of the checkpoint's.
        empty: structure only, parameters on the meta device.

    Raises:
        ConfigError: the checkpoint cannot be read, is not in safetensors, or lacks tensors of this model; or there is
            no such dtype.
    """
    register_attention()
    config = load_model_config(spec)
    kind: Any = _auto_class(spec.head)
    options: dict[str, Any] = {"dtype": dtype or torch_dtype(spec)}
    if spec.head is not Head.LM:
        config.num_labels = 1
    with torch.random.fork_rng(devices=[]), no_progress_bars():
        torch.manual_seed(seed)
        if empty:
            with torch.device("meta"):
                model = kind.from_config(config, trust_remote_code=spec.trust_remote_code, **options)
            return _finish(model)
        if init_from_config:
            model = kind.from_config(config, trust_remote_code=spec.trust_remote_code, **options)
        else:
            model = _from_checkpoint(kind, spec, config, options)
    return _finish(model.to(device))


def _finish(model: PreTrainedModel) -> PreTrainedModel:
    _remove_dropout(model)
    _keep_in_float32(model)
    if can_pack(model):
        model.set_attn_implementation(ATTENTION)
    model.config.architectures = [type(model).__name__]
    return model.eval()


def _keep_in_float32(model: PreTrainedModel) -> None:
    """Keeps buffers in float32 if the model requires it; transformers does so only when it reads a checkpoint."""
    kept = model._keep_in_fp32_modules_strict or ()
    for name, buffer in persistent_buffers(model).items():
        if not set(kept).isdisjoint(name.split(".")):
            buffer.data = buffer.data.float()


def _remove_dropout(model: nn.Module) -> None:
    """Removes dropout also for training mode, which recomputation needs: log-probs of one batch must not vary between
    calls."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in [name for name, value in vars(module).items() if "dropout" in name and isinstance(value, float)]:
            setattr(module, name, 0.0)


def _from_checkpoint(kind: Any, spec: ModelSpec, config: Any, options: Mapping[str, Any]) -> PreTrainedModel:
    try:
        model, report = kind.from_pretrained(
            spec.path,
            config=config,
            revision=spec.revision,
            trust_remote_code=spec.trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
            **options,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        _explain_misfit(kind, spec, config)
        raise ConfigError(f"model.path {spec.path!r}: weights could not be loaded: {error}") from error
    _check_loaded(spec, model, report["unexpected_keys"])
    lacking = sorted(name for name in report["missing_keys"] if not (spec.head is not Head.LM and _is_head(name)))
    if lacking:
        raise ConfigError(
            f"model.path {spec.path!r}: the checkpoint lacks {len(lacking)} tensors of {type(model).__name__}, first "
            f"{lacking[0]!r}; give a folder that holds the whole model"
        )
    return cast("PreTrainedModel", model)


def _explain_misfit(kind: Any, spec: ModelSpec, config: Any) -> None:
    """Raises ConfigError by name of the tensor, if the files do not fit the configuration."""
    try:
        with torch.device("meta"):
            empty = kind.from_config(config, trust_remote_code=spec.trust_remote_code)
        tensors, tied = canonical_tensors(empty)
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if not _is_head(name)}
    except Exception:  # the error of the load says more
        return
    check_fits(spec, empty, shapes, tied)


def _check_loaded(spec: ModelSpec, model: Any, unexpected: Iterable[str]) -> None:
    """Checks that nothing of the files was left out."""
    for other, name in (getattr(model, "_tied_weights_keys", None) or {}).items() if _ties(model) else ():
        pair = [dict(model.named_parameters(remove_duplicate=False)).get(key) for key in (other, name)]
        if None not in pair and pair[0] is not pair[1]:  # transformers ties them only if their values are equal
            raise tie_error(spec, other, name)
    check_unused(spec, model, [name for name, _ in model.named_parameters(remove_duplicate=False)], unexpected)


def _ties(model: Any) -> bool:
    return bool(getattr(model.config.get_text_config(), "tie_word_embeddings", False)) and isinstance(
        getattr(model, "_tied_weights_keys", None), Mapping
    )


def _is_head(name: str) -> bool:
    """Whether a tensor belongs to a value or score head, which checkpoints of language models do not have."""
    return name.startswith(("score.", "classifier."))


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Suppresses the progress bars and tables of transformers, which would fill a worker's log."""
    from transformers.utils import logging

    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _auto_class(head: Head) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

    return AutoModelForCausalLM if head is Head.LM else AutoModelForTokenClassification


ADAPTER_PARTS = (".lora_A.", ".lora_B.")
"""What names of an adapter's parameters contain."""
BASE_LAYER = ".base_layer"
"""Part of a name that an adapted layer adds to its own weights."""


def canonical_parameters(model: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, str]]:
    """Parameters by their name in the checkpoint, and tied names -> the name of the shared tensor. Those of an adapter
    are left out."""
    owner: dict[int, str] = {}
    tied: dict[str, str] = {}
    parameters: dict[str, nn.Parameter] = {}
    for full_name, parameter in model.named_parameters(remove_duplicate=False):
        if any(part in full_name for part in ADAPTER_PARTS):
            continue
        name = full_name.replace(BASE_LAYER, "")
        first = owner.setdefault(id(parameter), name)
        if first == name:
            parameters[name] = parameter
        else:
            tied[name] = first
    return parameters, tied


def canonical_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors that are sent to a rollout engine: `canonical_parameters`, and persistent buffers."""
    parameters, tied = canonical_parameters(model)
    return {**parameters, **persistent_buffers(model)}, tied


def dtype_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Dtype names as in layouts."""
    return {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()}


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that are part of the checkpoint (such as the bias with which DeepSeek-V3 balances its experts, arXiv
    2412.19437, section 2.1.2); not trained here."""
    saved = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}
