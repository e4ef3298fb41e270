"""Requirements: errors while writing checkpoints and exports are raised."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rlsdk.interfaces import Capability
from rlsdk.testing.suites.requirements import Measured, requirement
from rlsdk.testing.train.call_sequences import Act, export_alone, learn, refused, save, step
from rlsdk.testing.train.cases import rows_of
from rlsdk.testing.train.lab import TrainLab, furthest_weight, whole_of


class WriteErrorRequirements:
    """Mixed into `TrainConformance`."""

    @requirement("checkpoint.cannot_write", since=(2, 0))
    def test_checkpoint_cannot_write(self, lab: TrainLab, measured: Measured) -> None:
        """A checkpoint whose tensors cannot be written raises an error, even if threads write; training continues
        unaffected."""
        _is_heard_of(lab, measured, "checkpoint", save)

    @requirement("export.cannot_write", needs=Capability.EXPORT, since=(2, 0))
    def test_export_cannot_write(self, lab: TrainLab, measured: Measured) -> None:
        """An export whose tensors cannot be written raises an error; training continues unaffected."""
        _is_heard_of(lab, measured, "export", export_alone)


def _is_heard_of(lab: TrainLab, measured: Measured, what: str, write: Callable[[Path | str], Act]) -> None:
    first, blocked = lab.new_folder(f"{what}-written"), lab.new_folder(f"{what}-blocked")
    batches = [rows_of((8, 3), seed=140 + at) for at in range(2)]
    learning = [[learn(batch), step] for batch in batches]
    expected = lab.play([*learning[0], write(first), *learning[1]])
    largest = max((path for path in first.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    # A folder that is not empty in place of the file: not even root can write there.
    place = blocked / largest.relative_to(first)
    place.mkdir(parents=True)
    (place / "in the way").touch()
    failing = refused(f"a blocked {what}", write(blocked), Exception)
    # Without plain torch, which would read the export.
    found = lab.play([*learning[0], failing, *learning[1]], witness=False)
    measured.none("faults", found.faults)
    measured.equal("difference of weights", furthest_weight(whole_of(found), whole_of(expected)), 0.0)
