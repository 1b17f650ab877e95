"""Files of rows that somebody else made: damaged, misnamed, foreign and swollen ones are refused in one line, good rows are read."""

import bz2
import decimal
import gzip
import json
import os

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from marl_llm import data_files
from marl_llm.data_files import DataError, read_rows
from marl_llm.games.coding import load_problems
from marl_llm.games.maths.data import load_maths
from marl_llm.games.search.data import load_questions
from marl_llm.tools.retriever.passages import read_passages

ROWS = [{"problem": f"{i} + 1", "answer": str(i + 1)} for i in range(50)]
LINES = "\n".join(map(json.dumps, ROWS)).encode()
PACKED = gzip.compress(LINES, mtime=0)  # the same bytes in every worker


def damaged_parquet():
    sink = pa.BufferOutputStream()
    parquet.write_table(pa.Table.from_pylist(ROWS), sink)
    data = bytearray(sink.getvalue().to_pybytes())
    data[4:60] = b"\0" * 56
    return bytes(data)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl.gz", PACKED[:60], "damaged or cut behind line 0"),
        ("a.jsonl.gz", b"", "damaged or cut before line 1"),
        ("a.jsonl.gz", PACKED[:-3], "damaged or cut behind line 49"),
        ("a.jsonl.gz", PACKED + b"hello", "damaged or cut"),
        ("a.jsonl.gz", PACKED[:30] + b"\xff\xff\xff" + PACKED[33:], "damaged or cut"),
        ("a.jsonl.gz", LINES, "Not a gzipped file"),
        ("a.jsonl", PACKED, "compressed with gzip; name it .jsonl.gz"),
        ("a.jsonl", bz2.compress(LINES), "compressed with bzip2; unpack it"),
        ("a.jsonl", b"PAR1" + b"\0" * 9, "a parquet file; name it .parquet"),
        ("a.jsonl", LINES.decode().encode("utf-16"), "UTF-16 text; save it as UTF-8"),
        ("a.jsonl", '{"a": "é"}'.encode("latin-1"), r"line 1: not UTF-8 \(byte 7\)"),
        ("a.jsonl", LINES + b"\n3", "line 51: a JSON int; expected an object"),
        ("a.jsonl", b"\0" * 40, "line 1: not JSON"),
        ("a.jsonl", b'{"a":' * 70 + b"1" + b"}" * 70, "line 1: nested deeper than 64 levels"),
        ("a.json", LINES, r"if each line of it is an object, name it \.jsonl"),
        ("a.json", b'{"a": 1}', "expected a list of objects"),
        ("a.parquet", b"PAR1" + b"\0" * 40 + b"PAR1", "damaged parquet"),
        ("a.parquet", b"", "damaged parquet"),
        ("a.parquet", damaged_parquet(), "damaged parquet"),
        ("a.jsonl.zst", LINES, r"unknown kind of file '\.zst'"),
    ],
)
def test_a_damaged_or_foreign_file_is_refused_by_name_place_and_reason(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as refusal:
        load_maths(tmp_path / name, "train")
    assert str(refusal.value).startswith(str(tmp_path / name))
    assert "\n" not in str(refusal.value)


def test_what_is_no_file_is_refused_without_waiting(tmp_path):
    (tmp_path / "folder.jsonl").mkdir()
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "zero.jsonl").symlink_to("/dev/zero")
    for name, message in (("folder.jsonl", "a directory"), ("pipe.jsonl", "not a regular file"), ("zero.jsonl", "not a regular file")):
        with pytest.raises(DataError, match=f"{name}: {message}"):
            list(read_rows(tmp_path / name))


