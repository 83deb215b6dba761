"""Cached samples: neither read nor made again, and never those of other functions or data."""

import contextlib
import gc
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders.loops import loaded
from builders.numbers import later
from builders.tars import index_file, index_of_archive, numbered_samples, tar

import headrace as hr
from headrace.errors import OptionError
from headrace.fetch.stores import memory
from headrace.sample_cache import lookup as keeping
from headrace.sample_cache.file import place_of
from headrace.testing import FaultServer

pytestmark = pytest.mark.usefixtures("warm_server")

COUNT = 20


class Counted:
    """Writes down each call, whichever process makes it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, sample: Any) -> Any:
        with self.path.open("ab") as file:
            file.write(b".")
        return sample

    def taken(self) -> int:
        count = self.path.stat().st_size if self.path.exists() else 0
        self.path.write_bytes(b"")
        return count


@pytest.fixture
def counted(tmp_path: Path) -> Counted:
    return Counted(tmp_path / "calls")


@pytest.fixture(params=[0, 1], ids=["threads", "processes"])
def workers(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(params=["memory", "folder"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return None if request.param == "memory" else tmp_path / "kept"


def given(stream: Any, **options: Any) -> list[Any]:
    return [sample for batch in loaded(stream, **{"batch_size": 3, "collate_fn": list, **options}) for sample in batch]


STEPS: dict[str, Callable[[Any], Any]] = {
    "map": lambda data: data.map(str),
    "filter, flat_map": lambda data: data.filter(lambda n: n % 3 > 0).flat_map(lambda n: [n] * (n % 4)),
}


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
def test_second_epoch_makes_no_sample_again(step: str, counted: Counted, workers: int, place: Path | None) -> None:
    data = hr.from_map(range(COUNT)).shuffle()
    expected = sorted(map(float, given(STEPS[step](data))))
    stream = STEPS[step](data.map(later).map(counted)).cache(place).map(float)
    for epoch in range(3):
        assert sorted(given(stream, num_workers=workers)) == expected
        assert counted.taken() == (0 if epoch else COUNT)


def test_second_epoch_reads_nothing_of_a_store(place: Path | None, workers: int) -> None:
    samples = numbered_samples(0, COUNT, 40)
    with FaultServer() as server:
        url = server.add("a.tar", archive := tar(samples))
        memory.put("memory://kept/a.hri", index_file([(url, index_of_archive(url, archive))]))
        stream = hr.stream(url, index="memory://kept/a.hri").shuffle("window", window=7).cache(place)
        with hr.DataLoader(stream, batch_size=4, collate_fn=list, num_workers=workers) as loader:
            first = sorted(sample["__key__"] for batch in loader for sample in batch)
            requests = len(server.log)
            assert sorted(sample["__key__"] for batch in loader for sample in batch) == first
            assert len(server.log) == requests
    assert len(first) == COUNT


def test_ranks_share_cached_samples(counted: Counted, tmp_path: Path) -> None:
    def got(rank: int, seed: int) -> list[int]:
        stream = hr.from_map(range(COUNT)).map(counted).shuffle().cache(tmp_path / "kept")
        return given(stream, ranks=hr.Ranks(rank=rank, world_size=2), seed=seed, num_workers=0)

    assert sorted(got(0, 1) + got(1, 1)) == list(range(COUNT))
    assert counted.taken() == COUNT
    assert sorted(got(0, 2) + got(1, 2)) == list(range(COUNT))
    assert counted.taken() == 0


@pytest.mark.slow
def test_changed_function_or_data_makes_samples_again(counted: Counted, tmp_path: Path, workers: int) -> None:
    some = list(range(COUNT))
    for samples, shift, made in ((some, 1, COUNT), (some, 2, COUNT), (some, 1, 0), (some[::-1], 1, COUNT)):
        for expected in (made, 0):
            stream = hr.from_map(samples).map(lambda n, shift=shift: counted(n) + shift).cache(tmp_path / "kept")
            assert given(stream, num_workers=workers) == [n + shift for n in samples]
            assert counted.taken() == expected


@pytest.mark.slow
def test_change_of_a_global_between_epochs_has_samples_made_anew(workers: int, place: Path | None) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec("SHIFT = 1\ndef shifted(n): return n + SHIFT", names)
    stream = hr.from_map(range(COUNT)).map(names["shifted"]).cache(place)
    with hr.DataLoader(stream, batch_size=4, num_workers=workers) as loader:
        for names["SHIFT"] in (1, 5, 1):
            for _ in range(2):
                assert torch.cat(list(loader)).tolist() == [n + names["SHIFT"] for n in range(COUNT)]


def test_file_that_was_written_anew_is_read_anew(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"first")
    for content in (b"first", b"second"):
        (tmp_path / "a.bin").write_bytes(content)
        for _ in range(2):
            (sample,) = given(hr.files([str(tmp_path / "a.bin")]).cache(tmp_path / "kept"))
            assert sample["bin"] == content


@pytest.mark.slow
def test_failed_samples_are_not_cached(counted: Counted, workers: int, place: Path | None) -> None:
    def often_fails(n: int) -> int:
        counted(n)
        if n % 2:
            raise ValueError(f"{n} is odd")
        return n

    stream = hr.from_map(range(COUNT)).map(often_fails).cache(place)
    for made in (COUNT, COUNT // 2):
        assert given(stream, num_workers=workers, errors=hr.Skip(max_in_row=None)) == list(range(0, COUNT, 2))
        assert counted.taken() == made
    with pytest.raises(ValueError, match="1 is odd") as caught:
        given(stream, num_workers=workers)
    assert any("often_fails" in note for note in caught.value.__notes__)


@pytest.mark.slow
def test_samples_without_room_are_made_again(counted: Counted, workers: int, place: Path | None) -> None:
    def large(n: int) -> Any:
        return np.full(1000, counted(n), np.int64)

    stream = hr.from_map(range(COUNT)).map(large).cache(place, max_bytes=60_000)
    for epoch in range(3):
        assert [int(sample[0]) for sample in given(stream, num_workers=workers)] == list(range(COUNT))
        assert counted.taken() == (COUNT if not epoch else COUNT - 7)  # 7 of them have room


@pytest.mark.parametrize(
    ("place", "options", "text"),
    [(None, {"max_bytes": 100}, "no room for a table of 20 samples"), ("file", {}, "cannot be used")],
)
def test_unusable_cache_is_warned_of(place: str | None, options: dict[str, Any], text: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    stream = hr.from_map(range(COUNT)).map(str).cache(place and tmp_path / place, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert given(stream) == list(map(str, range(COUNT)))
    (warned,) = [str(warning.message) for warning in caught]
    assert text in warned


@pytest.mark.slow
def test_samples_are_the_users_own_to_change(workers: int, place: Path | None) -> None:
    def add_one(sample: Any) -> Any:
        sample["array"] += 1
        sample["tensor"] += 1
        return sample

    made = lambda n: {"array": np.full(3, n), "tensor": torch.full((3,), n)}
    stream = hr.from_map(range(COUNT)).map(made).cache(place).map(add_one)
    for _ in range(3):
        got = given(stream, num_workers=workers)
        assert [(int(one["array"][0]), int(one["tensor"][0])) for one in got] == [(n + 1, n + 1) for n in range(COUNT)]


def test_random_steps_are_refused_by_name() -> None:
    def flip(n: int) -> float:
        return n + float(np.random.rand())  # noqa: NPY002

    data = hr.from_map(range(COUNT))
    with pytest.raises(OptionError, match=r"map\(flip\), which draws random numbers \(flip, which uses rand\).*that"):
        data.map(flip).cache()
    data.map(flip, random=False).cache()
    data.cache().map(flip)


class Unknown:
    """A function and a data set that has no fingerprint."""

    def __init__(self) -> None:
        self.parts = (n for n in range(3))

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, n: int) -> int:
        return n

    __call__ = __getitem__


def test_function_without_a_fingerprint_needs_a_version(counted: Counted, tmp_path: Path) -> None:
    data = hr.from_map(range(COUNT)).map(counted)
    with pytest.raises(OptionError, match=r"generator cannot be taken apart.*give version="):
        data.map(Unknown()).cache()
    for version, made in ((1, COUNT), (1, 0), (2, COUNT), ("2", 0)):
        stream = data.map(Unknown()).cache(tmp_path / "kept", version=version)
        assert given(stream, num_workers=0) == list(range(COUNT))
        assert counted.taken() == made


def test_data_without_a_fingerprint_need_a_version_in_a_folder_only(tmp_path: Path) -> None:
    data = hr.from_map(Unknown())
    for stream in (data.cache(), data.cache(tmp_path, version=1)):
        assert given(stream, num_workers=0) == list(range(COUNT))
    with pytest.raises(OptionError, match="give version="):
        given(data.cache(tmp_path), num_workers=0)


@pytest.mark.parametrize(
    ("stream", "why"),
    [
        (lambda: hr.from_map(range(9)).batch(2).map(len).cache(), r"\.cache\(\) takes single samples"),
        (lambda: hr.from_map(range(9)).enumerate().map(str).cache(), r"put \.cache\(\) before \.enumerate"),
        (lambda: hr.from_iterable(range(9)).cache(), "no numbers"),
        (lambda: hr.stream("memory://none/a.tar", index=None).cache(), "no numbers"),
        (lambda: hr.from_map("ab").zip(hr.from_map("ab").shuffle()).cache(), r"inputs; put \.cache\(\) after each"),
        (lambda: hr.from_map(range(9)).cache(max_bytes=0), "max_bytes=0 must be a whole number, 1 or more"),
    ],
)
def test_streams_that_cannot_be_cached_are_refused(stream: Callable[[], Any], why: str) -> None:
    with pytest.raises(OptionError, match=why):
        stream()


@pytest.mark.parametrize(
    "combine",
    [
        lambda data: data.batch(3),
        lambda data: data.bucket(int, [5], batch_size=2).unbatch(),
        lambda data: data.shuffle().enumerate(),
        lambda data: data.zip(range(100, 100 + COUNT)).shuffle(),
        lambda data: hr.from_map([-1, -2]).concat(data),
        lambda data: data.shuffle().interleave(range(9)),
        lambda data: hr.mix({"a": data.shuffle(), "b": range(9)}),
    ],
)
def test_combined_streams_of_cached_samples_are_the_same(
    combine: Callable[[Any], Any], counted: Counted, place: Path | None
) -> None:
    data = combine(hr.from_map(range(COUNT)).map(counted))
    with hr.DataLoader(data, batch_size=None, seed=1) as made:
        expected = [[*map(repr, made)] for _ in range(2)]
    with hr.DataLoader(data.cache(place), batch_size=None, seed=1) as kept:
        assert [*map(repr, kept)] == expected[0]
        counted.taken()
        assert [*map(repr, kept)] == expected[1]
        assert counted.taken() == 0


def test_function_that_changes_while_it_runs_is_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, n: int) -> int:
            self.calls += 1
            return n + self.calls

    stream = hr.from_map(range(COUNT)).map(Counting()).cache()
    with pytest.warns(RuntimeWarning, match="has changed since the epoch began"):
        first = given(stream, num_workers=0)
    assert given(stream, num_workers=0) != first


SHIFT = 1


def shifted(n: int) -> int:
    return n + SHIFT


def test_worker_with_other_functions_caches_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    there = keeping.fingerprint_of([shifted])
    file = keeping.Keeping([shifted], [], place_of(tmp_path, None), None, None, lambda: COUNT).file()
    assert file is not None
    monkeypatch.setattr(sys.modules[__name__], "SHIFT", 2)
    with pytest.warns(RuntimeWarning, match="has changed since the epoch began"):
        keeping.Writer([shifted], file, there).add(1, lambda: b"piece")
    assert 1 not in file
    keeping.Writer([shifted], file, keeping.fingerprint_of([shifted])).add(1, lambda: b"piece")
    assert 1 in file


@pytest.mark.slow
def test_workers_share_memory_that_is_freed_with_the_stream() -> None:
    def memory_files() -> int:
        sizes = [0]
        for descriptor in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # that of this look
                if str(descriptor.readlink()).startswith("/memfd:headrace"):
                    sizes.append(descriptor.stat().st_size)
        return max(sizes)

    stream = hr.from_map(range(COUNT)).map(lambda n: np.full(10_000, n, np.int64)).cache()
    assert len(given(stream, num_workers=2)) == COUNT
    assert COUNT * 80_000 < memory_files() < COUNT * 80_000 + 20_000
    del stream
    gc.collect()
    assert memory_files() < COUNT * 80_000


def test_cache_is_part_of_the_description(tmp_path: Path) -> None:
    stream = hr.from_map(range(COUNT)).shuffle().map(str).cache(tmp_path).map(len)
    assert repr(stream) == f"FromMap(…).map(str).shuffle(auto).cache('{tmp_path}').map(len)"
    assert f"  .cache('{tmp_path}')  [workers]" in stream.describe()
    assert repr(hr.from_map(range(COUNT)).cache()) == "FromMap(…).cache()"


SCRIPT = """
import dataclasses, sys
from pathlib import Path
import headrace as hr

@dataclasses.dataclass
class Sample:
    number: int

def made(n):
    with open(sys.argv[1], "ab") as file:
        file.write(b".")
    return Sample(n)

if __name__ == "__main__":
    stream = hr.from_map(range(20)).map(made).cache(sys.argv[2])
    with hr.DataLoader(stream, batch_size=3, collate_fn=list, num_workers=int(sys.argv[3])) as loader:
        for _ in range(2):
            samples = [sample for batch in loader for sample in batch]
            assert all(type(sample) is Sample for sample in samples), samples
            assert [sample.number for sample in samples] == list(range(20)), samples
"""


@pytest.mark.slow
@pytest.mark.timeout(300)  # each imports torch
def test_runs_of_one_script_share_cached_samples_of_their_own_classes(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    calls = tmp_path / "calls"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for workers in ("1", "0"):
        command = [sys.executable, str(tmp_path / "script.py"), str(calls), str(tmp_path / "kept"), workers]
        subprocess.run(command, env=environment, check=True)
        assert calls.stat().st_size == 20
