"""Files with a teacher's log-probs of answers: `rlsdk generate --log-probs` writes them, `rlsdk distill` reads them.
Imports no torch: they are checked before that import."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from rlsdk.config import Problem, RunConfig, TeacherConfig
from rlsdk.interfaces import ConfigError
from rlsdk.interfaces.spelling import Setting
from rlsdk.system.atomic import atomic_path

KIND = "rlsdk log-probs 1"
"""Entry `format` of a file's metadata."""
ROUNDING = 1e-3
"""By how much a log-prob may be above 0."""
_SHAPES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "keys": ("uint8", ("answers", "32")),
    "lengths": ("int32", ("answers",)),
    "token_ids": ("int32", ("tokens",)),
    "log_probs": ("float32", ("tokens",)),
    "top_ids": ("int32", ("tokens", "k")),
    "top_log_probs": ("float32", ("tokens", "k")),
    "vocabulary_ids": ("int32", ("vocabulary",)),
    "vocabulary_lengths": ("int32", ("vocabulary",)),
    "vocabulary_bytes": ("uint8", ("bytes",)),
}
"""dtype and shape of each tensor. The last three say which bytes each id means, one id after the other."""


@dataclass(frozen=True, kw_only=True)
class AnswerLogProbs:
    """A teacher's log-probs of one answer of L tokens, natural, at temperature 1."""

    token_ids: NDArray[np.int64]
    """`[L]`: the answer, with the token that ended it unless it was cut."""
    log_probs: NDArray[np.float32]
    """`[L]`: of these tokens."""
    top_ids: NDArray[np.int64]
    """`[L, k]`: the most probable tokens in their places, the best one first."""
    top_log_probs: NDArray[np.float32]
    """`[L, k]`: of these."""


def answer_key(prompt_ids: Sequence[int], answer: str) -> bytes:
    """SHA-256 of a prompt's token ids and an answer's text: what an answer is found by."""
    ids = np.asarray([len(prompt_ids), *prompt_ids], "<i8").tobytes()
    return hashlib.sha256(ids + answer.encode("utf-8", "surrogatepass")).digest()


def write_log_probs(
    path: Path,
    answers: Mapping[bytes, AnswerLogProbs],
    meanings: Mapping[int, bytes],
    *,
    model: str,
    whole_distribution: bool,
) -> None:
    """Writes a file.

    Args:
        path: of the file.
        answers: by key; at least one.
        meanings: bytes that each id of the teacher's tokenizer stands for.
        model: name of the teacher, for messages.
        whole_distribution: the answers are samples of it at temperature 1, without filters.
    """
    found = list(answers.values())
    ids = sorted(meanings)
    tensors: dict[str, NDArray[Any]] = {
        "keys": np.frombuffer(b"".join(answers), np.uint8).reshape(-1, 32),
        "lengths": np.array([len(one.token_ids) for one in found], np.int32),
        **{
            name: np.ascontiguousarray(np.concatenate([getattr(one, name) for one in found]).astype(_SHAPES[name][0]))
            for name in ("token_ids", "log_probs", "top_ids", "top_log_probs")
        },
        "vocabulary_ids": np.array(ids, np.int32),
        "vocabulary_lengths": np.array([len(meanings[token]) for token in ids], np.int32),
        "vocabulary_bytes": np.frombuffer(b"".join(meanings[token] for token in ids), np.uint8),
    }
    about = {"format": KIND, "model": model, "whole_distribution": json.dumps(whole_distribution)}
    with atomic_path(path) as draft:
        save_file(tensors, draft, metadata=about)


