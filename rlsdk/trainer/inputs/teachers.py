"""Which rows each teacher teaches, and checks of teachers before any device is taken."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rlsdk.config import RunConfig, TeacherConfig
from rlsdk.config.sections.rewards import RemoteRewardConfig
from rlsdk.config.sections.role_kinds import teacher_role
from rlsdk.data import LearnedRow, PromptDataset, PromptFormat
from rlsdk.interfaces import Batch, BatchError, ConfigError, RlsdkError
from rlsdk.interfaces.spelling import Setting
from rlsdk.kit.model.hf import load_tokenizer
from rlsdk.rewards import applies_to, check_routes
from rlsdk.rollouts import Group
from rlsdk.trainer.inputs.given_log_probs import GivenLogProbs
from rlsdk.trainer.inputs.log_prob_files import LogProbFile
from rlsdk.trainer.inputs.prompt_formats import prompt_format
from rlsdk.trainer.inputs.prompt_scorers import ServiceScorer, run_apart
from rlsdk.trainer.inputs.teacher_tokenizers import check_meanings, check_tokenizer
from rlsdk.trainer.inputs.text_alignment import OwnText, TextReader
from rlsdk.trainer.inputs.tokenizer import answer_ends, run_ends


@dataclass(frozen=True, kw_only=True)
class Taught:
    """The prompts that one teacher teaches."""

    role: str
    teacher: TeacherConfig
    indices: Collection[int] | None
    """Indices of the prompts of its sources; None: those of all."""
    own_prompts: Mapping[int, Sequence[int]] | None = None
    """Index of a prompt -> the tokens that it reads in its place; None: it reads what the policy reads."""
    reader: TextReader | None = None
    """How it reads responses in tokens of its own; None: it reads the policy's tokens."""
    given: GivenLogProbs | None = None
    """What its file has of the prompts; None: it is no file."""

    @classmethod
    def of_run(cls, config: RunConfig, prompts: PromptDataset, tokenizer: Any) -> list[Taught]:
        """Of each teacher of a run with these training prompts; `tokenizer` is the policy's.

        Raises:
            DataError: a row lacks a field of a teacher's prompt template, or a file lacks a row.
        """
        made = []
        for at, one in enumerate(config.teachers):
            taught = cls(role=teacher_role(one.name), teacher=one, indices=_indices(one.sources, prompts))
            form = replace(prompt_format(config), prompt_template=one.prompt_template or config.data.prompt_template)
            if one.log_probs is not None:
                own = [prompt for prompt in prompts if taught.teaches_row(prompt.index, prompt.row)]
                given = GivenLogProbs.of(LogProbFile(one.log_probs), own, f"teachers.{at}.log_probs")
                taught = replace(taught, given=given)
            elif one.align == "text":
                taught = taught._reading(config, prompts, tokenizer, form)
            elif one.prompt_template is not None:
                taught = replace(taught, own_prompts=taught._tokenized(prompts, tokenizer, form))
            made.append(taught)
        return made

    def _reading(self, config: RunConfig, prompts: PromptDataset, tokenizer: Any, form: PromptFormat) -> Taught:
        """The same, with a tokenizer and a chat template of its own."""
        teacher, trust = self.teacher, config.model.trust_remote_code
        name = teacher.tokenizer or teacher.path or ""
        own = load_tokenizer(name, revision=teacher.revision, trust_remote_code=trust)
        form = replace(form, chat_template_kwargs={})
        end = answer_ends(own, form, name, revision=teacher.revision).learned
        stops = run_ends(config, tokenizer).stops
        reader = TextReader.of(tokenizer, sorted(stops), own, end)
        return replace(self, own_prompts=self._tokenized(prompts, own, form), reader=reader)

    def _tokenized(self, prompts: PromptDataset, tokenizer: Any, form: PromptFormat) -> Mapping[int, Sequence[int]]:
        """The prompts that it teaches, as it reads them."""
        rows = {at: row for at, row in enumerate(prompts.rows) if self.teaches_row(at, row.row)}
        if not rows:
            return {}
        made = PromptDataset(list(rows.values()), tokenizer, form, name=self.role)
        if len(made) < len(rows):
            raise ConfigError(f"{self.role}: its prompt_template leaves no text for some rows: {made.report.line()}")
        return dict(zip(rows, (prompt.prompt_ids for prompt in made), strict=True))

    def teaches(self, group: Group) -> bool:
        """Whether it teaches this group's prompt."""
        return self.teaches_row(group.task.id.index, group.task.prompt.row)

    def teaches_row(self, index: int, row: Mapping[str, Any]) -> bool:
        """Whether it teaches the prompt of this index, of this row of the data."""
        return (self.indices is None or index in self.indices) and applies_to(self.teacher.rows, row)


