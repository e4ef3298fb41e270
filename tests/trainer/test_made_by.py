"""What samples were made by: settings and content. A resume uses none that anything else made, and says what it was."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from test_loop import HERE, TASK, Recorder, model, registry, trainer_of

from rlsdk.config import RunConfig, load_config
from rlsdk.config.sections.base import Section
from rlsdk.config.sections.influence import influential_settings
from rlsdk.interfaces.settings import NO_INFLUENCE
from rlsdk.registry import Registry
from rlsdk.testing.process.models import write_tiny_model
from rlsdk.trainer.inputs.contents import DIGEST, WHOLE_BYTES, file_digest, model_digests
from rlsdk.trainer.runs.made_by import made_by
from rlsdk.trainer.runs.run_inputs import build_run_inputs
from rlsdk.trainer.stages.stage import Stage
from rlsdk.trainer.tracking.events import RunView

__all__ = ["model", "registry"]

REWARD = """
from helper import WEIGHT
from shapes.round import circle

def score(sample):
    return WEIGHT * len(sample.response) + circle()
"""


def settings_of(*arguments: str) -> dict[str, Any]:
    found = Registry.discover({"RLSDK_PLUGINS": "rlsdk"})
    return influential_settings(load_config([], ["--model", "m", *TASK, "--reward", "exact", *arguments], found))


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("reward_limits.on_failure", "-1.0"),
        ("reward_limits.timeout_s", "3.0"),
        ("critic.optim.lr", "1e-4"),
        ("ref.path", "other"),
        ("rollout.top_k", "5"),
        ("trainer.seed", "7"),
        ("trainer.epochs_per_step", "2"),
        ("data.system_prompt", "Be brief."),
        ("algorithm.lengths.penalty", "0.1"),
        ("rewards.0.weight", "2.0"),
        ("rewards.0.options", "{ignore_case: true}"),
        ("train.optim.betas", "[0.9, 0.99]"),
        ("placement.cpus_per_device", "2"),
    ],
)
def test_a_setting_counts_unless_it_is_marked_as_one_without_influence(flag: str, value: str) -> None:
    before, after = settings_of(), settings_of(f"--{flag}", value)
    assert next(name for name in before.keys() | after.keys() if before.get(name) != after.get(name)).startswith(flag)


@pytest.mark.parametrize(
    ("flag", "value"),
    [("trainer.steps", "900"), ("trainer.keep_checkpoints", "9"), ("schedule.journal", "all"),
     ("eval.every_steps", "7"), ("tracking.samples_per_step", "1"), ("deadlines.rollout_s", "9.0"),
     ("reward_limits.num_workers", "3")],
)  # fmt: skip
def test_marked_settings_do_not_count(flag: str, value: str) -> None:
    assert settings_of(f"--{flag}", value) == settings_of()


def test_the_number_of_steps_counts_where_the_learning_rate_decays() -> None:
    decay = ("--train.optim.schedule", "cosine")
    assert settings_of(*decay, "--trainer.steps", "900") != settings_of(*decay, "--trainer.steps", "800")


def test_fields_without_influence_are_few_and_none_is_of_rewards_data_or_models() -> None:
    """A new field counts unless somebody says at its declaration that it cannot matter."""

    def marked(section: type[Section], path: str) -> set[str]:
        found = set[str]()
        for name, field in section.model_fields.items():
            kind = field.annotation
            if NO_INFLUENCE in field.metadata:
                found.add(path + name)
            elif isinstance(kind, type) and issubclass(kind, Section):
                found |= marked(kind, f"{path}{name}.")
        return found

    assert marked(RunConfig, "") == {
        "eval", "checkpoint", "deadlines", "faults", "sft", "preferences", "tracking",
        "trainer.steps", "trainer.epochs", "trainer.run_dir", "trainer.run_name", "trainer.save_every_steps",
        "trainer.export_every_steps", "trainer.keep_checkpoints", "trainer.resume", "trainer.parity_threshold",
        "trainer.parity_action", "trainer.callbacks", "schedule.journal", "schedule.uncorrected", "train.ema_decay",
        "placement.ray_address", "placement.network_interface", "sharding.transport", "sharding.bucket_mb",
        "reward_limits.max_failure_share", "reward_limits.num_workers", "reward_limits.start_timeout_s",
        "reward_limits.log_mb", "gateway.host", "gateway.port", "gateway.max_sessions",
    }  # fmt: skip


class Inputs:
    """A run's inputs in a folder, which a test changes."""

    def __init__(self, folder: Path, registry: Registry) -> None:
        self.folder, self.registry = folder, registry
        write_tiny_model(folder / "tiny")
        (folder / "shapes").mkdir()
        (folder / "shapes" / "__init__.py").touch()
        (folder / "shapes" / "round.py").write_text("from .units import ONE\ndef circle():\n    return ONE\n")
        (folder / "shapes" / "units.py").write_text("ONE = 1\n")
        (folder / "helper.py").write_text("WEIGHT = 1.0\n")
        (folder / "reward.py").write_text(REWARD)
        (folder / "table.json").write_text("{}")
        rows = [{"question": f"{at}+1", "answer": str(at + 1), "level": 1} for at in range(8)]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.arguments = [
            "--model", str(folder / "tiny"), "--data", str(folder / "rows.jsonl"), "--data.num_eval_rows", "2",
            "--reward", f"{folder / 'reward.py'}:score", "--rewards.0.options", f"{{table: {folder / 'table.json'}}}",
            "--data.max_prompt_tokens", "32", "--rollout.max_response_tokens", "4", "--algorithm.ptx.coef", "0.1",
        ]  # fmt: skip

    def made_by(self, *more: str) -> dict[str, Any]:
        config = load_config([], [*self.arguments, *more], self.registry)
        inputs = build_run_inputs(config, self.registry, self.folder / "run", RunView(), rewarded=False)
        try:
            return made_by(config, self.registry, inputs)
        finally:
            inputs.close()


