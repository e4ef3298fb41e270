"""Files that others made are read only if they are regular, and removed only where they should be."""

from __future__ import annotations

import os
import pickle
import threading
from pathlib import Path

import pytest

from rlsdk.system.files import (
    UnfitFileError,
    check_inside,
    foreign_reason,
    open_regular,
    read_regular,
    read_regular_or_pipe,
    read_regular_text,
    regular_lines,
    remove_tree,
)


def test_a_regular_file_is_read_also_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes("ä\r\nb\n".encode())
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert read_regular(tmp_path / "link") == "ä\r\nb\n".encode()
    assert read_regular_text(tmp_path / "file") == "ä\nb\n"
    assert list(regular_lines(tmp_path / "file")) == ["ä\r\n".encode(), b"b\n"]


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "link to a device", "absent"])
def test_nothing_else_is_opened_and_nothing_waits(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "place"
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "folder":
        place.mkdir()
    elif kind == "link to a device":
        place.symlink_to("/dev/zero")
    elif kind == "device":
        place = Path("/dev/zero")
    with pytest.raises(OSError, match=r"expected a regular file|Is a directory|No such file") as caught:
        open_regular(place)
    assert caught.value.filename == str(place)


def test_size_and_lines_are_bounded(tmp_path: Path) -> None:
    file = tmp_path / "file"
    with file.open("wb") as written:
        written.truncate(1 << 40)
    with pytest.raises(UnfitFileError, match=r"has 1,099,511,627,776 bytes, expected at most 1,000"):
        read_regular(file, 1000)
    with pytest.raises(UnfitFileError, match="expected at most 1,000"):
        next(regular_lines(file, 1000))
    with pytest.raises(UnfitFileError, match="line 1 has more than 5 bytes"):
        next(regular_lines(file, line_limit=5))
    file.write_bytes(b"one\ntwo")
    assert list(regular_lines(file, 7, 4)) == [b"one\n", b"two"]


def test_a_pipe_that_the_user_named_is_read_to_its_end(tmp_path: Path) -> None:
    pipe, text = tmp_path / "pipe", b"line\n" * 100_000
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(text,))
    writer.start()
    assert read_regular_or_pipe(pipe) == text
    writer.join()
    (tmp_path / "file").write_bytes(b"text")
    assert read_regular_or_pipe(tmp_path / "file") == b"text"
    with pytest.raises(UnfitFileError, match="is a device, expected a regular file"):
        read_regular_or_pipe("/dev/zero")


def test_a_named_pipe_is_bounded_in_time_and_size(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(UnfitFileError, match=r"nobody wrote to its end within 0\.1 s"):
        read_regular_or_pipe(pipe, timeout_s=0.1)
    ours = os.open(pipe, os.O_RDWR)  # a writer that stays
    try:
        os.write(ours, b"123456")
        with pytest.raises(UnfitFileError, match=r"nobody wrote to its end within 0\.1 s"):
            read_regular_or_pipe(pipe, timeout_s=0.1)
        os.write(ours, b"123456")
        with pytest.raises(UnfitFileError, match="more than 5 bytes"):
            read_regular_or_pipe(pipe, 5)
    finally:
        os.close(ours)
    reader, writer = os.pipe()
    os.close(writer)
    try:
        with pytest.raises(UnfitFileError, match="ended without any text; its command may have failed"):
            read_regular_or_pipe(f"/dev/fd/{reader}")
    finally:
        os.close(reader)


def test_the_error_crosses_processes() -> None:
    error = pickle.loads(pickle.dumps(UnfitFileError("a", "is a pipe")))
    assert (error.filename, error.strerror) == ("a", "is a pipe")


def test_a_link_on_the_way_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "run" / "real").mkdir(parents=True)
    (tmp_path / "run" / "link").symlink_to(tmp_path)
    (tmp_path / "latest").symlink_to(tmp_path / "run")
    check_inside(tmp_path / "latest", tmp_path / "latest" / "real" / "absent")
    for path in ("link", "link/run/real", "../secret"):
        with pytest.raises(UnfitFileError):
            check_inside(tmp_path / "run", tmp_path / "run" / path)


def test_a_file_of_a_model_is_its_own_or_of_the_hubs_cache(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "abc"
    for folder in (blobs, snapshot):
        folder.mkdir(parents=True)
    (blobs / "123").write_text("{}")
    (tmp_path / "secret").write_text("key")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/123")
    (snapshot / "tokenizer.model").symlink_to(tmp_path / "secret")
    (snapshot / "tokenizer.zero").symlink_to("/dev/zero")
    os.mkfifo(snapshot / "tokenizer.pipe")
    assert foreign_reason(snapshot, snapshot / "tokenizer.json") == ""
    assert (
        foreign_reason(snapshot, snapshot / "tokenizer.model")
        == f"is a link out of its folder (to '{tmp_path}/secret')"
    )
    assert "is a device" in foreign_reason(snapshot, snapshot / "tokenizer.zero")
    assert "is a named pipe" in foreign_reason(snapshot, snapshot / "tokenizer.pipe")


def test_only_a_folder_directly_in_the_root_is_removed(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    for folder in (root / "own" / "deep", root / "other" / "deep", outside):
        folder.mkdir(parents=True)
    (root / "own" / "way_out").symlink_to(outside)
    (root / "link").symlink_to(outside)
    for wrong in (outside, root / "link", root / "other" / "deep", root / "..", root):
        with pytest.raises(UnfitFileError):
            remove_tree(root, wrong)
    remove_tree(root, root / "own")
    remove_tree(root, root / "own")
    assert sorted(path.name for path in root.iterdir()) == ["link", "other"]
    assert outside.is_dir()
