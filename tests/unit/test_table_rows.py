"""Rows of tables, field by field and one by one: the same values."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.formats.arrow_values import TableRows

COUNT = 40
TEXTS = st.lists(st.text(max_size=12), min_size=COUNT, max_size=COUNT)


@st.composite
def columns(draw: st.DrawFn) -> pa.Array:
    """A column of texts, numbers or nested values, also as a dictionary, or that begins within its buffers."""
    texts = draw(st.one_of(TEXTS, st.just([f"word {k}" for k in range(COUNT)])))
    if draw(st.booleans()):
        texts[draw(st.integers(0, COUNT - 1))] = None
    kind = draw(st.sampled_from(["text", "large", "dictionary", "numbers", "flags", "bytes", "dicts", "chats"]))
    if kind == "numbers":
        column = pa.array([None if text is None else len(text) / 2 for text in texts])
    elif kind == "flags":
        column = pa.array([None if text is None else "o" in text for text in texts])
    elif kind == "bytes":
        column = pa.array([None if text is None else text.encode() for text in texts])
    elif kind in ("dicts", "chats"):
        values = [
            None if text is None else {"text": text or None, "sizes": [len(text)], "n": len(text)} for text in texts
        ]
        chats = [None if value is None else values[k : k + k % 4] for k, value in enumerate(values)]
        column = pa.array(values if kind == "dicts" else chats)
    else:
        column = pa.array(texts, pa.large_string() if kind == "large" else pa.string())
    first = draw(st.integers(0, 5))
    part = column.slice(first, COUNT - 5)
    return part.dictionary_encode() if kind == "dictionary" else part


@pytest.mark.slow
@given(columns(), columns(), st.data())
def test_values_field_by_field_are_those_of_each_row(first: pa.Array, second: pa.Array, data: st.DataObject) -> None:
    features = data.draw(
        st.sampled_from([{}, {"a": [{"text": None}], "b": {"_type": "Sequence", "feature": {"n": None}}}])
    )
    rows = TableRows(pa.table({"a": first, "b": second}), features, {"folder": "x"})
    start = data.draw(st.integers(0, len(rows) - 1))
    follow = st.builds(lambda count: range(start, min(start + count, len(rows))), st.integers(1, len(rows)))
    numbers = data.draw(st.one_of(follow, st.lists(st.integers(0, len(rows) - 1), min_size=1)))
    found = rows.columns(numbers)
    assert found is not None
    samples = [dict(zip(found, values, strict=True)) for values in zip(*found.values(), strict=True)]
    assert repr(samples) == repr([rows.row(number) for number in numbers])


def test_text_that_is_none_is_an_error_of_its_row_alone() -> None:
    damaged = pa.Array.from_buffers(
        pa.string(),
        10,
        [None, pa.py_buffer(b"".join(k.to_bytes(4, "little") for k in range(11))), pa.py_buffer(b"abc\xffefghij")],
    )
    rows = TableRows(pa.table({"text": damaged}), {}, {})
    with pytest.raises(UnicodeDecodeError):
        list((rows.columns(range(10)) or {})["text"])
    assert rows[2] == {"text": "c"}
