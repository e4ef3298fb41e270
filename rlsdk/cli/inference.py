"""`rlsdk generate` and `rlsdk eval`: use a run, a checkpoint or a model folder."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from rlsdk.config import RunConfig, load_config
from rlsdk.interfaces import ConfigError
from rlsdk.kit.printable import json_line, printable
from rlsdk.registry import Registry


def generate(path: Path, prompts: Sequence[str], num_prompts: int, n: int, args: Sequence[str]) -> None:
    """Prints responses to the given prompts, or to the first evaluation prompts of the data."""
    from rlsdk.cli.console import ConsoleView
    from rlsdk.trainer.inference import generate_texts, open_rollout
    from rlsdk.trainer.parts import load_prompts, load_run_tokenizer, sampling_params
    from rlsdk.trainer.session import resolve_device

    config, registry = _config(path, args, sections=("model", "data", "rollout", "placement"))
    tokenizer = load_run_tokenizer(config)
    shown: list[tuple[str, str | None, Sequence[int]]]
    if prompts:
        shown = [(text, None, tokenizer(text)["input_ids"]) for text in prompts]
    elif config.data.train is not None:
        train, held = load_prompts(config, registry, tokenizer, ConsoleView())
        shown = [(p.text, p.answer, p.prompt_ids) for p in (held or train)[:num_prompts]]
    else:
        raise ConfigError("generate: expected prompts; give --prompt TEXT (repeatable) or --data SOURCE")
    with (
        tempfile.TemporaryDirectory() as logs,
        open_rollout(config, registry, device=resolve_device(config), log_dir=Path(logs)) as group,
    ):
        ids = [list(tokens) for _, _, tokens in shown]
        sampling = sampling_params(config, tokenizer)
        answers = generate_texts(group, tokenizer, ids, sampling, n=n, seed=config.trainer.seed)
    for (text, expected, _), responses in zip(shown, answers, strict=True):
        for response in responses:
            line: dict[str, Any] = {"prompt": text, "response": response}
            print(json_line(line if expected is None else {**line, "answer": expected}))


def evaluate(path: Path, args: Sequence[str], output: Path | None) -> None:
    """Prints accuracy and reward on the evaluation prompts."""
    from rlsdk.cli.console import ConsoleView
    from rlsdk.trainer.evaluation import measure_all
    from rlsdk.trainer.inference import open_rollout
    from rlsdk.trainer.parts import build_parts
    from rlsdk.trainer.session import resolve_device

    config, registry = _config(path, args)
    with tempfile.TemporaryDirectory() as logs:
        parts = build_parts(config, registry, Path(logs), ConsoleView())
        try:
            with open_rollout(config, registry, device=resolve_device(config), log_dir=Path(logs)) as group:
                metrics = measure_all(group, parts)
        finally:
            parts.close()
    for name, value in metrics.items():
        print(f"{printable(name):<28}{value:.4f}")
    if output is not None:
        output.write_text(json.dumps(metrics, indent=1))


def _config(path: Path, args: Sequence[str], sections: Collection[str] | None = None) -> tuple[RunConfig, Registry]:
    """The configuration that the model was trained with, where there is one, then the flags; no trackers.

    Args:
        path: of a run, a checkpoint or a model.
        args: as typed.
        sections: of the configuration that the command acts on; None: all.
    """
    from rlsdk.trainer.inference import find_model

    registry = Registry.discover()
    source = find_model(path)
    flags = [*args, f"--model.path={source.model}", "--tracking.trackers=[]", "--sft.steps=0"]
    return load_config([source.config] if source.config else [], flags, registry, sections=sections), registry
