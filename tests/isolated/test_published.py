"""From `rlsdk plugins new` to a run: distributions are written, built, installed beside the core's wheel, and used.

Nothing of this checkout is importable there: what is missing in a wheel is missing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlsdk.cli.plugin_tools.new import KINDS
from rlsdk.registry import read_record
from rlsdk.testing.process.models import write_tiny_model
from rlsdk.virtualenvs.installer import find_uv

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "third_party" / "rlsdk-openai"
TASKS = ROOT / "plugins" / "reasoning_gym"
OURS = ("PYTHONPATH", "PYTEST_ADDOPTS", "PYTHONDONTWRITEBYTECODE")
"""Variables of these tests that are not for the commands they call. A new environment is used by many of them: what
one had to compile, the next finds compiled."""
TIMEOUT_S = 800
"""Of a command: one of them brings a whole environment, over a slow line and from a cold cache maybe."""
pytestmark = pytest.mark.timeout(2 * TIMEOUT_S)
LIGHT = ("sharding", "reward", "algorithm", "tracker")
WRITTEN = {**{kind: ("--kind", kind) for kind in KINDS}, "ranks": ("--kind", "train", "--ranks")}
"""Name of a plugin behind `my-` -> arguments of `rlsdk plugins new`."""
TASK = (
    "--data", "reasoning_gym:chain_sum", "--data.options", "{size: 40, seed: 1, max_terms: 2, max_digits: 1}",
    "--data.max_prompt_tokens", "96", "--rollout.max_response_tokens", "6", "--trainer.prompts_per_step", "4",
    "--trainer.samples_per_prompt", "4", "--train.micro_batch_tokens", "2048", "--eval.every_steps", "null",
)  # fmt: skip


def call(*command: str | Path, cwd: Path | None = None, expect: int = 0, **environment: str) -> str:
    """Runs a command to its end; returns what it printed."""
    outside = {name: value for name, value in os.environ.items() if name not in OURS}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
        env={**outside, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", **environment},
    )  # fmt: skip
    assert done.returncode == expect, f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One distribution of every kind, as `rlsdk plugins new` writes it, `my-KIND` by name."""
    folder = tmp_path_factory.mktemp("written")
    for kind, arguments in WRITTEN.items():
        call(sys.executable, "-m", "rlsdk.cli", "plugins", "new", f"my-{kind}", *arguments, cwd=folder)
    return {kind: folder / f"rlsdk-my-{kind}" for kind in WRITTEN}


@pytest.fixture(scope="session")
def wheels(written: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The core's wheel as `core`, the example's as `openai`, reasoning-gym's as `tasks`, and that of every kind."""
    uv, found = find_uv(), {}
    assert uv, "uv is not there; run: make test"
    for name, source in {"core": ROOT, "openai": EXAMPLE, "tasks": TASKS, **written}.items():
        folder = tmp_path_factory.mktemp(f"wheel-{name}")
        call(*uv, "build", "--wheel", "--quiet", "--out-dir", folder, source)
        (found[name],) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="session")
def python(wheels: dict[str, Path], home: Path) -> Path:
    """The interpreter of a clean environment, made by the command for one of them; the others are put in as well."""
    tested = [line for line in (ROOT / "tools" / "tested.txt").read_text().splitlines() if line[:1].isalpha()]
    others = [str(wheel) for name, wheel in wheels.items() if name not in ("core", "rollout")]
    more = [part for text in (*tested, *others, "pytest>=8") for part in ("--with", text)]
    call(
        sys.executable, "-m", "rlsdk.cli", "plugins", "install", wheels["rollout"], "--isolated",
        "--core", wheels["core"], *more, RLSDK_HOME=str(home), UV_COMPILE_BYTECODE="0",
    )  # fmt: skip
    return Path(read_record(home / "plugins" / "rlsdk-my-rollout.json").python)


@pytest.fixture(scope="session")
def rlsdk(python: Path) -> Callable[..., str]:
    """The command of the clean environment."""

    def run(*arguments: str | Path, cwd: Path | None = None, expect: int = 0) -> str:
        return call(python.parent / "rlsdk", *arguments, cwd=cwd, expect=expect, RLSDK_HOME="/nonexistent")

    return run


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("models") / "qwen2", seed=1))


