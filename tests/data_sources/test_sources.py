from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import datasets
import pytest

import rlsdk.builtin
from rlsdk.data import DataRow, check_source, load_rows, parse_source
from rlsdk.interfaces import ConfigError, DataError, PluginNotFoundError
from rlsdk.registry import ComponentKind, Registry

from .conftest import check, write_lines

Load = Callable[..., list[DataRow]]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder that `datasets` saved, with two splits."""
    parts = {
        name: datasets.Dataset.from_list([{"question": f"{name} {i}"} for i in range(3)]) for name in ("train", "test")
    }
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "saved")
    return tmp_path / "saved"


@pytest.mark.parametrize(
    ("name", "kind", "rest"),
    [
        ("quickstart:spell_backward", "quickstart", "spell_backward"),
        ("reasoning_gym:chain_sum", "reasoning_gym", "chain_sum"),  # of a plugin
        ("a/b.jsonl", "jsonl", "a/b.jsonl"),
        ("b.JSON", "json", "b.JSON"),
        ("x.tsv", "csv", "x.tsv"),
        ("x.parquet", "parquet", "x.parquet"),
        ("json:notes.txt", "json", "notes.txt"),
        ("hf:org/name:main:train", "hf", "org/name:main:train"),
        ("openai/gsm8k:main:train", "hf", "openai/gsm8k:main:train"),
    ],
)
def test_a_source_is_told_by_its_name(sources: Mapping[str, str], name: str, kind: str, rest: str) -> None:
    source = parse_source(name, sources)
    assert (source.kind, source.rest) == (kind, rest)


def test_a_saved_folder_gives_the_split_that_is_named(load: Load, saved: Path) -> None:
    rows = load(f"{saved}:test")
    assert [row.row["question"] for row in rows] == ["test 0", "test 1", "test 2"]
    assert rows[1].source == f"{saved}:2"
    assert load(saved, split="train")[0].row["question"] == "train 0"


def test_a_folder_with_several_splits_asks_for_one(load: Load, saved: Path) -> None:
    with pytest.raises(DataError, match=r"has several splits \['test', 'train'\]; name one"):
        load(saved)
    with pytest.raises(DataError, match="no split 'tran'; did you mean 'train'"):
        load(f"folder:{saved}:tran")


def test_a_saved_single_data_set_needs_no_split(load: Load, tmp_path: Path) -> None:
    datasets.Dataset.from_list([{"question": "a", "n": 1}]).save_to_disk(tmp_path / "one")
    assert load(tmp_path / "one", columns=["question"])[0].row == {"question": "a"}
    with pytest.raises(DataError, match="has no splits, but split 'test' was asked for"):
        load(f"{tmp_path / 'one'}:test")


def test_a_folder_without_a_file_is_refused_before_anything_starts(load: Load, tmp_path: Path) -> None:
    (tmp_path / "rows" / "train").mkdir(parents=True)
    (tmp_path / "rows" / ".hidden").write_text("")
    for look in (lambda name: check(name, kinds=["folder"]), load):
        with pytest.raises(DataError, match=r"rows: this folder holds no file; expected one saved by `datasets`"):
            look(str(tmp_path / "rows"))
    write_lines(tmp_path / "rows" / "train" / "a.jsonl", {"question": "a"})
    check(str(tmp_path / "rows"), kinds=["folder"])


def test_a_folder_of_data_files_is_loaded_without_any_script(load: Load, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    write_lines(folder / "train.jsonl", {"question": "a"}, {"question": "b"})
    write_lines(folder / "test.jsonl", {"question": "c"})
    cache = str(tmp_path / "cache")
    assert [row.row["question"] for row in load(f"{folder}:train", cache_dir=cache)] == ["a", "b"]
    # The way of a hub name, which `datasets` takes a folder for as well.
    assert [row.row["question"] for row in load(f"hf:{folder}:test", cache_dir=cache)] == ["c"]


def test_a_data_set_that_cannot_be_loaded_says_what_to_do(load: Load, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"hf:nobody/nothing: .* Check the name and the network"):
        load("hf:nobody/nothing", cache_dir=str(tmp_path))
    with pytest.raises(DataError, match="expected hf:org/name, followed by"):
        load("hf:a:b:c:d")


def test_a_plugin_may_yield_plain_mappings() -> None:
    def countdown(rest: str, *, step: int = 1) -> Iterator[Mapping[str, object]]:
        for value in range(int(rest), 0, -step):
            yield {"question": f"{value}", "metadata": {"seen": {value}}}

    rows = load_rows("count:6", kinds=["count"], resolve={"count": countdown}.__getitem__, options={"step": 2}, limit=2)
    assert rows == [
        DataRow(row={"question": "6", "metadata": {"seen": [6]}}, source="count:6:1"),
        DataRow(row={"question": "4", "metadata": {"seen": [4]}}, source="count:6:2"),
    ]


def test_a_source_checks_its_names_before_anything_is_loaded(tmp_path: Path) -> None:
    def countdown(rest: str) -> Iterator[Mapping[str, object]]:
        raise AssertionError("not before the run")

    def is_number(rest: str) -> None:
        if not rest.isdecimal():
            raise ConfigError(f"count:{rest}: expected a number")

    countdown.check = is_number  # type: ignore[attr-defined]
    resolve = {"count": countdown}.__getitem__
    check_source("count:6", kinds=["count"], resolve=resolve)
    with pytest.raises(ConfigError, match="count:six: expected a number"):
        check_source("count:six", kinds=["count"], resolve=resolve)


def test_a_source_of_a_plugin_that_is_not_installed_is_answered_with_the_command() -> None:
    core = Registry()
    core.register_module(rlsdk.builtin)
    kinds, resolve = core.usable(ComponentKind.DATASET), partial(core.component, ComponentKind.DATASET)
    for look in (check_source, load_rows):
        with pytest.raises(
            PluginNotFoundError, match=r"'reasoning_gym' is not installed; .*; run `pip install rlsdk-reasoning-gym`"
        ):
            look("reasoning_gym:chain_sum", kinds=kinds, resolve=resolve)
    with pytest.raises(ConfigError, match="did you mean 'reasoning_gym'"):
        check_source("reasoning_gim:chain_sum", kinds=kinds, resolve=resolve)
