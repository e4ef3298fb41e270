"""Whether there is a GPU, from the files of devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsdk.cluster import count_gpus


@pytest.mark.parametrize(
    ("files", "visible", "expected"),
    [
        (["nvidia0"], None, 1),
        (["nvidia5", "nvidiactl", "nvidia-uvm"], None, 1),
        (["nvidia0", "nvidia1"], "1", 1),
        (["nvidia0"], "", 0),
        (["nvidia0"], "-1", 0),
        ([], "0,1", 0),
        (["nvidiactl"], None, 0),
    ],
)
def test_a_container_may_have_any_of_the_machines_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: list[str], visible: str | None, expected: int
) -> None:
    for name in files:
        (tmp_path / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert count_gpus(tmp_path) == expected