@pytest.fixture
def server(python: Path, model: str) -> Iterator[str]:
    """Address of the example's small server."""
    process = subprocess.Popen(
        [python, EXAMPLE / "tests" / "small_server.py", model], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


def test_a_clean_environment_lists_all_of_them_as_ready(rlsdk: Callable[..., str]) -> None:
    rows = json.loads(rlsdk("plugins", "list", "--json"))
    states = {row["distribution"]: row["state"] for row in rows if row["distribution"] != "rlsdk"}
    assert states == {
        **{f"rlsdk-my-{kind}": "ready" for kind in WRITTEN},
        "rlsdk-openai": "ready",
        "rlsdk-reasoning-gym": "ready",
    }


def test_the_environment_that_was_made_for_one_is_known_outside(python: Path, home: Path) -> None:
    said = call(sys.executable, "-m", "rlsdk.cli", "plugins", "list", "--json", RLSDK_HOME=str(home))
    (row,) = [row for row in json.loads(said) if row["name"] == "my-rollout"]
    assert (row["state"], row["environment"]) == ("ready", str(python.parent.parent))


@pytest.mark.parametrize("kind", LIGHT)
def test_what_was_written_passes_its_own_tests(kind: str, written: dict[str, Path], python: Path) -> None:
    call(python, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", written[kind], cwd=written[kind])


@pytest.fixture
def is_basic(pytestconfig: pytest.Config) -> bool:
    """Whether the basic requirements of published engines are enough: nothing that they depend on has changed."""
    return "published" in pytestconfig.getoption("--rlsdk-basic").split(",")


def said_of_parts(said: str) -> set[str]:
    return {line for line in said.splitlines() if line.startswith("LEFT OUT: ")}


def test_the_example_passes_its_own_tests_and_holds_what_it_claims(
    python: Path, is_basic: bool, left_out: set[str]
) -> None:
    part = ("--rlsdk-basic", "openai") if is_basic else ()
    said = call(python, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", *part, EXAMPLE, cwd=EXAMPLE)
    assert "conformance · rollout openai (" in said
    left_out |= said_of_parts(said)


@pytest.mark.parametrize("kind", ["train", "rollout"])
def test_written_engines_hold_all_that_they_claim(
    kind: str, rlsdk: Callable[..., str], is_basic: bool, left_out: set[str]
) -> None:
    part = ("--basic",) if is_basic else ()
    said = rlsdk("plugins", "check", f"my-{kind}", "--processes", "1", *part)
    assert f"conformance · {kind} my-{kind} · " in said
    left_out |= said_of_parts(said)


def test_a_written_engine_of_several_ranks_holds_the_basic_requirements(rlsdk: Callable[..., str]) -> None:
    said = rlsdk("plugins", "check", "my-ranks", "--processes", "1", "--basic")
    assert "conformance · train my-ranks · " in said


def test_a_run_uses_all_of_them_at_once(rlsdk: Callable[..., str], model: str, tmp_path: Path) -> None:
    rlsdk(
        "train", "--model", model, *TASK, "--train-backend", "my-train", "--rollout-backend", "my-rollout",
        "--reward", "my-reward", "--algorithm.advantage", "my-algorithm", "--tracking.trackers", "[jsonl, my-tracker]",
        "--trainer.steps", "2", "--trainer.run_name", "run", cwd=tmp_path,
    )  # fmt: skip
    run = tmp_path / "runs" / "run"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert next(row for row in rows if "parity/log_prob_diff_max" in row)["parity/log_prob_diff_max"] < 2e-5
    assert (run / "metrics.csv").read_text().startswith("step,name,value\n1,")


def test_the_example_evaluates_with_somebody_elses_server(
    rlsdk: Callable[..., str], model: str, server: str, tmp_path: Path
) -> None:
    flags = ("--rollout-backend", "openai", "--rollout.openai.url", server)
    said = rlsdk("generate", model, "--prompt", "1+1=", "--rollout.max_response_tokens", "4", *flags, cwd=tmp_path)
    assert '"response": ' in said


def test_a_run_that_would_train_with_it_is_refused_and_says_which_backends_can(
    rlsdk: Callable[..., str], model: str, tmp_path: Path
) -> None:
    said = rlsdk("train", "--model", model, *TASK, "--reward", "my-reward", "--rollout-backend", "openai", cwd=tmp_path,
                 expect=2)  # fmt: skip
    assert "rollout backend 'openai' serves weights of its own and takes none from a trainer" in said
    assert "installed and able: 'my-rollout', 'transformers'" in said
    assert not (tmp_path / "runs").exists()
