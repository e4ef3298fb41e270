from __future__ import annotations

import csv
import datetime
import decimal
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlsdk.data import DataRow, to_json
from rlsdk.data.sources import load_csv, load_json
from rlsdk.interfaces import ConfigError, DataError

from .conftest import SLICES, check, write_lines

Load = Callable[..., list[DataRow]]

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


def test_the_gsm8k_slice_loads_whole_and_in_order(load: Load) -> None:
    rows = load(SLICES / "gsm8k" / "train.jsonl")
    raw = [json.loads(line) for line in (SLICES / "gsm8k" / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row.row for row in rows] == raw
    assert rows[2].source == f"{SLICES}/gsm8k/train.jsonl:3"


def test_an_element_of_a_json_array_is_found_again_at_its_line(load: Load) -> None:
    path = SLICES / "svamp" / "SVAMP.json"
    rows = load(path)
    assert [row.row for row in rows] == json.loads(path.read_text(encoding="utf-8"))
    lines = path.read_text(encoding="utf-8").splitlines()
    for row in rows:
        line = int(row.source.rpartition(":")[2])
        assert lines[line - 1].strip() == "{"
        assert str(row.row["ID"]) in lines[line]


@given(
    rows=st.lists(st.dictionaries(st.text(min_size=1), VALUES, max_size=3), max_size=5),
    indent=st.sampled_from([None, 1]),
)
def test_json_lines_and_json_array_give_back_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], indent: int | None
) -> None:
    folder = tmp_path_factory.mktemp("json")
    (folder / "a.json").write_text(json.dumps(rows, indent=indent), encoding="utf-8")
    write_lines(folder / "a.jsonl", *rows)
    assert [row.row for row in load_json(str(folder / "a.json"))] == rows
    assert [row.row for row in load_json(str(folder / "a.jsonl"))] == rows


def test_json_lines_under_the_name_json_are_read_as_lines(load: Load, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.json", {"question": "1"}, {"question": "2"})
    assert [row.source for row in load(path)] == [f"{path}:1", f"{path}:2"]


def test_blank_lines_and_a_byte_order_mark_are_passed_over(load: Load, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"q": "a"}\r\n\n   \n{"q": "b"}')
    assert [(row.row["q"], row.source) for row in load(path)] == [("a", f"{path}:1"), ("b", f"{path}:4")]


def test_limit_takes_the_first_rows_and_reads_no_further(load: Load, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"q": "1"}, {"q": "2"}, "broken\n")
    assert [row.row["q"] for row in load(path, limit=2)] == ["1", "2"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"q": 1}\n{"q": }\n', "a.jsonl:2: not JSON: Expecting value"),
        (b'{"q": 1}\n{"q": "\xff"}\n', "a.jsonl:2: not UTF-8: byte 0xff at column 8"),
        (b'{"q": 1}\n\n[1, 2]\n', "a.jsonl:3: expected an object with named fields, got list"),
        (b"\n", "has no rows"),
        (b"[" * 100_000, "a.jsonl:1: not JSON"),
    ],
)
def test_a_bad_line_is_reported_with_file_and_line(load: Load, tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=said.replace("[", r"\[")):
        load(tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('[{"q": 1},\n 7]', "a.json:2: expected an object with named fields, got int"),
        ('[{"q": 1},\n {"q": ]', "a.json:2: not JSON"),
        ('{"a": [{"q": 1}],\n "b": [{"q": 2}]}', r"name the field that holds the array .* one of \['a', 'b'\]"),
        ('{"a": [1, 2],\n "n": 1}', r"name the field that holds the array .* one of \['a'\]"),
        ("7", "a.json:1: expected an array of objects, got int"),
    ],
)
def test_a_bad_json_file_is_reported_with_file_and_line(load: Load, tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(DataError, match=said):
        load(tmp_path / "a.json")


def test_the_array_of_a_json_object_is_named_by_an_option(load: Load, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"data": [{"q": 1}, {"q": 2}]}')
    assert [row.row["q"] for row in load(tmp_path / "a.json", field="data")] == [1, 2]
    with pytest.raises(DataError, match="field='date' is none of them; did you mean 'data'"):
        load(tmp_path / "a.json", field="date")


CELLS = st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\r")), min_size=2, max_size=2)


@given(rows=st.lists(CELLS, min_size=1, max_size=5))
def test_csv_gives_back_what_the_csv_module_wrote(
    tmp_path_factory: pytest.TempPathFactory, rows: list[list[str]]
) -> None:
    path = tmp_path_factory.mktemp("csv") / "a.csv"
    with path.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream, quoting=csv.QUOTE_ALL).writerows([["question", "answer"], *rows])
    assert [list(row.row.values()) for row in load_csv(str(path))] == rows


