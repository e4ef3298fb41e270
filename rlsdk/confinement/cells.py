"""Runs cells of a model inside its sandbox: Python, shell, and reads and writes of files.

`keeper.py` loads this by path, and calls `run` in a process that it has forked and that never returns.
"""

from __future__ import annotations

import ast
import base64
import builtins
import json
import linecache
import os
import shutil
import stat
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any

from rlsdk.confinement.room import Room
from rlsdk.confinement.sandbox_child import add_site_builtins

PYTHON, SHELL, FILES = "python", "shell", "files"
_MOST_TRACE = 20_000
"""Characters of a traceback; its end is kept."""
_LOOP = r"""
__number=0
while IFS= read -r -d '' -u 3 __cell; do
    eval "$__cell" </dev/null 3<&- 4>&-
    __status=$?
    __number=$((__number + 1))
    printf '{"number": %d, "code": %d}\n' "$__number" "$__status" >&4
done
"""


def run(room: Room, kind: str, asked: int, told: int, out: int, err: int) -> None:
    """Confines this process, says so in a first line, and runs cells until nobody asks for more.

    Args:
        room: the rules.
        kind: one of PYTHON, SHELL, FILES.
        asked: file descriptor on which cells come.
        told: for a line of JSON, or an exit status, for each.
        out: for standard output of cells.
        err: for their standard error.
    """
    null = os.open(os.devnull, os.O_RDONLY)
    _move({0: null, 1: out, 2: err, 3: asked, 4: told})
    os.chdir(room.home)
    os.environ |= {"HOME": room.home, "TMPDIR": room.home, "PWD": room.home}
    os.nice(5)
    found = room.confine()
    _tell({"number": 0, "held": found.held, "missing": found.missing, "home": room.home})
    if kind == SHELL:
        _become_shell()
    _serve(_PythonCells(room.home).run if kind == PYTHON else _of_files)
    os._exit(0)


def _move(wanted: dict[int, int]) -> None:
    """Gives open files these numbers, and closes all others."""
    high = {number: os.dup2(fd, 64 + number, inheritable=False) for number, fd in wanted.items()}
    for number, fd in high.items():
        os.dup2(fd, number)
    os.closerange(max(wanted) + 1, 4096)


def _tell(what: dict[str, Any]) -> None:
    data = json.dumps(what).encode() + b"\n"
    while data:
        data = data[os.write(4, data) :]


def _serve(answer: Callable[[str], dict[str, Any]]) -> None:
    number = 0
    while header := _read(8):
        number += 1
        text = _read(int.from_bytes(header, "big")).decode("utf-8", "surrogatepass")
        _tell({"number": number, **answer(text)})


def _read(count: int) -> bytes:
    data = b""
    while len(data) < count and (more := os.read(3, count - len(data))):
        data += more
    return data if len(data) == count else b""


def _become_shell() -> None:
    bash = shutil.which("bash", path=os.defpath)
    if bash is None:
        _tell({"number": 1, "refused": "shell cells need bash, which is not in /bin or /usr/bin"})
        os._exit(0)
    os.set_inheritable(3, True)
    os.set_inheritable(4, True)
    os.execve(bash, [bash, "--norc", "--noprofile", "-c", _LOOP, "bash"], dict(os.environ))


class _PythonCells:
    """An interpreter that keeps its names between cells, and shows the value of a cell's last expression."""

    def __init__(self, home: str) -> None:
        sys.argv, sys.path = [""], [home, *sys.path]
        add_site_builtins()
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        main.__dict__["__builtins__"] = builtins
        self._names, self._count, self._pid = main.__dict__, 0, os.getpid()

    def run(self, text: str) -> dict[str, Any]:
        self._count += 1
        name = f"<cell {self._count}>"
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        # Anew for every cell: one may close them, as `exit()` does, or put something else there.
        sys.stdin, sys.stdout, sys.stderr = _stream(0, "r"), _stream(1, "w"), _stream(2, "w")
        error = None
        try:
            self._execute(text, name)
        except BaseException as raised:  # `exit()` ends the cell, not the interpreter
            error = _trace(raised)
        if os.getpid() != self._pid:  # a child that the cell has forked
            os._exit(error is not None)
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except Exception as raised:  # the cell may have put anything there
                error = error or _trace(raised)
        return {"error": error}

    def _execute(self, text: str, name: str) -> None:
        tree = ast.parse(text, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), self._names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), self._names)
            if value is not None:
                print(repr(value))


def _stream(number: int, mode: str) -> Any:
    return open(number, mode, encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)


def _trace(error: BaseException) -> str:
    """The error as Python prints it, with the frames of cells only."""
    try:
        frames = error.__traceback__
        while frames is not None and not frames.tb_frame.f_code.co_filename.startswith("<cell "):
            frames = frames.tb_next
        return "".join(traceback.format_exception(type(error), error, frames))[-_MOST_TRACE:]
    except BaseException:  # memory, depth, or an exception with a broken `__str__`
        return f"{type(error).__name__}\n"


def _of_files(text: str) -> dict[str, Any]:
    """Reads or writes a file, with the rights of the sandbox: links lead nowhere else."""
    job = json.loads(text)
    try:
        if job["content"] is None:
            return {"content": base64.b64encode(_content(job["path"], job["most"])).decode()}
        _put(job["path"], base64.b64decode(job["content"]))
        return {}
    except (OSError, ValueError) as error:
        return {"error": getattr(error, "strerror", None) or str(error)}


def _content(path: str, most: int) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as stream:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ValueError("not a regular file")
        content = stream.read(most + 1)
    if len(content) > most:
        raise ValueError(f"more than {most} bytes")
    return content


def _put(path: str, content: bytes) -> None:
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    with os.fdopen(fd, "wb") as stream:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ValueError("not a regular file")
        os.ftruncate(fd, 0)
        stream.write(content)
