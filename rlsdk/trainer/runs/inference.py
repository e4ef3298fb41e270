"""Generation and evaluation without training: a rollout engine alone, on a checkpoint or a model folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlsdk.config import Measure, Role, RunConfig, with_dtype
from rlsdk.config.derived.roles import best_of_role, rollout_role
from rlsdk.config.problem import shown
from rlsdk.config.sections.role_kinds import REWARD, ROLLOUT
from rlsdk.data import AnswerEnds, DataRow, Prompt, PromptDataset, PromptFormat
from rlsdk.data.render import Template
from rlsdk.data.rows import Fields, Messages
from rlsdk.interfaces import ConfigError, nearest
from rlsdk.interfaces.spelling import Setting, as_given, number_of
from rlsdk.kit.model.adapter_files import write_merged
from rlsdk.system.temporary import held_folder
from rlsdk.trainer.checkpoints.run_folder import Notice, silent
from rlsdk.trainer.generation.sampler import Draw, sample_all
from rlsdk.trainer.inputs.data import first_prompts, load_eval_prompts
from rlsdk.trainer.inputs.prompt_formats import prompt_format
from rlsdk.trainer.inputs.run_rewards import RunRewards, start_run_rewards
from rlsdk.trainer.inputs.step_ends import StepReader
from rlsdk.trainer.inputs.tokenizer import load_run_tokenizer, run_ends, sampling_params
from rlsdk.trainer.inputs.vocabulary import odd_ends, read_vocabulary
from rlsdk.trainer.roles.device_turns import DeviceTurns
from rlsdk.trainer.roles.devices import start_cluster
from rlsdk.trainer.roles.placement import placed, placement_of, resolve_device
from rlsdk.trainer.roles.role_group import RoleGroup
from rlsdk.trainer.roles.session import limit_controller_threads, start_role, start_roles
from rlsdk.trainer.runs.build_stream import evaluation_of, open_stream
from rlsdk.trainer.runs.step_judge import StepJudge, check_best_of, step_reader
from rlsdk.trainer.stages.evaluation.run import Evaluated

if TYPE_CHECKING:
    from rlsdk.registry import Registry
    from rlsdk.trainer.tracking.events import RunView


def evaluate_model(
    config: RunConfig, registry: Registry, view: RunView, *, sets: Sequence[str] = ()
) -> tuple[Evaluated, Mapping[str, str]]:
    """Evaluates the model that `config` names; returns the metrics, and the rule for correctness of each set. Tokenizes
    only evaluation prompts.

    Args:
        config: configuration of the run that trained it; `model.path` is the model to evaluate.
        registry: the installed backends and components.
        view: receives notices about the data, and about samples without a grade.
        sets: names of the sets to evaluate; empty: all.

    Raises:
        ConfigError: a set does not exist, or there is nothing to evaluate.
        DataError: a row cannot be used.
    """
    measures, device = chosen_measures(config, sets), resolve_device(config.placement)
    check_best_of(config, registry, measures, device)
    with held_folder("eval") as folder, ExitStack() as stack:
        logs = Path(folder)
        tokenizer = load_run_tokenizer(config.model)
        rewards = start_run_rewards(config, registry, logs, measures, train=False)
        stack.callback(rewards.close)
        check_no_judges(rewards)
        prompts = load_eval_prompts(config, registry, tokenizer, view, measures=measures)
        sampling = sampling_params(config.rollout, known_ends(config, tokenizer, prompts.values(), view.notice))
        rewards.wait_ready()
        judge: StepJudge | None = None
        if config.eval.best_of is None:
            group = stack.enter_context(open_rollout(config, registry, device=device, log_dir=logs))
        else:
            reader = step_reader(config.eval.best_of, tokenizer, sampling)
            group, judge = stack.enter_context(open_judged(config, registry, reader, device=device, log_dir=logs))
        search = None if judge is None else judge.search
        stream = open_stream(config, registry, group.group, tokenizer, rewards, view.notice, rollouter=search)
        stack.enter_context(closing(stream))
        chooses = None if judge is None or search is not None else judge.of_samples
        evaluation = evaluation_of(config, prompts, sampling, stream, group.spec.log_prob_kind, chooses)
        if evaluation is None:
            raise ConfigError(
                f"data.num_eval_rows: no evaluation prompts are left; give {Setting('data.eval', 'SOURCE')}"
            )
        found = evaluation.run()
    for text in found.notices:
        view.notice(text)
    return found, {part.name: part.rule for part in evaluation.sets}


def check_no_judges(rewards: RunRewards) -> None:
    """Refuses rewards that ask an engine of a training run.

    Raises:
        ConfigError: names them.
    """
    if rewards.judges:
        raise ConfigError(
            f"rewards: judges {list(rewards.judges)} are engines of a training run, which this command does not "
            "start; name a service in judge.url, or give the evaluation sets rewards of their own (eval.sets)"
        )


def chosen_measures(config: RunConfig, sets: Sequence[str]) -> list[Measure]:
    """The measures with these names; all if no name is given.

    Raises:
        ConfigError: a name has no measure, or the run has none.
    """
    measures = {measure.name: measure for measure in config.eval.measures()}
    for name in sets:
        if name not in measures:
            raise ConfigError(f"{as_given('set', name)}: expected one of {list(measures)}{nearest(name, measures)}")
    if not measures:
        raise ConfigError(
            "eval.samples_per_prompt: 0 with eval.greedy false leaves nothing to measure; add "
            f"{Setting('eval.greedy', True)}"
        )
    return [measures[name] for name in dict.fromkeys(sets)] or list(measures.values())


def sample_prompts(
    config: RunConfig,
    registry: Registry,
    given: Sequence[str] | Sequence[Messages],
    *,
    num_prompts: int,
    num_samples: int,
    notice: Notice = silent,
) -> list[tuple[Prompt, list[str]]]:
    """Samples responses to typed prompts, or to the first evaluation prompts of the data; tokenizes only these.

    Args:
        config: configuration of the run that trained the model; `model.path` is the model to use.
        registry: the installed backends and components.
        given: texts, rendered like rows of the data: system prompt, prompt template, chat template. A template that
            needs several fields of a row is not used. Or conversations, which no prompt template applies to.
        num_prompts: number of prompts from the data if none is given.
        num_samples: responses per prompt.
        notice: receives a line if the template does not use the text as its `{prompt}`.

    Raises:
        ConfigError: there are neither prompts nor data.
        DataError: a conversation is no list of messages, or the tokenizer has no chat template for it.
    """
    tokenizer = load_run_tokenizer(config.model)
    prompts: Sequence[Prompt]
    if given:
        form, field = typed_format(prompt_format(config), notice, is_text=isinstance(given[0], str))
        values = [one if isinstance(one, str) else [dict(turn) for turn in one] for one in given]
        rows = [DataRow(row={field: value}, source=number_of("prompt", at)) for at, value in enumerate(values, 1)]
        prompts = PromptDataset(rows, tokenizer, form, name="prompts")
    elif config.data.train is None and config.data.eval is None and not config.data.mixture:
        raise ConfigError(
            f"generate: expected prompts; give {Setting('prompt', 'TEXT')} (repeatable) or "
            f"{Setting('data.train', 'SOURCE')}"
        )
    else:
        prompts = first_prompts(config, registry, tokenizer, num_prompts)
    sampling = sampling_params(config.rollout, known_ends(config, tokenizer, [prompts], notice))
    draw = Draw(source="generate", num_samples=num_samples, sampling=sampling)
    with (
        held_folder("generate") as logs,
        open_rollout(config, registry, device=resolve_device(config.placement), log_dir=Path(logs)) as group,
        closing(open_stream(config, registry, group.group, tokenizer)) as stream,
    ):
        groups = sample_all(stream, prompts, draw, seed=(config.trainer.seed, "generate"))
    return [(prompt, [sample.text for sample in group.samples]) for prompt, group in zip(prompts, groups, strict=True)]


def known_ends(config: RunConfig, tokenizer: Any, prompts: Iterable[Sequence[Prompt]], notice: Notice) -> AnswerEnds:
    """The tokens that end an answer, once the model is known to have a row for every token of the prompts."""
    ends = run_ends(config, tokenizer)
    vocabulary = read_vocabulary(config.model, (), tokenizer, ends)
    for part in prompts:
        vocabulary.check_rows((prompt.prompt_ids for prompt in part), [prompt.source for prompt in part])
    for said in (vocabulary.notice(), *odd_ends(config, tokenizer)):
        if said is not None:
            notice(said)
    return ends


def typed_format(form: PromptFormat, notice: Notice, *, is_text: bool = True) -> tuple[PromptFormat, str]:
    """Returns the format that makes a prompt from a typed text or conversation, and the row field that holds it.

    A typed text has no other fields: it fills `{prompt}`, or the only field of the template. If the template has
    several fields or none, the text is the whole user message.

    Args:
        form: format of the run's data.
        notice: receives a line if the text is not the template's `{prompt}`.
        is_text: whether texts were typed, and not conversations.
    """
    form = replace(form, answer_field=PromptFormat.answer_field)  # typed texts have no answer
    if not is_text:
        return replace(form, prompt_template=PromptFormat.prompt_template), form.prompt_field or Fields.prompt
    fields = list(dict.fromkeys(Template(form.prompt_template).fields))
    if fields == ["prompt"]:
        return form, form.prompt_field or Fields.prompt
    template = shown(form.prompt_template, 60)
    if len(fields) == 1:
        notice(f"prompt: the text is put in for {fields[0]!r} of data.prompt_template {template}")
        return form, fields[0]
    needs = f"asks for {fields} of a row" if fields else "takes no field"
    notice(f"prompt: the text is the whole user message, because data.prompt_template {template} {needs}")
    return replace(form, prompt_template=PromptFormat.prompt_template), form.prompt_field or Fields.prompt


@contextmanager
def open_rollout(config: RunConfig, registry: Registry, *, device: str, log_dir: Path) -> Iterator[RoleGroup]:
    """Context manager with a rollout engine that serves the model of `config`."""
    pools = placement_of(config.placement, [ROLLOUT], device)
    (role,) = placed([_served(config, device, log_dir)], pools)
    limit_controller_threads()
    with start_cluster([role], registry, config, pools, run_dir=log_dir) as cluster:
        yield start_role(role, registry, cluster)


@contextmanager
def open_judged(
    config: RunConfig, registry: Registry, reader: StepReader, *, device: str, log_dir: Path
) -> Iterator[tuple[RoleGroup, StepJudge]]:
    """As `open_rollout`, with the process reward model of `eval.best_of` beside it. It stays on the device, of which
    the rollout engine takes what is left."""
    pools = placement_of(config.placement, [ROLLOUT, REWARD], device)
    table = placed([best_of_role(with_dtype(config, device)), _served(config, device, log_dir)], pools)
    limit_controller_threads()
    with start_cluster(table, registry, config, pools, run_dir=log_dir) as cluster:
        groups = start_roles(table, lambda role: start_role(role, registry, cluster), DeviceTurns())
        yield groups[ROLLOUT], StepJudge.of_config(config, groups[REWARD], cluster, reader)


def _served(config: RunConfig, device: str, log_dir: Path) -> Role:
    """The rollout role, which loads the weights of the model, an adapter's merged into them."""
    role = rollout_role(with_dtype(config, device)).loading_weights()
    if (adapter := config.model.lora.path) is not None:
        merged = log_dir / "merged"
        write_merged(role.model, Path(adapter), merged)
        role = role.with_model(str(merged))
    return role
