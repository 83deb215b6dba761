"""Mixtures of samples and of tokens: real shards and reads, any workers and ranks, resumed anywhere."""

import asyncio
import gzip
import json
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.loops import assert_refused, first_of, flat, loaded, outcomes, state_after
from builders.numbers import Named, Words
from builders.tars import numbered_samples, put_indexed, wanted_sample
from builders.token_files import megatron

import headrace as hr
from headrace.errors import OptionError
from headrace.fetch.stores import memory
from headrace.ops import combined
from headrace.ops.combined import CombinedDataset, CombinedShards
from headrace.state.state import merge_states

pytestmark = pytest.mark.usefixtures("warm_server")
WEB, CODE = (30, 17, 0, 40, 3), (9, 20)


@pytest.fixture(scope="module")
def web() -> hr.Stream:
    return put_indexed("mixed-web", WEB)


@pytest.fixture(scope="module")
def code() -> hr.Stream:
    return put_indexed("mixed-code", CODE)


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
    other = hr.mix(streams, **{"step": 8, **changed})
    count = {} if "until" in saved else {"count": len(other)}  # which may differ, too
    edited = {**state, "fingerprint": state["fingerprint"] | count}
    assert_refused(hr.DataLoader(other, batch_size=8), edited, field=field)


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
        all_came = outcomes(data, batch_size=10, collate_fn=list)
        (failed,) = (got for got in all_came if isinstance(got, ValueError))
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


LENGTH = 64


def document(source: int, number: int) -> dict[str, Any]:
    length = int(np.random.default_rng([source, number]).integers(1, 20)) * (1 + 9 * source)
    return {"input_ids": np.full(length, 1000 * source + number + 1)}


def sources(first: int = 300, second: int = 40) -> dict[str, hr.Stream]:
    web = hr.from_map([(0, n) for n in range(first)]).shuffle().map(lambda at: document(*at))
    books = hr.from_map([(1, n) for n in range(second)]).shuffle().map(lambda at: document(*at))
    return {"web": web, "books": books}


def packed(weights: Any = None, **options: Any) -> hr.Stream:
    mixed = hr.mix(sources(), weights or {"web": 0.7, "books": 0.3}, by="tokens", **options)
    return mixed.filter(lambda one: one["input_ids"][0] % 10 != 3).pack(LENGTH)


def counted(rows: np.ndarray) -> list[int]:
    return [int(((rows > 0) & (rows < 1000)).sum()), int((rows >= 1000).sum())]


def rows_of(batch: dict[str, Any]) -> np.ndarray:
    found: np.ndarray = batch["input_ids"].numpy()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_shares_are_those_of_tokens_where_documents_differ_in_length(workers: int) -> None:
    with hr.DataLoader(packed().epoch(samples=4 * 400), batch_size=4, num_workers=workers) as loader:
        come = np.sum([counted(rows_of(batch)) for batch in loader], axis=0)
        stats, report = loader.stats(), loader.report()
    assert abs(come[0] / come.sum() - 0.7) < 0.005
    assert stats.tokens == {"web": come[0], "books": come[1]}
    assert f"tokens: web {come[0] / come.sum():.2%}, books" in report


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz"])
def test_shards_without_an_index_get_one_where_a_mixture_needs_numbers(kind: str, tmp_path: Path) -> None:
    for name, length in (("web", 3), ("books", 5)):
        lines = "".join(json.dumps({"n": n, "input_ids": [n] * length}) + "\n" for n in range(40)).encode()
        (tmp_path / f"{name}.{kind}").write_bytes(gzip.compress(lines) if kind.endswith("gz") else lines)

    def mixed(index: str, **options: Any) -> hr.Stream:
        return hr.mix(
            {name: hr.stream(f"{tmp_path}/{name}.{kind}", index=index) for name in ("web", "books")}, **options
        )

    by_tokens: dict[str, Any] = {"weights": {"web": 1, "books": 2}, "by": "tokens"}
    rows, wanted = ([*mixed(index, **by_tokens).pack(16).take(20)] for index in ("auto", "build"))
    assert [row["input_ids"].tolist() for row in rows] == [row["input_ids"].tolist() for row in wanted]
    assert sorted(one["n"] for one in mixed("auto")) == sorted([*range(40)] * 2)


@pytest.mark.slow
def test_stats_and_states_count_received_tokens_only() -> None:
    stream = packed()
    with hr.DataLoader(stream, ranks=hr.Ranks(global_batch_size=6, rank=0, world_size=2)) as first:
        with hr.DataLoader(stream, ranks=hr.Ranks(global_batch_size=6, rank=1, world_size=2)) as second:
            ranks, come = [(first, iter(first)), (second, iter(second))], [[0, 0], [0, 0]]
            for _ in range(5):
                for k, (loader, batches) in enumerate(ranks):
                    come[k] = np.add(come[k], counted(rows_of(next(batches)))).tolist()
                    assert [*loader.stats().tokens.values()] == come[k]
            state = merge_states([json.loads(json.dumps(loader.state_dict())) for loader, _ in ranks])
    assert state["rows"]["tokens"] == np.sum(come, axis=0).tolist()
    with hr.DataLoader(stream, batch_size=6) as loader:
        loader.load_state_dict(state)
        come.append(counted(rows_of(next(iter(loader)))))
        assert [*loader.stats().tokens.values()] == np.sum(come, axis=0).tolist()


