"""The contract of formats, as tests."""

from __future__ import annotations

import asyncio
import itertools
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import headrace as hr
from headrace._util.sample_ranges import Rows
from headrace.errors import StageError
from headrace.fetch.stores import memory
from headrace.formats.format import Format
from headrace.formats.limits import DEFAULTS, Limits
from headrace.formats.registry import SNIFFED_BYTES
from headrace.testing.decoders import same

_BLOCK = 512
_NUMBERS = itertools.count()


class FormatContract:
    """Tests of a `Format`. Inherit the class and define `open_format` and `write`.

        class TestRecords(FormatContract):
            samples = [{"n": n} for n in range(50)]

            def open_format(self):
                return Records()

            def write(self, samples):
                return {"0.rec": pack(samples)}

    Attributes:
        samples: 20 or more samples to write, with fields and values of every kind.
        finds_damage: True if changed bytes in the middle of a shard are always detected.
    """

    samples: ClassVar[Sequence[Mapping[str, object]]]
    finds_damage: ClassVar[bool] = False

    def open_format(self) -> Format:
        """Return a new instance, as it is registered."""
        raise NotImplementedError

    def write(self, samples: Sequence[Mapping[str, object]]) -> dict[str, bytes]:
        """Return the bytes of one shard with these samples by name, and of its catalogue if any."""
        raise NotImplementedError

    def test_name_and_suffixes_are_such_as_can_be_registered(self) -> None:
        form = self.open_format()
        assert form.name
        assert form.suffixes or form.catalogue
        assert all(suffix.startswith(".") and suffix == suffix.lower() for suffix in form.suffixes)

    def test_format_travels_to_workers(self) -> None:
        assert pickle.loads(pickle.dumps(self.open_format())).name == self.open_format().name

    def test_sniff_is_surest_of_its_own(self) -> None:
        form = self.open_format()
        (name, data), *_ = self.write(self.samples).items()
        assert 0 <= form.sniff(name, data[:SNIFFED_BYTES]) <= 1
        assert form.sniff("x", b"") == form.sniff("x", bytes(600)) == 0, "nothing shows that it is of this format"

    def test_samples_are_those_that_were_written(self) -> None:
        self._same(hr.stream(self._put(), format=self.open_format().name, index=None), self.samples)

    def test_samples_are_the_same_when_workers_open_them(self) -> None:
        data = hr.stream(self._put(), format=self.open_format().name, index=None)
        self._same(_samples(data, num_workers=1), self.samples)

    def test_shard_without_samples_has_none(self) -> None:
        assert list(hr.stream(self._put(()), format=self.open_format().name, index=None)) == []

    def test_samples_have_numbers_with_an_index(self) -> None:
        data = self._indexed()
        assert len(data) == len(self.samples)
        assert len(set(data.keys())) == len(self.samples), "each sample of a shard has a key of its own"
        for k in (0, 7, -1):
            self._same([data[k]], [self.samples[k]])

    def test_shuffled_samples_are_the_same_when_workers_open_them(self) -> None:
        for data in (self._indexed().shuffle("global"), self._indexed().shuffle()):
            by_key = dict(zip(self._indexed().keys(), self.samples, strict=True))
            got = _samples(data, num_workers=1)
            assert [sample["__key__"] for sample in got] != list(by_key), "they are shuffled"
            self._same(got, [by_key[sample["__key__"]] for sample in got])
            assert len(got) == len(by_key)

    def test_state_is_exact(self) -> None:
        for stream in (hr.stream(self._put(), format=self.open_format().name, index=None), self._indexed()):
            data = stream.shuffle()
            whole = _samples(data)
            interrupted: hr.DataLoader[Any] = hr.DataLoader(data, batch_size=4, collate_fn=list)
            with interrupted as loader:
                batches = iter(loader)
                first = [sample for _ in range(2) for sample in next(batches)]
                state = loader.state_dict()
            assert same(first + _samples(data, state), whole)

    def test_scanner_gives_the_same_for_any_pieces(self) -> None:
        form = self.open_format()
        for data in self._shards(form):
            whole, error = scanned(form, data, max(len(data), 1))
            assert error is None
            for piece in (_BLOCK, 3 * _BLOCK):
                found, error = scanned(form, data, piece)
                assert (error, found) == (None, whole), f"in pieces of {piece} bytes"

    def test_scanner_gives_the_same_when_it_travels(self) -> None:
        form = self.open_format()
        for data in self._shards(form):
            assert scanned(form, data, _BLOCK, carry=True) == scanned(form, data, max(len(data), 1))

    def test_truncated_shard_is_an_error_or_a_part_of_the_samples(self) -> None:
        """Damage may be undetectable, but must not cause other samples or other exceptions."""
        self._damaged(lambda data: (data[: len(data) * k // 9] for k in range(9)), is_prefix=True)

    def test_changed_shard_is_an_error_or_as_long(self) -> None:
        def changed(data: bytes) -> Iterator[bytes]:
            for k in range(1, 9):
                at = len(data) * k // 9
                yield data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :]

        self._damaged(changed, is_prefix=False)

    def test_shard_of_nonsense_is_an_error(self) -> None:
        for nonsense in (b"\xff" * 700, bytes(range(256)) * 3):
            got, error = self._read(nonsense)
            assert error is not None, f"{nonsense[:8]!r}… is no shard, and {got!r:.80} came of it"
            assert type(pickle.loads(pickle.dumps(error))) is type(error)

    def test_sample_over_the_limit_is_a_limit_error(self) -> None:
        low = Limits(member_bytes=1, header_bytes=1, name_bytes=1, unpacked_free_bytes=1, unpacked_ratio=1)
        try:
            list(hr.stream(self._put(), format=self.open_format().name, index=None, limits=low))
        except StageError:
            return
        raise AssertionError("samples of more than 1 byte came with Limits(member_bytes=1)")

    def _damaged(self, damage: Callable[[bytes], Iterable[bytes]], *, is_prefix: bool) -> None:
        name = next(iter(self.write(self.samples)))
        for damaged in damage(self.write(self.samples)[name]):
            got, error = self._read(damaged)
            if error is not None:
                continue
            assert not self.finds_damage, "this damage is always noticed"
            if is_prefix:
                self._same(got, self.samples[: len(got)])

    def _read(self, shard: bytes) -> tuple[list[object], StageError | None]:
        """Return (samples, error) after replacing the shard's bytes."""
        files = self.write(self.samples)
        files[next(iter(files))] = shard
        try:
            return list(hr.stream(self._place(files), format=self.open_format().name, index=None)), None
        except StageError as error:
            return [], error

    def _indexed(self) -> hr.Stream:
        """Return the stream with an index: the shard's own, or a built one."""
        form, place = self.open_format(), self._put()
        if type(form).scanner is Format.scanner:
            return hr.stream(place, format=form.name)
        from headrace.fetch.reader import Reader
        from headrace.indexes.building import build_index

        output = f"memory://contract/{next(_NUMBERS)}.hri"

        async def build() -> None:
            async with Reader(concurrency=4) as reader:
                progress = await build_index(reader, [place], output, form=form)
                assert not progress.failures, progress.failures

        asyncio.run(build())
        return hr.stream(place, format=form.name, index=output)

    def _put(self, samples: Sequence[Mapping[str, object]] | None = None) -> str:
        return self._place(self.write(self.samples if samples is None else samples))

    def _place(self, files: Mapping[str, bytes]) -> str:
        """Return the address of the shard, or of its catalogue."""
        folder = f"memory://contract/{self.open_format().name}{next(_NUMBERS)}"
        for name, data in files.items():
            memory.put(f"{folder}/{name}", data)
        catalogue = self.open_format().catalogue
        return f"{folder}/{catalogue if catalogue in files else next(iter(files))}"

    def _shards(self, form: Format) -> list[bytes]:
        is_scanned = type(form).scanner is not Format.scanner
        return list(self.write(self.samples).values())[:1] if is_scanned else []

    @staticmethod
    def _same(got: Any, samples: Sequence[Mapping[str, Any]]) -> None:
        bare = [{name: value for name, value in one.items() if not name.startswith("__")} for one in got]
        assert len(bare) == len(samples), f"{len(bare)} samples came, {len(samples)} were written"
        for one, sample in zip(bare, samples, strict=True):
            assert same(one, dict(sample)), f"{one!r:.300} came, and {sample!r:.300} was written"


def _samples(data: hr.Stream, state: Mapping[str, Any] | None = None, *, num_workers: int = 0) -> list[Any]:
    """Return a loader's samples, from a state on."""
    loader: hr.DataLoader[Any] = hr.DataLoader(data, batch_size=4, num_workers=num_workers, collate_fn=list)
    with loader:
        if state is not None:
            loader.load_state_dict(state)
        return [sample for batch in loader for sample in batch]


def scanned(form: Format, data: bytes, piece: int, *, carry: bool = False) -> tuple[list[object], str | None]:
    """Scan `data` in pieces. Return (key, row, fields, locations) of each sample, and the error."""
    scanner = form.scanner("memory://contract/shard", DEFAULTS)
    assert scanner is not None
    found, start = list[object](), 0
    while not scanner.done:
        stop, low = min(start + piece, len(data)), scanner.low
        rows = scanner.feed(memoryview(data)[start:stop], start, stop == len(data))
        assert not len(rows) or int(rows.offset.min(initial=low)) >= low, "the bytes before `low` may be gone"
        found += _listed(rows)
        start = stop
        if carry:
            scanner = pickle.loads(pickle.dumps(scanner))
    return found, None if scanner.error is None else str(scanner.error)


def _listed(rows: Rows) -> list[object]:
    blocks = range(len(rows)) if rows.block is None else rows.block.tolist()
    listed: list[object] = []
    for k, block in enumerate(blocks):
        part = slice(int(rows.starts[block]), int(rows.starts[block + 1]))
        names = [rows.fields[number] for number in rows.field[part].tolist()]
        row = 0 if rows.row is None else int(rows.row[k])
        places = zip(rows.offset[part].tolist(), rows.size[part].tolist(), strict=True)
        listed.append((rows.keys[k], row, names, list(places)))
    return listed
