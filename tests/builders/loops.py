"""Ways through a loader, and how their outcomes are compared."""

import asyncio
import itertools
import json
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest

import headrace as hr


def given(data: Any, batch_size: int | None = 4, **options: Any) -> list[Any]:
    with hr.DataLoader(data, batch_size, **{"collate_fn": list, **options}) as loader:
        return list(loader)


def loaded(data: Any, *arguments: Any, **options: Any) -> list[Any]:
    """The batches of one epoch."""
    with hr.DataLoader(data, *arguments, **options) as loader:
        return list(loader)


def first_of(data: Any, **options: Any) -> Any:
    with hr.DataLoader(data, **options) as loader:
        return next(iter(loader))


def given_later(data: Any, batch_size: int | None = 4, **options: Any) -> list[Any]:
    async def main() -> list[Any]:
        async with hr.DataLoader(data, batch_size, **{"collate_fn": list, **options}) as loader:
            return [batch async for batch in loader]

    return asyncio.run(main())


def iterated_later(data: Any) -> list[Any]:
    """The samples that `async for` gives without a loader."""

    async def main() -> list[Any]:
        return [sample async for sample in data]

    return asyncio.run(main())


def flat(batches: Iterable[Any]) -> list[Any]:
    return list(itertools.chain.from_iterable(batches))


def lists(batches: Iterable[Any]) -> list[Any]:
    return [batch.tolist() for batch in batches]


def saved(loader: hr.DataLoader[Any]) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(json.dumps(loader.state_dict()))
    return state


def state_after(loader: hr.DataLoader[Any], batches: int) -> dict[str, Any]:
    """The state of a loader after so many of its batches; it is closed then."""
    with loader:
        iterator = iter(loader)
        for _ in range(batches):
            next(iterator)
        return saved(loader)


def rest_of(loader: hr.DataLoader[Any], state: dict[str, Any]) -> list[Any]:
    """The batches that follow a state."""
    with loader:
        loader.load_state_dict(state)
        return list(loader)


def assert_refused(
    loader: hr.DataLoader[Any], state: dict[str, Any], *, match: str | None = None, field: str | None = None
) -> None:
    """A loader refuses a state, by the name of the field if one is given. The loader is closed then."""
    with loader, pytest.raises(hr.StateMismatchError, match=match) as caught:
        loader.load_state_dict(state)
    assert field is None or caught.value.field == field


def by_number(data: hr.Stream) -> hr.Stream:
    """Return the samples, each read by its number."""
    return data.sample(range(len(data)))


def outcomes_of(loader: Any) -> list[Any]:
    got: list[Any] = []
    batches = iter(loader)
    while True:
        try:
            got.append(next(batches))
        except StopIteration:
            return got
        except Exception as error:
            if "timed out" in str(error):
                raise
            got.append(error)


def outcomes(data: Any, **options: Any) -> list[Any]:
    """The batches of one epoch, and the errors in their places."""
    with hr.DataLoader(data, **options) as loader:
        return outcomes_of(loader)


def outcomes_later(data: Any, **options: Any) -> list[Any]:
    async def main() -> list[Any]:
        got: list[Any] = []
        async with hr.DataLoader(data, **options) as loader:
            batches = aiter(loader)
            while True:
                try:
                    got.append(await anext(batches))
                except StopAsyncIteration:
                    return got
                except Exception as error:
                    got.append(error)

    return asyncio.run(main())


def words(error: BaseException) -> str:
    return " ".join([str(error), *getattr(error, "__notes__", ())])


def plainly(outcome: Any) -> Any:
    """A batch or an error as something that can be compared."""
    if isinstance(outcome, dict):
        return {name: plainly(value) for name, value in outcome.items()}
    if isinstance(outcome, (list, tuple)):
        return [plainly(value) for value in outcome]
    if isinstance(outcome, Exception):
        return type(outcome), str(outcome)
    return outcome.tolist() if hasattr(outcome, "tolist") else outcome


def resumed_anywhere(
    make: Callable[[], hr.DataLoader[Any]],
    plain: Callable[[Any], Any] = plainly,
    resume: Callable[[], hr.DataLoader[Any]] | None = None,
    epochs: int = 1,
    most: int = 30,
) -> list[list[Any]]:
    whole, states = list[list[Any]](), list[tuple[int, dict[str, Any]]]()
    with make() as loader:
        for epoch in range(epochs):
            whole.append([])
            states.append((0, saved(loader)))
            for batch in loader:
                whole[epoch].append(plain(batch))
                states.append((len(whole[epoch]), saved(loader)))
    assert whole[0], "there is nothing to resume"
    for done, state in random.Random(7).sample(states, min(most, len(states))):
        with (resume or make)() as loader:
            loader.load_state_dict(state)
            epoch = loader.epoch
            assert saved(loader) == state
            got = [list(map(plain, loader)) for _ in range(epoch, epochs)]
            assert got == [whole[epoch][done:], *whole[epoch + 1 :]], f"after {done} batches: {state}"
    return whole
