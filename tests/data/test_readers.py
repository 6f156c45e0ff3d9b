"""Every file form, and every way in which a file can be broken: told with its line, never a traceback, never silent."""

from __future__ import annotations

import contextlib
import json
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fleetune.data import json_rows, table_rows, text_rows
from fleetune.data.read import read_rows
from fleetune.data.rows import BadRow, DataFile, Row
from fleetune.data.sources import find_files
from fleetune.spec.errors import UserError

Write = Callable[[str, bytes | str], Path]
ROWS = [{"question": "a", "answer": "b"}, {"question": "c\nd", "answer": "é"}, {"question": "e", "answer": "f,g"}]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def make(name: str, content: bytes | str) -> Path:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return make


def read(path: Path) -> list[Row | BadRow]:
    files = find_files([str(path)], offline=True).files
    return [row for file in files for row in read_rows(file)]


def good(rows: list[Row | BadRow]) -> list[dict[str, Any]]:
    return [row.fields for row in rows if isinstance(row, Row)]


def bad(rows: list[Row | BadRow]) -> list[tuple[int, str]]:
    return [(row.number, row.cause) for row in rows if isinstance(row, BadRow)]


def lines(rows: list[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def as_columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in rows[0]}


FORMS = {
    "lines.jsonl": lines(ROWS),
    "lines.json": lines(ROWS),
    "no_last_newline.jsonl": lines(ROWS).rstrip("\n"),
    "windows.jsonl": lines(ROWS).replace("\n", "\r\n"),
    "with_mark.jsonl": "\ufeff" + lines(ROWS),
    "blank_lines.jsonl": "\n" + lines(ROWS).replace("\n", "\n\n"),
    "array.json": json.dumps(ROWS),
    "array_indented.json": json.dumps(ROWS, indent=2),
    "array_with_mark.json": "\ufeff" + json.dumps(ROWS, indent=2),
    "array_in.jsonl": json.dumps(ROWS, indent=2),
    "array_on_one_line_in.jsonl": json.dumps(ROWS),
    "columns.json": json.dumps(as_columns(ROWS)),
    "pandas.json": json.dumps({name: dict(enumerate(values)) for name, values in as_columns(ROWS).items()}),
    "wrapped.json": json.dumps({"version": "1", "data": ROWS}),
    "plain.csv": 'question,answer\na,b\n"c\nd",é\ne,"f,g"\n',
    "semicolons.csv": 'question;answer\na;b\n"c\nd";é\ne;"f,g"\n',
    "with_mark.csv": '\ufeffquestion,answer\na,b\n"c\nd",é\ne,"f,g"\n',
    "tabs.tsv": 'question\tanswer\na\tb\n"c\nd"\té\ne\tf,g\n',
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_of_a_text_file_gives_the_same_rows(write: Write, name: str) -> None:
    rows = read(write(name, FORMS[name]))
    assert good(rows) == ROWS
    assert bad(rows) == []


@pytest.mark.parametrize("name", ["rows.parquet", "saved", "split", "rows.arrow"])
def test_every_form_of_a_table_gives_the_same_rows(tmp_path: Path, name: str) -> None:
    import datasets
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    path = tmp_path / name
    if name == "rows.parquet":
        parquet.write_table(arrow.Table.from_pylist(ROWS), path, row_group_size=2)
    elif name == "rows.arrow":
        table = arrow.Table.from_pylist(ROWS)
        with arrow.OSFile(str(path), "wb") as file, arrow.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    elif name == "saved":
        datasets.Dataset.from_list(ROWS).save_to_disk(path, num_shards=2)
    else:
        split = datasets.Dataset.from_list(ROWS)
        datasets.DatasetDict({"test": datasets.Dataset.from_list(ROWS[:1]), "train": split}).save_to_disk(path)
    rows = read(path)
    assert good(rows) == ROWS
    assert [row.number for row in rows] == [1, 2, 3], "rows are numbered across the files of a data set"


def test_a_row_keeps_the_number_it_has_in_its_file(write: Write) -> None:
    assert [row.number for row in read(write("a.jsonl", "\n" + lines(ROWS[:1]) + "\n\n" + lines(ROWS[1:])))] == [2, 5, 6]
    assert [(row.number, row.line) for row in read(write("a.json", json.dumps(ROWS, indent=1)))] == [(1, 2), (2, 6), (3, 10)]
    assert [row.number for row in read(write("a.csv", FORMS["plain.csv"]))] == [2, 3, 5]
    assert [row.number for row in read(write("a.txt", "one\ntwo\n\n\nthree\n"))] == [1, 5]


BROKEN_LINES = {
    "invalid": (b'{"a": nope}', "invalid JSON: Expecting value"),
    "cut": (b'{"a": "b', "invalid JSON: Unterminated string"),
    "utf8": (b'{"a": "\xff\xfe"}', "not UTF-8: byte 0xff at position 7"),
    "nul": (b'{"a": "\0"}', "NUL byte"),
    "list": (b'["a"]', "a list, not an object"),
    "number": (b"42", "a number, not an object"),
    "null": (b"null", "nothing, not an object"),
    "twice": (b'{"a": 1, "b": {"c": 1, "c": 2}}', "the key 'c' appears twice"),
    "deep": (b"[" * 100_000, "nested too deeply"),
    "digits": (b'{"a": ' + b"9" * 5000 + b"}", "4300"),
}


@pytest.mark.parametrize("name", BROKEN_LINES)
def test_a_broken_line_is_told_with_its_number_and_costs_only_itself(write: Write, name: str) -> None:
    broken, cause = BROKEN_LINES[name]
    rows = read(write("a.jsonl", lines(ROWS[:1]).encode() + broken + b"\n" + lines(ROWS[1:]).encode()))
    assert good(rows) == ROWS
    [(number, found)] = bad(rows)
    assert number == 2
    assert cause in found


@pytest.mark.parametrize("name", sorted(set(BROKEN_LINES) - {"cut", "deep", "list"}))
def test_a_broken_element_of_an_array_costs_only_itself(write: Write, name: str) -> None:
    broken, cause = BROKEN_LINES[name]
    first, *rest = [json.dumps(row).encode() for row in ROWS]
    rows = read(write("a.json", b"[\n" + b",\n".join([first, broken, *rest]) + b"\n]\n"))
    assert good(rows) == ROWS
    [(number, found)] = bad(rows)
    assert number == 2
    assert cause in found
    assert [row.line for row in rows] == [2, 3, 4, 5]


@pytest.mark.parametrize(
    "content", ['[{"a": "b"}, {"a": "c', '[{"a": "b"}, {"a": ["c"}', '[{"a": "b"}, {"a": "c"}', "[{}] more"]
)
def test_an_array_whose_rows_cannot_be_told_apart_is_an_error_that_names_the_line(write: Write, content: str) -> None:
    with pytest.raises(UserError, match=r"a\.json.*line 2"):
        read(write("a.json", "\n" + content))


def test_a_comma_too_many_is_told(write: Write) -> None:
    rows = read(write("a.json", '[{"a": "b"},\n]'))
    assert good(rows) == [{"a": "b"}]
    assert bad(rows) == [(2, "invalid JSON: a comma without a value")]


def test_brackets_and_quotes_inside_of_strings_do_not_confuse(write: Write) -> None:
    rows = [{"a": 'x]},{"[\\'}, {"a": "\\"}, {"a": '"'}, {"a": ["[", {"b": "}"}]}]
    assert good(read(write("a.json", json.dumps(rows)))) == rows


def test_columns_of_different_length_are_an_error(write: Write) -> None:
    with pytest.raises(UserError, match=r"differ in length: \{'a': 2, 'b': 1\}"):
        read(write("a.json", '{"a": ["x", "y"], "b": ["z"]}'))


def test_a_file_with_one_row_is_one_row(write: Write) -> None:
    row = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    assert good(read(write("a.json", json.dumps(row, indent=1)))) == [row]
    assert good(read(write("b.jsonl", json.dumps(row)))) == [row]
    assert good(read(write("c.json", json.dumps(row)))) == [row]


def test_missing_values_of_pandas_are_missing_not_a_fault(write: Write) -> None:
    assert good(read(write("a.jsonl", '{"a": NaN, "b": "c"}\n'))) == [{"a": None, "b": "c"}]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt"])
@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_file_has_no_rows(write: Write, name: str, content: str) -> None:
    assert good(read(write(name, content))) == []


def test_a_row_larger_than_the_limit_is_set_aside_and_the_next_is_read(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (json_rows, text_rows, table_rows):
        monkeypatch.setattr(module, "MAX_ROW_BYTES", 1000)
    huge = {"question": "x" * 5000, "answer": "y"}
    for name, content in {"a.jsonl": lines([huge, *ROWS]), "a.json": json.dumps([huge, *ROWS])}.items():
        rows = read(write(name, content))
        assert good(rows) == ROWS
        assert bad(rows)[0][0] == 1
        assert "larger than" in bad(rows)[0][1]
    rows = read(write("a.txt", "x" * 5000 + "\nshort\n"))
    assert good(rows) == [{"text": "short"}]
    assert "larger than" in bad(rows)[0][1]


CSV_FAULTS = {
    "few": ("a,b\n1\n3,4\n", 2, "1 fields and the header names 2"),
    "many": ("a,b\n1,2,3\n3,4\n", 2, "3 fields and the header names 2"),
    "quote": ('a,b\n"1"x,2\n3,4\n', 2, "invalid CSV"),
    "utf8": (b"a,b\n\xff,2\n3,4\n", 2, "column 'a' is not UTF-8"),
}


@pytest.mark.parametrize("name", CSV_FAULTS)
def test_a_broken_csv_row_costs_only_itself(write: Write, name: str) -> None:
    content, number, cause = CSV_FAULTS[name]
    rows = read(write("a.csv", content))
    assert good(rows) == [{"a": "3", "b": "4"}]
    assert bad(rows)[0][0] == number
    assert cause in bad(rows)[0][1]


def test_a_quote_that_swallows_the_rest_of_a_csv_file_is_an_error(write: Write) -> None:
    with pytest.raises(UserError, match=r"begins at line 3 is never closed, and swallows the 2 lines after it"):
        read(write("a.csv", 'a,b\n1,2\n"3,4\n5,6\n7,8\n'))


def test_a_column_that_a_csv_header_names_twice_is_an_error(write: Write) -> None:
    with pytest.raises(UserError, match="'a' twice"):
        read(write("a.csv", "a,b,a\n1,2,3\n"))


def test_text_is_parted_by_blank_lines_or_else_by_lines(write: Write) -> None:
    assert good(read(write("a.txt", "one\ntwo\n\n \nthree\n\n"))) == [{"text": "one\ntwo"}, {"text": "three"}]
    assert good(read(write("b.txt", "one\r\ntwo\r\n\r\n"))) == [{"text": "one"}, {"text": "two"}]


def test_a_broken_line_costs_its_own_document(write: Write) -> None:
    rows = read(write("a.txt", b"fine\n\nthis\nis \xff not\n\nfine too\n\nthis\0neither\n"))
    assert good(rows) == [{"text": "fine"}, {"text": "fine too"}]
    assert [number for number, _ in bad(rows)] == [3, 8]
    assert "line 4 is not UTF-8" in bad(rows)[0][1]


FOREIGN = {
    "a.jsonl": (b"\x1f\x8b\x08\x00", "gzip"),
    "a.csv": (b"PK\x03\x04", "zip archive"),
    "a.txt": ("hello".encode("utf-16"), "UTF-16"),
    "a.json": (b"PAR1\x15", "Parquet"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_file_of_another_kind_is_named_with_what_to_do(write: Write, name: str) -> None:
    content, what = FOREIGN[name]
    with pytest.raises(UserError, match=what):
        read(write(name, content))


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
@pytest.mark.parametrize("content", [b"", b"nonsense", b"PAR1garbagePAR1"])
def test_a_torn_table_is_an_error_with_its_name(write: Write, name: str, content: bytes) -> None:
    with pytest.raises(UserError, match=name):
        read(write(name, content))


def test_a_value_of_a_table_that_is_no_text_costs_only_its_row(tmp_path: Path) -> None:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    torn = arrow.array([b"good", b"\xff\xfe", b"fine"], type=arrow.binary()).cast(arrow.string(), safe=False)
    parquet.write_table(arrow.table({"text": torn}), tmp_path / "a.parquet")
    rows = read(tmp_path / "a.parquet")
    assert good(rows) == [{"text": "good"}, {"text": "fine"}]
    assert [number for number, _ in bad(rows)] == [2]


class _Payload:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.target,)


def test_pickled_bytes_in_a_table_are_never_unpickled(tmp_path: Path) -> None:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    payload = pickle.dumps(_Payload(tmp_path / "pwned"))
    table = arrow.table({"text": ["a"], "object": arrow.array([payload], type=arrow.binary())})
    parquet.write_table(table, tmp_path / "a.parquet")
    assert good(read(tmp_path / "a.parquet")) == [{"text": "a"}]
    parquet.write_table(table.select(["object"]), tmp_path / "b.parquet")
    with pytest.raises(UserError, match=r"only columns of bytes \(object\)"):
        read(tmp_path / "b.parquet")
    assert not (tmp_path / "pwned").exists()


def test_a_table_that_unpacks_to_a_thousandfold_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    monkeypatch.setattr(table_rows, "_GROWTH_COUNTS_FROM", 1 << 20)
    table = arrow.table({"text": ["x" * 20_000_000]})
    parquet.write_table(table, tmp_path / "a.parquet", compression="zstd", use_dictionary=False)
    with pytest.raises(UserError, match="unpacks to"):
        read(tmp_path / "a.parquet")


def test_keys_that_a_table_adds_to_every_struct_are_left_out_again(tmp_path: Path) -> None:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    turns = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning": "c"}]]
    parquet.write_table(arrow.table({"messages": turns}), tmp_path / "a.parquet")
    assert good(read(tmp_path / "a.parquet")) == [{"messages": turns[0]}]


def test_an_arrow_folder_that_names_files_outside_of_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text("{}")
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "../../etc/passwd"}]}))
    with pytest.raises(UserError, match="names no Arrow files of its own folder"):
        read(tmp_path)