def test_a_missing_file_is_named_with_the_nearest_name(tmp_path):
    (tmp_path / "train.jsonl").touch()
    for path, message in (
        (tmp_path / "trian.jsonl", "there is no file .*trian.jsonl.* did you mean 'train.jsonl'"),
        (tmp_path / "*.jsonl", "patterns are not expanded"),
        (tmp_path / "gone" / "train.jsonl", "there is no directory .*gone"),
    ):
        for read in (load_maths, load_questions, load_problems):
            with pytest.raises(FileNotFoundError, match=message):
                read(path, "train")
        with pytest.raises(FileNotFoundError, match=message):
            list(read_passages([path]))


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbf" + LINES,
        b"\xef\xbb\xbf\r\n" + LINES,
        LINES.replace(b"\n", b"\n\xef\xbb\xbf"),  # files with byte-order marks, joined
        LINES.replace(b"\n", b"\r\n") + b"\r\n",
        LINES.replace(b"\n", b"\n\n \t\n"),
    ],
)
def test_byte_order_marks_empty_lines_and_windows_line_ends_change_nothing(tmp_path, content):
    (tmp_path / "a.jsonl").write_bytes(content)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(content))
    assert list(read_rows(tmp_path / "a.jsonl")) == list(read_rows(tmp_path / "a.jsonl.gz")) == ROWS


def test_only_a_line_feed_ends_a_line(tmp_path):
    text = "a\u2028b\u2029c\u0085d\u00a0e\x1cf"
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    assert list(read_rows(tmp_path / "a.jsonl")) == [{"text": text}]
    calls = {"input": json.dumps("x\u2028y", ensure_ascii=False) + "\n2", "output": "1", "testtype": "functional", "fn_name": "f"}
    (tmp_path / "b.jsonl").write_text(json.dumps({"problem": "p", "tests": [calls] * 2}, ensure_ascii=False))
    assert load_problems(tmp_path / "b.jsonl", "train")[0].hidden["tests"][0][0] == ("x\u2028y", 2)


def test_values_that_json_lacks_are_read_as_text_and_a_missing_number_spoils_no_row(tmp_path):
    column = {
        "decimal": pa.array([decimal.Decimal("1.50")]),
        "time": pa.array([2**62], pa.timestamp("ns")),
        "bytes": pa.array([b"1+1"], pa.binary()),
        "picture": pa.array([b"\xff\xfe"], pa.binary()),
        "repeated": pa.array(["x"]).dictionary_encode(),
        "nested": pa.array([[{"a": decimal.Decimal(2)}]]),
    }
    parquet.write_table(pa.table(column), tmp_path / "a.parquet")
    (row,) = read_rows(tmp_path / "a.parquet")
    assert row == {
        "decimal": "1.50", "time": "2116-02-20 23:53:38.427387904", "bytes": "1+1", "picture": b"\xff\xfe", "repeated": "x",
        "nested": [{"a": "2"}],
    }  # fmt: skip
    (tmp_path / "b.jsonl").write_text('{"problem": "1+1", "answer": "2", "weight": NaN}')
    assert len(load_maths(tmp_path / "b.jsonl", "train").tasks) == 1


