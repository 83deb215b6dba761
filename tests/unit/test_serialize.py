"""Objects as bytes come back equal, with memory of their own or as views, and exceptions complete."""

from __future__ import annotations

import asyncio
import itertools
import pickle
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import aiohttp
import botocore.exceptions
import numpy as np
import pytest
import requests
import torch
from aiohttp.client_reqrep import ConnectionKey, RequestInfo
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from headrace.errors import DecodeError, StorageError
from headrace.torch_compat import serialize

DTYPES = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(),
    hnp.floating_dtypes(),
    hnp.complex_number_dtypes(),
    hnp.byte_string_dtypes(),
)
ARRAYS = hnp.arrays(DTYPES, hnp.array_shapes(min_dims=0, min_side=0, max_side=4))
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary(), ARRAYS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3), st.tuples(inner, inner)
    ),
    max_leaves=6,
)


def packed(value: Any) -> tuple[Any, Any]:
    parts = serialize.pack(value)
    slab = np.full(serialize.packed_size(parts) + 64, 0xA5, np.uint8)
    return slab, serialize.write(parts, memoryview(slab))


def through(value: Any, *, copy: bool) -> Any:
    return serialize.unpack(*packed(value), copy=copy)


def assert_equal(got: Any, wanted: Any) -> None:
    assert type(got) is type(wanted)
    if isinstance(wanted, np.ndarray):
        assert got.dtype == wanted.dtype
        np.testing.assert_array_equal(got, wanted)
    elif isinstance(wanted, dict):
        assert_equal([*got.items()], [*wanted.items()])
    elif isinstance(wanted, (list, tuple)):
        for one, other in zip(got, wanted, strict=True):
            assert_equal(one, other)
    else:
        assert got == wanted


@pytest.mark.slow
@settings(max_examples=200)
@given(value=VALUES, copy=st.booleans())
def test_values_survive_serialization(value: Any, copy: bool) -> None:
    assert_equal(through(value, copy=copy), value)
    assert_equal(serialize.unpack_bytes(serialize.pack_bytes(value)), value)


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float16, torch.bool, torch.uint8, torch.int64, torch.complex64, torch.uint16],
)
def test_tensors_survive_serialization(dtype: torch.dtype) -> None:
    for shape, copy in itertools.product([(), (0,), (3, 0), (2, 3), (1, 70, 30)], [False, True]):
        tensor = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
        got = through({"t": tensor}, copy=copy)["t"]
        assert got.dtype == tensor.dtype
        assert got.shape == tensor.shape
        assert torch.equal(got, tensor)
        assert got.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_unusual_tensors_survive_serialization() -> None:
    tensors = [
        torch.arange(12).reshape(3, 4).T,
        torch.arange(12)[::3],
        torch.ones(2, 3).expand(4, 2, 3),
        torch.ones(3, requires_grad=True),
        torch.nn.Parameter(torch.ones(3)),
        torch.complex(torch.ones(3), torch.ones(3)).conj(),
        torch.eye(3).to_sparse(),
    ]
    for tensor in tensors:
        got = through(tensor, copy=True)
        assert type(got) is type(tensor)
        assert got.layout == tensor.layout
        assert got.requires_grad == tensor.requires_grad
        assert torch.equal(got.to_dense(), tensor.to_dense())


def test_shared_objects_stay_shared() -> None:
    tensor = torch.ones(3)
    first, second = through((tensor, tensor), copy=False)
    assert first is second


def test_copies_are_independent_of_the_bytes_and_views_are_not() -> None:
    slab, lengths = packed({"t": torch.ones(1000), "a": np.ones(1000)})
    copied, viewed = serialize.unpack(slab, lengths, copy=True), serialize.unpack(slab, lengths, copy=False)
    slab[:] = 0
    copied["a"][0] = 5
    assert (viewed["t"].sum(), viewed["a"].sum()) == (0, 0)
    assert (copied["t"].sum(), copied["a"].sum()) == (1000, 1004)


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return serialize.unpack_error(pickle.loads(pickle.dumps(serialize.pack_error(caught))))


def test_an_error_keeps_type_arguments_notes_attributes_and_traceback() -> None:
    error = StorageError("it broke", url="s3://b/k", start=1, stop=9, attempts=3, status=503)
    error.add_note("stage: fetch")
    got = raised(error)
    assert type(got) is StorageError
    assert str(got) == str(error)
    assert (got.start, got.stop, got.attempts, got.status, got.url) == (1, 9, 3, 503, "s3://b/k")
    assert got.__notes__ == ["stage: fetch"]
    assert "in raised" in str(got.__cause__)
    assert "it broke" in str(got.__cause__)


