"""What goes into the engine is a value: another process, which has nothing of the trainer, gives the same of it."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import types
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from end_to_end import engine_elsewhere, videos
from end_to_end.engine_elsewhere import Wire, Written, all_of, plain
from end_to_end.tars import index_of, numbered_samples, tar

import headrace as hr
from headrace.deliver.iterator import BatchIterator
from headrace.deliver.progress import Progress
from headrace.engine.epoch_plan import EpochPlan
from headrace.engine.job import Job
from headrace.engine.packing import JobPacker
from headrace.loader import DataLoader
from headrace.runtime import Runtime
from headrace.streaming.callers import DirectCalls
from headrace.streaming.next_epoch import NextEpoch
from headrace.streaming.regime import Streaming
from headrace.torch_compat.serialize import unpack_error

COUNTS = (7, 0, 12, 1, 10)
TOTAL = sum(COUNTS)


@dataclass
class Places:
    """Where the data lie that are read."""

    shards: list[str]
    index: str
    files: list[str]
    lines: str
    tokens: str
    video: str


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    folder, first, shards = tmp_path_factory.mktemp("elsewhere"), 0, []
    for number, count in enumerate(COUNTS):
        shards.append(folder / f"{number}.tar")
        shards[-1].write_bytes(tar(numbered_samples(first, count, 60)))
        first += count
    index = folder / "shards.hri"
    index.write_bytes(index_of([str(shard) for shard in shards]))
    files = [folder / f"{number}.cls" for number in range(9)]
    for number, file in enumerate(files):
        file.write_bytes(str(number).encode())
    lines, tokens, video = folder / "lines.jsonl", folder / "tokens.bin", folder / "clip.mp4"
    video.write_bytes(videos.named("h264-plain"))
    lines.write_text("".join(f'{{"n": {number}}}\n' for number in range(11)))
    np.arange(80, dtype=np.uint16).tofile(tokens)
    shards_of, files_of = [str(shard) for shard in shards], [str(file) for file in files]
    return Places(shards_of, str(index), files_of, str(lines), str(tokens), str(video))


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[Wire]:
    """One process for all cases."""
    paths = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, engine_elsewhere.__file__]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": paths}
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        yield Wire(child.stdout, child.stdin)
        child.stdin.close()
        assert child.wait(20) == 0


# Data sets, of which the last ones hold functions and states of their own.


class Numbers(hr.AsyncDataset):
    def __init__(self, bad: tuple[int, ...] = ()) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return TOTAL

    async def aget(self, key: int) -> int:
        if key in self.bad:
            raise ValueError(f"bad {key}")
        return key


class AtOnce(Numbers):
    async def aget_many(self, keys: list[int]) -> list[int]:
        return [100 + key for key in keys]


class Lines(hr.AsyncIterableDataset):
    """Goes on from a state, and is shared by positions."""

    ranks_by = "position"

    def __init__(self) -> None:
        self.read = 0

    async def aiter(self) -> AsyncIterator[int]:
        while self.read < TOTAL:
            self.read += 1
            yield self.read

    def state_dict(self) -> dict[str, int]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.read = state["read"]


class Given(hr.AsyncIterableDataset):
    loop = "caller"

    def __init__(self) -> None:
        self.queue: asyncio.Queue[int] = asyncio.Queue()

    async def aiter(self) -> AsyncIterator[int]:
        yield 1


def digits(places: Places, index: bool = True) -> Any:
    stream = hr.stream(places.shards, index=places.index if index else None)
    return stream.map(lambda sample: int(sample["cls"]))


async def one_more(sample: int) -> int:
    await asyncio.sleep(0)
    return sample + 1


async def is_even(sample: int) -> bool:
    return sample % 2 == 0


def with_noise(sample: int) -> tuple[int, int]:
    return sample, int(hr.rng().integers(1 << 30))


def has_odd_key(key: str) -> bool:
    return int(key) % 2 == 1


def documents() -> Any:
    return hr.from_map([{"input_ids": np.full(number, number)} for number in range(TOTAL)])


def token_documents(places: Places) -> Any:
    return hr.tokens(places.tokens, "uint16", 100, eos=7, documents="separate", tail="short")


def summed(sequence: dict[str, Any]) -> list[int]:
    return [int(values.sum()) for values in sequence.values()]


class Drawing:
    """A sampler that gives other numbers each time: only the trainer knows which."""

    def __init__(self) -> None:
        self.generator = torch.Generator()
        self.generator.manual_seed(5)

    def __len__(self) -> int:
        return 11

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randint(TOTAL, (11,), generator=self.generator).tolist())


@dataclass
class Case:
    """A loader, and what has become of it before its epoch is packed.

    Attributes:
        data: of the loader.
        options: of the loader.
        after: how many batches another loader has given of which this one has the state.
        prepare: what else is done with the loader.
        is_late: whether the plan is that of an iterator which has begun, as a plan that is made again is another one.
    """

    data: Callable[[Places], Any]
    options: dict[str, Any] = field(default_factory=dict)
    after: int = 0
    prepare: Callable[[DataLoader[Any]], object] = lambda loader: None
    is_late: bool = False

    def loader(self, places: Places) -> DataLoader[Any]:
        return DataLoader(self.data(places), **{"batch_size": 4, "seed": 3, "timeout": 30, **self.options})


CASES: dict[str, Case] = {
    "indexed shards": Case(lambda p: digits(p)),
    "indexed shards, in windows": Case(lambda p: hr.stream(p.shards, index=p.index).shuffle().map(with_noise_of)),
    "indexed shards, shuffled globally": Case(lambda p: hr.stream(p.shards, index=p.index).shuffle("global").decode()),
    "indexed shards, resumed": Case(lambda p: digits(p), after=3),
    "some keys": Case(
        lambda p: hr.stream(p.shards, index=p.index).filter(lambda key: key[-1] in "135", field="__key__")
    ),
    "shards as they lie": Case(lambda p: digits(p, index=False)),
    "shards as they lie, shuffled and resumed": Case(
        lambda p: hr.stream(p.shards, index=None).shuffle(window=6).select("cls"), after=2
    ),
    "lines": Case(lambda p: hr.stream([p.lines], index=None).map(lambda line: line["n"]), after=1),
    "tokens": Case(lambda p: hr.tokens(p.tokens, "uint16", 6).shuffle().map(lambda window: window["tokens"])),
    "clips": Case(
        lambda p: hr.video(p.video, hr.Clips(frames=2, of_each=9), decoder="pyav").map(lambda clip: clip["times"]),
        after=1,
    ),
    "files": Case(lambda p: hr.files(p.files)),
    "by key": Case(lambda p: Numbers().shuffle().map(with_noise)),
    "by key, some at once": Case(lambda p: AtOnce()),
    "by key, a later epoch": Case(lambda p: Numbers().shuffle(), prepare=lambda loader: loader.set_epoch(4)),
    "by key, further on": Case(lambda p: Numbers().shuffle(), prepare=lambda loader: loader.skip(3)),
    "iterated": Case(lambda p: Lines().map(with_noise)),
    "iterated and resumed": Case(lambda p: Lines(), after=2),
    "iterated, from a buffer": Case(lambda p: hr.from_iterable(range(20)).shuffle(buffer=5)),
    "from a map": Case(lambda p: hr.from_map([{"n": n} for n in range(10)]).shuffle()),
    "from an iterable": Case(lambda p: hr.from_iterable(range(10))),
    "a mixture": Case(
        lambda p: hr.mix({"a": Numbers().shuffle(), "b": AtOnce()}, {"a": 0.3, "b": 0.7}, until="all"), after=2
    ),
    "a mixture of shards": Case(
        lambda p: hr.mix({"a": digits(p).shuffle(), "b": digits(p)}, {"a": 2, "b": 1}).map(with_noise)
    ),
    "a mixture whose shares change": Case(
        lambda p: hr.mix({"a": Numbers(), "b": AtOnce()}, lambda step: {"a": 1 + step, "b": 1}, step=5)
    ),
    "packed": Case(
        lambda p: documents().shuffle().pack(4, lengths=range(TOTAL), method="best_fit").map(summed), after=3
    ),
    "packed tokens": Case(lambda p: token_documents(p).pack(5, tokens="tokens").shuffle().map(summed), after=1),
    "filtered": Case(lambda p: Numbers().shuffle().filter(lambda n: n % 3)),
    "filtered and resumed": Case(lambda p: Lines().filter(lambda n: n % 3), after=2),
    "many of one": Case(lambda p: Numbers().flat_map(lambda n: [n] * (n % 4)).map(with_noise), after=3),
    "batches on the way": Case(lambda p: Numbers().batch(5).map(lambda some: some + 1).unbatch(), after=2),
    "some before batches on the way": Case(
        lambda p: Numbers().filter(lambda n: n % 3).take(15).batch(4).unbatch().map(with_noise), after=1
    ),
    "on the loop": Case(lambda p: Numbers().shuffle().map(one_more).map(with_noise)),
    "in workers and on the loop": Case(lambda p: digits(p, index=False).filter(is_even).map(one_more), after=1),
    "drawn by weight": Case(lambda p: Numbers().sample(weights=range(1, TOTAL + 1), count=20)),
    "by a sampler": Case(lambda p: Numbers().sample(Drawing()), is_late=True),
    "again and again": Case(lambda p: Numbers().shuffle().repeat().take(50)),
    "an epoch of so many": Case(lambda p: digits(p).shuffle().epoch(samples=45), after=8),
    "rank 1 of 2": Case(lambda p: Numbers().shuffle(), {"rank": 1, "world_size": 2, "tail": "pad"}, after=1),
    "shards on rank 0 of 2": Case(lambda p: digits(p).shuffle(), {"rank": 0, "world_size": 2}),
    "iterated on rank 1 of 2": Case(lambda p: Lines().epoch(samples=18), {"rank": 1, "world_size": 2}),
    "one that fails": Case(lambda p: Numbers((5,)).shuffle()),
    "some are skipped": Case(lambda p: Numbers((5, 6, 20)), {"on_error": "skip", "max_skips": 2}),
    "some are skipped, as the trainer says": Case(
        lambda p: Numbers((5, 6, 20)), {"on_error": lambda error: "6" not in str(error)}
    ),
    "own collation": Case(lambda p: Numbers(), {"collate_fn": lambda some: {"sum": sum(some)}, "drop_last": True}),
}


def with_noise_of(sample: dict[str, Any]) -> tuple[int, int]:
    return with_noise(int(sample["cls"]))


def planned(loader: DataLoader[Any]) -> tuple[Job, EpochPlan]:
    """What goes into the engine for the epoch that comes."""
    behind: Any = loader._behind
    behind._next.find_out()
    plan = behind._next.plan()
    return Job.of(behind._next.stream.pipeline(), behind._settings, behind._next.planning), plan


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_another_process_gives_the_same_batches_and_states(name: str, places: Places, elsewhere: Wire) -> None:
    case, state = CASES[name], None
    if case.after:
        with case.loader(places) as loader:
            batches = iter(loader)
            for _ in range(case.after):
                next(batches)
            state = loader.state_dict()
    with case.loader(places) as loader:
        if state is not None:
            loader.load_state_dict(state)
        case.prepare(loader)
        batches = None
        job, plan = planned(loader)
        if case.is_late:
            batches = iter(loader)
            plan = loader._behind._current  # type: ignore[union-attr, assignment]
        packer, descriptors = JobPacker(job), list[int]()
        elsewhere.send(
            Written(packer.parts, packer.descriptors), [Written(packer.pack(plan, descriptors), descriptors)]
        )
        decide = loader.on_error
        while (reply := elsewhere.receive())[0] == "decide":
            elsewhere.send(decide(unpack_error(reply[1])))  # type: ignore[operator]
        assert reply[0] == "done", "\n".join(reply[1:])
        progress, found = Progress(plan.received(), plan.save), []
        for batch, arrived in reply[1][0]:
            progress.ask()
            (progress.fail if isinstance(batch, tuple) else progress.receive)(arrived)
            found.append((batch, state_of(progress.state)))
        assert len(found) > 1
        batches = batches or iter(loader)
        assert found == [(plain(batch), state_of(loader.state_dict)) for batch in all_of(batches)]


def state_of(ask: Callable[[], dict[str, Any]]) -> object:
    try:
        return ask()
    except hr.OptionError as error:
        return str(error)


@pytest.mark.slow
def test_samples_of_the_trainers_loop_are_refused_by_name(places: Places, elsewhere: Wire) -> None:
    with DataLoader(Given(), batch_size=2) as loader:
        job, plan = planned(loader)
        packer = JobPacker(job)
        elsewhere.send(Written(packer.parts, packer.descriptors), [Written(packer.pack(plan, []), [])])
        assert elsewhere.receive()[:3] == (
            "failed",
            "OptionError",
            "samples of Given belong to the loop of an `async for` in another process",
        )


@pytest.mark.parametrize(
    "data",
    [
        Numbers().sample(Drawing()).repeat(2),
        Numbers().sample(Drawing()).epoch(samples=9),
        hr.mix({"a": Numbers().sample(Drawing()), "b": Numbers()}),
    ],
    ids=repr,
)
def test_sampler_that_would_be_asked_elsewhere_is_refused_by_name(data: Any) -> None:
    with DataLoader(data, batch_size=2) as loader, pytest.raises(hr.OptionError, match=r"sample\(sampler\) with"):
        JobPacker(planned(loader)[0])


def test_plan_does_not_carry_again_what_the_job_holds(places: Places) -> None:
    table = "x" * 300_000

    class Large(Numbers):
        def __init__(self) -> None:
            super().__init__()
            self.table = table

    data = hr.mix({"a": Large().shuffle().map(lambda n: (n, table)), "b": Large()}).map(lambda s: (s, table))
    with DataLoader(data, batch_size=2) as loader:
        job, plan = planned(loader)
        packer = JobPacker(job)
        assert sum(map(len, packer.parts)) > 300_000
        assert sum(map(len, packer.pack(plan, []))) < 20_000


def reached(*roots: object) -> Iterator[object]:
    """All that hangs on some objects; not what modules and classes have besides."""
    seen, to_do = set[int](), list(roots)
    while to_do:
        one = to_do.pop()
        if id(one) in seen or isinstance(one, type | types.ModuleType):
            continue
        seen.add(id(one))
        yield one
        if isinstance(one, types.FunctionType):
            to_do += [cell.cell_contents for cell in one.__closure__ or ()] + list(one.__defaults__ or ())
        else:
            to_do += gc.get_referents(one)


@pytest.mark.slow
def test_job_and_plan_hold_nothing_of_the_trainer(places: Places) -> None:
    kinds, found = (DataLoader, Streaming, NextEpoch, Runtime, BatchIterator), {}
    for name, case in CASES.items():
        with case.loader(places) as loader:
            next(iter(loader))  # so that all is there that is made once
            found[name] = [type(one) for one in reached(*planned(loader)) if isinstance(one, kinds)]
    assert {name: some for name, some in found.items() if some} == {}


@pytest.mark.slow
def test_what_an_epoch_is_made_of_holds_neither_loader_nor_function_of_the_trainer(places: Places) -> None:
    class Trainer:
        def decide(self, error: BaseException) -> bool:
            return True

    trainer, kinds = Trainer(), (DataLoader, Streaming, NextEpoch, BatchIterator, Trainer)
    for case in CASES.values():
        with case.loader(places) as plain_loader:
            data = plain_loader.dataset
        with DataLoader(data, batch_size=None, on_error=trainer.decide) as loader:
            behind: Any = loader._behind
            next(iter(loader))
            _, plan = planned(loader)
            behind._host_job()
            runtime, blueprint = behind._runtime, behind._host._blueprint
            calls = DirectCalls(behind._settings.skips, None)
            spec = blueprint.spec(plan, runtime.reader(None), calls, runtime.meters)
            assert [one for one in reached(spec) if isinstance(one, kinds)] == []


@pytest.mark.slow
def test_what_hangs_on_a_job_is_found() -> None:
    loader = DataLoader(Numbers(), batch_size=2)
    data = Numbers().map(lambda n: (n, loader))
    with DataLoader(data, batch_size=2) as holding:
        assert any(one is loader for one in reached(*planned(holding)))
    loader.close()