def with_taught(batch: Batch, groups: Sequence[Group], teachers: Sequence[Taught]) -> Batch:
    """Adds, for each teacher, `taught_by.ROLE` `[B]`: whether it teaches the row's prompt.

    Args:
        batch: made of `groups`.
        groups: of the step.
        teachers: those of the run.
    """
    fields = {}
    for one in teachers:
        ordinals = [group.task.ordinal for group in groups if one.teaches(group)]
        fields[row_field(one.role)] = torch.isin(batch["uid"], torch.tensor(ordinals, dtype=torch.int64))
    return batch.with_rows(**fields)


def own_of(groups: Sequence[Group], teacher: Taught) -> OwnPrompts | OwnText:
    """What a teacher with prompts of its own reads of a step's groups."""
    own = OwnPrompts.of_groups(groups, teacher)
    return own if teacher.reader is None else OwnText(teacher.reader, own.prompts)


@dataclass(frozen=True)
class OwnPrompts:
    """What a teacher reads in a step in place of the policy's prompts."""

    prompts: Mapping[int, tuple[Sequence[int], Sequence[int]]]
    """Ordinal of a group (`uid`) -> tokens of the policy's prompt, and of the teacher's."""

    @classmethod
    def of_groups(cls, groups: Sequence[Group], teacher: Taught) -> OwnPrompts:
        """Of a step's groups, for a teacher with a template of its own."""
        own = teacher.own_prompts or {}
        known = [group for group in groups if group.task.id.index in own]
        return cls({g.task.ordinal: (g.task.prompt.prompt_ids, own[g.task.id.index]) for g in known})

    def read(self, batch: Batch) -> Batch:
        """The rows as the teacher reads them: its prompts, and what follows the policy's.

        Raises:
            BatchError: a row does not begin with its prompt, so that it is not known what follows it.
        """
        ids, masks = [], []
        for row, (uid, start, end) in enumerate(_places(batch)):
            policy, own = self.prompts[uid]
            begin, tokens = start + len(policy), batch["input_ids"][start:end]
            if tokens[: len(policy)].tolist() != list(policy):
                raise BatchError(
                    f"row_id {int(batch['row_id'][row])} (uid {uid}) does not begin with its prompt, so a teacher with "
                    "a prompt_template cannot read what follows; teach such rows without one"
                )
            ids.append([*own, *batch["input_ids"][begin:end].tolist()])
            masks.append(torch.cat([torch.zeros(len(own), dtype=torch.bool), batch["response_mask"][begin:end]]))
        made = Batch.from_rows(ids, row_id=batch["row_id"], uid=batch["uid"])
        return replace(made, meta=batch.meta).with_tokens(response_mask=torch.cat(masks))

    def back(self, batch: Batch, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`[N, ...]` of the policy's rows, from what was computed of the teacher's: 0 on prompts."""
        return {name: self._back(batch, values) for name, values in found.items()}

    def _back(self, batch: Batch, found: Tensor) -> Tensor:
        given, at = found.new_zeros(batch.num_tokens, *found.shape[1:]), 0
        for uid, start, end in _places(batch):
            policy, own = self.prompts[uid]
            behind = end - start - len(policy)
            given[end - behind : end] = found[at + len(own) : at + len(own) + behind]
            at += len(own) + behind
        return given


def _places(batch: Batch) -> Iterator[tuple[int, int, int]]:
    """`uid`, first token and end of each row."""
    offsets = batch.offsets.tolist()
    return zip(batch["uid"].tolist(), offsets[:-1], offsets[1:], strict=True)


def row_field(role: str) -> str:
    """Field of the batch that says which rows a teacher teaches."""
    return f"taught_by.{role}"


def check_teachers(config: RunConfig, prompts: PromptDataset, tokenizer: Any, *, on_answers: bool = False) -> list[str]:
    """Checks the teachers of a run against its training rows and the policy's tokenizer. Returns notices.

    Args:
        config: of the run.
        prompts: its training rows.
        tokenizer: the policy's.
        on_answers: they teach the answers of the rows, which may be learned themselves, too.

    Raises:
        ConfigError: an id means other bytes in a teacher's tokenizer; no row has a field or value of a teacher's
            `rows`; a teacher teaches no row; or rows have neither a teacher nor a reward.
    """
    if not config.teachers:
        return []
    for at, teacher in enumerate(config.teachers):
        if teacher.log_probs is not None:
            named = f"teachers.{at}.log_probs {teacher.log_probs!r}"
            check_meanings(config, tokenizer, LogProbFile(teacher.log_probs).meanings(), named)
        elif not teacher.is_policy and teacher.align == "tokens":
            check_tokenizer(config, teacher, f"teachers.{at}", tokenizer)
    check_routes(config.teachers, ((row.source, row.row) for row in prompts.rows), whole=False, field="teachers")
    everyone = Taught.of_run(config, prompts, tokenizer)
    notices = list(_check_shares(config, prompts, everyone, on_answers=on_answers))
    if config.learns_by_divergence or any(one.given is not None for one in everyone):
        _check_alone(config, prompts, everyone)
    for at, one in enumerate(everyone):
        _check_room(config, one, f"teachers.{at}")
        _check_service(config, one, f"teachers.{at}", prompts)
    return notices


def _check_alone(config: RunConfig, prompts: PromptDataset, everyone: Sequence[Taught]) -> None:
    """Raises `ConfigError` where two teachers teach a row by a divergence, or from files: a token has one teacher's
    distribution, and a row the tokens of one file."""
    way_out = ", or use 'sampled'" if config.algorithm.distillation.objective != "sampled" else ""
    for index, row in enumerate(prompts.rows):
        teaching = [one.role for one in everyone if one.teaches_row(index, row.row)]
        if len(teaching) > 1:
            raise ConfigError(
                f"teachers: {' and '.join(teaching)} teach {row.source}, and with algorithm.distillation.objective "
                f"{config.algorithm.distillation.objective!r} a row may have one: say which rows each teaches (`rows`, "
                f"`sources`){way_out}"
            )


def given_rows(config: RunConfig, prompts: PromptDataset, tokenizer: Any) -> dict[int, LearnedRow]:
    """The rows whose tokens the file of a teacher has, by index of the prompt.

    Raises:
        ConfigError, DataError: a file cannot be used, or lacks a row.
    """
    if all(one.log_probs is None for one in config.teachers):
        return {}
    files = [one.given for one in Taught.of_run(config, prompts, tokenizer) if one.given is not None]
    return {at: given.learned(prompts[at]) for given in files for at in given.places}


def _check_room(config: RunConfig, taught: Taught, field: str) -> None:
    """Raises `ConfigError` where a prompt of its own leaves a teacher's rollout engine no room for a response."""
    own, engine = taught.own_prompts, taught.teacher.rollout
    if not own or engine is None:
        return
    longest = max(map(len, own.values())) + config.rollout.max_response_tokens + 1
    room = engine.max_model_tokens or config.max_model_tokens + 1
    if longest > room:
        raise ConfigError(
            f"{field}.rollout.max_model_tokens {room}: its longest prompt, a response of "
            f"rollout.max_response_tokens {config.rollout.max_response_tokens}, and one token more are {longest}: "
            f"`{Setting(f'{field}.rollout.max_model_tokens', longest)}`"
        )


def _check_service(config: RunConfig, taught: Taught, field: str, prompts: PromptDataset) -> None:
    """Asks a teacher that is a service once, for a prompt of the run.

    Raises:
        ConfigError: it does not answer, lacks the model, or gives no log-probs of prompts.
    """
    teacher, count = taught.teacher, config.algorithm.distillation.top_k if config.learns_by_divergence else 0
    if teacher.url is None or not (teacher.remote or RemoteRewardConfig()).check_at_start:
        return
    try:
        run_apart(ServiceScorer.of(teacher).check(prompts[0].prompt_ids, count))
    except RlsdkError as error:
        raise ConfigError(f"{field}.url {teacher.url!r}: {error}") from error


def _check_shares(
    config: RunConfig, prompts: PromptDataset, everyone: Sequence[Taught], *, on_answers: bool
) -> Iterator[str]:
    """Yields how many of the rows each teacher teaches, where that is not all of them."""
    lost: list[str] = []
    counts = [0] * len(config.teachers)
    rewards = () if on_answers else config.rewards
    if on_answers:
        everywhere = config.algorithm.distillation.sft_coef > 0
    else:
        everywhere = bool(config.reward_models) or any(reward.weight and not reward.rows for reward in rewards)
    for index, row in enumerate(prompts.rows):
        teaching = [at for at, one in enumerate(everyone) if one.teaches_row(index, row.row)]
        for at in teaching:
            counts[at] += 1
        learned = everywhere or any(config.teachers[at].weight for at in teaching)
        if not learned and not any(reward.weight and applies_to(reward.rows, row.row) for reward in rewards):
            lost.append(row.source)
    for at, count in enumerate(counts):
        if not count:
            raise ConfigError(
                f"teachers.{at}: teaches none of the {len(prompts.rows)} training rows, because no row fits its rows "
                f"{dict(config.teachers[at].rows)} and its sources {list(config.teachers[at].sources)} together"
            )
        if count < len(prompts.rows):
            yield f"{everyone[at].role} teaches {count:,} of {len(prompts.rows):,} training rows"
    if lost:
        without = "no teacher" if on_answers else "neither a teacher nor a reward"
        answers = Setting("algorithm.distillation.sft_coef", 0.5)
        instead = f"learn their answers (`{answers}`)" if on_answers else f"a reward (`{Setting('rewards', 'NAME')}`)"
        raise ConfigError(
            f"teachers: {len(lost)} of {len(prompts.rows)} training rows have {without} of non-zero weight, the first "
            f"is {lost[0]}; add their values to the `rows` of a teacher, or add a teacher without `rows`, or {instead}"
        )


def _indices(sources: Sequence[str], prompts: PromptDataset) -> Collection[int] | None:
    if not sources or len(prompts.parts) == 1:
        return None
    found: set[int] = set()
    start = 0
    for part in prompts.parts:
        if part.name in sources:
            found.update(range(start, start + part.size))
        start += part.size
    return found
