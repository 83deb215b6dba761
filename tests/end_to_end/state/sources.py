"""Data of every kind, whose samples have their number, their bytes and their random numbers."""

import collections
import gzip
import json
import random
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
import torch
from builders import arrows, mds, parquet
from builders.numbers import Made
from builders.tars import index_file, index_of_archive, numbered_samples, tar
from torch.utils.data import default_collate

import headrace as hr
from headrace.fetch.stores import memory
from headrace.formats.delimited import Csv
from headrace.formats.format import Format
from headrace.formats.index import ShardIndex
from headrace.formats.limits import DEFAULTS
from headrace.formats.lines import JSON_LINES
from headrace.testing import FaultServer

INDEXED, TAR, GZ, KEYS, FILES, MAP = "indexed", "tar", "tar.gz", "keys", "files", "map"
STATEFUL, STATEFUL_ITERATOR = "stateful data set", "stateful iterator"
CSV, INDEXED_CSV = "csv", "indexed csv"
LINES, INDEXED_LINES, MDS, MDS_ZSTD, TOKENS = "jsonl", "indexed jsonl", "mds", "mds in zstd", "tokens"
SEPARATE, EOS = "tokens by document", 2**31 - 1
PARQUET, ARROW = "parquet", "arrow stream"
PACKED, BEST_FIT = "packed", "packed by best fit"
SCHEMA = pa.schema({"n": pa.int64(), "bin": pa.string()})
INDEXED_SHARDS = (INDEXED, INDEXED_LINES, INDEXED_CSV, MDS, MDS_ZSTD, TOKENS, PARQUET, ARROW, SEPARATE)
SHARDS = (*INDEXED_SHARDS, TAR, GZ, LINES, CSV)
NUMBERED = (*INDEXED_SHARDS, KEYS, FILES, MAP, PACKED, BEST_FIT)
KINDS = (*NUMBERED, TAR, GZ, LINES, CSV, STATEFUL, STATEFUL_ITERATOR)


RECORDS = Csv(types={"n": int, "bin": lambda text: bytes.fromhex(text).decode("latin-1")})


@dataclass
class Written:
    """Stored samples in several formats. `counts` are those of each shard, `bad` the numbers of unusable ones."""

    counts: Sequence[int]
    bad: frozenset[int] = frozenset()
    urls: dict[str, list[str]] = field(default_factory=dict)
    index: str = ""

    @property
    def total(self) -> int:
        return sum(self.counts)


class Places:
    """Writes samples to a server on loopback, and to files."""

    def __init__(self, server: FaultServer, folder: Path) -> None:
        self.server, self.folder, self._number = server, folder, 0

    def write(self, counts: Sequence[int], bad: frozenset[int] = frozenset(), size: int = 40) -> Written:
        self._number += 1
        name, written, first = f"set{self._number}", Written(counts, bad), 0
        written.urls = collections.defaultdict(list)
        indexes, line_indexes, record_indexes, shards = [], [], [], []
        for k, count in enumerate(counts):
            samples = numbered_samples(first, count, size)
            archive = tar(samples)
            shards.append([{"n": int(key), "bin": fields["bin"].decode("latin-1")} for key, fields in samples])
            lines = "\n".join(json.dumps(sample) for sample in shards[-1]).encode()
            rows = [f'{sample["n"]},"{sample["bin"].encode("latin-1").hex()}"\n' for sample in shards[-1]]
            records = "".join(["n,bin\n", *rows]).encode()
            for kind, ending, data in (
                (TAR, "tar", _damaged(archive, samples, bad)),
                (GZ, "tar.gz", gzip.compress(archive, 1, mtime=0)),
                (LINES, "jsonl", lines),
                (CSV, "csv", records),
                (PARQUET, "parquet", parquet.written(shards[-1], SCHEMA, row_group_size=11)),
                (ARROW, "arrow", arrows.written(shards[-1], SCHEMA, rows=11, stream=True)),
            ):
                written.urls[kind].append(self.server.add(f"{name}/{k}.{ending}", data))
            indexes.append((written.urls[TAR][-1], index_of_archive(written.urls[TAR][-1], archive)))
            line_indexes.append(_index_of(written.urls[LINES][-1], JSON_LINES, lines))
            record_indexes.append(_index_of(written.urls[CSV][-1], RECORDS, records))
            for key, fields in samples:
                path = self.folder / name / f"{key}.bin"
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(fields["bin"])
                written.urls[FILES].append(str(path))
            if count:  # the number of a window, thrice, and then that of the next one
                tokens = np.repeat(np.arange(first, first + count + 1, dtype=np.int32), 3)[:-2]
                memory.put(f"memory://states/{name}/{k}.bin", tokens.tobytes())
                written.urls[TOKENS].append(f"memory://states/{name}/{k}.bin")
                twice = np.repeat(np.arange(first, first + count, dtype=np.int32), 2)
                documents = [[*twice[at : at + 4].tolist(), EOS] for at in range(0, 2 * count, 4)]  # of two windows
                memory.put(f"memory://states/{name}/e{k}.bin", np.concatenate(documents).astype(np.int32).tobytes())
                written.urls[SEPARATE].append(f"memory://states/{name}/e{k}.bin")
            first += count
        written.index = f"memory://states/{name}.hri"
        memory.put(written.index, index_file(indexes))
        memory.put(written.index + "l", index_file(line_indexes))
        memory.put(written.index + "r", index_file(record_indexes))
        for kind, compression in ((MDS, None), (MDS_ZSTD, "zstd:3")):
            files = mds.folder({"n": "int", "bin": "str"}, shards, compression)
            written.urls[kind] = [mds.put(f"states/{name}/{compression}", files)]
        return written


