"""Commands on somebody else's run: nothing that came with it is run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rlsdk.cli import main
from rlsdk.cli.errors import EXIT_REFUSED
from rlsdk.trainer.checkpoints.checkpoint import CheckpointStore

EVIL = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\ndef fn(*args, **kwargs):\n    return 1.0\n"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose configuration names a Python file beside it, and a checkpoint whose model brings code."""
    folder = tmp_path / "run"
    checkpoint = folder / "checkpoints" / "step_00000001"
    code = {"AutoConfig": "evil.Config", "AutoTokenizer": ["evil.Tokenizer", None]}
    config = f"""
model: {{path: {checkpoint / "model"}, trust_remote_code: true}}
data: {{train: "quickstart:spell_backward"}}
rewards: [{{name: "{folder / "evil.py"}:fn"}}]
"""
    with CheckpointStore(folder / "checkpoints", keep=1).write(1, {}) as draft:
        (draft / "model").mkdir()
        (draft / "model" / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": code}))
        (draft / "model" / "evil.py").write_text(EVIL)
        (draft / "model" / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
        (draft / "config.yaml").write_text(config)
    (folder / "evil.py").write_text(EVIL)
    (folder / "config.yaml").write_text(config)
    return tmp_path / "run"


@pytest.mark.parametrize(
    "command",
    [
        lambda run: ["eval", run],
        lambda run: ["eval", f"{run}/checkpoints/step_00000001"],
        lambda run: ["generate", run, "--prompt", "1+1="],
        lambda run: ["plan", "--config", f"{run}/config.yaml"],
        lambda run: ["train", "--config", f"{run}/config.yaml", "--resume", run],
        lambda run: ["train", f"--config={run}/checkpoints/step_00000001/config.yaml"],
        lambda run: ["sft", "--config", f"{run}/config.yaml"],
    ],
    ids=["eval", "eval of a checkpoint", "generate", "plan", "train", "train of a checkpoint", "sft"],
)
def test_its_code_is_refused_with_the_flag_that_would_run_it(
    command: Callable[[str], list[str]], run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parent)
    with pytest.raises(SystemExit) as caught:
        main(command(str(run)))
    said = capsys.readouterr().err
    assert caught.value.code == EXIT_REFUSED
    assert "model.trust_remote_code: True" in said
    assert "--trust-run" in said
    assert ("rewards.0.name" in said) == (command("")[0] != "generate"), "generate grades nothing"
    assert list(run.rglob("ran")) == []


def test_with_the_flag_it_is_taken_at_its_word(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parent)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(run / "modules"))
    with pytest.raises((SystemExit, AttributeError)):  # transformers looks for the classes in what it ran
        main(["generate", str(run), "--prompt", "1+1=", "--trust-run"])
    assert "--trust-run" not in capsys.readouterr().err
    assert list(run.rglob("ran")), "what was refused above does run code"
