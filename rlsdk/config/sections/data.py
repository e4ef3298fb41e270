"""Where prompts come from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from rlsdk.config.problem import Problem
from rlsdk.config.sections.base import Options, Section, empty_mapping, empty_tuple

OWN_TEMPLATE_ARGUMENTS = frozenset({"conversation", "messages", "tokenize", "add_generation_prompt", "return_dict"})
"""Arguments of `apply_chat_template` that rlsdk sets itself."""


class MixtureConfig(Section):
    """One source of a mixture."""

    source: str
    """Data source, in the form of `data.train`."""
    weight: PositiveFloat = 1.0
    """Share of the prompts that are drawn from this source, relative to the other weights."""
    options: Options = empty_mapping()
    """Parameters of the source."""
    num_rows: PositiveInt | None = None
    """Number of rows: the first ones, or as many generated ones; null: all."""
    fields: Options = empty_mapping()
    """Fields that are added to every row of this source, `{task: gsm8k}`, for instance for the `rows` of a reward."""


class DataConfig(Section):
    """Where prompts come from."""

    train: str | None = None
    """`SOURCE:REST` of a source in `rlsdk plugins list`, a file (.jsonl, .jsonl.gz, .ndjson, .json, .parquet, .csv,
    .tsv), or a data set's folder or hub name."""
    mixture: tuple[MixtureConfig, ...] = empty_tuple()
    """Several sources in place of `train`; prompts are drawn from them by weight. Each source has its own epochs."""
    eval: str | None = None
    """Source of evaluation rows, in the form of `train`; null: `num_eval_rows` rows are held out of `train`."""
    options: Options = empty_mapping()
    """Parameters of the train source, for instance `split` of a hub data set, or those of a generated task."""
    eval_options: Options = empty_mapping()
    """Parameters of the eval source."""
    prompt_field: str | None = None
    """Field of a row that holds the prompt: a text, or a list of chat messages. If they end in the assistant's
    turn, that one is the answer. null: the first of `question`, `prompt`, `problem`, `instruction`, `input`, `query`,
    `messages` and `conversations` that the first row of a source has; the run says which."""
    answer_field: str | None = None
    """Field of a row that holds the reference answer, a text or one message of the assistant; it may be missing. null:
    the first of `answer`, `solution`, `completion`, `response`, `ground_truth`, `reward_model.ground_truth`, `label`,
    `target` and `output` that the first row has."""
    system_prompt: str | None = None
    """Text of the system message; used with a chat template only."""
    prompt_template: str = "{prompt}"
    """Text of the user message; `{prompt}` and `{any_field_of_the_row}` are filled in."""
    chat_template: Literal["auto", "always", "never"] = "auto"
    """auto: uses the tokenizer's chat template if it has one."""
    chat_template_kwargs: Options = empty_mapping()
    """Variables of the chat template, for instance `{enable_thinking: false}` for models with optional thinking."""
    allow_special_tokens: bool = False
    """True: special tokens in the text of a row act as control tokens, so a row can end its turn and open another.
    False: they are encoded as plain text, and counted. Those in `system_prompt` and `prompt_template` always act."""
    max_prompt_tokens: PositiveInt = 1024
    """Most tokens of a prompt; longer prompts are dropped, and their number is reported. 1024 is lowered where the
    model has fewer positions."""
    shuffle: bool = True
    """Shuffles rows with `trainer.seed`, in another order in each epoch."""
    num_train_rows: PositiveInt | None = None
    """Number of training rows: the first ones, or as many generated ones; null: all (if rows are generated, the
    source's own default)."""
    num_eval_rows: PositiveInt | None = 256
    """Number of evaluation rows; null: all. Where 256 would leave no question to train on, an eighth of the questions
    is held out."""

    def problems(self) -> Iterator[Problem]:
        if self.system_prompt is not None and self.chat_template == "never":
            yield Problem(
                "system_prompt", f"{self.system_prompt!r} needs a chat template, but chat_template is 'never'"
            )
        if self.chat_template_kwargs and self.chat_template == "never":
            yield Problem(
                "chat_template_kwargs", f"{self.chat_template_kwargs!r} has no effect: chat_template is 'never'"
            )
        for name in sorted(OWN_TEMPLATE_ARGUMENTS & self.chat_template_kwargs.keys()):
            yield Problem(f"chat_template_kwargs.{name}", "is set by rlsdk itself; leave it out")
        if self.eval_options and self.eval is None:
            yield Problem("eval_options", f"{self.eval_options!r} has no effect without data.eval")
        if self.mixture and self.train is not None:
            yield Problem("mixture", f"replaces data.train, which is {self.train!r}; give one of the two")
        for field in ("options", "num_train_rows") if self.mixture else ():
            if getattr(self, field):
                yield Problem(field, "belongs to data.train; each source of data.mixture has its own")
        if self.eval is None and (self.train is not None or self.mixture) and self.num_eval_rows is None:
            yield Problem("num_eval_rows", "null needs data.eval; held-out rows must be a number")