def test_a_file_that_shrinks_to_nothing_is_an_error_not_a_crash(write: Write) -> None:
    path = write("a.parquet", b"")
    with pytest.raises(UserError, match="cannot be read as Parquet"):
        list(read_rows(DataFile("a", path, "parquet", (path,), 0)))


texts = st.text(max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | texts, lambda inner: st.lists(inner, max_size=3), max_leaves=4
)
objects = st.lists(st.dictionaries(texts, values, max_size=3), min_size=1, max_size=6)
reuse = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150)


@reuse
@given(rows=objects, indent=st.sampled_from([None, 0, 2]), as_ascii=st.booleans())
def test_any_array_is_read_as_json_itself_reads_it(
    tmp_path: Path, rows: list[dict[str, Any]], indent: int | None, as_ascii: bool
) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(rows, indent=indent, ensure_ascii=as_ascii), encoding="utf-8", errors="surrogatepass")
    found = list(read_rows(DataFile("a", path, "json", (path,), 0)))
    assert good(found) == rows
    assert bad(found) == []


@reuse
@given(name=st.sampled_from(["a.json", "a.jsonl", "a.csv", "a.txt"]), data=st.data())
def test_whatever_is_damaged_there_is_an_error_or_rows_and_never_a_crash(
    tmp_path: Path, name: str, data: st.DataObject
) -> None:
    whole = {"a.json": json.dumps(ROWS, indent=1), "a.jsonl": lines(ROWS), "a.csv": FORMS["plain.csv"], "a.txt": "a\n\nb\n"}
    content = bytearray(whole[name].encode())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content)))
        content[place : place + data.draw(st.integers(0, 3))] = data.draw(st.sampled_from(DAMAGE))
    path = tmp_path / name
    path.write_bytes(content)
    with contextlib.suppress(UserError):
        kind = {"json": "json", "jsonl": "json", "csv": "csv", "txt": "text"}[name[2:]]
        for row in read_rows(DataFile(name, path, kind, (path,), 0)):
            assert isinstance(row, Row | BadRow)


DAMAGE = [b"", b'"', b"[", b"]", b"{", b"}", b",", b"\0", b"\xff", b"\n", b"\r", b"\\", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"x"]


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_damaged_table_is_an_error_or_rows_and_never_a_crash(tmp_path: Path, kind: str) -> None:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    table = arrow.table({"text": [f"abc{row}" for row in range(200)], "turns": [[{"role": "user"}]] * 200})
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        parquet.write_table(table, path)
    else:
        with arrow.OSFile(str(path), "wb") as file, arrow.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    whole, chance, refused = path.read_bytes(), random.Random(0), 0
    for _ in range(150):
        damaged = bytearray(whole)
        for _ in range(chance.randint(1, 5)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        path.write_bytes(damaged)
        try:
            assert all(isinstance(row, Row | BadRow) for row in read_rows(DataFile("a", path, kind, (path,), 0)))
        except UserError:
            refused += 1
    assert 0 < refused < 150