def test_error_of_a_script_keeps_its_class() -> None:
    class BrokenSample(ValueError):
        def __init__(self, key: str) -> None:
            super().__init__(f"sample {key} is broken")
            self.key = key

    class Rebuilt(BrokenSample):
        def __reduce__(self) -> Any:
            return Rebuilt, (self.key,)

    got = raised(Rebuilt("a"))
    assert type(got).__name__ == "Rebuilt"
    assert got.key == "a"


def test_unpicklable_arguments_of_an_error_become_text() -> None:
    got = raised(ValueError("a lock", threading.Lock()))
    assert type(got) is ValueError
    assert got.args[0] == "a lock"
    assert "lock object" in got.args[1]


class NoTextError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_an_error_that_cannot_be_made_again_is_a_runtime_error_with_its_text() -> None:
    class StubbornError(Exception):
        held = threading.Lock()

        def __reduce__(self) -> Any:
            return self.held.acquire, ()

    assert type(raised(NoTextError())) is NoTextError
    got = raised(StubbornError("a text"))
    assert type(got) is RuntimeError
    assert "StubbornError: a text" in str(got)
    assert "in raised" in str(got.__cause__)


class StatusError(Exception):
    """As httpx has it: a property that raises where its attribute did not come."""

    def __init__(self, message: str, *, request: object) -> None:
        super().__init__(message)
        self.lock, self._request = threading.Lock(), request

    @property
    def request(self) -> object:
        if not hasattr(self, "lock"):
            raise RuntimeError("the request was not set")
        return self._request

    def __str__(self) -> str:
        return f"{self.args[0]} for {self.request}"


class RpcError(Exception):
    """As in grpc: its text is in a state with a lock."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def __repr__(self) -> str:
        return f"<RpcError of RPC that terminated with: status = {self._state.code}>"

    __str__ = __repr__


class RpcState:
    def __init__(self, code: str) -> None:
        self.condition, self.code = threading.Condition(), code


def client_response_error() -> Exception:
    headers = CIMultiDictProxy(CIMultiDict({"a": "b"}))
    url = URL("https://host/a.tar")
    return aiohttp.ClientResponseError(RequestInfo(url, "GET", headers, url), (), status=404, message="Not Found")


def connector_error() -> Exception:
    key = ConnectionKey("host", 443, True, True, None, None, None)
    return aiohttp.ClientConnectorError(key, OSError(111, "Connection refused"))


def http_error() -> Exception:
    response = requests.Response()
    response.status_code, response.url, response.raw = 403, "https://host/a.tar", threading.Lock()
    return requests.HTTPError("403 Client Error", response=response)


ERRORS: dict[str, Callable[[], Exception]] = {
    "ours": lambda: DecodeError("no", field="png", key="1", url="memory://a"),
    "Python, no text": lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
    "Python, a key": lambda: KeyError("k"),
    "Python, a file": lambda: FileNotFoundError(2, "No such file", "name.txt"),
    "aiohttp, an answer": client_response_error,
    "aiohttp, a connection": connector_error,
    "botocore, an answer": lambda: botocore.exceptions.ClientError(
        {"Error": {"Code": "NoSuchKey", "Message": "gone"}}, "GetObject"
    ),
    "botocore, a connection": lambda: botocore.exceptions.EndpointConnectionError(endpoint_url="https://host"),
    "requests": http_error,
    "httpx": lambda: StatusError("404 Not Found", request="GET https://host/a.tar"),
    "grpc": lambda: RpcError(RpcState("StatusCode.UNAVAILABLE")),
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_keeps_its_text_and_note_in_other_processes(name: str) -> None:
    error = ERRORS[name]()
    error.add_note("once")
    for got in (raised(error), raised(raised(error))):
        assert isinstance(got, type(error))
        assert (type(got).__name__, str(got), repr(got)) == (type(error).__name__, str(error), repr(error))
        assert f"{error}\n" in "".join(traceback.format_exception_only(got))
        assert got.__notes__ == ["once"]


def test_error_is_the_original_once_and_a_copy_afterwards() -> None:
    error = StatusError("404 Not Found", request="GET https://host/a.tar")
    error.add_note("stage: fetch")
    packed = serialize.pack_error(error)
    first, second = (serialize.unpack_error(each) for each in (packed, replace(packed, blob=packed.blob)))
    first.add_note("batch 0")
    assert first is error
    assert second is not error
    assert str(second) == str(error)
    assert second.__notes__ == ["stage: fetch"]


@pytest.mark.parametrize("kind", [StopIteration, StopAsyncIteration, GeneratorExit, asyncio.CancelledError])
def test_exceptions_that_end_iteration_become_errors(kind: type[BaseException]) -> None:
    error = kind("of the user")
    error.add_note("stage: map(f)")
    got = raised(error)
    assert type(got) is RuntimeError
    assert kind.__name__ in str(got)
    assert "of the user" in str(got)
    assert got.__notes__ == ["stage: map(f)"]
