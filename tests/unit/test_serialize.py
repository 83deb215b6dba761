"""Objects as bytes come back equal, exceptions complete. Modules go by value; a path names what cannot be sent."""

from __future__ import annotations

import asyncio
import enum
import functools
import importlib.util
import itertools
import mmap
import multiprocessing
import pickle
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from types import ModuleType
from typing import Any

import aiohttp
import botocore.exceptions
import cloudpickle
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

from headrace._util.shared_memory import close_all
from headrace.errors import CannotCarryError, DecodeError, StorageError
from headrace.torch_compat import serialize
from headrace.torch_compat.serialize import cannot_carry, cannot_carry_index

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


def test_cached_function_is_sent_with_an_empty_cache() -> None:
    @functools.lru_cache(maxsize=7)
    def doubled(value: int) -> int:
        return 2 * value

    doubled(4)
    copy = serialize.copied(doubled)
    assert (copy(4), copy.cache_parameters()) == (8, {"maxsize": 7, "typed": False})
    assert copy.cache_info().misses == 1


def test_class_with_cached_properties_goes_by_value() -> None:
    class Lazy:
        @functools.cached_property
        def value(self) -> int:
            return 5

    assert serialize.copied(Lazy)().value == 5


class Kelvin(float, enum.Enum):
    ROOM = 20

    def __new__(cls, celsius: float) -> Any:
        member = float.__new__(cls, celsius + 273.15)
        member._value_ = celsius
        return member


class Planet(enum.Enum):
    EARTH = 1

    def __init__(self, moons: int) -> None:
        self.moons = moons


def test_flags_are_sent_after_their_inverse_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = enum.IntFlag("flags", "READ WRITE")
    monkeypatch.setattr(flags, "__module__", "__main__")  # so that it goes by value
    assert (~flags.READ).value == serialize.copied(~flags.READ).value


@pytest.mark.parametrize("member", [Kelvin.ROOM, Planet.EARTH])
def test_enumeration_whose_members_are_more_than_their_values_is_refused(
    member: enum.Enum, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(member), "__module__", "__main__")  # so that it goes by value
    with pytest.raises(TypeError, match=r"more than its value|requires a 'float'"):
        serialize.copied(member)


@pytest.mark.parametrize("mode", ["r", "r+"])
@pytest.mark.parametrize(
    "part",
    [lambda array: array, lambda array: array[100:200:2], lambda array: np.asarray(array)[5:]],
    ids=["memmap", "slice", "plain array"],
)
def test_array_of_a_mapped_file_is_mapped_again(mode: Any, part: Callable[[Any], Any], tmp_path: Path) -> None:
    np.arange(300, dtype=np.int32).tofile(tmp_path / "numbers.bin")
    array = part(np.memmap(tmp_path / "numbers.bin", np.int32, mode))
    copy = serialize.copied(array)
    assert type(copy) is type(array)
    assert copy.tolist() == array.tolist()
    assert copy.flags.writeable == (mode == "r+")
    np.arange(300, 600, dtype=np.int32).tofile(tmp_path / "numbers.bin")
    assert copy[0] >= 300, "it is the file's memory"


def test_array_of_a_mapped_file_is_copied_when_the_file_is_gone_or_changes_are_private(tmp_path: Path) -> None:
    np.arange(3, dtype=np.int32).tofile(tmp_path / "numbers.bin")
    private = np.memmap(tmp_path / "numbers.bin", np.int32, "c")
    private[0] = 7
    assert serialize.copied(private).tolist() == [7, 1, 2]
    gone = np.memmap(tmp_path / "numbers.bin", np.int32, "r")
    (tmp_path / "numbers.bin").unlink()
    assert serialize.copied(gone).tolist() == [0, 1, 2]


class Measured(np.ndarray):
    """An array with an attribute."""


