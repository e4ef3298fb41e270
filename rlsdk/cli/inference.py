"""`rlsdk generate` and `rlsdk eval`: use a run, a checkpoint or a model folder."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Collection, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlsdk.config import RunConfig, load_config
from rlsdk.interfaces import ConfigError
from rlsdk.kit.printable import json_line, printable
from rlsdk.registry import Registry

if TYPE_CHECKING:
    from rlsdk.data import Prompt


def generate(path: Path, prompts: Sequence[str], num_prompts: int, n: int, args: Sequence[str]) -> None:
    """Prints responses to the given prompts, or to the first evaluation prompts of the data."""
    from rlsdk.trainer.assemble import open_stream
    from rlsdk.trainer.inference import open_rollout
    from rlsdk.trainer.parts import load_run_tokenizer, sampling_params
    from rlsdk.trainer.roles import resolve_device
    from rlsdk.trainer.sampler import Draw, sample_all

    config, registry = _config(path, args, sections=("model", "data", "rollout", "placement"))
    tokenizer = load_run_tokenizer(config.model)
    shown = _prompts(config, registry, tokenizer, prompts, num_prompts)
    draw = Draw(source="generate", num_samples=n, sampling=sampling_params(config.rollout, config.model, tokenizer))
    with (
        tempfile.TemporaryDirectory() as logs,
        open_rollout(config, registry, device=resolve_device(config.placement), log_dir=Path(logs)) as group,
        closing(open_stream(config, registry, group.group, tokenizer)) as stream,
    ):
        groups = sample_all(stream, shown, draw, seed=(config.trainer.seed, "generate"))
    for prompt, made in zip(shown, groups, strict=True):
        for sample in made.samples:
            line: dict[str, Any] = {"prompt": prompt.text, "response": sample.text}
            print(json_line(line if prompt.answer is None else {**line, "answer": prompt.answer}))


def evaluate(path: Path, args: Sequence[str], output: Path | None) -> None:
    """Prints figures on the evaluation prompts; a reward that failed is said."""
    from rlsdk.cli.console import ConsoleView
    from rlsdk.trainer.assemble import build_materials, evaluation_of, open_stream
    from rlsdk.trainer.inference import open_rollout
    from rlsdk.trainer.roles import resolve_device

    config, registry = _config(path, args)
    view = ConsoleView()
    with (
        tempfile.TemporaryDirectory() as logs,
        closing(build_materials(config, registry, Path(logs), view, held_out=True)) as materials,
        open_rollout(config, registry, device=resolve_device(config.placement), log_dir=Path(logs)) as group,
        closing(
            open_stream(config, registry, group.group, materials.tokenizer, materials.rewards, view.notice)
        ) as stream,
    ):
        evaluation = evaluation_of(config, materials, stream)
        if evaluation is None:
            raise ConfigError(
                "data.num_eval_rows: no evaluation prompts are left; give --data.eval SOURCE, or more rows"
            )
        metrics = evaluation.run()
    for text in evaluation.notices:
        view.notice(text)
    for name, value in metrics.items():
        print(f"{printable(name):<28}{value:.4f}")
    if output is not None:
        output.write_text(json.dumps(metrics, indent=1))


def _prompts(
    config: RunConfig, registry: Registry, tokenizer: Any, texts: Sequence[str], num_prompts: int
) -> Sequence[Prompt]:
    """Those that were typed, rendered like rows of the data: system prompt, prompt template, chat template."""
    from rlsdk.cli.console import ConsoleView
    from rlsdk.data import DataRow, PromptDataset
    from rlsdk.trainer.run_data import load_prompts, prompt_format

    if texts:
        field = config.data.prompt_field
        rows = [DataRow(row={field: text}, source=f"--prompt {at}") for at, text in enumerate(texts, 1)]
        return PromptDataset(rows, tokenizer, prompt_format(config), name="prompts")
    if config.data.train is None and not config.data.mixture:
        raise ConfigError("generate: expected prompts; give --prompt TEXT (repeatable) or --data SOURCE")
    train, held = load_prompts(config, registry, tokenizer, ConsoleView(), held_out=True)
    return (held or train)[:num_prompts]


def _config(path: Path, args: Sequence[str], sections: Collection[str] | None = None) -> tuple[RunConfig, Registry]:
    """The configuration that the model was trained with, where there is one, then the flags; no trackers.

    Args:
        path: of a run, a checkpoint or a model.
        args: as typed.
        sections: of the configuration that the command acts on; None: all.
    """
    from rlsdk.trainer.inference import find_model

    registry = Registry.discover()
    source = find_model(path, lambda text: print(text, file=sys.stderr))
    flags = [*args, f"--model.path={source.model}", "--tracking.trackers=[]", "--sft.steps=0"]
    return load_config([source.config] if source.config else [], flags, registry, sections=sections), registry
