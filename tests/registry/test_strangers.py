"""A hostile or damaged distribution costs its own row, and no command anything else."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from registry_plugins import Install, backend_source, rows_of

from rlsdk.interfaces import BackendKind, PluginLoadError
from rlsdk.registry import Registry, State
from rlsdk.registry.guard import Guard

HOOK = "from rlsdk.interfaces import BackendSpec, BackendKind, hookimpl\n@hookimpl\ndef rlsdk_register_"
UNSHOWABLE = "class Odd(Exception):\n    def __str__(self): raise KeyboardInterrupt\n    __repr__ = __str__\n"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("raise GeneratorExit('over')", "GeneratorExit: over"),
        ("raise SystemExit(0)", "SystemExit: 0"),
        ("import os\nos._exit(0)", "SystemExit: os._exit(0)"),
        ("from os import _exit\ntry: _exit(3)\nexcept Exception: pass", "SystemExit: os._exit(3)"),
        ("import asyncio\nraise asyncio.CancelledError", "CancelledError"),
        ("class Own(BaseException): pass\nraise Own('mine')", "Own: mine"),
        (f"{UNSHOWABLE}raise Odd", "Odd (its text cannot be shown"),
        ("class Odd(Exception):\n    def __str__(self): return 5\nraise Odd", "Odd (its text cannot be shown"),
        ("raise ImportError('\\x1b]0;title\\x07\\x1b[2J')", r"\x1b]0;title\x07\x1b[2J"),
        ("raise ImportError('x' * 10**7)", "more characters"),
    ],
)
def test_whatever_an_entry_module_raises_is_in_its_row(install: Install, source: str, said: str) -> None:
    install("rlsdk-hostile", source)
    registry = Registry.discover()
    (row,) = rows_of(registry, "rlsdk-hostile")
    assert row.state is State.BROKEN
    assert said in row.reason
    assert len(row.reason) < 3000
    assert "torch" in registry.usable(BackendKind.TRAIN)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("backends(register):\n    raise KeyboardInterrupt", "KeyboardInterrupt"),
        (f"backends(register):\n    register(Odd())\n{UNSHOWABLE}", "whose repr raises KeyboardInterrupt"),
        (f"backends(register):\n    return Odd()\n{UNSHOWABLE}", "whose repr raises KeyboardInterrupt"),
        (f"losses(register):\n    register('x', Odd())\n{UNSHOWABLE}", "whose repr raises KeyboardInterrupt"),
        (f"losses(register):\n    register(Odd(), print)\n{UNSHOWABLE}", "whose repr raises KeyboardInterrupt"),
        ("losses(register):\n    [register(f'n{i}', print) for i in range(10**5)]", "more than 1000 names"),
    ],
)
def test_whatever_a_hook_registers_or_raises_is_in_its_rows(install: Install, body: str, said: str) -> None:
    install("rlsdk-hostile", HOOK + body)
    registry = Registry.discover()
    rows = rows_of(registry, "rlsdk-hostile")
    assert any(row.state is State.BROKEN and said in row.reason for row in rows)
    assert len(rows) <= 1001
    assert "torch" in registry.usable(BackendKind.TRAIN)


def test_a_name_whose_hash_fails_is_an_ordinary_text_in_the_registry(install: Install) -> None:
    body = """backends(register):
    class Name(str):
        def __hash__(self): raise RuntimeError("no hash")
        def __eq__(self, other): raise RuntimeError("no equality")
    register(BackendSpec(name=Name("gale"), kind=BackendKind.TRAIN, engine=Name("gale:Engine")))
