"""Mixtures through the loader: real shards, real reads, any workers and ranks, resumed anywhere."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from builders.loops import assert_refused, flat, loaded, outcomes_of, state_after
from builders.numbers import Named, Words
from builders.tars import numbered_samples, put_index, put_shards, wanted_sample

import headrace as hr
from headrace.ops import combined
from headrace.ops.combined import CombinedDataset, CombinedShards

pytestmark = pytest.mark.usefixtures("warm_server")
WEB, CODE = (30, 17, 0, 40, 3), (9, 20)


@pytest.fixture(scope="module")
def web() -> hr.Stream:
    urls = put_shards("mixed-web", WEB)
    return hr.stream(urls, index=put_index(urls, "mixed-web"))


@pytest.fixture(scope="module")
def code() -> hr.Stream:
    urls = put_shards("mixed-code", CODE)
    return hr.stream(urls, index=put_index(urls, "mixed-code"))


def numbered(sample: dict[str, Any]) -> dict[str, Any]:
    return {"n": int(sample["cls"]), "size": len(sample["bin"]), "source": sample.get("__source__", "")}


def shout(word: str) -> str:
    return word.upper()


async def twice(word: str) -> str:
    await asyncio.sleep(0)
    return word + word


def curriculum(step: int) -> Mapping[str, float]:
    return {"web": 1, "code": step / 4}


def samples_of(data: Any, **options: Any) -> list[Any]:
    return flat(loaded(data, **{"batch_size": 12, "seed": 3, "collate_fn": list, **options}))


def test_mixture_reads_each_sample_once_in_few_requests(web: hr.Stream, code: hr.Stream) -> None:
    data = hr.mix({"web": web.shuffle(), "code": code.shuffle()})
    assert isinstance(data.source, CombinedShards)
    wanted = {}
    for name, urls, counts in (("web", web.source.urls, WEB), ("code", code.source.urls, CODE)):
        first = 0
        for url, count in zip(urls, counts, strict=True):
            for key, fields in numbered_samples(first, count):
                wanted[name, key] = {**wanted_sample(url, key, fields), "__source__": name}
            first += count
    with hr.DataLoader(data, batch_size=12, collate_fn=list) as loader:
        samples = flat(loader)
        assert loader.stats().fetch.requests <= len(WEB) + len(CODE) + 2  # and the two indexes
    assert len(samples) == len(data) == len(wanted)
    assert {(s["__source__"], s["__key__"]): s for s in samples} == wanted


def test_mixture_applies_the_steps_of_each_source_when_they_differ(web: hr.Stream) -> None:
    sources = {"web": web.take(10).map(numbered), "words": Words().map(twice).map(shout), "raw": Words()}
    data = hr.mix(sources)
    assert isinstance(data.source, CombinedDataset)
    samples = samples_of(data)
    assert sorted(s["n"] for s in samples if isinstance(s, dict)) == list(range(10))
    assert {s["__source__"] for s in samples if isinstance(s, dict)} == {"web"}
    words = {s for s in samples if isinstance(s, str)}
    assert words == {f"word-{k}" for k in range(25)} | {2 * f"WORD-{k}" for k in range(25)}
    data = hr.mix({"twice": Words().map(twice), "once": Words()})
    assert not data.operators  # nothing is left to workers
    assert set(samples_of(data)) == {f"word-{k}" for k in range(25)} | {2 * f"word-{k}" for k in range(25)}


def test_mixture_gives_samples_by_number_and_says_whose_they_are(web: hr.Stream, code: hr.Stream) -> None:
    for data in (hr.mix({"web": web, "code": code}), hr.mix({"web": web.shuffle("global"), "code": code.map(dict)})):
        assert (data[0]["cls"], data[0]["__source__"]) == (b"0", "web")
        assert (data[90]["cls"], data[90]["__source__"]) == (b"0", "code")
        assert data[-1]["cls"] == b"28"
        with pytest.raises(IndexError):
            data[119]


def test_sources_may_share_shards(code: hr.Stream) -> None:
    data = hr.mix({"low": code.filter(lambda key: int(key) < 9, field="__key__"), "all": code.shuffle()}).map(numbered)
    samples = samples_of(data)
    assert sorted(s["n"] for s in samples if s["source"] == "low") == list(range(9))
    assert sorted(s["n"] for s in samples if s["source"] == "all") == list(range(29))


def test_mixture_reads_only_filtered_keys_and_selected_fields(web: hr.Stream, code: hr.Stream) -> None:
    small = web.filter(lambda key: int(key) % 10 == 0, field="__key__").select("cls")

    def read(data: hr.Stream) -> tuple[list[Any], int]:
        with hr.DataLoader(data, batch_size=None, fetch=hr.Fetch(gap_bytes=0)) as loader:
            return list(loader), loader.stats().fetch.bytes

    data = hr.mix({"web": small, "code": code.select("cls")})
    assert isinstance(data.source, CombinedShards)
    samples, nbytes = read(data)
    assert sorted(int(s["cls"]) for s in samples if s["__source__"] == "web") == list(range(0, 90, 10))
    assert all(set(s) == {"__key__", "__url__", "__source__", "cls"} for s in samples)
    assert nbytes == read(small)[1] + read(code.select("cls"))[1] < read(hr.mix({"web": web, "code": code}))[1] / 3


def test_mixture_gives_tuples_when_the_source_is_named_or_not(web: hr.Stream, code: hr.Stream) -> None:
    data = hr.mix({"web": web, "code": code}).decode(cls="text")
    named = samples_of(data.to_tuple("cls", "__source__"))
    bare = samples_of(data.to_tuple("cls"))
    assert Counter(source for _, source in named) == {"web": 90, "code": 29}
    assert [text for text, _ in named] == [text for (text,) in bare]


def test_mixture_reads_its_windows_in_order(web: hr.Stream, code: hr.Stream, monkeypatch: Any) -> None:
    data = hr.mix({"web": web.shuffle(window=10), "code": code}).map(numbered)
    whole = samples_of(data)
    monkeypatch.setattr(combined, "_WINDOW_SAMPLES", 8)
    with hr.DataLoader(data, batch_size=12, seed=3, collate_fn=list) as loader:
        assert [sample for batch in loader for sample in batch] == whole
        assert loader.stats().fetch.requests > 2 * len(WEB + CODE)  # each window reads its shards again


def test_mixtures_nest(web: hr.Stream, code: hr.Stream) -> None:
    inner = hr.mix({"web": web.shuffle(), "code": code.shuffle()}, {"web": 1, "code": 1})
    for outer in (hr.mix({"both": inner}), hr.mix({"both": inner, "words": Words().map(shout)})):
        samples = [s for s in samples_of(outer) if isinstance(s, dict)]
        assert len(samples) == len(inner)
        assert {s["__source__"] for s in samples} == {"both"}
        assert len({(s["__url__"], s["__key__"]) for s in samples}) == len(inner)


def test_mixture_is_sliced_and_drawn_from_by_its_own_positions(web: hr.Stream, code: hr.Stream) -> None:
    data = hr.mix({"web": web.shuffle(), "code": code.shuffle()})
    whole = samples_of(data.map(numbered))
    assert samples_of(data.slice(10, 50, 5).map(numbered)) == whole[10:50:5]
    drawn = samples_of(data.sample(count=40, replacement=False).map(numbered))
    assert len({(s["source"], s["n"]) for s in drawn}) == 40
    kept = data.filter(lambda s: s["__source__"] == "code").map(numbered)
    assert samples_of(kept) == [s for s in whole if s["source"] == "code"]


def test_sources_of_equal_size_have_different_orders() -> None:
    same_data = {name: hr.from_map([{"n": n} for n in range(100)]).shuffle() for name in "ab"}
    samples = samples_of(hr.mix(same_data))
    orders = [[s["n"] for s in samples if s["__source__"] == name] for name in "ab"]
    assert orders[0] != orders[1]


def of_step(factor: float = 1.0) -> Callable[[int], Mapping[str, float]]:
    return lambda step: {"web": 1, "code": factor * (step + 1)}


SAVED: dict[str, Any] = {"weights": {"web": 3, "code": 1}}
CHANGED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("order", SAVED, {"weights": {"web": 2, "code": 1}}),
    ("order", SAVED, {**SAVED, "until": "all"}),
    ("order", SAVED, {**SAVED, "step": 64}),
    ("order", SAVED, {"weights": curriculum}),
    ("check", {"weights": of_step(), "until": "forever"}, {"weights": of_step(3.0), "until": "forever"}),
]


@pytest.mark.parametrize(("field", "saved", "changed"), CHANGED)
def test_state_of_other_weights_is_refused(
    web: hr.Stream, code: hr.Stream, field: str, saved: dict[str, Any], changed: dict[str, Any]
) -> None:
    streams = {"web": web.shuffle(), "code": code.shuffle()}
    state = state_after(hr.DataLoader(hr.mix(streams, **{"step": 8, **saved}), batch_size=8, collate_fn=list), 5)
    with hr.DataLoader(hr.mix(streams, **{"step": 8, **changed}), batch_size=8) as loader:
        count = {} if "until" in saved else {"count": len(loader.dataset)}  # which may differ, too
        edited = {**state, "fingerprint": state["fingerprint"] | count}
        with pytest.raises(hr.StateMismatchError) as caught:
            loader.load_state_dict(edited)
    assert caught.value.field == field


def test_state_is_refused_when_a_source_differs(web: hr.Stream, code: hr.Stream) -> None:
    state = state_after(hr.DataLoader(hr.mix({"web": web, "code": code}), batch_size=8, collate_fn=list), 5)
    for other, field in ((code.shuffle(), "order"), (web, "data")):
        assert_refused(hr.DataLoader(hr.mix({"web": web, "code": other}), batch_size=8), state, field=field)


def test_error_names_its_source(web: hr.Stream, code: hr.Stream) -> None:
    def refuses_7(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["cls"] == b"7":
            raise ValueError("seven")
        return sample

    def broken(key: str) -> str:
        raise ValueError(key)

    steps = hr.mix({"web": web, "code": code.map(refuses_7)})
    reads = hr.mix({"good": Words(), "bad": Named(["word-0"], broken)})
    for data, note in ((steps, "source 'code'; stage: map("), (reads, "source 'bad', key 'word-0'")):
        with hr.DataLoader(data, batch_size=10, collate_fn=list) as loader:
            (failed,) = (got for got in outcomes_of(loader) if isinstance(got, ValueError))
        assert any(note in each for each in failed.__notes__)
    assert sum(map(len, loaded(steps, batch_size=10, collate_fn=list, errors=hr.Skip()))) == 118


def test_sources_are_opened_and_closed_once_also_when_a_later_one_cannot_be_opened() -> None:
    class Opened(Words):
        calls: tuple[str, ...] = ()

        async def aopen(self) -> None:
            self.calls += ("opened",)

        async def aclose(self) -> None:
            self.calls += ("closed",)

    class Fails(Words):
        async def aopen(self) -> None:
            raise PermissionError("closed on Sundays")

    words, first = Opened(), Opened()
    assert len(samples_of(hr.mix({"a": words, "b": words.shuffle()}))) == 50
    with pytest.raises(PermissionError):
        samples_of(hr.mix({"a": first, "b": Fails()}))
    assert words.calls == first.calls == ("opened", "closed")
