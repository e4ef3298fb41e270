"""A Ray that does not start is an error in words, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsdk.cluster import preset_placement
from rlsdk.cluster.ray_cluster.local import LocalRay
from rlsdk.interfaces import WorkerError


def test_a_ray_that_times_out_is_said_with_what_to_look_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def slow(*_: object) -> None:
        raise Exception("The current node timed out during startup.\nmore")

    monkeypatch.setattr("rlsdk.cluster.ray_cluster.local._start_lean_node", slow)
    monkeypatch.setattr("rlsdk.cluster.ray_cluster.local.temporary_parent", lambda: str(tmp_path))
    with pytest.raises(WorkerError, match=r"Ray did not start .* timed out during startup\. Is it very"):
        LocalRay(preset_placement("colocate_all", ["actor"]))
    assert list(tmp_path.iterdir()) == []
