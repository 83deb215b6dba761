"""The contract of stores, as tests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import ClassVar, TypeVar

from headrace.errors import ObjectChangedError, ObjectMissingError
from headrace.types import Answer, Listed, Lists, Store

T = TypeVar("T")

BODY = bytes(range(256)) * 9 + b"the end"
LONG = b"".join(n.to_bytes(4, "big") for n in range(700_000))


class StoreContract:
    """Tests of a `headrace.types.Store`. Inherit the class and define `open_store` and `put`.

        class TestShelf(StoreContract):
            def open_store(self):
                return ShelfStore(FOLDER)

            def put(self, path, data):
                (FOLDER / path).write_bytes(data)

    Attributes:
        has_versions: True if the store gives ETags and honours `if_match`.
        names: Paths that may be difficult. Omit those that the store cannot have.
    """

    has_versions: ClassVar[bool] = True
    names: ClassVar[tuple[str, ...]] = (
        "plain.bin",
        "folder/deep/er.bin",
        "a b+c%20d.bin",
        "ünïcode.bin",
        "a=b&c;d.bin",
    )

    def open_store(self) -> Store:
        """Return a new store. Called on the event loop that will use it."""
        raise NotImplementedError

    def put(self, path: str, data: bytes) -> None:
        """Store or replace `data` under `path`."""
        raise NotImplementedError

    def test_whole_object_comes_byte_for_byte(self) -> None:
        self.put("whole.bin", BODY)
        answer, body = self._get("whole.bin")
        assert (answer.start, answer.stop, answer.size) == (0, len(BODY), len(BODY))
        assert body == BODY

    def test_range_is_the_bytes_from_start_to_stop(self) -> None:
        self.put("range.bin", BODY)
        for start, stop in ((0, 1), (0, 100), (7, 300), (len(BODY) - 1, len(BODY))):
            answer, body = self._get("range.bin", start, stop)
            assert (answer.start, answer.stop, answer.size) == (start, stop, len(BODY))
            assert body == BODY[start:stop]

    def test_range_without_a_stop_goes_to_the_end(self) -> None:
        self.put("tail.bin", BODY)
        answer, body = self._get("tail.bin", 100, None)
        assert (answer.start, answer.stop) == (100, len(BODY))
        assert body == BODY[100:]

    def test_stop_beyond_the_end_gives_what_there_is(self) -> None:
        self.put("beyond.bin", BODY)
        answer, body = self._get("beyond.bin", 10, len(BODY) + 1000)
        assert (answer.start, answer.stop, answer.size) == (10, len(BODY), len(BODY))
        assert body == BODY[10:]

    def test_start_at_or_beyond_the_end_gives_nothing_and_the_size(self) -> None:
        self.put("after.bin", BODY)
        for start in (len(BODY), len(BODY) + 50):
            answer, body = self._get("after.bin", start, start + 10)
            assert (answer.start, answer.stop, answer.size) == (len(BODY),) * 3
            assert body == b""

    def test_empty_object_is_no_error(self) -> None:
        self.put("empty.bin", b"")
        for start, stop in ((None, None), (0, 100)):
            answer, body = self._get("empty.bin", start, stop)
            assert (answer.start, answer.stop, answer.size) == (0, 0, 0)
            assert body == b""

    def test_long_object_comes_in_order(self) -> None:
        self.put("long.bin", LONG)
        assert self._get("long.bin")[1] == LONG
        assert self._get("long.bin", 1001, 2_500_003)[1] == LONG[1001:2_500_003]

    def test_negative_start_gives_the_last_bytes_where_the_store_says_so(self) -> None:
        if not self._with_store(_gives_ends):
            return
        self.put("end.bin", BODY)
        for count in (1, 10, len(BODY), len(BODY) + 100):
            answer, body = self._get("end.bin", -count, None)
            begin = max(0, len(BODY) - count)
            assert (answer.start, answer.stop, answer.size) == (begin, len(BODY), len(BODY))
            assert body == BODY[begin:]

    def test_missing_object_is_an_error_that_names_it(self) -> None:
        for start, stop in ((None, None), (0, 10)):
            assert "no-such.bin" in self._refusal(ObjectMissingError, "no-such.bin", start, stop)

    def test_names_are_taken_literally(self) -> None:
        for number, name in enumerate(self.names):
            self.put(name, b"%d" % number)
        for number, name in enumerate(self.names):
            assert self._get(name)[1] == b"%d" % number

    def test_version_is_the_same_while_the_object_is(self) -> None:
        self.put("version.bin", BODY)
        first, again = self._get("version.bin")[0].etag, self._get("version.bin", 3, 9)[0].etag
        assert first == again
        assert first is not None or not self.has_versions

    def test_object_of_another_version_is_refused(self) -> None:
        if not self.has_versions:
            return
        self.put("changed.bin", BODY)
        etag = self._get("changed.bin")[0].etag
        body = self._get("changed.bin", 0, 10, if_match=etag)[1]
        assert body == BODY[:10], f"of the version {etag} came {body!r}"
        self.put("changed.bin", BODY[::-1] + b"!")
        self._refusal(ObjectChangedError, "changed.bin", 0, 10, if_match=etag)

    def test_many_reads_at_once_do_not_mix(self) -> None:
        bodies = {f"many-{n}.bin": b"%d " % n * 2000 for n in range(24)}
        for path, data in bodies.items():
            self.put(path, data)

        async def read_all(store: Store) -> list[bytes]:
            return [body for _, body in await asyncio.gather(*(_read(store, path) for path in bodies))]

        assert self._with_store(read_all) == list(bodies.values())

    def test_store_serves_on_after_a_read_was_cancelled(self) -> None:
        self.put("cancel.bin", LONG)

        async def cancel_and_read(store: Store) -> bytes:
            for ticks in range(6):
                task = asyncio.ensure_future(_read(store, "cancel.bin"))
                for _ in range(ticks):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait([task])
            return (await _read(store, "cancel.bin", 5, 50))[1]

        assert self._with_store(cancel_and_read) == LONG[5:50]

    def test_answer_that_nobody_reads_is_no_leak(self) -> None:
        self.put("unread.bin", LONG)

        async def ask(store: Store) -> int:
            answers = [await store.get("unread.bin") for _ in range(4)]
            return len(answers)

        assert self._with_store(ask) == 4

    def test_listing_has_each_object_below_a_folder_once(self) -> None:
        names = self.names if self._is_listed() else ()
        for name in names:
            self.put(f"shelf/{name}", name.encode())
        self.put("shelf2/other.bin", b"x")
        found = self._listed("shelf/")
        assert sorted(one.path for one in found) == sorted(f"shelf/{name}" for name in names)
        sizes = {one.path: one.size for one in found}
        assert all(sizes[f"shelf/{name}"] in (None, len(name.encode())) for name in names), sizes
        assert self._listed("no-such-shelf/") == []

    def test_listing_of_one_level_has_what_lies_there(self) -> None:
        if not self._is_listed():
            return
        for name in ("rack/a.bin", "rack/b.bin", "rack/deep/c.bin"):
            self.put(name, b"x")
        found = {one.path for one in self._listed("rack/", levels=1)}
        assert {"rack/a.bin", "rack/b.bin"} <= found <= {"rack/a.bin", "rack/b.bin", "rack/deep/c.bin"}

    def _is_listed(self) -> bool:
        async def ask(store: Store) -> bool:
            return isinstance(store, Lists)

        return self._with_store(ask)

    def _listed(self, prefix: str, levels: int | None = None) -> list[Listed]:
        async def ask(store: Store) -> list[Listed]:
            if not isinstance(store, Lists):
                return []
            return [one async for page in store.listing(prefix, levels=levels) for one in page]

        return self._with_store(ask)

    def _get(
        self, path: str, start: int | None = None, stop: int | None = None, if_match: str | None = None
    ) -> tuple[Answer, bytes]:
        return self._with_store(lambda store: _read(store, path, start, stop, if_match))

    def _refusal(
        self, kind: type[Exception], path: str, start: int | None, stop: int | None, if_match: str | None = None
    ) -> str:
        try:
            self._get(path, start, stop, if_match)
        except kind as error:
            return str(error)
        raise AssertionError(f"{path}: bytes were given, where {kind.__name__} is promised")

    def _with_store(self, use: Callable[[Store], Awaitable[T]]) -> T:
        async def run() -> T:
            store = self.open_store()
            try:
                return await use(store)
            finally:
                await store.aclose()

        return asyncio.run(run())


async def _gives_ends(store: Store) -> bool:
    return bool(getattr(store, "gives_ends", False))


async def _read(
    store: Store, path: str, start: int | None = None, stop: int | None = None, if_match: str | None = None
) -> tuple[Answer, bytes]:
    answer = await store.get(path, start, stop, if_match=if_match)
    return answer, b"".join([bytes(chunk) async for chunk in answer.chunks])