@pytest.mark.parametrize("make", [
    lambda: torch.zeros(2),
    lambda: torch.zeros(2).share_memory_(),
    lambda: torch.nn.Parameter(torch.zeros(2)),
    lambda: np.zeros(2).view(Measured),
], ids=["tensor", "shared tensor", "parameter", "array"])  # fmt: skip
def test_attributes_are_sent_with_tensors_and_arrays(make: Callable[[], Any]) -> None:
    plain, measured = make(), make()
    measured.unit = "m"
    first, second = serialize.copied([plain, measured])
    assert (type(second), second.unit, second.tolist()) == (type(measured), "m", [0, 0])
    assert not hasattr(first, "unit")


@pytest.fixture
def shared() -> Iterator[SharedMemory]:
    memory = SharedMemory(create=True, size=80)
    yield memory
    memory.close()
    memory.unlink()


@pytest.mark.process
@pytest.mark.may_leave(
    processes="resource_tracker",
    descriptors="/dev/shm/pym-|pipe:",
    mappings="pym-",
    reason="multiprocessing keeps them",
)
def test_array_over_memory_that_processes_share_is_an_error(shared: SharedMemory) -> None:
    def check(array: Any) -> None:
        for part in (array, array[::2], array.reshape(5, 2)):
            with pytest.raises(CannotCarryError, match="what a worker writes to it would be lost"):
                serialize.pack_for_workers([part], [])
        array.flags.writeable = False
        assert serialize.copied(array).tolist() == [0] * 10

    check(np.frombuffer(multiprocessing.RawArray("q", 10), np.int64))
    check(np.ndarray(10, np.int64, shared.buf))
    check(np.frombuffer(mmap.mmap(-1, 80), np.int64))