def test_a_csv_row_over_several_lines_is_found_again_at_its_first(load: Load, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('question,answer\n"one\ntwo",1\nthree,3\n')
    assert [row.source for row in load(path)] == [f"{path}:2", f"{path}:4"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("question,answer\na,1\nb,2,3\n", r"a.csv:3: row has 3 values, but the header names 2 columns"),
        ("question,question\na,1\n", "a.csv:1: expected a header line"),
        ("question,\na,1\n", "a.csv:1: expected a header line"),
        ("", "a.csv:1: expected a header line"),
        ('question,answer\n"a"b,1\n', "a.csv:2: not CSV"),
    ],
)
def test_a_bad_csv_file_is_reported_with_file_and_line(load: Load, tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "a.csv").write_text(content)
    with pytest.raises(DataError, match=said):
        load(tmp_path / "a.csv")


def test_tabs_separate_the_columns_of_a_tsv_file(load: Load, tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("question\tanswer\na,b\t1\n")
    assert load(tmp_path / "a.tsv")[0].row == {"question": "a,b", "answer": "1"}


def test_parquet_rows_have_json_types_and_a_row_number(load: Load, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    messages = [{"role": "user", "content": "hi"}]
    table = pyarrow.table(
        {
            "prompt": [messages] * 3000,
            "n": list(range(3000)),
            "day": [datetime.date(2024, 1, 2)] * 3000,
            "price": [decimal.Decimal("1.50")] * 3000,
        }
    )
    pyarrow.parquet.write_table(table, path)
    rows = load(path)
    assert rows[2999].row == {"prompt": messages, "n": 2999, "day": "2024-01-02", "price": "1.50"}
    assert rows[2999].source == f"{path}:3000"


def test_a_parquet_column_without_json_form_is_named_and_can_be_left_out(load: Load, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"question": ["a"], "image": [b"\x89PNG"]}), path)
    with pytest.raises(DataError, match=r"a.parquet:1: field 'image': holds a bytes, .* option `columns`"):
        load(path)
    assert load(path, columns=["question"])[0].row == {"question": "a"}
    with pytest.raises(DataError, match="no column 'qestion'; did you mean 'question'"):
        load(path, columns=["qestion"])


def test_a_file_that_is_no_parquet_is_an_error(load: Load, tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_text("question,answer\n")
    with pytest.raises(DataError, match=r"a.parquet: not a Parquet file"):
        load(tmp_path / "a.parquet")


def test_a_missing_file_names_the_nearest_one(load: Load, tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl", {"q": 1})
    with pytest.raises(DataError, match=r"trian.jsonl: no such file; did you mean 'train.jsonl'"):
        load(tmp_path / "trian.jsonl")
    (tmp_path / "rows").mkdir()
    with pytest.raises(DataError, match=r"the folder '.*/rosw' does not exist either; did you mean 'rows'"):
        load(tmp_path / "rosw" / "deep" / "train.jsonl")


def test_where_no_name_is_near_the_files_of_the_folder_are_listed(load: Load, tmp_path: Path) -> None:
    with pytest.raises(
        DataError,
        match=r"missing.jsonl: no such file; '.*' has no file that ends in .jsonl or .ndjson or .jsonl.gz or .json or ",
    ):
        load(tmp_path / "missing.jsonl")
    for at in range(7):
        write_lines(tmp_path / f"{at}.csv", {"q": 1})
    (tmp_path / "notes.txt").touch()
    with pytest.raises(DataError, match=r"has 0.csv, 1.csv, 2.csv, 3.csv, 4.csv and 2 more$"):
        load(tmp_path / "missing.jsonl")


def test_a_source_whose_file_is_not_there_says_what_else_it_may_be(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"hub \(org/name\) or one that makes its own rows \(count:\.\.\.\)"):
        check(str(tmp_path / "missing.jsonl"), kinds=["jsonl", "hf", "count"])
    with pytest.raises(DataError, match=r"saved by `datasets` or a dataset of the hub \(org/name\)$"):
        check(str(tmp_path / "missing.jsonl"), kinds=["jsonl", "hf"])


def test_a_name_that_is_no_source_lists_what_there_is(load: Load) -> None:
    with pytest.raises(ConfigError, match=r"'reasoning_gim:chain_sum' is neither .*; did you mean 'reasoning_gym'"):
        load("reasoning_gim:chain_sum")


def test_an_option_that_a_source_does_not_know_names_the_nearest(load: Load, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"q": 1})
    with pytest.raises(ConfigError, match=r"'jsonl' has no option 'feild'; did you mean 'field'"):
        load(path, feild="x")


def test_numpy_values_tuples_and_sets_become_json() -> None:
    value = {1: (np.int64(2), np.array([1.5])), "s": {3, 1}, "t": np.str_("x"), "b": np.bool_(True)}
    assert to_json(value, "here") == {"1": [2, [1.5]], "s": [1, 3], "t": "x", "b": True}
    assert type(to_json(np.float64(1.0), "here")) is float


BROKEN_LINES = [
    ('{"question": ' + "9" * 5000 + "}", "integer of more than"),
    ('{"question": "q", "x": ' + "[" * 900 + "]" * 900 + "}", "nested"),
    ('{"question": ' + "[" * 200_000, "not JSON"),
    ('{"question": "a\\ud800b"}', r"half a surrogate pair \(U\+D800\) at character 2"),
    ('{"a\\udfff": "b"}', "half a surrogate pair"),
    ('{"question": ["x", {"y": "\\udc00"}]}', "half a surrogate pair"),
]


@pytest.mark.parametrize(("line", "told"), BROKEN_LINES, ids=lambda text: text[:24])
def test_a_row_that_json_allows_and_nothing_else_takes_is_named(
    tmp_path: Path, load: Callable[..., list[DataRow]], line: str, told: str
) -> None:
    path = write_lines(tmp_path / "rows.jsonl", {"question": "good"}, line + "\n")
    with pytest.raises(DataError, match=rf"rows\.jsonl:2: .*{told}"):
        load(path)
    array = tmp_path / "rows.json"
    array.write_text('[{"question": "good"},\n' + line + "]")
    with pytest.raises(DataError, match=r"rows\.json:\d"):
        load(array)


def test_a_number_that_is_too_long_is_found_in_an_array(tmp_path: Path, load: Callable[..., list[DataRow]]) -> None:
    (tmp_path / "rows.json").write_text('[{"question": "good"},\n{"question": ' + "9" * 5000 + "}]")
    with pytest.raises(DataError, match=r"rows\.json:2: not JSON: it holds an integer of more than 4,300 digits"):
        load(tmp_path / "rows.json")


def test_a_surrogate_pair_that_is_whole_is_text(tmp_path: Path, load: Callable[..., list[DataRow]]) -> None:
    path = write_lines(tmp_path / "rows.jsonl", '{"question": "\\ud83d\\ude00 ä"}\n')
    assert load(path)[0].row == {"question": "😀 ä"}


NAMES = ["x" * 300 + ".jsonl", "~nouser/rows.jsonl", "a\0b.jsonl", "x" * 300, "folder:" + "x" * 300, "~nouser/x",
         "folder:~nouser/x", "x" * 5000 + "/y.jsonl", "jsonl:~nouser/rows.jsonl"]  # fmt: skip


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name[:14])
def test_a_name_that_no_file_has_is_a_message(name: str, load: Callable[..., list[DataRow]]) -> None:
    with pytest.raises((DataError, ConfigError)) as caught:
        load(name)
    assert len(str(caught.value)) < 12_000
    if not name.startswith("folder:"):
        with pytest.raises((DataError, ConfigError)):
            check(name, kinds=["jsonl", "json", "csv", "parquet", "folder", "hf"])


