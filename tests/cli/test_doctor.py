"""`rlsdk doctor`: each check on facts that are given, and the whole command in environments that were sabotaged."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rlsdk.api.machine import graders
from rlsdk.cli.preparation.doctor import run
from rlsdk.confinement.measures import Confinement
from rlsdk.diagnosis import Finding, Health, machine, packages, verdict
from rlsdk.diagnosis import plugins as plugin_checks
from rlsdk.diagnosis.cluster import cluster
from rlsdk.diagnosis.examine import count_gpus, guarded
from rlsdk.diagnosis.machine import GIB, Space
from rlsdk.diagnosis.probe import Answer, ask
from rlsdk.interfaces import BackendKind, BackendSpec
from rlsdk.registry import Row, Source, State

ROOM = Space(total_bytes=64 * GIB, free_bytes=32 * GIB)
TIGHT = Space(total_bytes=64 * GIB, free_bytes=4 * GIB)
FULL = Space(total_bytes=64 * GIB, free_bytes=100 << 20)


@pytest.mark.parametrize(
    ("finding", "state", "said", "fix"),
    [
        (lambda: packages.interpreter("3.12.1", ">=3.11,<3.14"), "ok", "3.12.1", ""),
        (lambda: packages.interpreter("3.9.2", ">=3.11,<3.14"), "fault", "rlsdk supports >=3.11", "uv venv --python"),
        (lambda: machine.memory(ROOM), "ok", "32.0 GiB free of 64.0 GiB", ""),
        (lambda: machine.memory(TIGHT), "warning", "small models only", "ps -eo"),
        (lambda: machine.memory(FULL), "fault", "too little", "ps -eo"),
        (lambda: machine.shared_memory(space=ROOM), "ok", "/dev/shm", ""),
        (lambda: machine.shared_memory(space=FULL, contained=True), "warning", "100 MiB", "docker run --shm-size"),
        (lambda: machine.shared_memory(space=FULL, contained=False), "warning", "files", "sudo mount -o remount"),
        (lambda: machine.shared_memory(Path("/nowhere")), "fault", "is not there", "mount -t tmpfs"),
        (lambda: machine.run_folder(Path("/"), FULL), "fault", "12 bytes or more", "du -xh /"),
        (lambda: machine.run_folder(Path("/dev/null/runs")), "fault", "not a folder", "--trainer.run_dir"),
        (lambda: machine.temporary_folder(Path("/nowhere")), "fault", "No such file", "export TMPDIR"),
        (lambda: machine.open_files((65536, 65536)), "ok", "65536", ""),
        (lambda: machine.open_files((1024, 1 << 20)), "warning", "1024 a process", "ulimit -n 65536"),
        (lambda: machine.open_files((256, 1024)), "fault", "256 a process", "sudo prlimit"),
        (lambda: machine.ports(28232, ""), "ok", "28232 ports", ""),
        (lambda: machine.ports(100, ""), "warning", "100 ports", "sudo sysctl -w"),
        (lambda: machine.ports(28232, "no connection to 127.0.0.1"), "fault", "no connection", "sudo ip link"),
        (lambda: machine.ports(0, "no connection: address already in use"), "fault", "0 ports are free", "ss -tanp"),
        (lambda: packages.ray(Answer(error="ImportError: _raylet.so")), "fault", "_raylet.so", "--force-reinstall"),
        (lambda: cluster("h:1", Answer(error="refused")), "fault", "'h:1': refused", "ray start --head"),
    ],
)  # fmt: skip
def test_a_check_says_how_it_is_and_what_mends_it(
    finding: Callable[[], Finding], state: str, said: str, fix: str
) -> None:
    found = finding()
    assert found.state == state
    assert said in found.found
    assert fix in found.fix
    assert bool(found.fix) == (state != "ok")
    assert "\n" not in found.fix


def torch_answer(**facts: Any) -> Answer:
    return Answer(facts={"version": "2.13", "cuda": None, "gpus": [], "why": "", "right": True, **facts})


@pytest.mark.parametrize(
    ("num_gpus", "answer", "states", "said", "fix"),
    [
        (0, torch_answer(), ["ok", "ok"], "no GPU", ""),
        (2, torch_answer(cuda="12.8", gpus=[["H100", 80 * GIB]] * 2), ["ok", "ok"], "2 GPUs: H100 of 80 GiB", ""),
        (2, torch_answer(), ["ok", "fault"], "2 GPUs, but torch is built without CUDA", "--index-url"),
        (2, torch_answer(cuda="12.8", why="driver too old"), ["ok", "fault"], "use 0: driver too old", "nvidia-smi"),
        (2, torch_answer(cuda="12.8", gpus=[["H100", GIB]]), ["ok", "fault"], "torch can use 1", "nvidia-smi"),
        (0, torch_answer(right=False), ["fault"], "came out wrong", "--force-reinstall torch"),
        (0, Answer(error="its process died of SIGILL"), ["fault"], "died of SIGILL", "--force-reinstall 'torch>="),
    ],
)  # fmt: skip
def test_torch_must_import_compute_and_see_the_gpus(
    num_gpus: int, answer: Answer, states: list[str], said: str, fix: str
) -> None:
    found = list(packages.torch(num_gpus, answer))
    assert [finding.state for finding in found] == states
    assert said in found[-1].found
    assert fix in found[-1].fix


def test_requirements_that_are_missing_or_of_another_version_are_named_with_the_command() -> None:
    declared = ["pytest>=1", "pluggy<0.1", "no-such-thing>=2", "wandb; extra == 'wandb'", "x; python_version < '3'"]
    found = {finding.check: finding for finding in packages.requirements(declared)}
    assert set(found) == {"pluggy", "no-such-thing", "packages"}
    assert found["packages"].found.startswith("1 of")
    assert "but rlsdk needs <0.1" in found["pluggy"].found
    assert found["no-such-thing"].fix.endswith("install 'no-such-thing>=2'") or "uv pip" in found["no-such-thing"].fix


def test_gpus_are_counted_as_far_as_this_process_may_use_them(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert count_gpus(tmp_path, "") == 0
    assert count_gpus(tmp_path, "1") == 1
    assert count_gpus(tmp_path, "-1") == 0


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("raise OSError('libcudart.so.99: cannot open')", "OSError: libcudart.so.99: cannot open"),
        ("import os; os.abort()", "its process died of SIGABRT"),
        ("import time; time.sleep(60)", "no answer within 2 s"),
        ("sys.exit(3)", "its process ended with code 3 and said nothing"),
    ],
)
def test_a_probe_that_fails_crashes_or_hangs_costs_its_answer_only(code: str, error: str) -> None:
    assert ask(code, timeout_s=2.0 if "sleep" in code else 60.0).error == error
    assert ask("print('noise'); answer(a=[1])\nprint('more')", timeout_s=60.0).facts == {"a": [1]}


@pytest.mark.parametrize("damage", ["def (", "raise KeyboardInterrupt", "import absent"])
def test_a_module_of_rlsdk_that_a_run_could_not_import_is_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    package = tmp_path / "rlsdk"
    for name, source in {"__init__": "", "data/__init__": "", "data/rows": damage, "testing/__init__": "fail"}.items():
        (package / f"{name}.py").parent.mkdir(parents=True, exist_ok=True)
        (package / f"{name}.py").write_text(source + "\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    finding = packages.own()
    assert finding.state is Health.FAULT
    assert finding.found.startswith("rlsdk.data.rows cannot be imported: ")
    assert "--force-reinstall rlsdk" in finding.fix
    (package / "data" / "rows.py").write_text("")
    assert packages.own().found == "imports, all 3 modules"


def test_every_module_of_rlsdk_is_imported_and_none_has_a_fault() -> None:
    finding = packages.own()
    assert finding.state is Health.OK, finding.found
    assert int(finding.found.split()[2]) > 300


def test_a_check_that_fails_by_itself_becomes_a_warning() -> None:
    def broken() -> Finding:
        raise ZeroDivisionError("oh")

    (found,) = guarded("memory", broken)
    assert (found.check, found.state) == ("memory", Health.WARNING)
    assert "ZeroDivisionError: oh" in found.found
    assert verdict([found]) is Health.WARNING
    assert verdict([]) is Health.OK


def backend(state: State, reason: str = "", **fields: Any) -> Row:
    spec = BackendSpec(name="gale", kind=BackendKind.TRAIN, engine="gale:Engine", **fields)
    source = Source(distribution="rlsdk-gale", version="0.4", entry_point="gale")
    return Row(name="gale", kind=BackendKind.TRAIN, source=source, state=state, reason=reason, spec=spec)


NEEDS: dict[str, Any] = {"engine_requires": {"no-such|pluggy": ">=1,<2"}}


@pytest.mark.parametrize(
    ("row", "answer", "state", "said", "fix"),
    [
        (backend(State.READY, **NEEDS), Answer(facts={}), "ok", "pluggy 1.", ""),
        (backend(State.READY), Answer(error="OSError: lib.so"), "fault", "lib.so", "--force-reinstall rlsdk-gale"),
        (backend(State.UNTESTED, "tested with", **NEEDS), Answer(facts={}), "warning", "tested", "'pluggy>=1,<2'"),
        (backend(State.ENGINE_MISSING, "needs x", install_hint="get x"), None, "fault", "needs x", "get x"),
        (backend(State.ENGINE_MISSING, "needs x", engine_requires={"x|y": ">1"}), None, "fault", "", "'x>1'"),
        (backend(State.WRONG_INTERFACE, "for 9.0"), None, "fault", "for 9.0", "--upgrade rlsdk-gale"),
        (backend(State.CLASH, "also by z"), None, "fault", "also by z", "uninstall rlsdk-gale"),
        (backend(State.BROKEN, "no import"), None, "fault", "no import", "--force-reinstall rlsdk-gale"),
        (backend(State.DISABLED, "left out"), None, "ok", "left out", ""),
    ],
)  # fmt: skip
def test_every_state_of_a_plugin_is_told_with_what_mends_it(
    row: Row, answer: Answer | None, state: str, said: str, fix: str
) -> None:
    def probe(spec: BackendSpec) -> Answer:
        assert answer is not None, "what cannot be used is not imported"
        return answer

    (found,) = plugin_checks.plugins([row], probe)
    assert (found.check, found.state) == ("train gale", state)
    assert said in found.found
    assert fix in found.fix


def test_what_a_plugins_recipe_asks_for_on_this_device_is_named_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "galeish").mkdir()
    (tmp_path / "galeish" / "__init__.py").write_text("raise AssertionError('a package is found, not imported')")
    wanted = ["wind-engine[fast]>=2.9,<2.12", "torch>=2", "torch==1.0.0", "none; sys_platform == 'never'"]
    (tmp_path / "galeish" / "install.toml").write_text(f"[cuda]\nrequires = {json.dumps(wanted)}")
    monkeypatch.syspath_prepend(str(tmp_path))
    ready = backend(State.READY)
    row = replace(ready, spec=replace(ready.spec, engine="galeish.engine:Gale"))
    assert [found.state for found in plugin_checks.plugins([row], lambda _: Answer(facts={}))] == ["ok"]
    _, *lacking = plugin_checks.plugins([row], lambda _: Answer(facts={}), device="cuda")
    assert [found.state for found in lacking] == ["warning", "warning"]
    assert f"on cuda its engine is meant to run with {wanted[0]}; here: not installed" in lacking[0].found
    assert lacking[0].fix.endswith(f"install '{wanted[0]}'")
    assert "here: version 2." in lacking[1].found


def test_packages_of_an_engine_are_imported_by_the_names_that_it_is_installed_under() -> None:
    assert plugin_checks.import_names("no-such-thing|torch") == ["torch"]
    assert plugin_checks.import_names("no-such-thing") == []


SABOTAGED = {
    "torch": ("raise OSError('libtorch_cuda.so: cannot open shared object file')", "libtorch_cuda.so"),
    "ray": ("raise ModuleNotFoundError(\"No module named 'ray._raylet'\")", "No module named 'ray._raylet'"),
}


@pytest.fixture(scope="module")
def sabotaged(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """The command where neither torch nor Ray can be imported, with a plugin that is broken and one without engine."""
    folder = tmp_path_factory.mktemp("sabotaged")
    for name, (code, _) in SABOTAGED.items():
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(code + "\n")
    plugin = (
        "from rlsdk.interfaces import BackendKind, BackendSpec, hookimpl\n@hookimpl\n"
        "def rlsdk_register_backends(register):\n"
        "    register(BackendSpec(name='lost', kind=BackendKind.TRAIN, engine='lost:Engine',\n"
        "        engine_requires={'no-such-engine': '>=1'}, install_hint='pip install no-such-engine'))\n"
    )
    for name, source in (("rlsdk_lost", plugin), ("rlsdk_wreck", "raise OSError('libwreck.so')\n")):
        (folder / f"{name}.py").write_text(source)
        info = folder / f"{name}-0.4.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 0.4\n")
        (info / "entry_points.txt").write_text(f"[rlsdk]\n{name.removeprefix('rlsdk_')} = {name}\n")
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, "-m", "rlsdk.cli", "doctor", "--json", "--run-dir", str(folder / "runs")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "RLSDK_PLUGINS": "lost,wreck", "CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )


def test_where_torch_and_ray_are_broken_the_doctor_still_speaks(sabotaged: subprocess.CompletedProcess[str]) -> None:
    assert sabotaged.returncode == 1, sabotaged.stderr
    report = json.loads(sabotaged.stdout)
    assert report["verdict"] == "fault"
    found = {finding["check"]: finding for finding in report["findings"]}
    for name, (_, said) in SABOTAGED.items():
        assert found[name]["state"] == "fault"
        assert said in found[name]["found"]
        assert f"--force-reinstall '{name}>=" in found[name]["fix"]
    assert found["train lost"]["fix"] == "pip install no-such-engine"
    assert "libwreck.so" in found["plugin wreck"]["found"]
    assert found["train torch"]["state"] == "fault"
    for name in ("interpreter", "processors", "memory", "shared memory", "run folder", "open files", "ports"):
        assert name in found


def test_a_sound_environment_ends_well_and_without_a_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def some(run_dir: Path, ray_address: str | None, begins: Callable[[str], None]) -> list[Finding]:
        return [Finding(check="ray", state=Health.OK, found="[version] 2")]

    monkeypatch.setattr("rlsdk.diagnosis.examine", some)
    monkeypatch.setattr(
        "rlsdk.confinement.measures.probe", lambda: Confinement(["no network"], ["not root (it is root)"])
    )
    run(tmp_path, None, as_json=False)
    assert capsys.readouterr().out == (
        f"ok       {'ray':<20} [version] 2\n"
        f"ok       {'graders':<20} confined: no network; not here: not root (it is root)\n"
        "\nverdict: well: nothing to fix\n"
    )


def test_a_terminal_shows_what_is_being_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()

    def slow(run_dir: Path, ray_address: str | None, begins: Callable[[str], None]) -> Iterator[Finding]:
        begins("torch")
        deadline = time.monotonic() + 30
        while "checking torch ..." not in screen.getvalue():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield Finding(check="torch", state=Health.OK, found="2.9")

    monkeypatch.setattr("rlsdk.diagnosis.examine", slow)
    monkeypatch.setattr("rlsdk.cli.preparation.doctor._terminal", lambda: Console(file=screen, force_terminal=True))
    with suppress(SystemExit):
        run(tmp_path, None, as_json=False)
    assert "2.9" in screen.getvalue()


def test_a_system_that_confines_no_graders_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = ["no network and no tracing (unknown machine)", "no new privileges"]
    monkeypatch.setattr("rlsdk.confinement.measures.probe", lambda: Confinement(["limits"], missing))
    finding = graders()
    assert finding.state is Health.WARNING
    assert "not here: no network and no tracing (unknown machine)" in finding.found
    assert "container" in finding.fix


def test_the_verdict_lists_what_mends_the_worst_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = [
        Finding(check="open files", state=Health.WARNING, found="few", fix="ulimit -n 65536"),
        Finding(check="ray", state=Health.FAULT, found="gone", fix="pip install 'ray[a]'"),
    ]
    monkeypatch.setattr("rlsdk.diagnosis.examine", lambda *_: bad)
    with pytest.raises(SystemExit) as caught:
        run(tmp_path, None, as_json=False)
    assert caught.value.code == 1
    said = capsys.readouterr().out
    assert "verdict: 1 fault and 1 warning\n\nFAULT ray\n  pip install 'ray[a]'\n\nwarning open files\n" in said
