"""The contract of operators, as tests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any, ClassVar

from headrace.dataset.operators import Operators
from headrace.dataset.stream import Stream
from headrace.errors import StateMismatchError
from headrace.loader import DataLoader
from headrace.sources.synchronous import from_map
from headrace.testing.decoders import same


class OperatorContract:
    """Tests of an operator. Inherit the class and define `samples` and `apply`.

        class TestTimes(OperatorContract):
            samples = list(range(20))
            expected = [n for n in range(20) for _ in range(2)]

            def apply(self, data):
                return data.apply_op("times", 2)

    Attributes:
        samples: Ten or more input samples, of every kind.
        expected: The output samples. None: unknown, as the operator uses random numbers.
        workers: Numbers of worker processes to test, in addition to none.
    """

    samples: ClassVar[Sequence[object]]
    expected: ClassVar[Sequence[object] | None] = None
    workers: ClassVar[Sequence[int]] = (1, 2)

    def apply(self, data: Operators) -> Stream:
        """Return the stream with the operator."""
        raise NotImplementedError

    def test_samples_become_what_is_expected(self) -> None:
        assert len(self.samples) >= 10, "ten samples or more are needed"
        if self.expected is not None:
            got = self._given(self.apply(from_map(self.samples)))
            assert same([sample for batch in got for sample in batch], list(self.expected)), f"it gave {got!r:.400}"

    def test_samples_are_the_same_in_each_run(self) -> None:
        for stream in (self.apply(from_map(self.samples)), self.apply(from_map(self.samples).shuffle(seed=1))):
            assert same(self._given(stream), self._given(stream))

    def test_samples_are_the_same_for_any_number_of_workers(self) -> None:
        stream = self.apply(from_map(self.samples).shuffle(seed=2))
        alone = self._given(stream)
        for workers in self.workers:
            assert same(self._given(stream, num_workers=workers), alone), f"with {workers} workers others come"

    def test_samples_are_the_same_in_an_asynchronous_loop(self) -> None:
        stream = self.apply(from_map(self.samples))

        async def given() -> list[object]:
            with self._loader(stream) as loader:
                return [batch async for batch in loader]

        assert same(asyncio.run(given()), self._given(stream))

    def test_state_is_exact_behind_every_batch(self) -> None:
        for stream in (
            self.apply(from_map(self.samples).shuffle(seed=3)),
            self.apply(from_map(self.samples)).batch(3).unbatch() if self._is_collated else None,
        ):
            if stream is not None:
                self._go_on_everywhere(stream)

    def test_state_is_exact_behind_every_sample_that_comes_of_it(self) -> None:
        self._go_on_everywhere(self.apply(from_map(self.samples).shuffle(seed=4)), batch_size=1)

    def test_state_is_exact_when_it_goes_on_with_other_workers(self) -> None:
        stream = self.apply(from_map(self.samples).shuffle(seed=5))
        for workers in self.workers:
            with self._loader(stream, num_workers=workers) as loader:
                batches = iter(loader)
                given = [next(batches)]
                state = loader.state_dict()
            with self._loader(stream, num_workers=max(self.workers) - workers) as loader:
                loader.load_state_dict(state)
                assert same([*given, *loader], self._given(stream)), (
                    f"started with {workers} workers, other samples follow"
                )

    def test_state_belongs_to_the_operator(self) -> None:
        """A state must not load without an operator that changes the number or order of samples."""
        with self._loader(self.apply(from_map(self.samples))) as loader:
            state = loader.state_dict()
        pipeline = self.apply(from_map(self.samples)).pipeline()
        if pipeline.order.operators or not pipeline.keeps_count:
            with self._loader(from_map(self.samples)) as loader:
                try:
                    loader.load_state_dict(state)
                except StateMismatchError:
                    return
                raise AssertionError("its state loads where the operator is missing")

    @property
    def _is_collated(self) -> bool:
        """True if the default collation can batch the operator's samples."""
        try:
            self._given(self.apply(from_map(self.samples)).batch(3).unbatch())
        except Exception:
            return False
        return True

    def _go_on_everywhere(self, stream: Stream, **options: Any) -> None:
        states, whole = [], []
        with self._loader(stream, **options) as loader:
            for batch in loader:
                whole.append(batch)
                states.append(json.dumps(loader.state_dict()))
        for done, state in enumerate(states, 1):
            with self._loader(stream, **options) as loader:
                loader.load_state_dict(json.loads(state))
                left = list(loader) if done < len(whole) else []
            assert same(left, whole[done:]), f"resumed after {done} batches it gives {left!r:.400}"

    def _given(self, stream: Stream, **options: Any) -> list[Any]:
        with self._loader(stream, **options) as loader:
            return list(loader)

    def _loader(self, stream: Stream, **options: Any) -> DataLoader[Any]:
        return DataLoader(stream, **{"batch_size": 3, "collate_fn": list, **options})
