from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import pytest

from rlsdk.builtin import rlsdk_register_datasets
from rlsdk.data import DataRow, Loader, check_source, load_rows
from rlsdk.data.sources import load_json
from rlsdk.rewards import load_function

SLICES = Path(__file__).parent.parent / "data"

CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</{{ m['role'] }}>"
    "{% if m['content'] == 'refuse me' %}{{ raise_exception('no such thing') }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def check(name: str, *, kinds: Collection[str]) -> None:
    """`check_source` with loaders that check nothing themselves."""
    check_source(name, kinds=kinds, resolve=lambda kind: load_json)


@pytest.fixture(scope="session")
def sources() -> dict[str, str]:
    """The registered sources, as the built-in hooks name them."""
    found: dict[str, str] = {}
    rlsdk_register_datasets(lambda name, target, description="": found.__setitem__(name, target))
    return found


@pytest.fixture(scope="session")
def load(sources: Mapping[str, str]) -> Callable[..., list[DataRow]]:
    """`load_rows` with the built-in sources."""

    def resolve(kind: str) -> Loader:
        return load_function(sources[kind])

    def call(name: object, limit: int | None = None, **options: Any) -> list[DataRow]:
        return load_rows(str(name), kinds=sources, resolve=resolve, options=options, limit=limit)

    return call


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """A byte-level fast tokenizer made on the spot: 256 bytes and an end token, no chat template."""
    return make_tokenizer()


@pytest.fixture(scope="session")
def chat_tokenizer() -> Any:
    return make_tokenizer(chat_template=CHAT_TEMPLATE)


def make_tokenizer(*, chat_template: str | None = None, end_behind_texts: bool = False) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {char: at for at, char in enumerate(alphabet)} | {"<end>": len(alphabet)}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    if end_behind_texts:
        inner.post_processor = processors.TemplateProcessing(
            single="$A <end>", special_tokens=[("<end>", vocabulary["<end>"])]
        )
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>")
    made.chat_template = chat_template
    return made


def rows_of(*rows: Mapping[str, Any]) -> list[DataRow]:
    return [DataRow(row=row, source=f"made.jsonl:{number}") for number, row in enumerate(rows, 1)]


def write_lines(path: Path, *rows: object) -> Path:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
