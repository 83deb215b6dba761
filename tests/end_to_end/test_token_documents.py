"""Windows within documents: as numpy cuts them, in any order, resumed anywhere."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from builders.loops import loaded, resumed_anywhere, state_after
from builders.token_files import litdata, llm_c, megatron, npy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import headrace as hr
from headrace.errors import FormatError, LimitError, ObjectMissingError, OptionError, StateMismatchError
from headrace.fetch.stores import memory
from headrace.testing import FaultServer

pytestmark = pytest.mark.usefixtures("warm_server")

EOS = 7
NAMES = "raw", "llm.c", "npy", "litdata", "megatron"


def put_file(name: str, data: bytes) -> str:
    memory.put(f"memory://documents/{name}", data)
    return f"memory://documents/{name}"


def put(kind: str, documents: list[list[int]], dtype: str = "uint16") -> dict[str, Any]:
    arrays = [np.array(document, dtype) for document in documents]
    tokens = np.concatenate(arrays)
    if kind == "megatron":
        data, index = megatron([[one[: len(one) // 2], one[len(one) // 2 :]] for one in arrays], dtype)
        put_file("megatron.idx", index)
        return {"urls": put_file("megatron.bin", data)}
    if kind == "litdata":
        for name, data in litdata([arrays]).items():
            put_file(f"chunks/{name}", data)
        return {"urls": "memory://documents/chunks/", "eos": EOS}
    data = {"raw": tokens.tobytes, "llm.c": lambda: llm_c(tokens), "npy": lambda: npy(tokens)}[kind]()
    return {"urls": put_file("npy.npy" if kind == "npy" else f"{kind}.bin", data), "dtype": dtype, "eos": EOS}


def cut(documents: list[list[int]], window: int, stride: int, tail: str) -> list[list[int]]:
    windows = []
    for document in documents:
        end = 0
        for k in range(0, len(document), stride):
            one = document[k : k + window]
            if len(one) == window or (tail == "short" and (k == 0 or k + len(one) > end)):
                windows.append(one)
                end = k + len(one)
    return windows


DOCUMENTS = st.lists(
    st.lists(st.integers(8, 60_000), max_size=25).map(lambda tokens: [*tokens, EOS]), min_size=1, max_size=8
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    documents=DOCUMENTS, kind=st.sampled_from(NAMES), window=st.integers(1, 9), stride=st.integers(1, 9),
    tail=st.sampled_from(["drop", "short"]), piece=st.sampled_from([2**22, 512, 33]), is_open=st.booleans(),
)  # fmt: skip
def test_windows_are_those_of_each_document(
    documents: list[list[int]], kind: str, window: int, stride: int, tail: Any, piece: int, is_open: bool
) -> None:
    if is_open and len(documents[-1]) > 1:
        documents = [*documents[:-1], documents[-1][:-1]]  # the last document continues in another file
    given = put(kind, documents) | {"window": window, "stride": stride, "tail": tail, "documents": "separate"}
    wanted = cut(documents, window, stride, tail)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headrace.formats.pinned_object.PIECE_BYTES", piece)
        data = hr.tokens(**given)
        if not wanted:
            with pytest.raises(FormatError, match=f"none of|none fits|a window {window}"):
                len(data)
            return
        assert len(data) == len(wanted)
        some = 0, len(wanted) // 2, len(wanted) - 1
        assert [data[k]["tokens"].tolist() for k in some] == [wanted[k] for k in some]


SOME = [[*range(100 * k + 10, 100 * k + 10 + size), EOS] for k, size in enumerate([30, 2, 0, 55, 9, 17, 80, 5])]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["raw", "megatron"])
@pytest.mark.parametrize("by", [None, "auto", "global"])
def test_windows_come_once_in_any_order_and_resume_exactly(kind: str, by: Any) -> None:
    plain = hr.tokens(**put(kind, SOME), window=6, stride=5, documents="separate")
    data = plain if by is None else plain.shuffle(by)

    def loader() -> hr.DataLoader[Any]:
        return hr.DataLoader(data, batch_size=12, num_workers=0)

    (whole,) = resumed_anywhere(loader)
    windows = [window for batch in whole for window in batch["tokens"]]
    assert sorted(windows) == sorted(cut(SOME, 6, 5, "drop"))
    assert (windows == cut(SOME, 6, 5, "drop")) == (by is None)
    with hr.DataLoader(hr.tokens(**put(kind, SOME), window=6, stride=5), batch_size=12, num_workers=0) as made:
        with pytest.raises(StateMismatchError):
            made.load_state_dict(state_after(loader(), 2))
            next(iter(made))


def test_file_is_read_once_for_its_documents_and_by_ranges_for_its_windows(server: FaultServer) -> None:
    tokens = np.tile(np.array([*range(10, 999), EOS], np.uint16), 100)
    data = hr.tokens(server.add("a.bin", tokens.tobytes()), "uint16", 90, eos=EOS, documents="separate")
    batches = loaded(data.shuffle(), batch_size=50, num_workers=0)
    assert sum(len(batch["tokens"]) for batch in batches) == len(data) == 1100
    asked = [request.headers["range"] for request in server.requests_for("a.bin")]
    assert sum(one == "bytes=0-16383" for one in asked) <= 2
    assert len(asked) <= 6, asked


ROWS, LOW = np.ones((3, 6), np.uint16), hr.Limits(member_bytes=50)
REFUSED: list[tuple[Callable[[], dict[str, Any]], type[Exception], str]] = [
    (lambda: put("raw", SOME) | {"eos": None}, ObjectMissingError, r"documents/raw\.idx"),
    (lambda: put("npy", SOME) | {"eos": None}, OptionError, "no index of Megatron's, .* eos= finds them by the token"),
    (lambda: {"urls": put_file("rows.npy", npy(ROWS)), "eos": EOS}, OptionError, "6 tokens, which are the windows"),
    (lambda: put("raw", SOME) | {"window": 100}, FormatError, "longest of its 8 documents has 81 tokens, .* none fits"),
    (lambda: put("raw", SOME) | {"limits": LOW}, LimitError, "where each begins takes 8 bytes, over the limit of 50"),
]


@pytest.mark.parametrize(("make", "error", "match"), REFUSED)
def test_files_without_documents_or_of_too_many_are_refused(make: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        len(hr.tokens(**{"window": 6, "documents": "separate"} | make()))