def _damaged(archive: bytes, samples: Sequence[tuple[str, dict[str, bytes]]], bad: frozenset[int]) -> bytes:
    whole = bytearray(archive)
    for key, fields in samples:
        if int(key) in bad:
            header = archive.index(f"{key}.bin\0".encode())
            whole[header + 512 : header + 512 + len(fields["bin"])] = bytes(len(fields["bin"]))
    return bytes(whole)


def _index_of(url: str, form: Format, data: bytes) -> tuple[str, ShardIndex]:
    scanner = form.scanner(url, DEFAULTS)
    assert scanner is not None
    rows = scanner.feed(memoryview(data), 0, True)
    crc = [google_crc32c.value(data[at : at + size]) for at, size in zip(rows.offset, rows.size, strict=True)]
    return url, ShardIndex(rows, np.array(crc, np.uint32), len(data), None)


def source(kind: str, written: Written) -> Any:
    if kind == INDEXED:
        return hr.stream(written.urls[TAR], index=written.index)
    if kind == INDEXED_LINES:
        return hr.stream(written.urls[LINES], index=written.index + "l")
    if kind in (CSV, INDEXED_CSV):
        index = written.index + "r" if kind == INDEXED_CSV else None
        return hr.stream(written.urls[CSV], index=index, format=RECORDS)
    if kind in (TAR, GZ, LINES, MDS, MDS_ZSTD, PARQUET, ARROW):
        return hr.stream(written.urls[kind], index=None)
    if kind == TOKENS:
        return hr.tokens(written.urls[kind], "int32", 4, stride=3)
    if kind == SEPARATE:
        return hr.tokens(written.urls[kind], "int32", 2, eos=EOS, documents="separate")
    if kind == PACKED:  # the number of a sequence, twice, in documents that do not end where it does
        texts = Texts(np.array_split(np.repeat(np.arange(written.total), 2), 1 + written.total // 2))
        return texts.pack(2, lengths=texts.lengths).map(sample_of_sequence)
    if kind == BEST_FIT:  # each document is a sequence, and another one in each epoch
        texts = Texts([np.full(3, number) for number in range(written.total)])
        return texts.shuffle().pack(5, lengths=texts.lengths, method="best_fit").map(sample_of_sequence)
    if kind == FILES:
        return hr.files(written.urls[FILES])
    made: dict[str, Any] = {KEYS: Keyed, STATEFUL: Stateful}
    if kind == STATEFUL_ITERATOR:
        return WithStatefulIterator(written.total)
    return hr.from_map(Listed(written)) if kind == MAP else made[kind](written)


def sample_of(number: int) -> dict[str, Any]:
    ((key, fields),) = numbered_samples(number, 1, 40)
    return {"__key__": key, "bin": fields["bin"]}


def sample_of_sequence(sequence: dict[str, Any]) -> dict[str, Any]:
    first, second = sequence["input_ids"][:2].tolist()
    assert first == second
    return sample_of(first)


class Texts(Made):
    def __init__(self, texts: Sequence[Any]) -> None:
        super().__init__(lambda key: {"input_ids": texts[key]}, len(texts))
        self.lengths = list(map(len, texts))


class Keyed(Made):
    def __init__(self, written: Written) -> None:
        def make(key: int) -> dict[str, Any]:
            if key in written.bad:
                raise ValueError(f"sample {key} is damaged")
            return sample_of(key)

        super().__init__(make, written.total)


class Listed:
    def __init__(self, written: Written) -> None:
        self.written = written

    def __len__(self) -> int:
        return self.written.total

    def __getitem__(self, key: int) -> dict[str, Any]:
        return sample_of(key)


class Stateful(hr.AsyncIterableDataset):
    """Samples in turn. The data set knows its position and starts again unless a state was just loaded."""

    def __init__(self, written: Written) -> None:
        self.total, self.next, self.is_told = written.total, 0, False

    async def aiter(self) -> AsyncIterator[dict[str, Any]]:
        self.next, self.is_told = self.next if self.is_told else 0, False
        while self.next < self.total:
            self.next += 1
            yield sample_of(self.next - 1)

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next, self.is_told = state["next"], True


class WithStatefulIterator(hr.AsyncIterableDataset):
    """Samples in turn. The iterator knows its position."""

    def __init__(self, total: int, make: Callable[[int], Any] = sample_of) -> None:
        self.total, self.make = total, make

    def aiter(self) -> AsyncIterator[Any]:
        return _Counting(self.total, self.make)


class _Counting(AsyncIterator[Any]):
    def __init__(self, total: int, make: Callable[[int], Any]) -> None:
        self.total, self.make, self.place = total, make, {"next": 0}

    async def __anext__(self) -> Any:
        if self.place["next"] >= self.total:
            raise StopAsyncIteration
        self.place["next"] += 1
        return self.make(self.place["next"] - 1)

    def state_dict(self) -> dict[str, Any]:
        return self.place  # the same object each time: the loader must copy it

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state

    def snapshot(self) -> str:
        return "a method of the user's, no state"


class Seen:
    """The number, bytes and random numbers of a sample. `with_torch`: also of the generator in torch, in processes."""

    def __init__(self, bad: frozenset[int] = frozenset(), *, with_torch: bool = False) -> None:
        self.bad, self.with_torch = bad, with_torch

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        if "tokens" in sample:
            sample = {"n": int(sample["tokens"][0]), "bin": sample["tokens"].tobytes()}
        number = sample["n"] if "n" in sample else int(sample["__key__"])
        data = sample["bin"]
        if number in self.bad:
            raise ValueError(f"sample {number} is damaged")
        return {
            "n": number,
            "crc": zlib.crc32(data if isinstance(data, bytes) else data.encode("latin-1")),
            "numpy": int(hr.rng().integers(1 << 40)),
            "torch": torch.rand((), dtype=torch.float64) if self.with_torch else 0.0,
        }


def of_all(samples: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    parts = [part.get("bin", part.get("tokens")) for part in samples]
    each = [part.tobytes() if isinstance(part, np.ndarray) else part for part in parts]
    data = b"|".join(one if isinstance(one, bytes) else one.encode("latin-1") for one in each)
    first = {name: value for name, value in samples[0].items() if name != "tokens"}
    if "tokens" in samples[0]:
        first["n"] = int(samples[0]["tokens"][0])
    return {**first, "bin": data}


def some(sample: dict[str, Any]) -> bool:
    return sample["n"] % 5 not in (1, 2) and not 20 <= sample["n"] < 26


async def most(sample: dict[str, Any]) -> bool:
    return bool(sample["n"] % 4 != 3)


async def as_it_is(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "asynchronous": True}


def even_key(key: str) -> bool:
    return int(key) % 2 == 0


def with_sum(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "sum": batch["n"].sum().repeat(len(batch["n"]))}


def parts_of(sample: dict[str, Any]) -> list[dict[str, Any]]:
    """Some samples for each, or none; of a batch's they are numbered too."""
    return [{**sample, "part": k + int(hr.rng().integers(100)) * 10} for k in range(int(sample["n"]) * 7 % 4)]


async def some_parts(sample: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    for one in parts_of(sample):
        yield one


def length(sample: dict[str, Any]) -> int:
    return int(sample["n"]) % 7


def weighed(batch: dict[str, Any]) -> dict[str, Any]:
    """With the size of the batch, and a random number of its own, by each sample."""
    count = len(batch["n"])
    return {**batch, "weight": torch.full((count,), count * 1000 + int(hr.rng().integers(1000)))}


async def as_it_is_slowly(batch: dict[str, Any]) -> dict[str, Any]:
    return weighed(batch)


def totals(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: batch[name].sum() for name in ("n", "crc", "numpy")}


def most_batches(batch: dict[str, Any]) -> bool:
    return int(batch["n"].sum()) % 4 != 3


def packed(length: int, method: Any, data: Any) -> Any:
    sequences = data.map(_as_document).pack(length, tokens="n", method=method, fields="numpy", document_ids=False)
    return sequences.map(_weighed_sequence)


def _as_document(sample: dict[str, Any]) -> dict[str, Any]:
    count = length(sample)
    return {"n": np.full(count, sample["n"]), "numpy": np.full(count, sample["numpy"])}


def _weighed_sequence(sequence: dict[str, Any]) -> dict[str, Any]:
    return {**sequence, "weight": int(hr.rng().integers(1 << 40))}


def mixed_by_tokens(kinds: Sequence[str], streams: Sequence[Any], written: Written) -> Any:
    """Streams mixed by tokens, of samples whose lengths are known."""
    known = {str(k): [3 + n * 7 % 5 for n in range(len(source(kind, written)))] for k, kind in enumerate(kinds)}
    weights = {name: 1 + 2 * k for k, name in enumerate(known)}
    mixed = hr.mix(dict(zip(known, streams, strict=True)), weights, by="tokens", step=31, lengths=known)
    return mixed.take(3 * written.total)


class Sums:
    """Samples with the sum of the numbers before them in the epoch, but for each third one; it knows where it is."""

    def __init__(self) -> None:
        self.sum, self.count, self.is_told = 0, 0, False

    def __call__(self, samples: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        if not self.is_told:
            self.sum = self.count = 0
        self.is_told = False
        for sample in samples:
            self.sum, self.count = self.sum + int(sample["n"]), self.count + 1
            if self.count % 3:
                yield {**sample, "before": self.sum}

    def state_dict(self) -> dict[str, Any]:
        return {"sum": self.sum, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sum, self.count, self.is_told = state["sum"], state["count"], True


def applied(data: Any) -> Any:
    return data.apply(Sums())


def numbered(data: Any) -> Any:
    return data.enumerate().map(_with_place)


def _with_place(numbered: tuple[int, dict[str, Any]]) -> dict[str, Any]:
    place, sample = numbered
    return {**sample, "place": place}


def branched(data: Any) -> Any:
    """Samples to which something is done in each of two branches."""
    first, second = data.fork(2)
    return first.map(_drawn).zip(second.map(as_it_is).map(_drawn)).map(_of_branches)


def _drawn(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "drawn": int(hr.rng().integers(1 << 40))}


def _of_branches(pair: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    assert pair[0]["n"] == pair[1]["n"]
    return {**pair[0], "other": pair[1]["drawn"]}


def of_one(sample: Any) -> Any:
    return default_collate([sample])


def rows(batch: Any) -> tuple[Any, ...]:
    """A batch, or the error in its place, as plain values: one tuple for each sample, its number first."""
    if isinstance(batch, BaseException):
        return (type(batch).__name__,)
    names = sorted(batch, key=lambda name: (name not in ("n", "crc"), name))
    return tuple(zip(*(batch[name].tolist() for name in names), strict=True))


def shuffled_numbers(total: int, rng: random.Random) -> list[int]:
    """Some of the numbers, in any order, some of them twice."""
    return [rng.randrange(total) for _ in range(rng.randint(1, total))]
