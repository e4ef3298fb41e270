"""Memory that is given back on a CPU and taken again, under tensors that stay."""

from __future__ import annotations

import torch

from rlsdk.kit.memory.offload import ReleasedMemory


def test_memory_is_given_back_and_comes_back_as_zeros() -> None:
    whole = torch.arange(12.0)
    views, released = [whole[:6].view(2, 3), whole[6:]], ReleasedMemory()
    released.release(views)
    assert whole.untyped_storage().nbytes() == 0
    released.restore()
    assert [view.tolist() for view in views] == [[[0.0] * 3] * 2, [0.0] * 6]
    views[0][1, 2] = 5.0
    assert whole[5] == 5.0
    released.restore()  # a second time nothing is taken
    assert whole[5] == 5.0


def test_memory_that_numpy_looks_into_stays_and_loses_its_values() -> None:
    """As after a checksum: torch never resizes such memory."""
    weight, released = torch.arange(1.0, 5.0), ReleasedMemory()
    seen = weight.numpy()
    released.release([weight])
    assert weight.untyped_storage().nbytes() == 16
    assert seen.tolist() == [0.0] * 4
    released.restore()
    weight.fill_(2.0)
    assert seen.tolist() == [2.0] * 4
