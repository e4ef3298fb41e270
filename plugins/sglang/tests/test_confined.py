"""What SGLang's parts send one another can be reached by nobody else, and what schedulers unpickle is data."""

from __future__ import annotations

import os
import pickle
import stat
from pathlib import Path
from typing import Any

import pytest
import torch


class RunsCommand:
    """Unpickled without care, it runs a command."""

    def __init__(self, *command: object) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        function, *arguments = self.command
        return function, tuple(arguments)


def test_sockets_lie_in_a_folder_of_their_owner_alone(lab: Any) -> None:
    quiet = lab.engine.engine.engine._home._engine
    folder = quiet.named_resources.folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    ports = vars(quiet._engine.port_args)
    addresses = [value for value in ports.values() if isinstance(value, str) and "://" in value]
    assert any(address.startswith("ipc://") for address in addresses)
    strangers = [
        address
        for address in addresses
        if not address.startswith((f"ipc://{folder}/", "tcp://127.0.0.1:", "tcp://localhost:"))
    ]
    assert strangers == []


@pytest.mark.parametrize("gadget", ["os.system", "builtins.eval", "builtins.exec", "posix.system", "dynamic_import"])
def test_what_schedulers_unpickle_runs_nothing(gadget: str, tmp_path: Path) -> None:
    """SGLang reads what the adapter sends with a list of types that hold data; its own importing function is none."""
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.utils.common import dynamic_import

    ran = tmp_path / "ran"
    touch = f"open({str(ran)!r}, 'w')"
    command: tuple[Any, ...] = {
        "os.system": (os.system, f"touch {ran}"),
        "posix.system": (os.popen, f"touch {ran}"),
        "builtins.eval": (eval, touch),
        "builtins.exec": (exec, touch),
        "dynamic_import": (dynamic_import, "os.system"),
    }[gadget]
    harmless = torch.arange(4)
    assert torch.equal(MultiprocessingSerializer.deserialize(pickle.dumps([("command", harmless)]))[0][1], harmless)
    with pytest.raises((RuntimeError, pickle.UnpicklingError), match=r"(?i)blocked|unsafe|not allowed|forbidden"):
        MultiprocessingSerializer.deserialize(pickle.dumps([("command", RunsCommand(*command))]))
    assert not ran.exists()
