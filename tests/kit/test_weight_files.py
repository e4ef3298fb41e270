"""A checkpoint that lacks a tensor of its model is refused before an engine serves what was allocated for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlsdk.interfaces import ConfigError, ModelSpec
from rlsdk.kit.files.weight_files import check_whole
from rlsdk.kit.model.hf import build_model, canonical_tensors
from rlsdk.testing.process.models import without_tensor, write_tiny_model


@pytest.mark.parametrize(("tied", "file_bytes"), [(False, None), (True, None), (False, 100_000)])
def test_a_whole_checkpoint_is_accepted(tmp_path: Path, tied: bool, file_bytes: int | None) -> None:
    spec = ModelSpec(path=str(write_tiny_model(tmp_path / "model", tied=tied, file_bytes=file_bytes)))
    tensors, other_names = canonical_tensors(build_model(spec, empty=True))
    check_whole(spec, tensors, other_names)
    assert bool(other_names) is tied


def test_a_tensor_may_be_there_under_the_other_name(tmp_path: Path) -> None:
    spec = ModelSpec(path=str(write_tiny_model(tmp_path / "model")))
    names = canonical_tensors(build_model(spec, empty=True))[0].keys()
    only_here = [*names - {"lm_head.weight"}, "head.weight"]
    check_whole(spec, only_here, {"lm_head.weight": "head.weight"})
    with pytest.raises(ConfigError, match=r"lacks 1 tensors, first 'head\.weight'"):
        check_whole(spec, only_here, {})


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    names = canonical_tensors(build_model(ModelSpec(path=str(folder)), empty=True))[0]
    spec = ModelSpec(path=str(without_tensor(folder, tmp_path / "lacking")))
    with pytest.raises(ConfigError, match=r"lacks 1 tensors, first 'model\.norm\.weight'; give a folder"):
        check_whole(spec, names, {})


def test_files_with_names_of_their_own_are_left_to_the_engine(tmp_path: Path) -> None:
    spec = ModelSpec(path=str(write_tiny_model(tmp_path / "model")))
    check_whole(spec, [f"language_model.{at}" for at in range(9)], {})