class LogProbFile:
    """An open file. Log-probs are read as they are needed; they may be larger than memory."""

    def __init__(self, path: str) -> None:
        """Opens a file and checks all but its log-probs.

        Raises:
            ConfigError: there is none, it is of another kind, or it is damaged.
        """
        self.path = path
        try:
            opened: Any = safe_open
            self._file = opened(path, framework="np")
            about = self._file.metadata() or {}
        except FileNotFoundError as error:
            raise ConfigError(f"{path!r}: no such file; `rlsdk generate --log-probs K` writes one") from error
        except (OSError, SafetensorError) as error:
            raise self._damaged(str(error)) from error
        if about.get("format") != KIND:
            raise ConfigError(
                f"{path!r}: is no file of log-probs (format {about.get('format')!r}, expected {KIND!r}): "
                "`rlsdk generate --log-probs K` writes one"
            )
        self.model = about.get("model", "")
        self.is_of_whole_distribution = about.get("whole_distribution") == "true"
        sizes = self._sizes()
        self.num_top = sizes["k"]
        """Tokens that are known in each place."""
        lengths = self._file.get_tensor("lengths").astype(np.int64)
        if (lengths < 0).any() or int(lengths.sum()) != sizes["tokens"]:
            raise self._damaged(f"its answers have {int(lengths.sum())} tokens, and it holds {sizes['tokens']}")
        self.max_tokens = int(lengths.max(initial=0))
        """Tokens of the longest answer."""
        self._ends = np.cumsum([0, *lengths])
        keys = self._file.get_tensor("keys")
        self._places = {key.tobytes(): at for at, key in enumerate(keys)}
        if len(self._places) != len(keys):
            raise self._damaged("it holds an answer twice")

    def __len__(self) -> int:
        return len(self._places)

    def find(self, prompt_ids: Sequence[int], answer: str) -> int | None:
        """Place of an answer to a prompt; None: the file does not have it."""
        return self._places.get(answer_key(prompt_ids, answer))

    def token_ids(self, place: int) -> tuple[int, ...]:
        """The answer at a place."""
        found: list[int] = self._slice("token_ids", place).tolist()
        return tuple(found)

    def read(self, place: int) -> AnswerLogProbs:
        """What the file has of an answer.

        Raises:
            ConfigError: something in it is no log-prob, or no token of the vocabulary.
        """
        found = {name: self._slice(name, place) for name in ("token_ids", "log_probs", "top_ids", "top_log_probs")}
        for name in ("log_probs", "top_log_probs"):
            if bool((~np.isfinite(found[name]) | (found[name] > ROUNDING)).any()):
                raise self._damaged(f"numbers of answer {place} are no log-probs: above 0, or not finite")
        if any(bool((found[name] < 0).any()) for name in ("token_ids", "top_ids")):
            raise self._damaged(f"answer {place} has tokens below 0")
        return AnswerLogProbs(
            token_ids=found["token_ids"].astype(np.int64),
            log_probs=found["log_probs"],
            top_ids=found["top_ids"].astype(np.int64),
            top_log_probs=found["top_log_probs"],
        )

    def meanings(self) -> Mapping[int, bytes]:
        """Bytes that each id stood for when the file was written."""
        ids, lengths = (self._file.get_tensor(f"vocabulary_{name}").astype(np.int64) for name in ("ids", "lengths"))
        whole, ends = self._file.get_tensor("vocabulary_bytes").tobytes(), np.cumsum([0, *lengths])
        if (lengths < 0).any() or int(ends[-1]) != len(whole):
            raise self._damaged("its vocabulary is not whole")
        return {int(token): whole[ends[at] : ends[at + 1]] for at, token in enumerate(ids)}

    def _slice(self, name: str, place: int) -> NDArray[Any]:
        found: NDArray[Any] = self._file.get_slice(name)[int(self._ends[place]) : int(self._ends[place + 1])]
        return found

    def _sizes(self) -> dict[str, int]:
        """Sizes by name, equal wherever a name stands in a shape."""
        sizes: dict[str, int] = {}
        names = set(self._file.keys())
        for name, (dtype, shape) in _SHAPES.items():
            if name not in names:
                raise self._damaged(f"it lacks {name}")
            part = self._file.get_slice(name)
            known = [int(one) if one.isdigit() else sizes.setdefault(one, size)
                     for one, size in zip(shape, part.get_shape(), strict=False)]  # fmt: skip
            if part.get_dtype() != _STORED[dtype] or known != list(part.get_shape()) or len(known) != len(shape):
                raise self._damaged(f"{name} is {part.get_dtype()} {part.get_shape()}, and not {dtype} {list(shape)}")
        return sizes

    def _damaged(self, why: str) -> ConfigError:
        return ConfigError(f"{self.path!r}: is damaged ({why}); copy it again, or write it again")


_STORED = {"uint8": "U8", "int32": "I32", "float32": "F32"}
"""Names of dtypes in safetensors."""


def log_prob_problems(config: RunConfig) -> Iterator[Problem]:
    """Problems of the files of a run's teachers, as far as they can be found without its rows."""
    for at, teacher in enumerate(config.teachers):
        if teacher.log_probs is None:
            continue
        field = f"teachers.{at}.log_probs"
        try:
            yield from _problems_of(LogProbFile(teacher.log_probs), config, teacher, field)
        except ConfigError as error:
            yield Problem(field, str(error))


def _problems_of(file: LogProbFile, config: RunConfig, teacher: TeacherConfig, field: str) -> Iterator[Problem]:
    own, path = config.algorithm.distillation, "algorithm.distillation"
    if own.objective == "top_k" and file.num_top < own.top_k:
        best = Setting(f"{path}.top_k", file.num_top) if file.num_top else Setting(f"{path}.objective", "sampled")
        yield Problem(
            f"{path}.top_k",
            value=own.top_k,
            expected=f"at most {file.num_top}, the tokens that {field} {file.path!r} has in each place (`rlsdk "
            f"generate --log-probs {own.top_k}` writes more)",
            commands=(best,),
        )
    if own.objective == "sampled" and teacher.weight and not file.is_of_whole_distribution:
        yield Problem(
            f"{path}.objective",
            value="sampled",
            expected=f"'top_k': the answers of {field} {file.path!r} were sampled at another temperature than 1, or "
            "with top_p, top_k or min_p, or chosen by their score, so that the gap is no estimate of a divergence",
        )
    if file.max_tokens > config.rollout.max_response_tokens:
        yield Problem(
            "rollout.max_response_tokens",
            value=config.rollout.max_response_tokens,
            expected=f"at least {file.max_tokens}, the tokens of the longest answer of {field} {file.path!r}",
            commands=(Setting("rollout.max_response_tokens", file.max_tokens),),
        )
