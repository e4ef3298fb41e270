"""A teacher that is a file: its log-probs of the answers of a run's rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlsdk.config.problem import shown
from rlsdk.data import LearnedRow, Prompt
from rlsdk.interfaces import Batch, BatchError, DataError
from rlsdk.system.quantities import counted
from rlsdk.trainer.inputs.log_prob_files import LogProbFile


@dataclass(frozen=True)
class GivenLogProbs:
    """What a file has of the answers of a run's prompts."""

    file: LogProbFile
    places: Mapping[int, int]
    """Index of a prompt -> place of its answer in the file."""

    @classmethod
    def of(cls, file: LogProbFile, prompts: Sequence[Prompt], field: str) -> GivenLogProbs:
        """Of the prompts that the file is to teach; `field` names it in the message.

        Raises:
            DataError: the file lacks some of their answers.
        """
        found = {prompt.index: file.find(prompt.prompt_ids, prompt.answer or "") for prompt in prompts}
        lacking = [prompt for prompt in prompts if found[prompt.index] is None]
        if lacking:
            first = lacking[0]
            raise DataError(
                f"{field} {file.path!r}: lacks {counted(len(lacking), 'row')} of {len(prompts):,}, the first is "
                f"{first.source}, answer {shown(first.answer, 60)}. A row is found by the tokens of its prompt and its "
                "answer: use the rows that were written beside the file, with the same prompt and chat templates, or "
                "say which rows it teaches (`rows`, `sources`)"
            )
        return cls(file, {index: place for index, place in found.items() if place is not None})

    def learned(self, prompt: Prompt) -> LearnedRow:
        """The tokens of a prompt and of its answer, as the file has them."""
        answer = self.file.token_ids(self.places[prompt.index])
        ids = (*prompt.prompt_ids, *answer)
        return LearnedRow(token_ids=ids, learned=((len(prompt.prompt_ids), len(ids)),))

    def outputs(self, batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
        """`log_probs`, `top_ids`, `top_log_probs` of a batch whose `uid` is the index of each row's prompt, as a train
        engine computes them at temperature 1: 0 off the mask, and on rows that it does not teach.

        Raises:
            ConfigError: what the file has of an answer is damaged.
            BatchError: a row has other tokens than the file.
        """
        count = int(batch.meta["top_k"]) if "top_ids" in names else 0
        found = {
            "log_probs": torch.zeros(batch.num_tokens),
            "top_ids": torch.zeros(batch.num_tokens, count, dtype=torch.int64),
            "top_log_probs": torch.zeros(batch.num_tokens, count),
        }
        for row, index in enumerate(batch["uid"].tolist()):
            if (place := self.places.get(index)) is None:
                continue
            at = batch.token_index(torch.tensor([row]))
            at, one = at[batch["response_mask"][at]], self.file.read(place)
            if batch["input_ids"][at].tolist() != one.token_ids.tolist():
                raise BatchError(f"row_id {int(batch['row_id'][row])}: has other tokens than {self.file.path!r}")
            found["log_probs"][at] = torch.from_numpy(one.log_probs)
            found["top_ids"][at] = torch.from_numpy(one.top_ids[:, :count])
            found["top_log_probs"][at] = torch.from_numpy(one.top_log_probs[:, :count])
        return {name: found[name] for name in names}
