"""Windows of tokens and of documents: as numpy cuts them, in any order, on any ranks, resumed anywhere."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from builders.loops import flat, given, loaded, state_after
from builders.token_files import ids, litdata, llm_c, megatron, npy
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

import headrace as hr
from headrace.errors import (
    FormatError,
    LimitError,
    ObjectChangedError,
    ObjectMissingError,
    OptionError,
    StateMismatchError,
)
from headrace.fetch.stores import memory
from headrace.testing import FaultServer

pytestmark = pytest.mark.usefixtures("warm_server")

SIZES = (1000, 64, 731)
FILES = {f"memory://tokens/{k}.bin": ids(size, seed=k) for k, size in enumerate(SIZES)}


@pytest.fixture(autouse=True)
def files() -> None:
    for url, tokens in FILES.items():
        memory.put(url, tokens.tobytes())


def put(url: str, data: bytes) -> str:
    memory.put(url, data)
    return url


def cut(tokens: np.ndarray[Any, Any], window: int, stride: int) -> list[np.ndarray[Any, Any]]:
    return [tokens[k : k + window] for k in range(0, len(tokens) - window + 1, stride)]


def seen(data: Any, **options: Any) -> dict[tuple[str, str], torch.Tensor]:
    """The windows of an epoch by where they are; none comes twice."""
    got: dict[tuple[str, str], torch.Tensor] = {}
    for batch in loaded(data, **{"batch_size": 7, "num_workers": 0} | options):
        keys = list(zip(batch["__url__"], batch["__key__"], strict=True))
        assert len({*keys, *got}) == len(got) + len(keys)
        got |= dict(zip(keys, batch["tokens"], strict=True))
    return got


def assert_cut(got: dict[tuple[str, str], torch.Tensor], files: dict[str, Any], window: int, stride: int) -> None:
    wanted = {(u, str(k)): one for u, tokens in files.items() for k, one in enumerate(cut(tokens, window, stride))}
    assert got.keys() == wanted.keys()
    for key, tokens in got.items():
        assert tokens.tolist() == wanted[key].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("by", ["", "auto", "window", "shards", "within", "global"])
@pytest.mark.parametrize("workers", [0, 2])
def test_windows_are_those_of_numpy_in_any_order(by: Any, workers: int) -> None:
    data = hr.tokens(list(FILES), "uint16", 64, stride=50)
    shuffled = data if not by else data.shuffle(by, window=9 if by == "window" else None)
    got = seen(shuffled, num_workers=workers)
    assert_cut(got, FILES, 64, 50)
    assert len(got) == len(data) == sum(len(cut(tokens, 64, 50)) for tokens in FILES.values())
    assert next(iter(got.values())).dtype == torch.uint16


def test_overlapping_windows_are_read_by_one_range_and_a_file_is_asked_for_once(server: FaultServer) -> None:
    url = server.add("large.bin", ids(100_000).tobytes())
    assert_cut(seen(hr.tokens(url, "uint16", 513, stride=64).shuffle()), {url: ids(100_000)}, 513, 64)
    ranges = [request.headers["range"] for request in server.requests_for("large.bin")]
    assert ranges == ["bytes=0-16383", "bytes=0-199937"], "one request for the size, and one for all tokens"
    url = server.add("a.bin", ids(100).tobytes())
    server.log.clear()
    assert len(hr.tokens(url, "uint16", 10)) == 10
    assert sorted(request.name for request in server.log) == ["a.bin", "a.idx"]


def test_state_is_refused_by_other_windows() -> None:
    def loader(**options: Any) -> hr.DataLoader[Any]:
        data = hr.tokens(list(FILES), "uint16", 20, stride=10, **options).shuffle()
        return hr.DataLoader(data, batch_size=8, num_workers=0, seed=3)

    state = state_after(loader(), 5)
    for options in ({"eos": 4}, {"eos": 4, "documents": "separate"}):
        with loader(**options) as other, pytest.raises(StateMismatchError):
            other.load_state_dict(state)
            next(iter(other))


def test_sample_is_got_by_its_number_and_data_set_travels() -> None:
    data = hr.tokens(list(FILES), "uint16", 64, stride=50)
    first = len(cut(FILES["memory://tokens/0.bin"], 64, 50))
    assert (data[first]["__url__"], data[first]["__key__"]) == ("memory://tokens/1.bin", "0")
    assert data[-1]["tokens"].tolist() == cut(FILES["memory://tokens/2.bin"], 64, 50)[-1].tolist()
    copy = pickle.loads(pickle.dumps(data))
    assert copy[3]["tokens"].tolist() == data[3]["tokens"].tolist()
    data[3]["tokens"][0] = 1  # it owns its memory
    with pytest.raises(IndexError):
        data[len(data)]


def test_keys_and_chosen_numbers_leave_the_others_unread() -> None:
    data = hr.tokens(list(FILES), "uint16", 20)
    kept = seen(data.filter(lambda key: int(key) % 2 == 0, field="__key__").shuffle())
    assert {key for _, key in kept} == {str(k) for k in range(0, 50, 2)}
    assert len(seen(data.slice(3, 40, 4))) == 10


def test_last_tokens_are_dropped_or_come_as_a_short_window() -> None:
    url, tokens = "memory://tokens/0.bin", FILES["memory://tokens/0.bin"].tolist()
    for window, stride, tail, sizes in (
        (300, None, "drop", [300, 300, 300]),
        (300, None, "short", [300, 300, 300, 100]),
        (301, 300, "short", [301, 301, 301, 100]),
        (2000, None, "short", [1000]),
    ):
        got = [sample["tokens"].tolist() for sample in hr.tokens(url, "uint16", window, stride=stride, tail=tail)]
        assert got == [tokens[k * 300 : k * 300 + size] for k, size in enumerate(sizes)]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8", "uint16", "int32", "int64", ">u2", "uint32"])
def test_tokens_keep_their_type_in_this_machines_order(dtype: str) -> None:
    tokens = ids(100, np.dtype(dtype).newbyteorder("=").name)
    url = put("memory://tokens/typed.bin", tokens.astype(dtype).tobytes())
    assert seen(hr.tokens(url, dtype, 10))[url, "3"].tolist() == tokens[30:40].tolist()
    (kept,) = {one.dtype for one in seen(hr.tokens(url, dtype, 10)).values()}
    assert kept == torch.from_numpy(tokens).dtype


def test_headers_give_the_count_and_type_of_tokens() -> None:
    small, large = ids(500), ids(300, "uint32")
    urls = [put("memory://tokens/h.bin", llm_c(small)), put("memory://tokens/l.bin", llm_c(large, 20240801, 7))]
    assert_cut(seen(hr.tokens(urls[0], None, 33).shuffle()), {urls[0]: small}, 33, 33)
    assert_cut(seen(hr.tokens(urls[1], "uint32", 33)), {urls[1]: large}, 33, 33)
    with pytest.raises(OptionError, match=r"uint32, and .* of uint16: read them apart"):
        len(hr.tokens(urls, None, 33))


def test_arrays_are_tokens_or_rows_of_them() -> None:
    flat, rows = ids(200, "int32"), ids(240, "int32").reshape(12, 20)
    urls = [put("memory://tokens/flat.npy", npy(flat)), put("memory://tokens/rows.npy", npy(rows))]
    assert_cut(seen(hr.tokens(urls[0], window=30)), {urls[0]: flat}, 30, 30)
    for window in (None, 20):
        assert_cut(seen(hr.tokens(urls[1], window=window).shuffle()), {urls[1]: rows.reshape(-1)}, 20, 20)
    with pytest.raises(OptionError, match="rows of 20 tokens"):
        len(hr.tokens(urls[1], window=10))
    with pytest.raises(OptionError, match="no table of rows"):
        len(hr.tokens(urls[0]))


@pytest.mark.parametrize(("leaf", "dtype"), [("tensor:20", "uint16"), ("tensor:16", "int32"), ("numpy:2", "int32")])
def test_chunks_of_litdata_are_read_by_their_catalogue(leaf: str, dtype: str) -> None:
    chunks = [[ids(90, dtype, 1), ids(31, dtype, 2)], [ids(77, dtype, 3)], [ids(5, dtype)]]
    for name, data in litdata(chunks, f"no_header_{leaf}").items():
        memory.put(f"memory://lit/data/{name}", data)
    files = {f"memory://lit/data/chunk-0-{k}.bin": np.concatenate(items) for k, items in enumerate(chunks)}
    for place in ("memory://lit/data", "memory://lit/data/index.json"):
        got = seen(hr.tokens(place, window=20).shuffle())
        assert_cut(got, files, 20, 20)
        assert {one.numpy().dtype for one in got.values()} == {np.dtype(dtype)}
    with pytest.raises(FormatError, match="has 121 tokens, and a window 200"):
        len(hr.tokens("memory://lit/data", window=200))


DOCUMENTS = [[ids(n, seed=n) for n in sizes] for sizes in ([30, 5], [1], [64], [0], [3, 0, 4], [200], [17])]


def put_megatron(name: str = "m", *, modes: bool = False) -> tuple[str, np.ndarray[Any, Any]]:
    data, index = megatron(DOCUMENTS, modes=modes)
    memory.put(f"memory://{name}/x.idx", index)
    return put(f"memory://{name}/x.bin", data), np.frombuffer(data, "<u2")


@pytest.mark.parametrize("modes", [False, True])
def test_index_of_megatron_gives_type_and_documents(modes: bool) -> None:
    url, tokens = put_megatron(modes=modes)
    assert_cut(seen(hr.tokens(url, None, 40, stride=16).shuffle()), {url: tokens}, 40, 16)
    assert_cut(seen(hr.tokens(url.replace(".bin", ".idx"), "uint16", 40, stride=16)), {url: tokens}, 40, 16)
    with pytest.raises(OptionError, match="tokens of uint16, and dtype=int32"):
        len(hr.tokens(url, "int32", 40))


@pytest.mark.parametrize("by", ["auto", "global"])
def test_documents_of_a_window_are_numbered(by: Any) -> None:
    url, tokens = put_megatron()
    lengths = [sum(map(len, document)) for document in DOCUMENTS]
    owner = np.repeat(np.arange(len(lengths)), lengths)
    samples = flat(given(hr.tokens(url, None, 40, stride=7, documents="ids").shuffle(by), num_workers=0))
    for sample in samples:
        here = slice(int(sample["__key__"]) * 7, int(sample["__key__"]) * 7 + 40)
        assert sample["tokens"].tolist() == tokens[here].tolist()
        assert sample["document_ids"].tolist() == np.unique(owner[here], return_inverse=True)[1].tolist()
    assert len(samples) == (len(tokens) - 40) // 7 + 1


def test_documents_of_a_window_are_found_by_the_token_that_ends_them() -> None:
    url = put("memory://tokens/eos.bin", np.array([5, 0, 7, 8, 0, 0, 9, 4], "<u2").tobytes())
    (sample,) = hr.tokens(url, "uint16", 8, eos=0)
    assert sample["document_ids"].tolist() == [0, 0, 1, 1, 1, 2, 3, 3]
    assert (sample["document_ids"].dtype, sample["tokens"].dtype) == (np.int32, np.uint16)
    with pytest.raises(OptionError, match="none can be eos=70000"):
        len(hr.tokens(url, "uint16", 8, eos=70000))


def test_documents_are_samples_of_their_own() -> None:
    url, _ = put_megatron()
    data = hr.tokens(url, documents="samples")
    assert len(data) == len(DOCUMENTS)
    wanted = [[int(n) for one in document for n in one] for document in DOCUMENTS]
    for order in (data, data.shuffle(), data.shuffle("global")):
        got = {int(one["__key__"]): one["tokens"].tolist() for one in flat(given(order, 3, num_workers=0))}
        assert [got[k] for k in range(len(got))] == wanted


def test_large_index_is_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.sources.tokens._PIECE_SEQUENCES", 2)
    test_documents_are_samples_of_their_own()
    test_documents_of_a_window_are_numbered("auto")


def test_object_that_is_replaced_meanwhile_is_an_error(server: FaultServer) -> None:
    url = server.add("replaced.bin", ids(5000).tobytes())
    data = hr.tokens(url, "uint16", 50)
    assert len(data) == 100
    server.add("replaced.bin", ids(5000, seed=9).tobytes())
    for use in (lambda: seen(data.shuffle()), lambda: data[7]):
        with pytest.raises(ObjectChangedError):
            use()


@pytest.mark.parametrize("workers", [0, 2])
def test_windows_of_local_files_are_read_together(workers: int, tmp_path: Path) -> None:
    files = {str(tmp_path / f"{k}.bin"): ids(size, seed=k) for k, size in enumerate(SIZES)}
    for path, tokens in files.items():
        Path(path).write_bytes(tokens.tobytes())
    data = hr.tokens(list(files), "uint16", 64, stride=50).shuffle("global")
    assert_cut(seen(data, num_workers=workers), files, 64, 50)
    with hr.DataLoader(data, batch_size=7, num_workers=workers) as loader:
        list(loader)
        assert loader.stats().fetch.requests < len(data), "those of a batch are read by one request for each file"


@pytest.mark.parametrize("size", [5000, 4000])
def test_local_file_that_is_replaced_meanwhile_is_an_error(size: int, tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(ids(5000).tobytes())
    data = hr.tokens(str(path), "uint16", 50)
    assert len(data) == 100
    path.write_bytes(ids(size, seed=9).tobytes())
    os.utime(path, (1, 1))
    with pytest.raises(ObjectChangedError):
        seen(data.shuffle("global"))


def damaged_index(at: int = 0, value: bytes = b"") -> bytes:
    whole = bytearray(megatron(DOCUMENTS)[1])
    whole[at : at + len(value)] = value
    return bytes(whole)


SEQUENCES = sum(map(len, DOCUMENTS))
POINTERS = 34 + 4 * SEQUENCES
FIRSTS = POINTERS + 8 * SEQUENCES
LAST = FIRSTS + 8 * len(DOCUMENTS)


def number(value: int, size: int = 8) -> bytes:
    return value.to_bytes(size, "little", signed=True)


DAMAGED: list[tuple[bytes, str, bool]] = [  # an index, its error, and whether only its documents show it
    (b"", "has 0 bytes", False),
    (damaged_index()[:20], "has 20 bytes", False),
    (damaged_index(0, b"TNTIDX\0\0\0"), "begins with b'TNTIDX", False),
    (damaged_index(9, b"\2"), "version 2", False),
    (damaged_index(17, b"\x06"), r"type 6 \(float64\)", False),
    (damaged_index(17, b"\x63"), "type 99", False),
    (damaged_index(18, number(SEQUENCES + 1)), f"{SEQUENCES + 1} sequences", False),
    (damaged_index(18, number(2**60)), f"{2**60} sequences", False),
    (damaged_index(26, number(2**40)), f"{2**40} entries", False),
    (damaged_index()[:-1], "cut off", False),
    (damaged_index() + b"\0", "cut off", False),
    (damaged_index(FIRSTS - 8, number(10**12)), "end at|sequence", False),
    (damaged_index(POINTERS - 4, number(-5, 4)), "end at|sequence", False),
    (damaged_index(POINTERS + 8, number(62)), "sequence 1 has 5 tokens from byte 62 on, .* at 60", True),
    (damaged_index(34, number(-1, 4)), "sequence 0 has -1 tokens", True),
    (damaged_index(FIRSTS, number(1)), "document 0 would begin with sequence 1 ", True),
    (damaged_index(FIRSTS + 8, number(9999)), "document 1 would begin with sequence 9999 ", True),
    (damaged_index(FIRSTS + 16, number(1)), "document 2 would begin with sequence 1 .* with 2", True),
    (damaged_index(FIRSTS + 8, number(-3)), "document 1 would begin with sequence -3 ", True),
    (damaged_index(LAST, number(SEQUENCES - 1)), f"documents end with sequence {SEQUENCES - 1}", True),
]


SIZE = 2 * sum(len(one) for document in DOCUMENTS for one in document)
CUT_OFF = f"has {SIZE - 2} bytes, and the sequences of .* end at {SIZE}"


@pytest.mark.parametrize(
    ("index", "match", "is_of_documents", "cut"),
    [*((*case, 0) for case in DAMAGED), (damaged_index(), CUT_OFF, False, 2)],
)
def test_damaged_index_names_the_damage(index: bytes, match: str, is_of_documents: bool, cut: int) -> None:
    data, _ = megatron(DOCUMENTS)
    put("memory://bad/x.idx", index)
    url = put("memory://bad/x.bin", data[: len(data) - cut])
    uses: list[dict[str, Any]] = [{"window": 10, "documents": "ids"}, {"documents": "samples"}, {"window": 10}]
    for options in uses[: 2 if is_of_documents else 3]:
        with pytest.raises(FormatError, match=match):
            len(hr.tokens(url, **options))


CATALOGUE = litdata([[ids(90)]])["index.json"].decode()


@pytest.mark.parametrize(
    ("name", "data", "options", "error", "why"),
    [
        ("x.bin", b"\1\2\3", {"dtype": "uint16"}, FormatError, "3 bytes are no whole number of uint16s"),
        ("x.bin", b"", {"dtype": "uint16"}, FormatError, "0 bytes have no tokens"),
        ("x.bin", bytes(18), {"dtype": "uint16"}, FormatError, "has 9 tokens, and a window 10"),
        ("x.bin", bytes(40), {}, OptionError, "state the type"),
        ("x.bin", bytes(40), {"documents": "ids"}, ObjectMissingError, "x.idx"),
        ("x.bin", llm_c(ids(9), version=2), {}, FormatError, "version 2, and 1 is known"),
        ("x.bin", llm_c(ids(90), count=91), {}, FormatError, "91 tokens of 2 bytes, and 180 bytes follow"),
        ("x.bin", llm_c(ids(90), count=-1), {}, FormatError, "-1 tokens"),
        ("x.bin", llm_c(ids(90))[:600], {}, FormatError, "has 600 bytes, and its header alone"),
        ("x.bin", llm_c(ids(90)), {"dtype": "uint32"}, OptionError, "tokens of uint16, and dtype=uint32"),
        ("x.npy", npy(ids(90))[:-1], {}, FormatError, "180 bytes of array, and 179 follow"),
        ("x.npy", npy(np.zeros((2, 3, 4), int)), {}, FormatError, "shape"),
        ("x.npy", npy(np.zeros(90)), {}, FormatError, "float64"),
        ("x.npy", npy(np.asfortranarray(np.ones((5, 10), int))), {}, FormatError, "fortran_order"),
        ("x.npy", npy(ids(90)), {"documents": "ids"}, OptionError, "no index of Megatron's"),
        ("x.npy", b"", {}, FormatError, "does not begin as"),
        ("index.json", b"{", {}, FormatError, "no JSON"),
        ("index.json", b"[]", {}, FormatError, "no JSON object"),
        ("index.json", CATALOGUE.replace("tensor:20", "tensor:1").encode(), {}, FormatError, "no tokens of whole"),
        ("index.json", litdata([[ids(90)]], compression="zstd")["index.json"], {}, FormatError, "compressed"),
        ("index.json", CATALOGUE.replace("chunk-0-0.bin", "../a").encode(), {}, FormatError, "chunk 0: .* outside"),
        ("index.json", CATALOGUE.replace('"dim": 90', '"dim": -1').encode(), {}, FormatError, "are counts"),
    ],
)  # fmt: skip
def test_damage_is_named(name: str, data: bytes, options: dict[str, Any], error: type[Exception], why: str) -> None:
    url = put(f"memory://damaged-{len(data)}-{len(str(options))}/{name}", data)
    with pytest.raises(error, match=why) as raised:
        len(hr.tokens(url, window=10, **options))
    assert name.partition(".")[0] in str(raised.value)


def test_chunk_that_is_not_as_its_catalogue_says_is_an_error() -> None:
    files = litdata([[ids(90)]])
    chunk = files["chunk-0-0.bin"]
    put("memory://lit2/index.json", files["index.json"])
    for data, why in ((chunk[:-2], "has 190 bytes, and 12 of a header"), (b"\2" + chunk[1:], "it has 2 items")):
        put("memory://lit2/chunk-0-0.bin", data)
        with pytest.raises(FormatError, match=why):
            len(hr.tokens("memory://lit2", window=10))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"window": 0}, "window=0"),
        ({"window": 5, "stride": -1}, "stride=-1"),
        ({"window": 5, "dtype": "float32"}, "dtype='float32'"),
        ({"window": 5, "dtype": "what"}, "dtype='what'"),
        ({"window": 5, "documents": True}, "documents=True"),
        ({"window": 5, "documents": "samples"}, "documents='samples' and"),
        ({"window": 5, "documents": "apart"}, "documents='apart'"),
        ({"window": 5, "tail": "pad"}, "tail='pad'"),
        ({"window": 5, "eos": 0, "documents": "ids"}, "eos=0 and documents='ids'"),
        ({"urls": "memory://nowhere/x.bin.zst", "dtype": "uint16", "window": 9}, "is compressed"),
        ({"urls": "memory://nowhere/index.json", "dtype": "uint16", "window": 9}, "is no folder of LitData"),
    ],
)
def test_wrong_argument_is_named_before_anything_is_read(options: dict[str, Any], why: str) -> None:
    with pytest.raises(OptionError, match=why):
        hr.tokens(**{"urls": "memory://nowhere/x.bin", **options})


EOS = 7
NAMES = "raw", "llm.c", "npy", "litdata", "megatron"


def put_file(name: str, data: bytes) -> str:
    memory.put(f"memory://documents/{name}", data)
    return f"memory://documents/{name}"


def stored(kind: str, documents: list[list[int]], dtype: str = "uint16") -> dict[str, Any]:
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


def cut_each(documents: list[list[int]], window: int, stride: int, tail: str) -> list[list[int]]:
    windows = []
    for document in documents:
        end = 0
        for k in range(0, len(document), stride):
            one = document[k : k + window]
            if len(one) == window or (tail == "short" and (k == 0 or k + len(one) > end)):
                windows.append(one)
                end = k + len(one)
    return windows


ANY_DOCUMENTS = st.lists(
    st.lists(st.integers(8, 60_000), max_size=25).map(lambda tokens: [*tokens, EOS]), min_size=1, max_size=8
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@hypothesis.given(
    documents=ANY_DOCUMENTS, kind=st.sampled_from(NAMES), window=st.integers(1, 9), stride=st.integers(1, 9),
    tail=st.sampled_from(["drop", "short"]), piece=st.sampled_from([2**22, 512, 33]), is_open=st.booleans(),
)  # fmt: skip
def test_windows_are_those_of_each_document(
    documents: list[list[int]], kind: str, window: int, stride: int, tail: Any, piece: int, is_open: bool
) -> None:
    if is_open and len(documents[-1]) > 1:
        documents = [*documents[:-1], documents[-1][:-1]]  # the last document continues in another file
    given = stored(kind, documents) | {"window": window, "stride": stride, "tail": tail, "documents": "separate"}
    wanted = cut_each(documents, window, stride, tail)
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


def test_file_is_read_once_for_its_documents_and_by_ranges_for_its_windows(server: FaultServer) -> None:
    tokens = np.tile(np.array([*range(10, 999), EOS], np.uint16), 100)
    data = hr.tokens(server.add("a.bin", tokens.tobytes()), "uint16", 90, eos=EOS, documents="separate")
    batches = loaded(data.shuffle(), batch_size=50, num_workers=0)
    assert sum(len(batch["tokens"]) for batch in batches) == len(data) == 1100
    asked = [request.headers["range"] for request in server.requests_for("a.bin")]
    assert sum(one == "bytes=0-16383" for one in asked) <= 2
    assert len(asked) <= 6, asked


ROWS, LOW = np.ones((3, 6), np.uint16), hr.Limits(member_bytes=50)


def limited(most: int, **options: Any) -> dict[str, Any]:
    plain = {"window": None, "documents": None, **options}
    return {"urls": put_megatron("limits")[0], "limits": hr.Limits(member_bytes=most), **plain}


REFUSED: list[tuple[Callable[[], dict[str, Any]], type[Exception], str]] = [
    (lambda: limited(16, window=9), LimitError, "a window of 9 tokens of uint16 has 18 bytes, over the limit of 16"),
    (lambda: limited(60, documents="samples"), LimitError, "documents has 64 bytes"),
    (lambda: limited(390, documents="samples"), LimitError, "a document of 200 tokens"),
    (lambda: stored("raw", SOME) | {"eos": None}, ObjectMissingError, r"documents/raw\.idx"),
    (
        lambda: stored("npy", SOME) | {"eos": None},
        OptionError,
        "no index of Megatron's, .* eos= finds them by the token",
    ),
    (lambda: {"urls": put_file("rows.npy", npy(ROWS)), "eos": EOS}, OptionError, "6 tokens, which are the windows"),
    (
        lambda: stored("raw", SOME) | {"window": 100},
        FormatError,
        "longest of its 8 documents has 81 tokens, .* none fits",
    ),
    (
        lambda: stored("raw", SOME) | {"limits": LOW},
        LimitError,
        "where each begins takes 8 bytes, over the limit of 50",
    ),
]


@pytest.mark.parametrize(("make", "error", "match"), REFUSED)
def test_files_without_documents_or_of_too_many_are_refused(make: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        len(hr.tokens(**{"window": 6, "documents": "separate"} | make()))
