"""`rlsdk plugins install` and `remove`, with real interpreters: what was never finished is never used."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import psutil
import pytest

from rlsdk.diagnosis import Health
from rlsdk.diagnosis.plugins import plugins
from rlsdk.interfaces import ConfigError, PluginError
from rlsdk.registry import Registry, read_record
from rlsdk.virtualenvs.install import Choices, install, install_isolated
from rlsdk.virtualenvs.installer import Pip, Uv, Wanted, find_uv, make_environment
from rlsdk.virtualenvs.requirement import check_requirement, distribution_of

PLUGIN = """
from rlsdk.interfaces import BackendKind, BackendSpec, hookimpl

@hookimpl
def rlsdk_register_backends(register):
    register(BackendSpec(name="gale", kind=BackendKind.ROLLOUT, engine="rlsdk_gale_engine:Engine",
        options="rlsdk_gale_engine:Options", max_ranks=1))
"""
ENGINE = '''
from dataclasses import dataclass

from rlsdk.interfaces import RolloutEngine


@dataclass
class Options:
    force: int = 3
    """Of the wind."""


class Engine(RolloutEngine):
    def initialize(self, ctx, spec): ...
    async def generate(self, requests): yield
    def layout(self): return []
    def update_weights(self, shards, version): ...
'''


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLSDK_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A virtual environment that sees this one's packages, and has the plugin `gale` besides."""
    venv.create(tmp_path / "env", symlinks=True)
    (packages,) = (tmp_path / "env").glob("lib/python3*/site-packages")
    (packages / "here.pth").write_text("\n".join(path for path in sys.path if path))
    (packages / "rlsdk_gale.py").write_text(PLUGIN)
    (packages / "rlsdk_gale_engine.py").write_text(ENGINE)
    info = packages / "rlsdk_gale-0.4.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rlsdk-gale\nVersion: 0.4\n")
    (info / "entry_points.txt").write_text("[rlsdk]\ngale = rlsdk_gale\n")
    return tmp_path / "env"