def test_a_folder_that_may_not_be_read_is_a_message(tmp_path: Path, load: Callable[..., list[DataRow]]) -> None:
    path = write_lines(tmp_path / "rows.jsonl", {"question": "q"})
    path.chmod(0)
    try:
        if not os.access(path, os.R_OK):
            with pytest.raises(DataError, match=r"rows.jsonl: cannot be opened: Permission denied"):
                load(path)
    finally:
        path.chmod(0o644)


@pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="needs a file whose first byte cannot be read")
@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet"])
def test_a_disk_that_fails_while_it_is_read_is_a_message(
    tmp_path: Path, load: Callable[..., list[DataRow]], kind: str
) -> None:
    path = tmp_path / f"rows.{kind}"
    path.symlink_to("/proc/self/mem")
    with pytest.raises(DataError, match=rf"rows\.{kind}: (cannot be read: Input/output error|not a Parquet file)"):
        load(path)


@given(data=st.data())
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_parquet_file_is_read_or_refused_by_name(
    parquet: bytes, load: Callable[..., list[DataRow]], tmp_path: Path, data: st.DataObject
) -> None:
    content = bytearray(parquet)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "rows.parquet"
    path.write_bytes(bytes(content[: data.draw(st.integers(len(content) // 2, len(content)))]))
    try:
        load(path)
    except DataError as error:
        assert str(path) in str(error)  # noqa: PT017


@pytest.fixture(scope="module")
def parquet(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("parquet") / "rows.parquet"
    rows = [{"question": f"q {n} ä", "answer": str(n), "n": n, "deep": {"x": [n, n]}} for n in range(200)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path.read_bytes()


@given(
    content=st.one_of(st.binary(max_size=300), st.text(max_size=200).map(lambda text: text.encode("utf-8", "replace"))),
    ending=st.sampled_from(["jsonl", "json", "csv", "tsv", "parquet"]),
)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_rows_or_an_error_that_names_the_file(
    load: Callable[..., list[DataRow]], tmp_path: Path, content: bytes, ending: str
) -> None:
    path = tmp_path / f"rows.{ending}"
    path.write_bytes(content)
    try:
        rows = load(path)
    except DataError as error:
        assert str(path) in str(error)  # noqa: PT017
    else:
        json.dumps([row.row for row in rows], ensure_ascii=False).encode()


def test_a_message_does_not_list_thousands_of_columns(tmp_path: Path) -> None:
    names = [f"column-{at}-{'x' * 100}" for at in range(5_000)]
    (tmp_path / "wide.csv").write_text(f"{','.join(names)}\n1,2\n")
    with pytest.raises(DataError, match=r"names 5000 columns \['column-0-x+', .*\] and 4980 more; a value") as found:
        list(load_csv(str(tmp_path / "wide.csv")))
    assert len(str(found.value)) < 2_500
