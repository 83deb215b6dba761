"""What very many names have in common, found in their bytes and without an object for each of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from headrace.datasets.packed import Packed
from headrace.datasets.places.kinds import MEDIA, TABLE, Survey, extension_of, kind_in
from headrace.formats.compression.decompressor import ENDINGS
from headrace.formats.registry import KnownFormat, formats_by_names, known_formats
from headrace.types import Ints

Bytes = NDArray[np.uint8]
Says = Callable[[str], KnownFormat | None]

_CHUNK = 2**17
_DOT, _SLASH, _NEWLINE = b"./\n"
_EXTENSION_BYTES = 8  # as many as a number holds; names with longer ones are looked at one by one
_TABLE_NAME = len("metadata")
_SAID_MOST = 2**15  # folders, tables and extensions: a summary with more of them is not kept


def kept_from(found: Survey) -> dict[str, object] | None:
    """What is kept of a survey beside the names; None where it is too long for that."""
    longest = max(map(len, (found.others, found.tables, found.extensions, found.folders)))
    return {**asdict(found), "by": _known_by()} if longest <= _SAID_MOST else None


def kept_survey(said: object) -> Survey | None:
    """The survey that was kept; None where there is none, or by other formats than are known now."""
    if not isinstance(said, Mapping) or said.get("by") != _known_by():
        return None
    return Survey(**{name: value for name, value in said.items() if name != "by"})


def surveyed(names: Packed[str], start: int) -> Survey:
    """What names have; 100 MB of them take about a second.

    Args:
        start: where the paths begin in them, in bytes: behind what all of them begin with.
    """
    says = formats_by_names()
    formats, others, extensions = Counter[str](), Counter[str](), Counter[str]()
    found, folders, digest = Survey(), set[str](), blake2b(digest_size=8)
    for chunk in _chunks(names):
        for text, numbers in chunk.by_extension():
            extensions[text] += len(numbers)
            found.media += len(numbers) if text in MEDIA else 0
            if TABLE.fullmatch(f"metadata.{text}"):
                found.tables += chunk.tables(numbers)
            for (form, kind), count in _formats(chunk, text, numbers, says):
                if form is None:
                    others[kind] += count
                else:
                    formats[form] += count
        some, loose = chunk.folders(start)
        folders |= some
        found.loose += loose
        found.is_single = found.is_single and chunk.is_single()
        digest.update(chunk.paths(start))
    found.formats, found.others, found.extensions = dict(formats), dict(others), dict(extensions)
    found.folders, found.digest = sorted(folders), digest.hexdigest()
    return found


def _formats(chunk: _Chunk, extension: str, numbers: Ints, says: Says) -> Iterable[tuple[tuple[str | None, str], int]]:
    """(format, kind as `kind_in` has it) of names with one extension, and how many have these."""
    if extension.isascii() and extension not in _not_alone():
        form = says(f"x.{extension}" if extension else "x")
        return [((None if form is None else form.name, extension), len(numbers))]
    names = map(chunk.text, numbers.tolist())
    return Counter((None, kind_in(name)) if (form := says(name)) is None else (form.name, "") for name in names).items()


def _not_alone() -> frozenset[str]:
    """Extensions before which another one may say the format."""
    several = {suffix for form in known_formats().values() for suffix in form.suffixes if suffix.count(".") > 1}
    return frozenset(one.rpartition(".")[2] for one in {*ENDINGS, *several})


def _known_by() -> str:
    """What tells the formats and extensions that are known from others."""
    suffixes = sorted((name, *form.suffixes) for name, form in known_formats().items())
    return blake2b(repr((suffixes, sorted(MEDIA), sorted(ENDINGS))).encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Some names, with where in each its last part begins, and the first and the last dot of that.

    Attributes:
        data: the bytes of the names, and of the one that follows them, if one does.
        starts, ends: of each name in `data`, and of that one.
        names: where the last part begins.
        first, last: its dots; where there is none, the name's end.
        slashes: all of them in `data`.
        count: of the names.
    """

    data: Bytes
    starts: Ints
    ends: Ints
    names: Ints
    first: Ints
    last: Ints
    slashes: Ints
    count: int

    def text(self, number: int) -> str:
        """A name."""
        return self._text(int(self.starts[number]), int(self.ends[number]))

    def by_extension(self) -> Iterator[tuple[str, Ints]]:
        """Each extension in lower case, and the numbers of the names that have it."""
        begins, ends = np.minimum(self.last + 1, self.ends)[: self.count], self.ends[: self.count]
        keys, is_long = np.zeros(self.count, np.uint64), ends - begins > _EXTENSION_BYTES
        last = max(0, len(self.data) - 1)
        for k in range(_EXTENSION_BYTES):
            at = begins + k
            byte = np.where(at < ends, self.data[np.minimum(at, last)], 0)
            byte = np.where((byte >= ord("A")) & (byte <= ord("Z")), byte + 32, byte)
            is_long |= byte >= 128
            keys |= byte.astype(np.uint64) << np.uint64(8 * k)
        short = np.flatnonzero(~is_long)
        yield from ((_of_key(key), short[numbers]) for key, numbers in _groups(keys[short]))
        long = np.flatnonzero(is_long)
        texts = [extension_of(self.text(k)) for k in long.tolist()]
        yield from ((text, long[np.array([one == text for one in texts])]) for text in dict.fromkeys(texts))

    def tables(self, numbers: Ints) -> list[str]:
        """Those of some names that tables of metadata have."""
        numbers = numbers[(self.last - self.names)[numbers] == _TABLE_NAME]
        texts = [self.text(k) for k in numbers[self.data[self.names[numbers]] == ord("m")].tolist()]
        return [text for text in texts if TABLE.fullmatch(text.rpartition("/")[2])]

    def folders(self, start: int) -> tuple[set[str], int]:
        """The first folders from a place in the names on, and how many names lie in none."""
        begins = self.starts[: self.count] + start
        found = np.searchsorted(self.slashes, begins)
        ends = np.append(self.slashes, len(self.data))[found]
        inside = np.flatnonzero(ends < self.ends[: self.count])
        begins, ends = begins[inside], ends[inside]
        is_new = np.ones(len(inside), np.bool_)
        is_new[1:] = ~_same(self.data, (begins[:-1], ends[:-1]), (begins[1:], ends[1:]))
        texts = (self._text(int(begins[k]), int(ends[k])) for k in np.flatnonzero(is_new).tolist())
        return set(texts), self.count - len(inside)

    def is_single(self) -> bool:
        """Whether no name agrees with the next one up to the first dot of its last part."""
        ends = np.minimum(self.first, self.ends)
        return not _same(self.data, (self.starts[:-1], ends[:-1]), (self.starts[1:], ends[1:])).any()

    def paths(self, start: int) -> bytes:
        """The names from a place on, each with a line's end."""
        end = int(self.ends[self.count - 1])
        ends = self.ends[: self.count]
        keeps = np.ones(end, np.bool_)
        keeps[(self.starts[: self.count, None] + np.arange(start)).ravel()] = False
        lines = np.full(end - self.count * start + self.count, _NEWLINE, np.uint8)
        is_text = np.ones(len(lines), np.bool_)
        is_text[np.cumsum(ends - self.starts[: self.count] - start + 1) - 1] = False
        lines[is_text] = self.data[:end][keeps]
        return lines.tobytes()

    def _text(self, start: int, stop: int) -> str:
        return str(self.data[start:stop].tobytes(), "utf-8", "surrogatepass")