def edit(name: str, old: str, new: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / name
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    return change


def other_weights(folder: Path) -> None:
    """Of the same names, shapes and dtypes."""
    [path] = (folder / "tiny").glob("*.safetensors")
    save_file({name: torch.flip(t, [0]) for name, t in load_file(path).items()}, path, metadata={"format": "pt"})


CHANGES: Mapping[str, tuple[Callable[[Path], None], list[str]]] = {
    "reward": (edit("reward.py", "len", "max"), ["content of rewards.0.name (reward.py)"]),
    "imported": (edit("helper.py", "1.0", "2.0"), ["content of rewards.0.name (helper.py)"]),
    "imported by an import": (edit("shapes/units.py", "1", "2"), ["content of rewards.0.name (shapes/units.py)"]),
    "option": (edit("table.json", "{}", "[]"), ["content of rewards.0.options.table (table.json)"]),
    "a column that only rewards read": (edit("rows.jsonl", '"level": 1', '"level": 2'), ["content of data.train"]),
    "weights": (other_weights, ["content of model.path (weights)"]),
    "template": (
        lambda folder: (folder / "tiny" / "chat_template.jinja").write_text("{{ 1 }}") and None,
        ["content of model.path (chat_template.jinja)"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", CHANGES)
def test_what_is_read_counts_by_its_content(kind: str, registry: Registry, tmp_path: Path) -> None:
    inputs = Inputs(tmp_path, registry)
    before = inputs.made_by()
    assert inputs.made_by() == before
    for path in tmp_path.rglob("*"):
        os.utime(path, (1e9, 1e9))
    assert inputs.made_by() == before, "when a file was written says nothing"
    change, expected = CHANGES[kind]
    change(tmp_path)
    after = inputs.made_by()
    changed = [name for name in sorted(before.keys() | after.keys()) if before.get(name) != after.get(name)]
    assert changed[0].startswith(expected[0])
    assert len([name for name in changed if name.startswith("content of rewards")]) <= 1


def test_a_function_of_a_module_counts_with_what_it_imports_of_its_package(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "own_package_of_rewards"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "terms.py").write_text("ONE = 1\n")
    (package / "score.py").write_text("from own_package_of_rewards.terms import ONE\ndef score(sample): return ONE\n")
    monkeypatch.syspath_prepend(str(package.parent))
    inputs = Inputs(tmp_path, registry)
    more = ("--reward", "own_package_of_rewards.score:score", "--rewards.1.label", "own")
    before = inputs.made_by(*more)
    (package / "terms.py").write_text("ONE = 2\n")
    after = inputs.made_by(*more)
    name = "content of rewards.1.name (own_package_of_rewards.score)"
    assert {each for each in before if before[each] != after[each]} == {name}


def test_of_a_hub_name_the_commit_in_the_cache_counts(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "cache" / "models--org--judge"
    for commit in ("c" * 40, "d" * 40):
        (folder / "snapshots" / commit).mkdir(parents=True)
        (folder / "snapshots" / commit / "config.json").write_text("{}")
    (folder / "refs").mkdir()
    inputs, found = Inputs(tmp_path, registry), []
    for commit in ("c" * 40, "d" * 40):
        (folder / "refs" / "main").write_text(commit)
        found.append(inputs.made_by("--ref.path", "org/judge"))
    assert [each["content of ref.path (commit)"] for each in found] == ["c" * 40, "d" * 40]


def test_large_weights_are_not_read_whole(tmp_path: Path) -> None:
    """Half a terabyte, which takes no room on the disk: of each file a few pages are read."""
    for at in range(4):
        with (tmp_path / f"model-{at}.safetensors").open("wb") as file:
            file.write((16).to_bytes(8, "little") + b'{"__metadata__":')
            file.truncate(128 << 30)
    before = model_digests(tmp_path)
    with (tmp_path / "model-2.safetensors").open("r+b") as file:
        file.write((16).to_bytes(8, "little") + b'{"__metaDATA__":')
    assert model_digests(tmp_path) != before
    assert file_digest(tmp_path / "nothing") == "missing"


@pytest.mark.parametrize("offsets", [[0, 10**40], [-(10**40), 3], [1e300, 2e300], ["a", "b"], [], 3])
def test_a_header_that_is_not_true_hinders_no_digest(offsets: object, tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": offsets}}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(file, WHOLE_BYTES + 1)
    assert file_digest(file).startswith(DIGEST)


@pytest.mark.parametrize("change", ["one tensor", "the last row", "a byte in each page"])
def test_weights_of_equal_headers_and_size_are_told_apart(change: str, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    tensors = {"a": torch.zeros(1 << 20, 8), "b": torch.zeros(100, 8), "c": torch.zeros(1 << 20, 8)}
    save_file(tensors, file)
    assert file.stat().st_size > WHOLE_BYTES
    before = file_digest(file)
    assert file_digest(file) == before
    if change == "one tensor":
        tensors["b"] += 1
    elif change == "the last row":
        tensors["a"][-1] += 1
    else:
        tensors["c"][::128] += 1
    save_file(tensors, file)
    assert file_digest(file) != before


def killed_in_its_second_step(config: RunConfig, registry: Registry, folder: Path) -> None:
    """Its samples are made, and nothing is trained on them; there is a checkpoint of the first step."""
    with trainer_of(config, registry, folder, Recorder()) as (trainer, stage, _):
        trainer.stop = lambda: stage.step == 1
        trainer.fit()
        stage.advance()


def resumed(config: RunConfig, registry: Registry, folder: Path) -> tuple[Recorder, list[float], Stage]:
    view = Recorder()
    reused: list[float] = []
    with trainer_of(config, registry, folder, view) as (trainer, stage, _):
        checkpoint = trainer.store.newest()
        assert checkpoint is not None
        trainer.restore(checkpoint)
        stage.output.view.step = lambda step, steps, metrics: reused.append(  # type: ignore[method-assign]
            metrics.get("throughput/reused_samples", 0.0)
        )
        trainer.fit()
    return view, reused, stage


def test_samples_of_an_edited_reward_are_made_again_and_the_resume_names_the_file(
    model: str, registry: Registry, tmp_path: Path
) -> None:
    reward = tmp_path / "own.py"
    reward.write_text((HERE / "rewards.py").read_text())
    task = ["--model", model, *TASK, "--reward", f"{reward}:share_of_digits", "--trainer.steps", "3",
            "--trainer.save_every_steps", "1"]  # fmt: skip
    config = load_config([], task, registry)
    for name in ("same", "edited"):
        killed_in_its_second_step(config, registry, tmp_path / name)
    view, reused, _ = resumed(config, registry, tmp_path / "same")
    assert reused == [16.0, 0.0]
    assert not [notice for notice in view.notices if "not used" in notice]
    reward.write_text(reward.read_text() + "\n# another\n")
    view, reused, _ = resumed(config, registry, tmp_path / "edited")
    assert reused == [0.0, 0.0]
    [notice] = [notice for notice in view.notices if "not used" in notice]
    assert notice.startswith(f"the samples in {tmp_path / 'edited' / 'journal'} are not used: since then, changed:")
    assert "content of rewards.0.name (own.py)" in notice


def test_the_resume_names_the_setting_with_both_values_unless_nothing_is_lost(
    model: str, registry: Registry, tmp_path: Path
) -> None:
    task = ["--model", model, *TASK, "--reward", f"{HERE / 'rewards.py'}:share_of_digits", "--trainer.steps", "2",
            "--trainer.save_every_steps", "1"]  # fmt: skip
    killed_in_its_second_step(load_config([], task, registry), registry, tmp_path / "run")
    lenient = load_config([], [*task, "--reward_limits.on_failure", "-1.0"], registry)
    view, _, _ = resumed(lenient, registry, tmp_path / "run")
    [notice] = [notice for notice in view.notices if "not used" in notice]
    assert "changed: reward_limits.on_failure (none -> -1.0); what was not trained on is generated again" in notice
    more = load_config([], [*task, "--trainer.steps", "3", "--reward_limits.on_failure", "-2.0"], registry)
    view, _, _ = resumed(more, registry, tmp_path / "run")
    assert not [notice for notice in view.notices if "not used" in notice], "every sample was trained on"
