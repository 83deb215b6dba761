"""Mixtures through the loader: real shards, real reads, any workers and ranks, resumed anywhere."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from builders.loops import loaded, outcomes_of, resumed_anywhere, state_after
from builders.ranks import on_other_ranks
from end_to_end.tars import numbered_samples, put_index, put_shards, same, wanted_sample
from end_to_end.words import Words

import headrace as hr
from headrace.ops import combined
from headrace.ops.combined import CombinedDataset, CombinedShards

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


def with_noise(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "noise": float(hr.rng().random()), "torch": float(torch.rand(()))}


def shout(word: str) -> str:
    return word.upper()


async def twice(word: str) -> str:
    await asyncio.sleep(0)
    return word + word


def curriculum(step: int) -> Mapping[str, float]:
    return {"web": 1, "code": step / 4}


def mixtures(web: hr.Stream, code: hr.Stream) -> dict[str, hr.Stream]:
    shuffled = {"web": web.shuffle(), "code": code.shuffle()}
    weights = {"web": 3, "code": 1}
    return {
        "ranges": hr.mix(shuffled, weights, step=32).map(numbered).map(with_noise),
        "numbers": hr.mix({"web": web.shuffle("global").map(numbered), "code": code.map(numbered)}, until="all"),
        "curriculum": hr.mix(shuffled, curriculum, until="forever", step=16).map(numbered).epoch(samples=150),
    }


MIXTURES = ["ranges", "numbers", "curriculum"]


def batches_of(data: Any, epoch: int = 0, **options: Any) -> list[Any]:
    with hr.DataLoader(data, **{"batch_size": 12, "seed": 3, **options}) as loader:
        loader.set_epoch(epoch)
        return list(loader)


def samples_of(data: Any, **options: Any) -> list[Any]:
    return [sample for batch in batches_of(data, collate_fn=list, **options) for sample in batch]


def test_mixture_gives_the_bytes_of_each_sample_once_when_shards_are_read_in_ranges(
    web: hr.Stream, code: hr.Stream
) -> None:
    data = hr.mix({"web": web.shuffle(), "code": code.shuffle()})
    assert isinstance(data.source, CombinedShards)
    wanted = {}
    for name, urls, counts in (("web", web.source.urls, WEB), ("code", code.source.urls, CODE)):
        first = 0
        for url, count in zip(urls, counts, strict=True):
            for key, fields in numbered_samples(first, count):
                wanted[name, key] = {**wanted_sample(url, key, fields), "__source__": name}
            first += count
    samples = samples_of(data)
    assert len(samples) == len(data) == len(wanted)
    assert {(s["__source__"], s["__key__"]): s for s in samples} == wanted


def test_mixture_reads_each_shard_about_once_when_windows_are_large(web: hr.Stream, code: hr.Stream) -> None:
    with hr.DataLoader(hr.mix({"web": web.shuffle(), "code": code.shuffle()}), batch_size=12) as loader:
        assert len(list(loader)) == len(loader)
        fetch = loader.stats().fetch
    assert fetch.requests <= len(WEB) + len(CODE) + 2  # and the two indexes


@pytest.mark.slow
@pytest.mark.parametrize("kind", MIXTURES)
def test_mixture_is_the_same_when_workers_differ(web: hr.Stream, code: hr.Stream, kind: str, warm_server: None) -> None:
    data = mixtures(web, code)[kind]
    alone, several = batches_of(data, num_workers=1), batches_of(data, num_workers=2, fetch_concurrency=3)
    assert len(alone) == len(several) > 5
    assert all(map(same, alone, several))


@pytest.mark.slow
@pytest.mark.parametrize("kind", MIXTURES)
def test_mixture_goes_on_exactly_when_it_is_resumed_with_other_workers(
    web: hr.Stream, code: hr.Stream, kind: str, warm_server: None
) -> None:
    def loader(workers: int = 1) -> hr.DataLoader[Any]:
        return hr.DataLoader(mixtures(web, code)[kind], batch_size=12, seed=3, num_workers=workers)

    resumed_anywhere(loader, resume=lambda: loader(2), epochs=2, most=4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MIXTURES)
def test_mixture_goes_on_exactly_when_the_number_of_ranks_changes(web: hr.Stream, code: hr.Stream, kind: str) -> None:
    data = mixtures(web, code)[kind].map(lambda s: (s["source"], s["n"]))
    assert on_other_ranks(lambda: data, seed=3) == samples_of(data, batch_size=12)


def test_mixture_applies_the_steps_of_each_source_when_they_differ(web: hr.Stream) -> None:
    sources = {"web": web.take(10).map(numbered), "words": Words().map(twice).map(shout), "raw": Words()}
    data = hr.mix(sources)
    assert isinstance(data.source, CombinedDataset)
    samples = samples_of(data)
    assert sorted(s["n"] for s in samples if isinstance(s, dict)) == list(range(10))
    assert {s["__source__"] for s in samples if isinstance(s, dict)} == {"web"}
    words = {s for s in samples if isinstance(s, str)}
    assert words == {f"word-{k}" for k in range(25)} | {2 * f"WORD-{k}" for k in range(25)}


def test_mixture_leaves_nothing_to_workers_when_no_source_has_a_plain_step() -> None:
    data = hr.mix({"twice": Words().map(twice), "once": Words()})
    assert not data.operators
    assert set(samples_of(data)) == {f"word-{k}" for k in range(25)} | {2 * f"word-{k}" for k in range(25)}


def test_mixture_gives_samples_by_number_and_says_whose_they_are(web: hr.Stream, code: hr.Stream) -> None:
    for data in (hr.mix({"web": web, "code": code}), hr.mix({"web": web.shuffle("global"), "code": code.map(dict)})):
        assert (data[0]["cls"], data[0]["__source__"]) == (b"0", "web")
        assert (data[90]["cls"], data[90]["__source__"]) == (b"0", "code")
        assert data[-1]["cls"] == b"28"
        with pytest.raises(IndexError):
            data[119]


def test_mixture_knows_sources_of_the_same_shards_apart(code: hr.Stream) -> None:
    data = hr.mix({"low": code.filter(lambda key: int(key) < 9, field="__key__"), "all": code.shuffle()}).map(numbered)
    samples = samples_of(data)
    assert sorted(s["n"] for s in samples if s["source"] == "low") == list(range(9))
    assert sorted(s["n"] for s in samples if s["source"] == "all") == list(range(29))


def test_mixture_reads_only_what_keys_and_selections_leave_when_shards_are_read_in_ranges(
    web: hr.Stream, code: hr.Stream
) -> None:
    small = web.filter(lambda key: int(key) % 10 == 0, field="__key__").select("cls")

    def read(data: hr.Stream) -> tuple[list[Any], int]:
        with hr.DataLoader(data, batch_size=None, fetch=hr.FetchOptions(gap_bytes=0)) as loader:
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


def test_mixture_gives_each_window_in_order_when_it_has_many(
    web: hr.Stream, code: hr.Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = hr.mix({"web": web.shuffle(window=10), "code": code}).map(numbered)
    whole = samples_of(data)
    monkeypatch.setattr(combined, "_WINDOW_SAMPLES", 8)
    with hr.DataLoader(data, batch_size=12, seed=3, collate_fn=list) as loader:
        assert [sample for batch in loader for sample in batch] == whole
        assert loader.stats().fetch.requests > 2 * len(WEB + CODE)  # each window reads its shards again


def test_mixture_may_be_part_of_a_mixture(web: hr.Stream, code: hr.Stream) -> None:
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


def test_sources_with_as_many_samples_have_orders_of_their_own() -> None:
    same_data = {name: hr.from_map([{"n": n} for n in range(100)]).shuffle() for name in "ab"}
    samples = samples_of(hr.mix(same_data))
    orders = [[s["n"] for s in samples if s["__source__"] == name] for name in "ab"]
    assert orders[0] != orders[1]


CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "weights": ("order", {"weights": {"web": 2, "code": 1}}),
    "until": ("order", {"until": "all"}),
    "step": ("order", {"step": 64}),
    "function": ("order", {"weights": curriculum}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_state_is_refused_when_the_mixture_is_another_one(web: hr.Stream, code: hr.Stream, change: str) -> None:
    field, changed = CHANGES[change]
    streams, options = {"web": web.shuffle(), "code": code.shuffle()}, {"weights": {"web": 3, "code": 1}}
    state = state_after(hr.DataLoader(hr.mix(streams, **options), batch_size=4, collate_fn=list), 1)
    with hr.DataLoader(hr.mix(streams, **{**options, **changed}), batch_size=4) as loader:
        with pytest.raises(hr.StateMismatchError) as caught:
            loader.load_state_dict({**state, "count": len(loader.dataset)})  # which may differ, too
    assert caught.value.field == field


@pytest.mark.slow
def test_state_is_refused_when_a_source_or_a_function_of_the_step_changed(web: hr.Stream, code: hr.Stream) -> None:
    def loader_of(code: hr.Stream, factor: float = 1.0) -> hr.DataLoader[Any]:
        weights = lambda step: {"web": 1, "code": factor * (step + 1)}
        data = hr.mix({"web": web, "code": code}, weights, until="forever", step=8)
        return hr.DataLoader(data, batch_size=8, collate_fn=list)

    state = state_after(loader_of(code), 5)
    for other, field in (
        (loader_of(code.shuffle()), "order"),
        (loader_of(web), "data"),
        (loader_of(code, 3.0), "check"),
    ):
        with other as loader, pytest.raises(hr.StateMismatchError) as caught:
            loader.load_state_dict(state)
        assert caught.value.field == field


def refuses_7(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["cls"] == b"7":
        raise ValueError("seven")
    return sample


def test_error_names_the_source_when_one_of_its_steps_fails(web: hr.Stream, code: hr.Stream) -> None:
    data = hr.mix({"web": web, "code": code.map(refuses_7)})
    with hr.DataLoader(data, batch_size=10, collate_fn=list) as loader:
        failed = [got for got in outcomes_of(loader) if isinstance(got, ValueError)]
    assert len(failed) == 1
    assert any("source 'code'; stage: map(refuses_7)" in note for note in failed[0].__notes__)
    assert sum(map(len, loaded(data, batch_size=10, collate_fn=list, on_error="skip"))) == 118


def test_error_names_the_source_when_a_sample_cannot_be_got() -> None:
    class Broken(Words):
        async def aget(self, key: str) -> str:
            raise ConnectionError(key)

    with hr.DataLoader(hr.mix({"good": Words(), "bad": Broken().take(1)}), batch_size=None) as loader:
        failed = [got for got in outcomes_of(loader) if isinstance(got, ConnectionError)]
    assert len(failed) == 1
    assert any("source 'bad', key 'word-0'" in note for note in failed[0].__notes__)


class Opened(Words):
    """Counts how often it is open."""

    def __init__(self, *, fails: bool = False) -> None:
        self.opened = self.closed = 0
        self.fails = fails

    async def aopen(self) -> None:
        if self.fails:
            raise PermissionError("closed on Sundays")
        self.opened += 1

    async def aclose(self) -> None:
        self.closed += 1


def test_sources_are_opened_and_closed_once_when_they_are_in_a_mixture_twice() -> None:
    words = Opened()
    assert len(samples_of(hr.mix({"a": words, "b": words.shuffle()}))) == 50
    assert (words.opened, words.closed) == (1, 1)


def test_sources_are_closed_when_a_later_one_cannot_be_opened() -> None:
    first, second = Opened(), Opened(fails=True)
    with pytest.raises(PermissionError):
        samples_of(hr.mix({"a": first, "b": second}))
    assert (first.opened, first.closed) == (1, 1)