def _chunks(names: Packed[str]) -> Iterator[_Chunk]:
    data, offsets = names.arrays
    for begin in range(0, len(names), _CHUNK):
        count = min(_CHUNK, len(names) - begin)
        some = np.asarray(offsets[begin : begin + count + 2])
        piece = np.asarray(data[int(some[0]) : int(some[-1])])
        starts, ends = some[:-1] - some[0], some[1:] - some[0]
        slashes, dots = np.flatnonzero(piece == _SLASH), np.flatnonzero(piece == _DOT)
        parts = np.maximum(_before(slashes, ends) + 1, starts)
        first = np.append(dots, len(piece))[np.searchsorted(dots, parts)]
        last = _before(dots, ends)
        has_dot = last >= parts
        first, last = np.where(has_dot, first, ends), np.where(has_dot, last, ends)
        yield _Chunk(piece, starts, ends, parts, first, last, slashes, count)


def _before(marks: Ints, ends: Ints) -> Ints:
    """The last of some places before each of `ends`; -1 where there is none."""
    return np.concatenate([[-1], marks])[np.searchsorted(marks, ends)]


def _same(data: Bytes, some: tuple[Ints, Ints], others: tuple[Ints, Ints]) -> NDArray[np.bool_]:
    """Whether pieces (their begins, their ends) are equal to others; seen from the end, where most differ."""
    lengths = some[1] - some[0]
    same: NDArray[np.bool_] = lengths == others[1] - others[0]
    left, back = np.flatnonzero(same), 0
    while len(left := left[lengths[left] > back]):
        back += 1
        differ = data[some[1][left] - back] != data[others[1][left] - back]
        same[left[differ]] = False
        left = left[~differ]
    return same


def _groups(keys: NDArray[np.uint64]) -> Iterator[tuple[int, Ints]]:
    """Each number, and where it stands."""
    if not len(keys):
        return
    if (keys == keys[0]).all():
        yield int(keys[0]), np.arange(len(keys))
        return
    order = np.argsort(keys, kind="stable")
    bounds = np.flatnonzero(np.diff(keys[order])) + 1
    for numbers in np.split(order, bounds):
        yield int(keys[numbers[0]]), np.sort(numbers)


def _of_key(key: int) -> str:
    return key.to_bytes(_EXTENSION_BYTES, "little").rstrip(b"\0").decode("ascii")
