"""A list of small objects as two flat arrays: shared by processes, without reference counts."""

from __future__ import annotations

import io
import operator
import pickle
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Literal, TypeVar, cast, overload

import numpy as np
import numpy.typing as npt

from headrace.errors import CannotCarryError

T = TypeVar("T")
N = TypeVar("N", bound=np.generic)
T_co = TypeVar("T_co", covariant=True)
_Kind = Literal["str", "bytes", "pickle"]
_CHUNK = 2**14
_SHOWN = 3
_MENTIONS_A_GLOBAL = b"\x93"  # the opcode STACK_GLOBAL; the byte may also occur in strings, which only costs time


def packed(elements: Iterable[T]) -> Packed[T]:
    """Return the elements as a read-only list stored in two flat arrays.

    A list of a million strings is a million objects. Each worker that reads them writes their reference counts, and so
    gets its own copy of every page. A packed list is placed in shared memory once, for all workers.

    Strings are stored as UTF-8, bytes as they are. If there is any other type, every element is stored as a pickle.
    Each access creates a new object, equal to the original. Changing that object does not change the list.

    Args:
        elements: Read once, and never held as a whole. A packed list is returned unchanged.

    Raises:
        CannotCarryError: An element cannot be pickled. The message names its index. It is a TypeError.

    Examples:
        >>> names = packed(["cat.jpg", "dog.jpg", "eel.jpg"])
        >>> names[1], names[-1], len(names)
        ('dog.jpg', 'eel.jpg', 3)
        >>> names[1:]
        packed(['dog.jpg', 'eel.jpg'])
        >>> names == ["cat.jpg", "dog.jpg", "eel.jpg"]
        True
    """
    return elements if isinstance(elements, Packed) else _pack(iter(elements), None)


