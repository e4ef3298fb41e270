"""Checks, before any device is taken, that the models of a run have a row for every token of its data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlsdk.config import ModelConfig, Role, RunConfig
from rlsdk.data import AnswerEnds, PromptDataset
from rlsdk.interfaces import ConfigError, DataError, ModelSpec
from rlsdk.interfaces.spelling import Setting
from rlsdk.kit.model.hf import generation_stops, load_model_config


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """The smallest vocabulary of a run's models, and the tokens of the tokenizer that it lacks."""

    size: int
    where: str = ""
    """Field and model, for messages."""
    beyond: Mapping[int, str] = field(default_factory=dict)
    """Ids from `size` on -> token."""

    def check_prompts(self, prompts: PromptDataset) -> None:
        """Checks the tokens of prompts.

        Raises:
            DataError: one has a token that a model lacks; names the row.
        """
        if self.beyond:
            self.check_rows((prompt.prompt_ids for prompt in prompts), [row.source for row in prompts.rows])

    def check_rows(self, rows: Iterable[Sequence[int]], sources: Sequence[str]) -> None:
        """As `check_prompts`, for token ids and where each row came from."""
        for ids, source in zip(rows, sources, strict=True) if self.beyond else ():
            if ids and max(ids) >= self.size:
                token = next(token for token in ids if token >= self.size)
                raise DataError(f"{source}: {self.fault(token)}")

    def fault(self, token: int) -> str:
        """What is wrong with a token that a model lacks, and what to do."""
        return (
            f"the tokenizer reads {self.beyond.get(token, '?')!r} as token {token}, but {self.where} has vocab_size "
            f"{self.size}: ids 0 to {self.size - 1}. Name the tokenizer that belongs to the model "
            f"({Setting('model.tokenizer', 'FOLDER')}), or give the model rows for the new tokens "
            "(resize_token_embeddings, then save_pretrained)"
        )

    def notice(self) -> str | None:
        """What is to be said about tokens that the data does not use."""
        if not self.beyond:
            return None
        first = min(self.beyond)
        return (
            f"model.tokenizer: {len(self.beyond)} added tokens from {self.beyond[first]!r} = {first} on are unknown to "
            f"{self.where}, whose vocab_size is {self.size}; no row of the data uses them"
        )


def read_vocabulary(model: ModelConfig, table: Sequence[Role], tokenizer: Any, ends: AnswerEnds) -> Vocabulary:
    """Compares the tokenizer with `config.json` of every model that receives its tokens.

    Args:
        model: the policy's.
        table: roles of the run; judges have tokenizers of their own.
        tokenizer: the policy's.
        ends: tokens that end an answer.

    Raises:
        ConfigError: a model lacks tokens of the tokenizer's own vocabulary, the end of an answer, or the row of its
            padding token.
    """
    spec = ModelSpec(path=model.path or "", revision=model.revision, trust_remote_code=model.trust_remote_code)
    models = {spec.path: ("model.path", spec)}
    models |= {
        role.model.path: (role.fields["path"], role.model)
        for role in table
        if not (role.is_sampling and role.has_own_weights)
    }
    sizes = [(size, f"{where} {path!r}") for path, (where, one) in models.items() if (size := _vocab_size(one, where))]
    if not sizes:
        return Vocabulary(size=0)
    size, where = min(sizes)
    tokens = {int(token): str(name) for name, token in tokenizer.get_vocab().items()}
    vocabulary = Vocabulary(size=size, where=where, beyond={at: name for at, name in tokens.items() if at >= size})
    # Models of some families ship a tokenizer with added tokens that a smaller model never reads; others do not fit.
    added = set(tokenizer.get_added_vocab().values())
    unknown = sorted(token for token in vocabulary.beyond if token not in added or token == ends.learned)
    if unknown:
        raise ConfigError(
            f"model.tokenizer {model.tokenizer or model.path!r}: has {len(tokens):,} tokens with ids up to "
            f"{max(tokens)}; {vocabulary.fault(unknown[0])}"
        )
    return vocabulary


def odd_ends(config: RunConfig, tokenizer: Any) -> Iterator[str]:
    """What is said of the first and last tokens that the files of the policy's model name, and that do not exist: its
    responses never end there.

    Raises:
        ConfigError: a file cannot be read, or has something else than ids there.
    """
    model = config.model
    stops = [] if config.rollout.stop_token_ids is not None else generation_stops(model.path, model.revision)
    if beyond := [token for token in stops if not 0 <= token < len(tokenizer)]:
        yield (
            f"model.path {model.path!r}: generation_config.json has eos_token_id {beyond}, but the tokenizer has ids 0 "
            f"to {len(tokenizer) - 1}: no response ends there"
        )
    spec = ModelSpec(path=model.path or "", revision=model.revision, trust_remote_code=model.trust_remote_code)
    fields = load_model_config(spec).get_text_config()
    size = getattr(fields, "vocab_size", None)
    for name, effect in {"bos_token_id": "no prompt begins", "eos_token_id": "no response ends"}.items():
        named = getattr(fields, name, None)
        ids = named if isinstance(named, list | tuple) else [named]
        odd = [token for token in ids if isinstance(token, int) and isinstance(size, int) and not 0 <= token < size]
        if odd:
            shown = odd if isinstance(named, list | tuple) else odd[0]
            yield f"model.path {model.path!r}: config.json has {name} {shown}, but vocab_size {size}: {effect} there"


def _vocab_size(spec: ModelSpec, field: str) -> int | None:
    """`vocab_size` of a model's `config.json`; None: its configuration, of remote code, has no such field.

    Raises:
        ConfigError: there is no configuration, or its padding token has no row.
    """
    config = load_model_config(spec).get_text_config()
    size, pad = getattr(config, "vocab_size", None), getattr(config, "pad_token_id", None)
    if not isinstance(size, int):
        return None
    if isinstance(pad, int) and not -size <= pad < size:
        raise ConfigError(
            f"{field} {spec.path!r}: config.json has pad_token_id {pad}, but vocab_size {size}; set pad_token_id in "
            f"config.json to an id below {size}, or to null"
        )
    return size