def mixture(**options: Any) -> hr.Stream:
    return hr.mix(sources(), {"web": 1, "books": 1}, by="tokens", **options)


def known(weights: Any = None, **options: Any) -> hr.Stream:
    lengths = {
        name: [len(document(source, n)["input_ids"]) for n in range(count)]
        for source, (name, count) in enumerate({"web": 300, "books": 40}.items())
    }
    return hr.mix(sources(), weights or {"web": 0.7, "books": 0.3}, by="tokens", lengths=lengths, **options)


def packable() -> hr.Stream:
    return hr.mix(sources(20, 20), {"web": 1, "books": 1}, by="tokens")


FEW, NEGATIVE = {"web": [3] * 299, "books": [4] * 40}, {"web": [3, -1]}
EMPTY = {"web": [3] * 300, "books": [0] * 40}
REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: first_of(mixture(), batch_size=2), r"put \.pack\(length\) after the mixture"),
    (lambda: first_of(mixture(lengths={"web": [3] * 300}), batch_size=2), "'books' before they are read.*lengths="),
    (lambda: first_of(mixture(lengths=FEW), batch_size=2), "of source .web. has 299 values, and .* has 300 documents"),
    (lambda: mixture(lengths=NEGATIVE), r"hr.mix\(\): lengths\['web'\]\[1\]=-1 must be"),
    (lambda: mixture(lengths={"code": [3]}), "an array for each of web, books"),
    (lambda: hr.mix(sources(), lengths={"web": [3] * 300}), "lengths= needs by='tokens'"),
    (lambda: known().pack(8), r"\.pack\(\) and hr.mix\(…, lengths=…\)"),
    (lambda: known().repeat(2), "bound it first"),
    (lambda: first_of(mixture(lengths=EMPTY), batch_size=2), "source 'books' has no tokens"),
    (lambda: list(mixture()), r"put \.pack\(length\) after the mixture"),
    (lambda: first_of(hr.mix({"a": mixture()}, {"a": 1}, until="forever"), batch_size=2), "no length|by tokens"),
    (lambda: mixture().take(5), r"\.take\(5\) cannot follow hr.mix"),
    (lambda: mixture().epoch(samples=5), r"\.epoch\(samples=5\) cannot follow hr.mix"),
    (lambda: first_of(mixture().shuffle(), batch_size=1), r"put \.pack\(length\)"),
    (lambda: mixture().enumerate().pack(8), "other positions in the epoch"),
    (lambda: mixture().pack(8, lengths=[3] * 340), "pack each of its inputs"),
    (lambda: first_of(hr.mix({"a": hr.from_map([])}, {"a": 1}, by="tokens").pack(8), batch_size=1), "has no samples"),
    (lambda: list(packable().filter(is_of_web).pack(LENGTH)), "none was left by what leaves samples out|had no tokens"),
]


def is_of_web(one: dict[str, Any]) -> bool:
    return bool(one["input_ids"][0] < 1000)


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_samples_that_cannot_be_mixed_by_tokens_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises((OptionError, TypeError), match=message):
        make()


SHARE = 0.7  # of web


def plain(sample: dict[str, Any]) -> int:
    return int(sample["input_ids"][0])


@pytest.mark.slow
def test_lengths_of_files_of_tokens_are_known() -> None:
    random, files, folder = np.random.default_rng(0), {}, uuid.uuid4().hex
    for k, (name, longest) in enumerate((("web", 40), ("books", 400))):
        lengths = random.integers(1, longest, 120)
        documents = [[np.full(length, 1 + k)] for length in lengths]
        for ending, body in zip((".bin", ".idx"), megatron(documents), strict=True):
            memory.put(f"memory://{folder}/{name}{ending}", body)
        files[name] = hr.tokens(f"memory://{folder}/{name}.bin", documents="samples").shuffle()
    mixed = hr.mix(files, {"web": SHARE, "books": 1 - SHARE}, by="tokens").epoch(samples=3000)
    come = [0, 0]
    with hr.DataLoader(mixed, batch_size=None) as loader:
        for sample in loader:
            come[int(sample["tokens"][0]) - 1] += len(sample["tokens"])
    assert abs(come[0] - SHARE * sum(come)) < 400
    assert sum(come) > 50_000


def with_lengths(first: int) -> hr.Stream:
    return mixture(lengths={"web": [first] + [9] * 299, "books": [90] * 40}).map(plain)


def changed_at(step: int) -> hr.Stream:
    return known(lambda now: {"web": 1 + (now < step), "books": 1}, step=100).map(plain)


CHANGED_TOKENS: list[tuple[Callable[[], hr.Stream], Callable[[], hr.Stream], str]] = [
    (packed, lambda: packed({"web": 0.6, "books": 0.4}), r"weights=0\.7:0\.3, .*by=tokens"),
    (lambda: with_lengths(9), lambda: with_lengths(8), "lengths="),
    (lambda: changed_at(100), lambda: changed_at(1), "not those of this loader's order"),
]


@pytest.mark.parametrize(("saved", "other", "message"), CHANGED_TOKENS)
def test_state_of_other_weights_or_lengths_is_refused(saved: Any, other: Any, message: str) -> None:
    state = state_after(hr.DataLoader(saved(), batch_size=20), 9)
    assert_refused(hr.DataLoader(other(), batch_size=20), state, match=message)