def test_a_text_of_parquet_that_is_not_utf_8_is_named_by_its_column(tmp_path):
    texts = pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff\xfe"], pa.binary()).buffers())
    parquet.write_table(pa.table({"answer": ["2"], "problem": texts}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet, column 'problem': a text that is not UTF-8"):
        load_maths(tmp_path / "a.parquet", "train")


def test_more_rows_than_memory_holds_are_refused_unless_a_limit_says_how_many(tmp_path, monkeypatch):
    monkeypatch.setattr(data_files, "MOST_ROWS", 50)
    parquet.write_table(pa.Table.from_pylist(ROWS * 2), tmp_path / "a.parquet", row_group_size=10)
    (tmp_path / "a.jsonl").write_bytes(LINES + b"\n" + LINES)
    (tmp_path / "b.jsonl").write_bytes(LINES)
    for name in ("a.parquet", "a.jsonl"):
        with pytest.raises(DataError, match=rf"{name}: more than 50 rows, which do not fit into memory"):
            list(read_rows(tmp_path / name))
        assert len(list(read_rows(tmp_path / name, limit=70))) == 70
    assert list(read_rows(tmp_path / "b.jsonl")) == ROWS


def test_rows_of_a_large_file_are_read_one_after_the_other(tmp_path):
    parquet.write_table(pa.Table.from_pylist(ROWS * 1000), tmp_path / "a.parquet")
    before = pa.total_allocated_bytes()
    rows = read_rows(tmp_path / "a.parquet")
    assert next(rows) == ROWS[0]
    assert pa.total_allocated_bytes() - before < 400_000  # the whole is 1.5 MB
    assert data_files.BATCH_ROWS[1] < 50_000


def test_a_file_that_unpacks_to_far_more_than_it_weighs_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(data_files, "SPARE", 1 << 20)
    swollen = {"problem": "x" * 200_000}
    line = json.dumps(swollen).encode() + b"\n"
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(line * 100))
    (tmp_path / "blank.jsonl.gz").write_bytes(gzip.compress(b"\n" * 20_000_000))
    parquet.write_table(pa.Table.from_pylist([swollen] * 100), tmp_path / "a.parquet")
    repeated = pa.DictionaryArray.from_arrays(pa.array([0] * 100), ["x" * 200_000])
    parquet.write_table(pa.table({"problem": repeated}), tmp_path / "b.parquet")
    parquet.write_table(pa.table({"problem": pa.array([[None] * 1_000_000], pa.list_(pa.int8()))}), tmp_path / "c.parquet")
    for name in ("a.jsonl.gz", "blank.jsonl.gz", "a.parquet", "b.parquet", "c.parquet"):
        with pytest.raises(DataError, match=rf"{name}: its [\d,]+ bytes unpack to more than"):
            list(read_rows(tmp_path / name))
    (tmp_path / "a.jsonl").write_bytes(line * 100)
    assert len(list(read_rows(tmp_path / "a.jsonl"))) == 100


def test_a_line_is_read_up_to_a_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(data_files, "MOST_LINE", 1000)
    (tmp_path / "a.jsonl").write_bytes(LINES + b'\n{"problem": "' + b"x" * 2000 + b'"}')
    with pytest.raises(DataError, match="a.jsonl, line 51: longer than 1,000 bytes"):
        list(read_rows(tmp_path / "a.jsonl"))


def test_an_answer_that_is_an_article_takes_neither_its_row_nor_its_file_away(tmp_path, caplog):
    rows = [
        {"question": "capital of France", "answer": "Paris"},
        {"question": "which vitamin is retinol", "golden_answers": ["A", "vitamin A"]},
        {"question": "which blood type is universal for plasma", "answer": "A"},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows[:2])))
    assert [task.hidden["answers"] for task in load_questions(path, "train")] == [("Paris",), ("vitamin A",)]
    path.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(DataError, match="row 2: no answer with a word: .* or leave such rows out with bad_rows=drop"):
        load_questions(path, "train")
    assert [task.number for task in load_questions(path, "train", bad_rows="drop")] == [0, 1]
    assert "1 rows are left out: no answer with a word" in caplog.text


def test_problems_that_cannot_be_used_can_be_left_out(tmp_path, caplog):
    good = {"problem": "p", "tests": [["1", "2"]] * 2}
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, [good, {"problem": "p", "tests": "{"}, {}])))
    assert [task.number for task in load_problems(tmp_path / "a.jsonl", "train", bad_rows="drop")] == [0]
    assert "1 rows are left out: tests that cannot be read" in caplog.text


@pytest.mark.parametrize(
    ("test", "why"),
    [
        ('[null, "1"]', "missing"), ('["1", ["2", null]]', "missing"), (f'["1", {"9" * 5000}]', "4300 digits"),
        (f'[[[{"9" * 5000}]], "1"]', "4300 digits"),
    ],
    ids=["input", "line", "output", "list"],
)  # fmt: skip
def test_a_test_that_is_no_text_is_refused_by_row_or_left_out(tmp_path, test, why):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"problem": "p", "tests": f'[{test}, ["1", "2"]]'}))
    with pytest.raises(DataError, match=f"row 0: tests that cannot be read: .*{why}"):
        load_problems(path, "train")
    assert load_problems(path, "train", bad_rows="drop") == []
