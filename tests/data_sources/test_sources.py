from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import datasets
import pytest

from rlsdk.data import DataRow, check_source, load_rows, parse_source
from rlsdk.interfaces import ConfigError, DataError

from .conftest import write_lines

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
        ("reasoning_gym:chain_sum", "reasoning_gym", "chain_sum"),
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
    for look in (lambda name: check_source(name, kinds=["folder"]), load):
        with pytest.raises(DataError, match=r"rows: this folder holds no file; expected one saved by `datasets`"):
            look(str(tmp_path / "rows"))
    write_lines(tmp_path / "rows" / "train" / "a.jsonl", {"question": "a"})
    check_source(str(tmp_path / "rows"), kinds=["folder"])


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


def test_a_generated_task_is_the_same_for_the_same_seed(load: Load) -> None:
    first = load("reasoning_gym:chain_sum", size=20, seed=5, min_digits=2, max_digits=2)
    again = load("reasoning_gym:chain_sum", size=20, seed=5, min_digits=2, max_digits=2)
    other = load("reasoning_gym:chain_sum", size=20, seed=6, min_digits=2, max_digits=2)
    assert first == again
    assert first != other
    assert first[3].source == "reasoning_gym:chain_sum:4"
    assert {"question", "answer", "metadata"} <= first[0].row.keys()
    json.dumps([row.row for row in first])


def test_limit_is_the_number_of_generated_rows(load: Load) -> None:
    assert len(load("reasoning_gym:gcd", limit=7)) == 7
    assert len(load("reasoning_gym:gcd", limit=3, size=7)) == 3


def test_a_misspelt_task_parameter_or_value_is_refused(load: Load) -> None:
    with pytest.raises(ConfigError, match="no such task; did you mean 'chain_sum'"):
        load("reasoning_gym:chainsum")
    with pytest.raises(ConfigError, match="no parameter 'min_digit'; did you mean 'min_digits'"):
        load("reasoning_gym:chain_sum", min_digit=2)
    with pytest.raises(ConfigError, match=r"refuses .*'min_digits': -1.*: "):
        load("reasoning_gym:chain_sum", min_digits=-1)


def test_a_plugin_may_yield_plain_mappings() -> None:
    def countdown(rest: str, *, step: int = 1) -> Iterator[Mapping[str, object]]:
        for value in range(int(rest), 0, -step):
            yield {"question": f"{value}", "metadata": {"seen": {value}}}

    rows = load_rows("count:6", kinds=["count"], resolve={"count": countdown}.__getitem__, options={"step": 2}, limit=2)
    assert rows == [
        DataRow(row={"question": "6", "metadata": {"seen": [6]}}, source="count:6:1"),
        DataRow(row={"question": "4", "metadata": {"seen": [4]}}, source="count:6:2"),
    ]


def test_a_misspelt_task_is_seen_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match="reasoning_gym:chain_sm: no such task; did you mean 'chain_sum'"):
        check_source("reasoning_gym:chain_sm", kinds=["reasoning_gym"])


def test_known_tasks_are_checked_without_importing_them_or_what_draws(tmp_path: Path) -> None:
    script = """
import sys
from rlsdk.data import check_source
from rlsdk.registry.task_library import import_reasoning_gym, may_have_task
check_source("reasoning_gym:game_of_life", kinds=["reasoning_gym"])
print("reasoning_gym" in sys.modules)
library = import_reasoning_gym()
print([name for name in library.DATASETS if not may_have_task(name)], {"matplotlib", "cellpylib"} & set(sys.modules))
print(len(library.create_dataset("game_of_life", size=1, seed=1)[0]["question"]) > 100, "cellpylib" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.stdout.splitlines() == ["False", "[] set()", "True True"], done.stderr
