"""The pages of a column: their heads, which are walked through before anything is decoded."""

from __future__ import annotations

import zlib
from typing import NamedTuple

from headrace.errors import LimitError
from headrace.formats.limits import Limits
from headrace.formats.parquet.expansion import DELTA_BYTE_ARRAY, RepeatingPage
from headrace.formats.parquet.thrift import Struct, ThriftReader, Value

_DATA, _INDEX, _DICTIONARY, _DATA_2 = range(4)
_BY_DICTIONARY = (2, 8)  # encodings
_KNOWN = (0, 2, 3, 4, 5, 6, 7, 8, 9)


class Walked(NamedTuple):
    """What the heads of a column's pages say.

    Attributes:
        values: of all data pages.
        unpacked: bytes that all pages become.
        is_by_dictionary: whether all values are numbers of entries of a dictionary.
        has_dictionary: whether the first page is one.
        first: where the first data page begins.
        dictionary: the page that is one.
        by_dictionary: how many values are numbers of its entries.
        beginnings: the pages whose values say what they begin with.
    """

    values: int
    unpacked: int
    is_by_dictionary: bool
    has_dictionary: bool
    first: int
    dictionary: RepeatingPage | None
    by_dictionary: int
    beginnings: tuple[RepeatingPage, ...]


def walked(data: bytes, limits: Limits) -> Walked:
    """What pages there are in a column's bytes, with their checksums compared where they have some.

    Raises:
        ValueError: they are damaged, or encoded as nothing that is read; the message says at which byte.
        LimitError: they ask for more than may be held.
    """
    view, at, values, unpacked = memoryview(data), 0, 0, 0
    most = max(limits.unpacked_free_bytes, limits.unpacked_ratio * len(data))
    all_by_dictionary, first = True, -1
    dictionary, by_dictionary, beginnings = None, 0, list[RepeatingPage]()
    while at < len(data):
        reader = ThriftReader(view[at : at + limits.header_bytes])
        try:
            head = reader.struct()
            body = at + reader.at
            kind, full, packed = (_number(head, field) for field in (1, 2, 3))
            if body + packed > len(data):
                raise ValueError(f"its {packed} bytes reach beyond the column's end")
            unpacked += full
            if unpacked > most:
                raise LimitError(f"its pages unpack to over {unpacked} bytes, the limit is {most}")
            _check_crc(head.get(4), view[body : body + packed])
            if kind == _DICTIONARY:
                if at:
                    raise ValueError("a dictionary comes behind other pages")
                said = head.get(7)
                _check_encoding(said, 2)
                entries = _number(said, 1) if type(said) is dict else 0
                dictionary = RepeatingPage(view[body : body + packed], full, entries, 0, is_packed=True)
            elif kind in (_DATA, _DATA_2):
                first = at if first < 0 else first
                said = head.get(5 if kind == _DATA else 8)
                encoding = _check_encoding(said, 2 if kind == _DATA else 4)
                all_by_dictionary = all_by_dictionary and encoding in _BY_DICTIONARY
                count = _number(said, 1) if type(said) is dict else 0
                values += count
                by_dictionary += count if encoding in _BY_DICTIONARY else 0
                if encoding == DELTA_BYTE_ARRAY and type(said) is dict:
                    beginnings.append(_page(view[body : body + packed], full, count, said if kind == _DATA_2 else None))
            elif kind != _INDEX:
                raise ValueError(f"it is of kind {kind}, which there is not")
        except LimitError:
            raise
        except ValueError as error:
            raise ValueError(f"the page at byte {at}: {error}") from None
        at = body + packed
    return Walked(
        values,
        unpacked,
        all_by_dictionary and first >= 0 and dictionary is not None,
        dictionary is not None,
        max(first, 0),
        dictionary,
        by_dictionary,
        tuple(beginnings),
    )


def _page(body: memoryview, unpacked: int, values: int, said: Struct | None) -> RepeatingPage:
    """A data page; of the second kind with what its head says of that."""
    if said is None:
        return RepeatingPage(body, unpacked, values, None, is_packed=True)
    levels = _number({5: 0, **said}, 5) + _number({6: 0, **said}, 6)
    if levels > min(len(body), unpacked):
        raise ValueError(f"its levels have {levels} bytes, and all of it {len(body)}")
    return RepeatingPage(body, unpacked, values, levels, is_packed=said.get(7) is not False)


def _number(head: Struct, field: int) -> int:
    value = head.get(field, -1)
    if type(value) is not int or value < 0:
        raise ValueError("it does not say its size" if field == 3 else "its head is damaged")
    return value


def _check_encoding(said: Value | None, field: int) -> int:
    if type(said) is not dict:
        raise ValueError("its head is damaged")
    encoding = _number(said, field)
    if encoding not in _KNOWN:
        raise ValueError(f"its encoding {encoding} is not known")
    return encoding


def _check_crc(said: Value | None, body: memoryview) -> None:
    if type(said) is int and zlib.crc32(body) != said & 0xFFFFFFFF:
        raise ValueError("its bytes are others than its checksum says")
