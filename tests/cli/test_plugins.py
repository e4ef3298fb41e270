"""`rlsdk plugins`, `rlsdk --help` and errors, as a person meets them."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import rlsdk
from rlsdk.cli import main
from rlsdk.interfaces import INTERFACE_VERSION

INTERFACE = ".".join(map(str, INTERFACE_VERSION))
BROKEN = "raise OSError('libcudart.so.99: cannot open shared object file')\n"
PLUGIN = """
from rlsdk.interfaces import BackendKind, BackendSpec, Capability, hookimpl

@hookimpl
def rlsdk_register_backends(register):
    register(BackendSpec(
        name="gale", kind=BackendKind.ROLLOUT, engine="rlsdk_gale_engine:Engine", options="rlsdk_gale_options:Options",
        description="A test of the wind.", capabilities=frozenset({Capability.SEED}), max_ranks=2,
        engine_requires={"pluggy": ">=1,<99"},
    ))
"""
OPTIONS = '''
from dataclasses import dataclass

@dataclass
class Options:
    force: int = 3
    """Of the wind, in Beaufort."""
'''


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two installed plugins: one whole, one that fails to import."""
    for name, source in (("rlsdk_gale", PLUGIN), ("rlsdk_wreck", BROKEN)):
        (tmp_path / f"{name}.py").write_text(source)
        info = tmp_path / f"{name}-0.4.dist-info"
        info.mkdir()
        distribution, point = name.replace("_", "-"), name.removeprefix("rlsdk_")
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 0.4\n")
        (info / "entry_points.txt").write_text(f"[rlsdk]\n{point} = {name}\n")
    (tmp_path / "rlsdk_gale_options.py").write_text(OPTIONS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def rlsdk_command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rlsdk.cli", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )


def called(*arguments: str) -> int:
    """Exit code of the command line, run in this process."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return int(caught.value.code or 0)


def row_of(table: str, name: str) -> str:
    return next(line for line in table.splitlines() if line.startswith(f"  {name} "))


def test_the_list_shows_what_works_what_does_not_and_why(plugins: Path) -> None:
    done = rlsdk_command("plugins", "list")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[:6] == ["name", "distribution", "version", "interface", "state", "why"]
    assert row_of(done.stdout, "torch").split() == ["torch", "rlsdk", rlsdk.__version__, INTERFACE, "ready"]
    assert row_of(done.stdout, "gale").split() == ["gale", "rlsdk-gale", "0.4", INTERFACE, "ready"]
    assert row_of(done.stdout, "wreck").split()[:4] == ["wreck", "rlsdk-wreck", "0.4", "broken"]
    assert "OSError: libcudart.so.99: cannot open shared object file" in row_of(done.stdout, "wreck")
    parts = [group.splitlines() for group in done.stdout.split("\n\n")]
    groups = {part[0]: [line.split()[0] for line in part[1:]] for part in parts}
    assert {"torch", "gale"}.isdisjoint(groups["plugin"])
    assert "torch" in groups["train backend"]
    assert groups["rollout backend"][-1] == "gale"
    assert "ppo_clip" in groups["loss"]


def test_the_list_names_first_party_plugins_that_are_not_installed() -> None:
    done = rlsdk_command("plugins", "list", RLSDK_PLUGINS="rlsdk")
    assert "not installed: train backend 'megatron'; run `pip install rlsdk-megatron`" in done.stdout


def test_the_list_is_machine_readable_on_request(plugins: Path) -> None:
    rows = json.loads(rlsdk_command("plugins", "list", "--json").stdout)
    gale = next(row for row in rows if row["name"] == "gale")
    assert gale["kind"] == "rollout"
    assert gale["capabilities"] == ["seed"]
    assert gale["entry_point"] == "gale"
    assert any(row["name"] == "wreck" and row["state"] == "broken" and row["why"] for row in rows)


def test_info_shows_capabilities_versions_and_options_with_types_defaults_and_texts(plugins: Path) -> None:
    shown = rlsdk_command("plugins", "info", "gale").stdout
    assert "gale: rollout backend of rlsdk-gale 0.4" in shown
    assert "capabilities  seed" in shown
    assert "tested with   pluggy>=1,<99; installed: " in shown
    assert "as --rollout.gale.OPTION" in shown
    assert "force (int, default 3)\n        Of the wind, in Beaufort." in shown


def test_info_on_a_broken_plugin_gives_its_reason_and_on_a_distribution_all_it_provides(plugins: Path) -> None:
    assert "libcudart.so.99" in rlsdk_command("plugins", "info", "wreck").stdout
    assert "gale: rollout backend" in rlsdk_command("plugins", "info", "rlsdk-gale").stdout


def test_info_on_a_component_shows_what_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert called("plugins", "info", "ppo_clip") == 0
    assert "clip_high" in capsys.readouterr().out


def test_info_on_a_misspelt_name_offers_the_nearest_and_what_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    assert called("plugins", "info", "transformes") == 2
    said = capsys.readouterr().err
    assert said.startswith("error: nothing named 'transformes' is installed (installed: ")
    assert said.strip().endswith("did you mean 'transformers'?")


def test_info_on_a_known_plugin_that_is_not_installed_gives_the_pip_command() -> None:
    done = rlsdk_command("plugins", "info", "megatron", RLSDK_PLUGINS="rlsdk")
    assert done.returncode == 2
    assert "pip install rlsdk-megatron" in done.stderr


def test_a_broken_plugin_asked_for_by_name_stops_the_run_before_it_starts(plugins: Path) -> None:
    done = rlsdk_command("train", "--train-backend", "wreck", "--model", "m")
    assert done.returncode == 2
    assert "train.backend: train backend 'wreck': plugin 'wreck' (rlsdk-wreck 0.4) is broken" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("variable", [True, False])
def test_a_traceback_is_shown_only_on_request(variable: bool) -> None:
    arguments = ["plugins", "info", "nothing-like-it"]
    done = rlsdk_command(*arguments, RLSDK_TRACEBACK="1") if variable else rlsdk_command(*arguments, "--traceback")
    assert done.returncode == 2
    assert "Traceback" in done.stderr
    assert "Traceback" not in rlsdk_command(*arguments).stderr


def test_help_lists_every_command_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert called("--help") == 0
    said = capsys.readouterr().out
    assert all(f"\n  {name} " in said for name in ("train", "sft", "eval", "generate", "report", "plugins"))
    assert called() == 0
    assert capsys.readouterr().out == said


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert called("--version") == 0
    assert capsys.readouterr().out == f"rlsdk {rlsdk.__version__}\n"


def test_help_of_train_lists_every_field_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert called("train", "--help") == 0
    assert "--rollout-backend (rollout.backend)" in capsys.readouterr().out
    assert called("train", "--help", "all") == 0
    assert "--trainer.samples_per_prompt  int, default 8" in capsys.readouterr().out


def test_an_unknown_command_or_flag_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert called("trian") == 2
    assert called("train", "--trainer.stepz", "5") == 2
    assert "trainer.stepz: unknown key; did you mean 'steps'? (--trainer.stepz)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("group", "name", "meant"),
    [
        ("reward", "gsm8k", "commands: serve. A run takes a reward by `--reward gsm8k`"),
        ("plugins", "vllm", "`rlsdk plugins info vllm`"),
        ("algorithms", "grpo", "`rlsdk algorithms show grpo`"),
        ("plugins", "lst", "Did you mean 'list'?"),
    ],
)
def test_a_name_in_place_of_a_command_says_what_was_meant(
    group: str, name: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert called(group, name) == 2
    assert meant in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["plugins", "list"], ["plugins", "info", "torch"]])
def test_light_commands_load_no_engine(arguments: list[str]) -> None:
    code = (
        f"import sys\nfrom rlsdk.cli import main\ntry:\n    main({arguments!r})\nexcept SystemExit:\n    pass\n"
        "heavy = ('torch', 'ray', 'transformers', 'datasets', 'numpy', 'rlsdk.config')\n"
        "print([name for name in heavy if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize(("arguments", "bare"), [(["--help"], ["--help"]), (["plugins", "list"], ["nothing"])])
def test_light_commands_take_less_than_three_times_the_processor_time_of_a_program_that_does_nothing(
    arguments: list[str], bare: list[str], tmp_path: Path
) -> None:
    """Measured: 1.9 times for `--help`, 1.6 for the list. typer itself imports pydantic from 0.29 on: a time in seconds
    would be one of its version and of the processor."""
    program = tmp_path / "bare.py"
    program.write_text(
        "import typer\napp = typer.Typer(rich_markup_mode=None)\n@app.callback()\ndef all() -> None: ...\n"
        "@app.command()\ndef nothing(flag: bool = False) -> None: ...\napp()\n"
    )
    ours = least_cpu_seconds([sys.executable, "-m", "rlsdk.cli", *arguments])
    assert ours < 3 * least_cpu_seconds([sys.executable, str(program), *bare])


def least_cpu_seconds(command: list[str]) -> float:
    """Of three runs, behind one that leaves byte-code behind, where that is written."""
    subprocess.run(command, capture_output=True, check=True)
    best = float("inf")
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return best
