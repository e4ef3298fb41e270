"""Prevents text of data from becoming control tokens (prompt injection through special tokens).

A tokenizer reads `<|im_end|>` in a text as the token that ends a turn, wherever the text came from, so a prompt could
close its own turn and open a system turn. Here only templates and settings produce special tokens; in the text of a row
the same characters are encoded like any other text.

How: special tokens in the row are replaced by placeholders while the template is rendered, so the remaining ones are
the template's own. Those are replaced by private names that a copy of the tokenizer has as added tokens; the copy reads
special tokens as text (`encode_special_tokens` of the tokenizers library), and the ids of the private names are mapped
back. Everything else, including white space and normalization around special tokens, is up to the tokenizer.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlsdk.interfaces import DataError

if TYPE_CHECKING:
    import tokenizers

    from rlsdk.data.rows import JsonValue

_OPEN, _CLOSE = "\ue0f0", "\ue0f1"
"""Private-use characters around placeholders and private names, with an unpredictable number between them."""


class LiteralEncoder:
    """Finds special tokens in texts, hides them, and encodes texts in which some special tokens are plain text.

    Created once per tokenizer; `encode` builds its copy of the tokenizer on the first call.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        names = sorted(_special_tokens(tokenizer), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, names))) if names else None
        self._starts = {name[0] for name in names}
        self._normalized = _normalized_search(tokenizer)
        self._nonce = secrets.token_hex(8)
        self._split = f"{_OPEN}{self._nonce}b{_CLOSE}"
        self._hidden: dict[str, int] = {}
        """Special token -> number of its placeholder."""
        self._place = re.compile(f"{_OPEN}{self._nonce}h([0-9]+){_CLOSE}")
        self._copy: tuple[tokenizers.Tokenizer, dict[str, str], dict[int, int]] | None = None

    def found_in(self, value: JsonValue) -> bool:
        """Whether a text, or any text in messages, contains a special token."""
        pattern = self._pattern
        if pattern is None:
            return False

        def holds(text: str) -> bool:
            # Checking first characters decides nearly all texts, many times faster than the pattern.
            return any(start in text for start in self._starts) and pattern.search(text) is not None

        return _any_text(value, holds) or self.found_normalized(value)

    def found_normalized(self, value: JsonValue) -> bool:
        """Whether it contains one that the tokenizer matches only after normalization of the text."""
        return self._normalized is not None and _any_text(value, self._normalized)

    def hide(self, value: JsonValue) -> Any:
        """A copy with a placeholder for every special token in every text."""
        if isinstance(value, str):
            return self.hide_parts([(value, False)])
        if isinstance(value, Mapping):
            return {key: self.hide(item) for key, item in value.items()}
        return [self.hide(item) for item in value] if isinstance(value, Sequence) else value

    def hide_parts(self, parts: Sequence[tuple[str, bool]]) -> str:
        """Joins texts, with a placeholder for every special token that is not completely within one trusted text.

        Args:
            parts: text, and whether it is trusted: from the run's configuration, not from the data.
        """
        joined = "".join(text for text, _ in parts)
        if self._pattern is None:
            return joined
        trusted: list[tuple[int, int]] = []
        at = 0
        for text, is_trusted in parts:
            if is_trusted:
                trusted.append((at, at + len(text)))
            at += len(text)

        def hidden(match: re.Match[str]) -> str:
            if any(start <= match.start() and match.end() <= end for start, end in trusted):
                return match[0]
            return f"{_OPEN}{self._nonce}h{self._hidden.setdefault(match[0], len(self._hidden))}{_CLOSE}"

        return self._pattern.sub(hidden, joined)

    def show(self, text: str, split_by: str = "") -> str:
        """The text with every placeholder replaced by its special token, with `split_by` inserted after the first
        character."""

        contents = [*self._hidden]

        def hidden(match: re.Match[str]) -> str:
            content = contents[int(match[1])]
            return content[:1] + split_by + content[1:]

        return self._place.sub(hidden, text)

    def encode(self, text: str, *, add_special_tokens: bool, where: str) -> list[int]:
        """Token ids of a text in which placeholders mean plain text, and special tokens mean themselves.

        Raises:
            DataError: this tokenizer cannot encode the characters of a special token as text; names `where`.
        """
        copy, names, ids = self._literal_copy(where)
        if self._pattern is not None:
            text = self._pattern.sub(lambda match: names[match[0]], text)
        unknown = getattr(self._tokenizer, "unk_token_id", None)
        control = set(ids.values()) - {unknown}
        # A vocabulary may contain a special token as an ordinary piece too (as Unigram models do). If the result has
        # one, the characters are split after the first one by a private name, which is removed again.
        for shown in (self.show(text), self.show(text, split_by=self._split)):
            encoded = copy.encode(shown, add_special_tokens=add_special_tokens)
            # The mask marks tokens that the tokenizer itself adds around a text.
            pairs = zip(encoded.ids, encoded.special_tokens_mask, strict=True)
            if not any(token in control and not added for token, added in pairs):
                split = copy.token_to_id(self._split)
                return [ids.get(token, token) for token in encoded.ids if token != split]
        raise self._refused(where)

    def _refused(self, where: str) -> DataError:
        return DataError(
            f"{where}: the text holds a special token of the tokenizer, which {type(self._tokenizer).__name__} cannot "
            "encode as text. Remove it from the row, or set data.allow_special_tokens"
        )

    def _literal_copy(self, where: str) -> tuple[tokenizers.Tokenizer, dict[str, str], dict[int, int]]:
        """The copy, the private name of each special token, and the id for which each private name's id stands."""
        if self._copy is None:
            inner = getattr(self._tokenizer, "backend_tokenizer", None)
            if inner is None or not getattr(self._tokenizer, "is_fast", False):
                raise self._refused(where)
            import tokenizers

            copy = tokenizers.Tokenizer.from_str(inner.to_str())
            copy.no_truncation()
            copy.no_padding()
            names: dict[str, str] = {}
            ids: dict[int, int] = {}
            for number, (content, token) in enumerate(_special_tokens(self._tokenizer).items()):
                names[content] = f"{_OPEN}{self._nonce}s{number}{_CLOSE}"
                private = tokenizers.AddedToken(
                    names[content], lstrip=token.lstrip, rstrip=token.rstrip, normalized=False, special=False
                )
                copy.add_tokens([private])
                ids[copy.token_to_id(names[content]) or 0] = inner.token_to_id(content)
            copy.add_tokens([tokenizers.AddedToken(self._split, normalized=False, special=False)])
            copy.encode_special_tokens = True
            self._copy = copy, names, ids
        return self._copy


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Ids of everything that the tokenizer reads as a control token."""
    return frozenset(int(tokenizer.convert_tokens_to_ids(content)) for content in _special_tokens(tokenizer))


def _any_text(value: JsonValue, holds: Callable[[str], bool]) -> bool:
    """Whether a text, or any text in messages, has the property."""
    if isinstance(value, str):
        return holds(value)
    if isinstance(value, Mapping):
        return any(_any_text(item, holds) for item in value.values())
    return isinstance(value, Sequence) and any(_any_text(item, holds) for item in value)


def _normalized_search(tokenizer: Any) -> Callable[[str], bool] | None:
    """Looks for special tokens that the tokenizer matches in normalized text, for instance in any case of letters."""
    normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
    names = [content for content, token in _special_tokens(tokenizer).items() if getattr(token, "normalized", False)]
    if normalizer is None or not names:
        return None
    pattern = re.compile("|".join(re.escape(normalizer.normalize_str(name)) for name in names))
    return lambda text: pattern.search(normalizer.normalize_str(text)) is not None


def _special_tokens(tokenizer: Any) -> dict[str, Any]:
    """Content -> token of everything that the tokenizer reads as a control token; longest first."""
    inner = getattr(tokenizer, "backend_tokenizer", None)
    if inner is not None and hasattr(inner, "get_added_tokens_decoder"):
        special = {token.content: token for token in inner.get_added_tokens_decoder().values() if token.special}
    else:
        special = {str(token): token for token in getattr(tokenizer, "all_special_tokens", ())}
    return {content: special[content] for content in sorted(special, key=len, reverse=True) if content}
