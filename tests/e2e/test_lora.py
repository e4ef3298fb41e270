"""Adapters in whole runs: warm start, KL to the beginning of the run, resuming, evaluating, starting from one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import ANSWERS, TASK, rlsdk
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rlsdk.trainer.checkpoints.checkpoint import CheckpointStore
from rlsdk.trainer.tracking.trackers import read_metrics

LORA = ("--model.lora.rank", "4", "--train.optim.lr", "1e-2")
WARM = ("--sft.steps", "3", "--sft.lr", "1e-2", "--algorithm.kl_coef", "0.1", "--trainer.save_every_steps", "2")
QUIET = ("--eval.every_steps", "null", "--trainer.updates_per_step", "1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lora")


def train(model: str, folder: Path, name: str, steps: int, *more: str, expect: int = 0) -> str:
    return rlsdk("train", "--model", model, *TASK, *LORA, *QUIET, "--trainer.steps", str(steps),
                 "--trainer.run_name", name, *more, cwd=folder, expect=expect)  # fmt: skip


@pytest.fixture(scope="module")
def whole(model: str, folder: Path) -> Path:
    train(model, folder, "whole", 4, *WARM)
    return folder / "runs" / "whole"


def newest(run: Path) -> Path:
    return CheckpointStore(run / "checkpoints", 1).whole()[-1][1]


def test_the_actor_is_its_own_reference_as_it_was_after_the_warm_start(whole: Path) -> None:
    assert not (whole / "reference").exists(), "no second model, and none written for it"
    assert sorted(path.name for path in newest(whole).iterdir() if path.is_dir()) == ["actor", "model"]
    steps = [step for step in read_metrics(whole) if "policy/kl" in step]
    assert steps[0]["policy/kl"] == pytest.approx(0.0, abs=1e-6), "the reference is not the base"
    assert steps[-1]["policy/kl"] > 1e-4


def test_a_resumed_run_takes_the_same_steps(model: str, whole: Path, folder: Path) -> None:
    train(model, folder, "resumed", 2, *WARM)
    train(model, folder, "resumed", 4, *WARM)
    files = [newest(run) / "model" / "adapter_model.safetensors" for run in (whole, folder / "runs" / "resumed")]
    one, other = map(load_file, files)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_export_opens_in_peft_and_is_evaluated(model: str, whole: Path, folder: Path) -> None:
    exported = newest(whole) / "model"
    opened = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), exported)
    assert any(float(p.detach().abs().max()) > 0 for name, p in opened.named_parameters() if "lora_B" in name)
    said = rlsdk("generate", str(whole), "--prompt", "1 + 1 =", "--rollout.max_response_tokens", "4", cwd=folder)
    assert "1 + 1 =" in said
    few = ("--data.num_eval_rows", "8", "--eval.greedy", "true", "--trust-run")
    assert "accuracy" in rlsdk("eval", str(whole), *few, cwd=folder)


def test_a_run_starts_from_an_adapter_of_supervised_training(model: str, folder: Path) -> None:
    rlsdk("sft", "--model", model, *ANSWERS, "--model.lora.rank", "4", "--sft.steps", "3", "--sft.lr", "1e-2",
          "--trainer.run_name", "sft", cwd=folder)  # fmt: skip
    trained = folder / "runs" / "sft" / "model"
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json"} <= {p.name for p in trained.iterdir()}
    said = train(str(trained), folder, "never", 1, expect=2)
    assert "it is an adapter" in said
    assert "--model.lora.path" in said
    assert "--model.lora.rank 8" in train(model, folder, "never", 1, "--model.lora.path", str(trained),
                                          "--model.lora.alpha", "16", expect=2).replace("rank 4", "rank 8")  # fmt: skip
    apart = ("--train-backend", "fsdp", "--placement.preset", "disaggregated", "--placement.devices_per_node", "2")
    train(model, folder, "on", 2, "--model.lora.path", str(trained), "--algorithm.kl_coef", "0.1", *apart)
    first, second = [step for step in read_metrics(folder / "runs" / "on") if "policy/kl" in step]
    assert first["policy/kl"] == pytest.approx(0.0, abs=1e-6), "the reference is the adapter it began with"
    assert second["policy/kl"] > 1e-5
    for step in (first, second):  # what is served, in another process, is the model with its adapter
        assert step["parity/log_prob_diff_mean"] < 1e-4
