"""Checks, by writing and reading, that a folder is shared by every node of a run."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from rlsdk.interfaces import PlacementError

PREFIX = ".rlsdk-shared-"
RunOnNodes = Callable[..., Sequence[tuple[str, str]]]
"""`run_on_nodes(node_ids, function, *args)`: the function's result on each."""


def answer(folder: str, question: str) -> tuple[str, str]:
    """Of one node: what it reads of the controller's file (or why it cannot), and under which name it wrote its own.

    Args:
        folder: absolute.
        question: name of the controller's file in it.
    """
    host, name = socket.gethostname(), f"{question}-{uuid.uuid4().hex}"
    try:
        read = Path(folder, question).read_text(encoding="ascii")
        Path(folder, name).write_text(name, encoding="ascii")
    except OSError as error:
        return f"{host}: {error.strerror} ({error.filename})", ""
    return read, name


def check_shared_folder(folder: Path, node_ids: Sequence[str], run_on_nodes: RunOnNodes) -> None:
    """Has every node read what this process wrote into the folder, and reads what each wrote.

    Args:
        folder: of this run; made here where it is missing.
        node_ids: nodes of the run.
        run_on_nodes: calls `answer` there.

    Raises:
        PlacementError: a node sees another folder, or cannot write to it; names each such node, and what to do.
    """
    token = uuid.uuid4().hex
    question = folder / f"{PREFIX}{token}"
    folder.mkdir(parents=True, exist_ok=True)
    question.write_text(token, encoding="ascii")
    faults = []
    try:
        answers = run_on_nodes(node_ids, answer, str(folder.absolute()), question.name)
        for node_id, (read, name) in zip(node_ids, answers, strict=True):
            if read != token:
                faults.append(f"node {node_id[:8]} cannot read what was written here: {read}")
            elif not (folder / name).is_file():
                faults.append(f"node {node_id[:8]} wrote a file that is not seen here")
    finally:
        for file in folder.glob(f"{question.name}*"):
            with suppress(OSError):
                file.unlink()
    if faults:
        raise PlacementError(
            f"trainer.run_dir {str(folder)!r} is not one folder on all {len(node_ids)} nodes of this run, and each of "
            f"them writes checkpoints: {'; '.join(faults)}. Give a folder of a file system that all nodes mount at the "
            "same path"
        )