@pytest.fixture
def plugin(tmp_path: Path) -> Iterator[ModuleType]:
    """A module that was loaded from a place that is not on the path: no worker could import it."""
    path = tmp_path / "plugin_of_a_user.py"
    path.write_text("def twice(x):\n    return 2 * x\n\n\nclass Pair(tuple):\n    pass\n")
    spec = importlib.util.spec_from_file_location("plugin_of_a_user", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["plugin_of_a_user"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    if "plugin_of_a_user" in cloudpickle.list_registry_pickle_by_value():
        cloudpickle.unregister_pickle_by_value(module)
    del sys.modules["plugin_of_a_user"]


def sent(value: object) -> bytes:
    descriptors: list[int] = []
    try:
        return b"".join(bytes(part) for part in serialize.pack_for_workers(value, descriptors))
    finally:
        close_all(descriptors)


def test_module_that_workers_cannot_import_is_registered_in_cloudpickle(plugin: ModuleType) -> None:
    before = cloudpickle.dumps(plugin.twice)
    assert len(sent(plugin.twice)) > len(before), "it goes by value"
    assert "plugin_of_a_user" in cloudpickle.list_registry_pickle_by_value()
    assert len(serialize.pack_bytes(plugin.Pair)) > 100, "so do samples, once that is known"


def test_code_sent_by_value_keeps_its_file_name(plugin: ModuleType) -> None:
    def outer() -> object:
        return lambda: None

    sent(plugin.twice)
    for function in (plugin.twice, outer):
        came = serialize.unpack_bytes(serialize.pack_bytes(function))
        assert came is not function
        assert came.__code__ == function.__code__
        assert came.__code__.co_filename == function.__code__.co_filename
    assert came().__code__.co_filename == __file__


LOCK = threading.Lock()


class Plain:
    """A data set, a transform: whatever has attributes."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def begin(self, worker: int) -> None:
        del worker


class Slotted:
    __slots__ = ("first", "second")

    def __init__(self, value: Any) -> None:
        self.first, self.second = "a", value


class Choosy(Plain):
    """Leaves what hinders out of its state, and keeps something else that does."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "lock"}


class Wrapper:
    """Passes attributes on to another data set, also during unpickling, before it has one."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def closure(value: Any) -> Callable[[Any], Any]:
    return lambda batch: (batch, value)


def by_default(value: Any) -> Callable[..., Any]:
    def collate(batch: Any, *, log: Any = value) -> Any:
        return batch, log

    return collate


def with_global(value: Any) -> Callable[..., Any]:
    namespace: dict[str, Any] = {"lock": value, "unused": LOCK}
    exec("def collate(batch):\n    return [lock for _ in batch] and lock\n", namespace)
    return namespace["collate"]


def class_with(value: Any) -> type:
    class Local:
        log = value

        def __init__(self) -> None:
            super().__init__()  # its cell holds the class: a circle

    return Local


def friends(value: Any) -> Plain:
    """Two objects that know one another, asked for the one without the fault first."""
    first = Plain()
    first.friend = Plain(friend=first)  # type: ignore[attr-defined]
    first.log = value  # type: ignore[attr-defined]
    return first


PATHS: list[tuple[str, Callable[[Any], Any]]] = [
    ("x", lambda value: value),
    ("x.transforms[2].log", lambda value: Plain(name="a", transforms=[1, Plain(), Plain(log=value)])),
    ("x['b'][1]", lambda value: {"a": 1, "b": ("c", value)}),
    ("x[0]", lambda value: {value}),
    ("x.second", Slotted),
    ("x.other", lambda value: Choosy(lock=LOCK, other=value)),
    ("x.<variable value>", closure),
    ("x.<global lock>", with_global),
    ("x.log", friends),
    ("x.log", by_default),
    ("x.args[0]", lambda value: functools.partial(print, value)),
    ("x.keywords['log'].log", lambda value: functools.partial(print, log=Plain(log=value))),
    ("x.func.<variable value>", lambda value: functools.partial(closure(value), 1)),
    ("x.__self__.log", lambda value: Plain(log=value).begin),
    ("type(x).log", lambda value: class_with(value)()),
    ("x.inner.log", lambda value: Wrapper(Plain(log=value))),
]


def named_by(value: Any) -> str:
    return str(cannot_carry(TypeError("nothing is found"), {"x": value})).partition(" cannot be sent")[0]


@pytest.mark.parametrize(("path", "make"), PATHS)
def test_path_names_the_unpicklable_value(path: str, make: Callable[[Any], Any]) -> None:
    assert named_by(make(LOCK)) == f"{path} (a _thread.lock)"
    assert named_by(make("just text")) == "x"


def test_value_that_refuses_pickling_is_named() -> None:
    class Refuses(Plain):
        def __getstate__(self) -> Any:
            raise ValueError("not today")

    error = cannot_carry(TypeError("nothing is found"), {"dataset": [Refuses(lock=LOCK)]})
    assert str(error).startswith(
        f"dataset[0] (a {__name__}.{Refuses.__qualname__}) cannot be sent to a worker: not today"
    )


def test_path_is_short_when_things_are_nested_deeply_or_in_circles() -> None:
    nested: list[Any] = [LOCK]
    for _ in range(150):
        nested = [nested]
    nested.append(nested)
    assert named_by(nested).startswith("x[0][0]")
    assert "…" in named_by(nested)
    assert len(named_by(nested)) < 300


def test_error_names_the_first_fault_and_a_remedy() -> None:
    reason = TypeError("cannot pickle something else")
    error = cannot_carry(reason, {"dataset": Plain(), "collate_fn": closure(LOCK), "worker_init_fn": None})
    assert isinstance(error, CannotCarryError)
    assert isinstance(error, TypeError)
    assert str(error).startswith(
        "collate_fn.<variable value> (a _thread.lock) cannot be sent to a worker: cannot pickle '_thread.lock' object."
    )
    for offer in ("__getitem__", "worker_init_fn", 'multiprocessing_context="fork"'):
        assert offer in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert str(cannot_carry_index(reason, [LOCK])).startswith("sampler's index[0] (a _thread.lock) cannot be sent")


def test_error_without_a_found_fault_keeps_the_reason() -> None:
    error = cannot_carry(MemoryError("no room"), {"dataset": Plain(), "collate_fn": None})
    assert str(error).startswith("dataset and collate_fn cannot be sent to a worker: no room.")