def rlsdk(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rlsdk.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_an_environment_that_is_there_is_tested_recorded_used_and_forgotten(home: Path, environment: Path) -> None:
    done = rlsdk("plugins", "install", "rlsdk-gale", "--environment", str(environment))
    assert done.returncode == 0, done.stderr
    assert f"rlsdk-gale 0.4 works in {environment}" in done.stdout
    listed = json.loads(rlsdk("plugins", "list", "--json").stdout)
    gale = next(row for row in listed if row["name"] == "gale")
    assert (gale["state"], gale["environment"]) == ("ready", str(environment))
    shown = rlsdk("plugins", "info", "gale").stdout
    assert "force (int, default 3)\n        Of the wind." in shown
    assert f"environment   {environment}" in shown
    refused = rlsdk("train", "--rollout-backend", "gale", "--rollout.gale.forse", "4", "--model", "m")
    assert "rollout.gale.forse: unknown key; did you mean 'force'?" in refused.stderr
    assert rlsdk("plugins", "remove", "rlsdk-gale").stdout == "forgot rlsdk-gale\n"
    assert (environment / "bin" / "python").exists()
    assert "gale" not in rlsdk("plugins", "list").stdout


def test_the_doctor_imports_an_engine_where_it_lives(home: Path, environment: Path) -> None:
    assert rlsdk("plugins", "install", "rlsdk-gale", "--environment", str(environment)).returncode == 0
    rows = [row for row in Registry.discover().rows() if row.name == "gale"]
    (found,) = plugins(rows)
    assert (found.state, found.fix) == (Health.OK, "")
    assert f"environment {environment}" in found.found
    (packages,) = environment.glob("lib/python3*/site-packages")
    (packages / "rlsdk_gale_engine.py").unlink()
    (found,) = plugins(rows)
    assert (found.state, found.fix) == (Health.FAULT, "rlsdk plugins install rlsdk-gale --isolated")
    assert "No module named 'rlsdk_gale_engine'" in found.found


def test_a_plugin_whose_engine_cannot_be_imported_is_not_recorded(home: Path, environment: Path) -> None:
    (packages,) = environment.glob("lib/python3*/site-packages")
    (packages / "rlsdk_gale_engine.py").write_text("raise OSError('libgale.so.1: cannot open shared object file')\n")
    done = rlsdk("plugins", "install", "rlsdk-gale", "--environment", str(environment))
    assert done.returncode == 2
    assert "libgale.so.1: cannot open shared object file" in done.stderr
    assert "Traceback" not in done.stderr
    assert "gale" not in rlsdk("plugins", "list").stdout


def test_an_environment_without_rlsdk_is_refused_with_what_it_must_have(home: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", symlinks=True)
    done = rlsdk("plugins", "install", "rlsdk-gale", "--environment", str(tmp_path / "bare"))
    assert done.returncode == 2
    assert "the environment must have this rlsdk, and the same Python and Ray" in done.stderr
    missing = rlsdk("plugins", "install", "rlsdk-gale", "--environment", str(tmp_path / "nowhere"))
    assert "is not a virtual environment" in missing.stderr


def test_a_failed_install_leaves_the_older_one_and_nothing_of_itself(home: Path, tmp_path: Path) -> None:
    project = tmp_path / "no_plugin"
    project.mkdir()
    (project / "pyproject.toml").write_text("[project]\nname = 'no-plugin'\nversion = '1'\ndependencies = ['")
    with pytest.raises(ConfigError, match="cannot be read"):
        install_isolated(str(project), Choices())
    (project / "pyproject.toml").write_text("[project]\nname = 'no-plugin'\nversion = 'not a version'\n")
    with pytest.raises(PluginError, match="failed"):
        install_isolated(str(project), Choices())
    assert [path for path in home.glob("environments/*") if not path.name.startswith(".")] == []
    assert list(home.glob("plugins/*")) == []


def test_what_an_interrupted_install_left_is_never_found_and_cleared_by_the_next(home: Path, environment: Path) -> None:
    """As after kill -9: the folder is there, whole or not, but no record names it."""
    left = home / "environments" / "rlsdk-gale-0badcafe"
    left.parent.mkdir(parents=True)
    os.rename(environment, left)
    assert "gale" not in rlsdk("plugins", "list").stdout
    with pytest.raises(PluginError):
        install_isolated("rlsdk-gale @ file:///nowhere", Choices())
    assert [path for path in left.parent.iterdir() if not path.name.startswith(".")] == []


def test_an_environment_in_use_is_not_taken_away(home: Path, environment: Path) -> None:
    own = home / "environments" / "rlsdk-gale-0badcafe"
    own.parent.mkdir(parents=True)
    os.rename(environment, own)
    assert rlsdk("plugins", "install", "rlsdk-gale", "--environment", str(own)).returncode == 0
    (path,) = home.glob("plugins/*.json")
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "owned": True}))
    held = subprocess.Popen([read_record(path).python, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        refused = rlsdk("plugins", "remove", "rlsdk-gale")
        assert refused.returncode == 2
        assert f"is in use by process {held.pid}; end it" in refused.stderr
    finally:
        held.communicate()
    assert rlsdk("plugins", "remove", "rlsdk-gale").stdout == "removed rlsdk-gale and its environment\n"
    assert not own.exists()


def write_wheel(folder: Path, name: str, version: str, *requires: str) -> None:
    """An empty distribution."""
    info = f"{name}-{version}.dist-info"
    asks = "".join(f"Requires-Dist: {text}\n" for text in requires)
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{asks}")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def test_pip_too_replaces_what_an_engine_asks_for_and_never_brings_the_rest(
    environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`gpu_kernels` and 2.0 of `gale_math` exist nowhere: to look for them would fail."""
    write_wheel(
        tmp_path, "gale_engine", "1.0", "gale-math==2.0", "gpu_kernels[big]==3", "gale-text", "absent; extra=='x'"
    )
    write_wheel(tmp_path, "gale_math", "1.5")
    write_wheel(tmp_path, "gale_text", "0.1", "gale_vision")
    write_wheel(tmp_path, "gale_vision", "0.1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    never = "sys_platform == 'never'"
    overrides = ["gale-math==1.5", f"gpu-kernels ; {never}", f"gale_vision ; {never}"]
    Pip(environment / "bin" / "python").install(
        Wanted(plugin="rlsdk-gale", asked=["gale-engine>=1", "gale_math>=1"], overrides=overrides)
    )
    found = {path.name.partition("-")[0] for path in environment.glob("lib/python3*/site-packages/gale_*.dist-info")}
    assert found == {"gale_engine", "gale_math", "gale_text"}


@pytest.mark.parametrize("edited", ["outside", "..", "link", "inside another", "root"])
def test_an_edited_record_removes_nothing_outside_of_the_environments(
    home: Path, environment: Path, tmp_path: Path, edited: str
) -> None:
    assert rlsdk("plugins", "install", "rlsdk-gale", "--environment", str(environment)).returncode == 0
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    environments = home / "environments"
    (environments / "rlsdk-gale-12345678").symlink_to(precious)
    (environments / "rlsdk-other-12345678" / "lib").mkdir(parents=True)
    places = {
        "outside": precious,
        "..": environments / ".." / ".." / "precious",
        "link": environments / "rlsdk-gale-12345678",
        "inside another": environments / "rlsdk-other-12345678" / "lib",
        "root": environments,
    }
    record = home / "plugins" / "rlsdk-gale.json"
    data = json.loads(record.read_text()) | {"owned": True, "environment": str(places[edited])}
    record.write_text(json.dumps(data))
    done = rlsdk("plugins", "remove", "rlsdk-gale")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"forgot rlsdk-gale; '{places[edited]}' stays")
    assert (precious / "thesis.txt").read_text() == "years of work"
    assert (environments / "rlsdk-other-12345678" / "lib").is_dir()


@pytest.mark.parametrize("name", ["../../precious", "a/b", "*", ""])
def test_the_name_in_a_strangers_project_does_not_become_a_path(home: Path, tmp_path: Path, name: str) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "pyproject.toml").write_text(f"[project]\nname = {json.dumps(name)}\n")
    done = rlsdk("plugins", "install", str(project), "--isolated")
    assert done.returncode == 2, done.stderr
    assert "has no project name" in done.stderr
    assert not home.exists()


def test_a_record_that_is_a_pipe_costs_its_row(home: Path) -> None:
    (home / "plugins").mkdir(parents=True)
    os.mkfifo(home / "plugins" / "rlsdk-gale.json")
    done = rlsdk("plugins", "list")
    assert done.returncode == 0
    assert "is a named pipe, expected a regular file" in done.stdout


def test_removing_what_is_not_there_says_so(home: Path) -> None:
    done = rlsdk("plugins", "remove", "rlsdk-nothing-like-it")
    assert done.returncode == 2
    assert "is neither in this environment nor in its own" in done.stderr


def test_names_wheels_and_folders_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'Acme_Engine'\n")
    assert distribution_of(str(tmp_path)) == distribution_of(f"-e {tmp_path}") == "acme-engine"
    assert distribution_of("/a/rlsdk_acme-1.2-py3-none-any.whl") == "rlsdk-acme"
    assert distribution_of("rlsdk.acme[x]>=1.2") == "rlsdk-acme"
    with pytest.raises(ConfigError, match="is not a plugin: expected a backend's name"):
        distribution_of("no such thing")


@pytest.mark.parametrize(
    "text",
    [
        "https://example.org/rlsdk_evil-1-py3-none-any.whl", "git+https://example.org/evil", "git+ssh://git@host/evil",
        "evil @ https://example.org/evil.tar.gz", "evil@git+https://example.org/evil", "file:///tmp/evil.whl",
        "--index-url=https://example.org", "-rhttps://example.org/all.txt", "--config-settings", "-e git+https://a.org/b",
        "../evil", "a b", "",
    ],
)  # fmt: skip
def test_urls_options_and_places_that_are_not_there_never_reach_an_installer(
    text: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlsdk.virtualenvs.install.run", _refused)
    monkeypatch.setattr("rlsdk.virtualenvs.installer.run", _refused)
    for choices, name in ((Choices(), text), (Choices(more=[text]), "rlsdk-acme"), (Choices(core=text), "rlsdk-acme")):
        for isolated in (True, False):
            if text or name == text:
                with pytest.raises(ConfigError):
                    install(name, choices, isolated=isolated)


def _refused(*_: object, **__: object) -> str:
    raise AssertionError("an installer was called")


def test_names_with_versions_and_what_is_here_pass_and_urls_when_asked_for(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'acme'")
    for text in ("vllm", "rlsdk-acme>=1.2,<2", "rlsdk-acme[extra]==1.0", str(tmp_path), "acme==1; python_version>'3'"):
        check_requirement(text, allow_direct=False)
    check_requirement("acme @ https://example.org/acme.whl", allow_direct=True)
    with pytest.raises(ConfigError, match="--allow-direct"):
        check_requirement("acme @ https://example.org/acme.whl", allow_direct=False)


SLOW_INSTALLER = """
import signal, subprocess, sys
# Whoever runs the tests may ignore these (a background shell, nohup), and children inherit it.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
from rlsdk.virtualenvs import install
from rlsdk.virtualenvs.install import Choices, install_isolated

def slow(folder, python):
    (folder / "bin").mkdir(parents=True)
    (folder / "large").write_bytes(b"0" * 1000)
    work = "subprocess.Popen(['sleep', '600']); print('at work', flush=True); time.sleep(600)"
    subprocess.run([sys.executable, "-c", f"import subprocess, time; {work}"])

install.make_environment = slow
install_isolated("rlsdk-acme", Choices())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_an_install_that_is_killed_takes_its_installer_and_what_it_wrote_along(
    number: signal.Signals, home: Path
) -> None:
    with subprocess.Popen([sys.executable, "-c", SLOW_INSTALLER], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "at work\n"
        family = psutil.Process(process.pid).children(recursive=True)
        assert "sleep" in {member.name() for member in family}
        assert list((home / "environments").glob("rlsdk-acme-*/large"))
        process.send_signal(number)
    alive = psutil.wait_procs(family, timeout=60)[1]
    assert [member for member in alive if member.status() != psutil.STATUS_ZOMBIE] == []
    assert list((home / "environments").glob("rlsdk-acme-*")) == []


@pytest.mark.skipif(not find_uv(), reason="uv is not installed")
@pytest.mark.parametrize("name", ["uv.toml", "pyproject.toml"])
def test_uv_reads_the_settings_of_the_user_and_not_those_of_the_current_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cloned" / "below").mkdir(parents=True)
    refusal = 'required-version = "==0.0.1"\n'
    table = "" if name == "uv.toml" else '[project]\nname = "x"\nversion = "1"\n[tool.uv]\n'
    (tmp_path / "cloned" / name).write_text(table + refusal)
    monkeypatch.chdir(tmp_path / "cloned" / "below")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user"))
    monkeypatch.delenv("UV_NO_CONFIG", raising=False)
    installer = make_environment(tmp_path / "made", Path(sys.executable))
    assert isinstance(installer, Uv)
    installer._pip("list")
    (tmp_path / "user" / "uv").mkdir(parents=True)
    (tmp_path / "user" / "uv" / "uv.toml").write_text(refusal)
    with pytest.raises(PluginError, match=r"0\.0\.1"):
        installer._pip("list")