"""
    install("rlsdk-hostile", HOOK + body)
    registry = pickle.loads(pickle.dumps(Registry.discover()))
    assert "gale" in registry.usable(BackendKind.TRAIN)
    assert registry.backend(BackendKind.TRAIN, "gale").engine == "gale:Engine"


def test_a_plugin_cannot_move_the_program(install: Install, tmp_path: Path) -> None:
    source = "import os, signal, sys\nos.chdir('/')\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nsys.stdout = None\n"
    before = os.getcwd(), signal.getsignal(signal.SIGINT), sys.stdout
    install("rlsdk-mover", source + backend_source("rlsdk_mover", "mover"))
    assert "mover" in Registry.discover().usable(BackendKind.TRAIN)
    assert (os.getcwd(), signal.getsignal(signal.SIGINT), sys.stdout) == before


def test_a_process_that_a_plugin_forks_ends_as_it_says(install: Install) -> None:
    fork = "import os\nchild = os.fork()\nif not child: os._exit(7)\n"
    install("rlsdk-forks", f"{fork}CODE = os.waitpid(child, 0)[1] >> 8\n" + backend_source("rlsdk_forks", "forks"))
    assert "forks" in Registry.discover().usable(BackendKind.TRAIN)
    assert sys.modules["rlsdk_forks"].CODE == 7
    assert os._exit.__module__ == "posix"


def test_what_a_plugin_prints_while_it_loads_does_not_reach_standard_output(
    install: Install, capfd: pytest.CaptureFixture[str]
) -> None:
    talk = "import os\nprint('noise')\nos.write(1, b'more noise\\n')\nos.system('echo loud noise')\n"
    install("rlsdk-noisy", talk + backend_source("rlsdk_noisy", "noisy") + f"    exec({talk!r})\n")
    install("rlsdk-noisy-engine", talk, module="rlsdk_noisy_engine")
    registry = Registry.discover()
    with pytest.raises(PluginLoadError):
        registry.load_engine(registry.backend(BackendKind.TRAIN, "noisy"))
    out, err = capfd.readouterr()
    assert out == ""
    assert all(word in err for word in ("noise\n", "more noise", "loud noise"))


def test_ctrl_c_while_a_plugin_loads_ends_the_command_whatever_the_plugin_makes_of_it() -> None:
    def swallow() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            signal.pause()
        except KeyboardInterrupt:
            raise ImportError("swallowed") from None

    with pytest.raises(KeyboardInterrupt), Guard():
        swallow()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_plugin_that_does_not_finish_is_named(
    install: Install, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rlsdk.registry.guard.SLOW_S", 0.05)
    install("rlsdk-slow", "import time\ntime.sleep(0.5)\n" + backend_source("rlsdk_slow", "slow"))
    Registry.discover()
    assert "RLSDK_DISABLE_PLUGINS=rlsdk-slow leaves it out" in caplog.text


DAMAGE = {
    "entry points that are not UTF-8": ("entry_points.txt", b"[pydantic]\n\xff\xfe = nothing\n"),
    "a line that is no entry point": ("entry_points.txt", b"[pydantic]\nnothing\n"),
    "metadata that is not UTF-8": ("METADATA", b"Metadata-Version: 2.1\nName: \xff\xfe\nVersion: 1.0\n"),
    "metadata without a name": ("METADATA", b"Metadata-Version: 2.1\n"),
    "a list of files that is none": ("RECORD", b"a,b,c,d,e\n,,,\n\xff\n"),
}


@pytest.mark.parametrize("damage", [*DAMAGE, "a pipe"])
def test_a_damaged_distribution_keeps_nothing_from_being_imported(site: Path, damage: str) -> None:
    info = site / "damaged-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: damaged\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rlsdk]\ndamaged = damaged\n")
    if damage == "a pipe":
        (info / "entry_points.txt").unlink()
        os.mkfifo(info / "entry_points.txt")
    else:
        name, content = DAMAGE[damage]
        (info / name).write_bytes(content)
    code = (
        "import rlsdk, importlib.metadata as m; m.entry_points(); m.packages_distributions(); import rlsdk.config\n"
        "from rlsdk.registry import Registry\n"
        "print(*[f'{row.state} {row.reason}' for row in Registry.discover().rows() if 'damaged' in str(row)])"
    )
    environment = {**os.environ, "PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("broken "), done.stdout
    if damage != "a list of files that is none":
        assert "metadata cannot be read" in done.stdout or "import failed" in done.stdout


def test_many_and_strange_entry_points_are_bounded_and_harmless(install: Install) -> None:
    points = "[rlsdk]\n\x1b]0;pwn\x07 = absent\n" + "".join(f"n{number} = absent\n" for number in range(2000))
    install("rlsdk-many", "", points=points + f"{'x' * 10**6} = absent\n")
    rows = rows_of(Registry.discover(), "rlsdk-many")
    assert len(rows) <= 1001
    assert any("2,002 entry points" in row.reason for row in rows)
    assert "\x1b" not in str(rows)
    assert max(len(row.name) for row in rows) < 200