class Packed(Sequence[T_co]):
    """The result of `packed`. It equals the list of its elements; slices are packed, too.

    A slice without a step shares the bytes of the whole. Only its own part is pickled.

    Attributes:
        nbytes: Size of the two arrays, in bytes.

    Examples:
        >>> hr.packed(["a", "b", "c"])[1:] == ["b", "c"]
        True
    """

    __slots__ = ("__weakref__", "_bytes", "_data", "_ends", "_globals", "_kind", "_offsets")
    __hash__ = None  # type: ignore[assignment]  # unhashable, like a list

    def __init__(
        self,
        kind: _Kind,
        data: npt.NDArray[np.uint8],
        offsets: npt.NDArray[np.int64],
        globals_: tuple[object, ...] = (),
    ) -> None:
        self._kind: _Kind = kind
        self._data = _read_only(data)
        self._offsets = _read_only(offsets)
        # Classes and functions that pickled elements reference. They are stored outside the pickles and sent like those
        # of the data set: by value where a worker could not import them.
        self._globals = globals_
        self._bytes, self._ends = self._data.data, self._offsets.data  # memoryviews are faster to index than arrays

    @property
    def nbytes(self) -> int:
        return self._data.nbytes + self._offsets.nbytes

    @property
    def arrays(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
        """The bytes of all elements, and the offset of each element plus the end of the last."""
        return self._data, self._offsets

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> T_co: ...
    @overload
    def __getitem__(self, index: slice) -> Packed[T_co]: ...
    def __getitem__(self, index: int | slice) -> T_co | Packed[T_co]:
        if isinstance(index, slice):
            return self._part(index)
        number = operator.index(index)
        if number < 0:
            number += len(self)
        if not 0 <= number < len(self):
            raise IndexError(f"index {index} is out of range: there are {len(self)} elements")
        return self._element(number)

    def __iter__(self) -> Iterator[T_co]:
        return map(self._element, range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Packed | list):
            return NotImplemented
        if len(self) != len(other):
            return False
        if isinstance(other, Packed) and self._kind == other._kind != "pickle":
            return np.array_equal(self._offsets, other._offsets) and np.array_equal(self._data, other._data)
        return all(map(operator.eq, self, other))

    def __repr__(self) -> str:
        shown = ", ".join(map(repr, self[:_SHOWN]))
        more = f", and {len(self) - _SHOWN} more" if len(self) > _SHOWN else ""
        return f"packed([{shown}{more}])"

    def __reduce__(self) -> tuple[object, ...]:
        return Packed, (self._kind, self._data, self._offsets, self._globals)

    def _element(self, number: int) -> T_co:
        piece = self._bytes[self._ends[number] : self._ends[number + 1]]
        value: object
        if self._kind == "str":
            value = str(piece, "utf-8", "surrogatepass")
        elif self._kind == "bytes":
            value = bytes(piece)
        elif self._globals:
            value = _Unpickler(piece, self._globals).load()
        else:
            value = pickle.loads(piece)
        return cast("T_co", value)

    def _part(self, index: slice) -> Packed[T_co]:
        start, stop, step = index.indices(len(self))
        if step == 1:
            stop = max(start, stop)
            first, last = self._ends[start], self._ends[stop]
            data, offsets = self._data[first:last], self._offsets[start : stop + 1] - first
        else:
            pieces = (self._bytes[self._ends[n] : self._ends[n + 1]] for n in range(start, stop, step))
            data = np.frombuffer(bytearray().join(pieces), np.uint8)
            offsets = _offsets([np.diff(self._offsets)[index]])
        return Packed(self._kind, data, offsets, self._globals)


def _pack(source: Iterator[T], kind: _Kind | None) -> Packed[T]:
    """Pack `source` as `kind`. None: the kind that fits its elements."""
    data = bytearray()
    lengths: list[npt.NDArray[np.int64]] = []
    count = 0
    pickler = _Pickler()
    while chunk := list(islice(source, _CHUNK)):
        fitting = _kind_of(chunk)
        kind = kind or fitting
        if kind not in (fitting, "pickle"):  # another type occurred: pickle the earlier elements, too
            so_far: Packed[T] = Packed(kind, np.frombuffer(data, np.uint8), _offsets(lengths))
            return _pack(chain(so_far, chunk, source), "pickle")
        if kind == "str":
            pieces = [cast("str", element).encode("utf-8", "surrogatepass") for element in chunk]
        elif kind == "bytes":
            pieces = cast("list[bytes]", chunk)
        else:
            pieces = [pickler.pickled(element, number) for number, element in enumerate(chunk, count)]
        data += b"".join(pieces)
        lengths.append(np.fromiter(map(len, pieces), np.int64, len(pieces)))
        count += len(pieces)
    return Packed(kind or "str", np.frombuffer(data, np.uint8), _offsets(lengths), tuple(pickler.globals))


def _kind_of(elements: Sequence[object]) -> _Kind:
    """Go by exact types: an instance of a subclass must stay one."""
    types = set(map(type, elements))
    return "str" if types == {str} else "bytes" if types == {bytes} else "pickle"


def _offsets(lengths: list[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    offsets = np.zeros(1 + sum(map(len, lengths)), np.int64)
    if lengths:
        np.cumsum(np.concatenate(lengths), out=offsets[1:])
    return offsets


def _read_only(array: npt.NDArray[N]) -> npt.NDArray[N]:
    array = np.require(array, requirements="A").view()  # a memoryview of unaligned numbers cannot be indexed
    array.flags.writeable = False
    return array


class _Pickler(pickle.Pickler):
    """Pickles elements one by one; `globals` are the classes and functions they reference."""

    def __init__(self) -> None:
        self._out = io.BytesIO()
        super().__init__(self._out, protocol=5)
        self.globals: list[object] = []
        self._numbers: dict[int, int] = {}

    def pickled(self, element: object, index: int) -> bytes:
        try:
            plain = pickle.dumps(element, protocol=5)
        except Exception:  # perhaps classes and functions of a script: the code below does not look them up by name
            plain = _MENTIONS_A_GLOBAL
        if _MENTIONS_A_GLOBAL not in plain:
            return plain
        self._out.seek(0)
        self._out.truncate()
        self.clear_memo()
        try:
            self.dump(element)
        except Exception as error:
            raise CannotCarryError(
                f"element {index}, of type {type(element).__qualname__}, cannot be packed: {error}"
            ) from error
        return self._out.getvalue()

    def persistent_id(self, value: object) -> int | None:
        is_global = isinstance(value, type | FunctionType) or (
            isinstance(value, BuiltinFunctionType) and isinstance(value.__self__, ModuleType)
        )
        if not is_global:
            return None
        number = self._numbers.setdefault(id(value), len(self.globals))
        if number == len(self.globals):
            self.globals.append(value)
        return number


class _Unpickler(pickle.Unpickler):
    def __init__(self, piece: memoryview, globals_: tuple[object, ...]) -> None:
        super().__init__(io.BytesIO(piece))
        self._globals = globals_

    def persistent_load(self, number: int) -> object:
        return self._globals[number]
