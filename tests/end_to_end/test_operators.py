"""The built-in operators and delivery options of streams, alone and in a loader."""

import itertools
import os
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tiktoken
import tokenizers
import torch
from builders.loops import first_of, flat, given, iterated_later, loaded, rest_of, state_after
from builders.numbers import Made, is_odd, later
from builders.tars import number_of, put_indexed
from torch.utils.data import default_collate
from unit.fake_device import FakeBackend

import headrace as hr
from headrace.delivery.device import Mover

TEXTS = ["abc", "", "b", "cab bac", "<|end|>", "ü"]


def texts() -> hr.Stream:
    return hr.from_map([{"text": text, "n": k} for k, text in enumerate(TEXTS)])


def letters(text: str) -> list[int]:
    return [ord(sign) for sign in text]


def by_tiktoken() -> Any:
    ranks = {bytes([k]): k for k in range(256)}
    return tiktoken.Encoding("letters", pat_str=r".", mergeable_ranks=ranks, special_tokens={"<|end|>": 256})


def by_tokenizers() -> Any:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"abc": 1, "cab": 2, "bac": 3, "?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return tokenizer


class Mapped:
    """As transformers' tokenizers: called, it gives several fields."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": letters(text), "attention_mask": [1] * len(text)}


TOKENIZERS: dict[str, tuple[Callable[[], Any], list[list[int]]]] = {
    "function": (lambda: letters, [letters(text) for text in TEXTS]),
    "mapping": (Mapped, [letters(text) for text in TEXTS]),
    "array": (lambda: lambda text: np.array(letters(text), np.uint32), [letters(text) for text in TEXTS]),
    "tiktoken": (by_tiktoken, [[*text.encode()] for text in TEXTS]),
    "tokenizers": (by_tokenizers, [[1], [], [0], [2, 3], [0, 0, 0], [0]]),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dtype", ["int64", "int32", "uint16"])
def test_tokens_replace_their_text(kind: str, workers: int, dtype: Any) -> None:
    make, expected = TOKENIZERS[kind]
    stream = texts().tokenize(make(), dtype=dtype)
    samples = loaded(stream, batch_size=None, num_workers=workers, collate_fn=dict)
    assert [sample["input_ids"].tolist() for sample in samples] == expected
    assert {sample["input_ids"].dtype for sample in samples} == {np.dtype(dtype)}
    assert [sorted(sample) for sample in samples] == [["input_ids", "n"]] * len(TEXTS)


@pytest.mark.parametrize("is_cut", [False, True])
def test_rules_of_the_tokenizer_are_kept(is_cut: bool) -> None:
    tokenizer = by_tokenizers()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A <end>", special_tokens=[("<end>", tokenizer.token_to_id("<end>"))]
    )
    if is_cut:
        tokenizer.enable_truncation(2)
        tokenizer.enable_padding(length=4, pad_id=9)
    expected = [tokenizer.encode(text).ids for text in TEXTS]
    assert [sample["input_ids"].tolist() for sample in texts().tokenize(tokenizer)] == expected
    assert (expected[0] == [1, 4, 9, 9]) is is_cut


def test_tokenizers_have_no_threads_of_their_own_in_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_environment(sample: Any) -> Any:
        return {"input_ids": sample["input_ids"], "is_parallel": os.environ.get("TOKENIZERS_PARALLELISM", "unset")}

    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    stream = texts().tokenize(by_tokenizers()).map(with_environment)
    for told in ("unset", "true"):
        if told != "unset":
            monkeypatch.setenv("TOKENIZERS_PARALLELISM", told)
        with hr.DataLoader(stream, batch_size=None, num_workers=1) as loader:
            assert {sample["is_parallel"] for sample in loader} == {"false" if told == "unset" else told}
        assert os.environ.get("TOKENIZERS_PARALLELISM", "unset") == told


def test_tokens_of_tuples_and_of_bytes_stay_in_their_place() -> None:
    data = hr.from_map([("ab", 1), (b"\xc3\xbc", 2)]).tokenize(letters, 0, dtype="int32")
    assert [(tokens.tolist(), n) for tokens, n in data] == [([97, 98], 1), ([252], 2)]
    renamed = texts().tokenize(letters, into="ids").select("ids")
    assert [sample["ids"].tolist() for sample in renamed] == [letters(text) for text in TEXTS]
    assert [*next(iter(texts().tokenize(letters, into="text")))] == ["text", "n"]


def tokenized(fn: Callable[[str], Any], *arguments: Any, **options: Any) -> hr.Stream:
    return texts().tokenize(fn, *arguments, **options)


PAIR, LISTS, ONE_TWO = hr.from_map([("a", 1)]), hr.from_map([[1], [2]]), hr.from_map([1, 2])
WRONG: dict[type[Exception], list[tuple[Callable[[], hr.Stream], str]]] = {
    hr.OptionError: [
        (lambda: texts().tokenize(7), "tokenizer=7 must be a tokenizer"),
        (lambda: tokenized(letters, dtype="int8"), "one of 'int64', 'int32', 'uint16'"),
        (lambda: texts().rename(text="a", n="a"), "different names of fields"),
        (lambda: texts().rename(), "at least one"),
        (lambda: texts().skip(-1), r"\.skip\(\): n=-1"),
        (lambda: texts().skip(None), "n=None must be a whole number, 0 or more"),
        (lambda: texts().take(1.5), r"n=1\.5 must be a whole number, 0 or more"),
        (lambda: texts().slice(None), "start=None must be a whole number"),
        (lambda: texts().slice(2, 1), "stop=1 must be a whole number, 2 or more"),
        (lambda: texts().slice(0, 1, 0), "step=0 must be a whole number, 1 or more"),
        (lambda: texts().shard(index=None, count=2), "index=None must be a whole number"),
        (lambda: texts().shard(index=2, count=2), "count=2 must be a whole number, 3 or more"),
        (lambda: numbers().batch(2).map(sum).collate(), r"right after \.batch"),
        (lambda: numbers().batch(2).collate(slow_sum), "fn=slow_sum must be a plain function"),
        (lambda: numbers().padded_batch(0), "n=0 must be a whole number, 1 or more"),
        (lambda: numbers().bucket(int, [3, 3], batch_size=2), "ascending whole numbers"),
        (lambda: numbers().bucket(int, [3]), "either batch_size= or batch_tokens="),
        (lambda: numbers().bucket(int, [3], batch_size=2, batch_tokens=9), "either batch_size= or"),
        (lambda: numbers().bucket(int, [3], batch_tokens=0), "batch_tokens=0 must be"),
        (lambda: numbers().bucket(slow_sum, [3], batch_size=2), "slow_sum must be a plain"),
        (lambda: on_two_ranks(LISTS.filter(bool).enumerate()), r"enumerate\(\) has is_shardable=False"),
        (lambda: on_two_ranks(LISTS.filter(bool).skip(1)), r"skip\(1\) has is_shardable=False"),
        (lambda: LISTS.enumerate().pack(4, lengths=[1, 2]), r"\.enumerate\(\): it is about a whole epoch"),
        (lambda: ONE_TWO.prefetch(-1), r"prefetch\(\): n=-1 must be a whole number, 0 or more"),
        (lambda: ONE_TWO.prefetch(1).prefetch(1), r"\.prefetch\(1\) and \.prefetch\(1\)"),
        (lambda: hr.DataLoader(ONE_TWO.prefetch(3), prefetch_factor=2), r"factor=2 and \.prefetch\(3\) exclude"),
        (lambda: ONE_TWO.prefetch(1).map(abs), r"map\(abs\) cannot follow \.prefetch\(1\)"),
        (lambda: ONE_TWO.prefetch(1).batch(2), r"batch\(2\) cannot follow \.prefetch\(1\)"),
        (lambda: ONE_TWO.prefetch(1).bucket(len, [2], batch_size=1), r"bucket\(.*\) cannot follow \.prefetch\(1\)"),
        (lambda: ONE_TWO.prefetch(1).zip(ONE_TWO), r"prefetch\(1\) of input 0 of \.zip\(\)"),
        (lambda: ONE_TWO.concat(ONE_TWO.prefetch(1)), r"prefetch\(1\) of input 1 of \.concat\(\)"),
        (lambda: ONE_TWO.zip(ONE_TWO.on_every_rank()), r"on_every_rank\(\) of input 1 of \.zip\(\)"),
        (lambda: hr.mix({"a": ONE_TWO.on_every_rank()}), r"on_every_rank\(\) of source 'a'"),
        (lambda: ONE_TWO.prefetch(2).pack(4, lengths=[1, 2]), r"\.prefetch\(2\)"),
    ],
    ValueError: [
        (lambda: tokenized(lambda text: [70000], dtype="uint16"), "70000, which uint16 cannot hold"),
        (lambda: tokenized(lambda text: [1, -1], dtype="uint16"), "number -1, which uint16 cannot hold"),
        (lambda: tokenized(letters, into="n"), "has a field 'n' already"),
        (lambda: texts().rename(text="n"), "has a field 'n' already"),
        (lambda: numbers().bucket(lambda n: -n, [3], batch_size=2), "the length of a sample is -1: 0 or more"),
        (lambda: numbers().bucket(int, [3], batch_tokens=8), "has the length 9, and batch_tokens=8 is less"),
    ],
    TypeError: [
        (lambda: PAIR.tokenize(letters), "indices must be integers"),
        (lambda: PAIR.rename(a="b"), "the sample is a tuple, whose fields have no names: 'a'"),
        (lambda: PAIR.select("a"), "the sample is a tuple, whose fields have no names: 'a'"),
        (lambda: tokenized(lambda text: text.split()), "gave a list for a text"),
        (lambda: tokenized(letters, "n"), "decoding to str: need a bytes-like object, int found"),
        (lambda: numbers().collate(sum), "'int' object is not iterable"),
        (lambda: numbers().enumerate()[3], "by its number"),
        (lambda: numbers().bucket(float, [3], batch_size=2), "the length of a sample is 0.0: a whole number"),
    ],
    hr.errors.FormatError: [
        (lambda: tokenized(letters, "body"), "no field 'body'"),
        (lambda: texts().rename(txt="t"), "no field 'txt'"),
    ],
    OverflowError: [(lambda: tokenized(lambda text: [1, 2**63]), "9223372036854775808, which int64 cannot")],
    UnicodeDecodeError: [(lambda: hr.from_map([{"text": b"\xff"}]).tokenize(letters), "utf-8")],
}


@pytest.mark.parametrize(
    ("error", "make", "match"), [(error, *case) for error, cases in WRONG.items() for case in cases]
)
def test_wrong_arguments_and_samples_are_errors(error: type[Exception], make: Callable[[], Any], match: str) -> None:
    with pytest.raises(error, match=match):
        list(make())


def numbers(count: int = 10) -> hr.Stream:
    return hr.from_map(range(count))


async def slow_sum(samples: list[int]) -> int:
    return sum(samples)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_collate_after_batch_replaces_the_default(workers: int) -> None:
    stream = numbers().batch(4).collate(sum)
    with hr.DataLoader(stream, num_workers=workers) as loader:
        assert len(loader) == 3
        assert list(loader) == list(stream) == [6, 22, 17]
    assert loaded(stream.map(str), num_workers=workers) == ["6", "22", "17"]
    with hr.DataLoader(stream.map(float).batch(2), num_workers=workers) as loader:  # it is made on the way
        assert [batch.tolist() for batch in loader] == [[6.0, 22.0], [17.0]]
    assert loaded(stream.take(2), num_workers=workers) == [6, 22]


def test_collate_takes_lists_that_other_operators_made() -> None:
    lists = hr.from_map([[1, 2], [3], [4, 5, 6]])
    assert [batch.tolist() for batch in loaded(lists.collate())] == [[1, 2], [3], [4, 5, 6]]
    assert list(lists.collate(sum)) == [3, 3, 15]
    assert repr(lists.collate(sum)) == "FromMap(…).collate(sum)"
    (batch,) = loaded(arrays().skip(6).take(1).batch(1).collate())
    assert torch.equal(batch["ids"], default_collate([{"ids": np.arange(6)}])["ids"])
    with pytest.raises(hr.OptionError, match=r"collate_fn=len and \.padded_batch\(2\) exclude each other"):
        hr.DataLoader(numbers().padded_batch(2), collate_fn=len)
    with pytest.raises(hr.OptionError, match=r"batch_size=3 and \.bucket\(int, \[3\], batch_size=2\) exclude"):
        hr.DataLoader(numbers().bucket(int, [3], batch_size=2), batch_size=3)


def arrays() -> hr.Stream:
    return hr.from_map([{"ids": np.arange(k % 7), "k": k} for k in range(50)])


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batch_tokens", [6, 20])
def test_buckets_hold_samples_of_like_length_within_their_tokens(workers: int, batch_tokens: int) -> None:
    stream = arrays().shuffle(seed=3).bucket("ids", [2, 4], batch_tokens=batch_tokens)
    batches = loaded(stream, num_workers=workers)
    assert sorted(k for batch in batches for k in batch["k"].tolist()) == list(range(50))
    for batch in batches:
        lengths = [k % 7 for k in batch["k"].tolist()]
        assert len({sum(length > edge for edge in (2, 4)) for length in lengths}) == 1
        assert batch["ids"].shape == (len(lengths), max(lengths))
        assert batch["ids"].numel() <= batch_tokens
    assert loaded(stream.map(str), num_workers=workers) == [str(batch) for batch in batches]


def test_streams_and_loaders_are_true_unless_it_is_known_that_they_are_empty() -> None:
    for stream in (numbers(3), numbers(3).filter(bool), hr.from_iterable([])):
        assert stream
        assert hr.DataLoader(stream, persistent_workers=True, num_workers=1)
    assert not numbers(3).take(0)
    assert not hr.DataLoader(numbers(3).take(0))
    with pytest.raises(TypeError, match=r"has no length: .* tqdm\(loader, total=100\)"):
        len(hr.DataLoader(hr.from_iterable([])))


def test_shard_skip_and_slice_select_by_position() -> None:
    data = numbers(11)
    parts = [list(data.shard(index=k, count=3)) for k in range(3)]
    assert parts == [[0, 1, 2], [3, 4, 5, 6], [7, 8, 9, 10]]
    mixed = [list(data.shuffle(seed=1).shard(index=k, count=3)) for k in range(3)]
    assert sorted(n for part in mixed for n in part) == list(range(11))
    assert list(data.skip(8)) == [8, 9, 10]
    assert list(data.skip(12)) == []
    assert list(data.skip(2).slice(1, None, 4).take(2)) == [3, 7]
    assert [len(data.skip(8)), len(data.shard(index=1, count=3)), len(data.slice(2, 100, 3))] == [3, 4, 3]
    assert repr(data.skip(8).shard(index=0, count=2)) == "FromMap(…).skip(8).shard(0, 2)"
    assert [list(data.filter(is_odd).shard(index=k, count=2)) for k in range(2)] == [[1, 3], [5, 7, 9]]
    many = Made(int, 10**15)  # no list of their numbers is made
    assert list(many.skip(10**14).slice(5, None, 3).take(3)) == [10**14 + 5, 10**14 + 8, 10**14 + 11]
    assert list(many.shard(index=7, count=8).take(1)) == [7 * 10**15 // 8]


def test_fields_are_renamed_in_their_place_and_the_first_of_several() -> None:
    assert list(texts().rename(text="n", n="text"))[2] == {"n": "b", "text": 2}
    assert [*next(iter(texts().rename(text="body")))] == ["body", "n"]
    data = hr.from_map([{"jpg": 1, "n": 2}, {"png": 3, "jpg": 4}, {"jpeg": 5}])
    assert list(data.rename(**{"png;jpg;jpeg": "image"})) == [
        {"image": 1, "n": 2},
        {"image": 3, "jpg": 4},
        {"image": 5},
    ]


def test_operators_can_be_iterated_in_any_loop_and_pickled() -> None:
    stream = arrays().rename(ids="x").skip(5).bucket("x", [3], batch_size=4)

    expected = [batch["k"].tolist() for batch in stream]
    assert [batch["k"].tolist() for batch in iterated_later(stream)] == expected
    assert [batch["k"].tolist() for batch in pickle.loads(pickle.dumps(stream))] == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_longer_than_its_batch_may_be_is_skipped_by_itself(workers: int) -> None:
    data = numbers().map(lambda n: [n] * n).bucket(len, [4], batch_tokens=8)
    with hr.DataLoader(data, num_workers=workers, errors=hr.Skip()) as loader:
        kept = sorted(n for batch in loader for row in batch.tolist() for n in row if n)
        assert [sample.position for sample in loader.stats().skipped_samples] == [9]
    assert kept == [n for n in range(9) for _ in range(n)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "full"),
    [
        (lambda data: data.batch(4), 2),
        (lambda data: data.batch(4).filter(lambda batch: True), 2),
        (lambda data: data.padded_batch(4).map(later), 2),
        (lambda data: data.bucket(int, [4], batch_size=4), 2),
        (lambda data: data.batch(4).unbatch().bucket(int, [4], batch_size=4).filter(lambda batch: True), 2),
        (lambda data: data.batch(4).unbatch().batch(2).collate(sum), 5),
        (lambda data: data.batch(4).unbatch().map(lambda n: [n]).collate(), 10),
    ],
)
def test_drop_last_of_the_loader_drops_short_batches_of_the_stream(make: Any, full: int) -> None:
    assert len(loaded(make(numbers()), drop_last=True)) == full


COUNTS = (9, 0, 17, 30)


@pytest.fixture(scope="module")
def indexed() -> hr.Stream:
    return put_indexed("enumerated", COUNTS)


@pytest.mark.slow
@pytest.mark.parametrize("by", ["window", "global", "shards", None])
@pytest.mark.parametrize("workers", [0, 2])
def test_numbers_are_positions_in_the_epoch(indexed: hr.Stream, by: Any, workers: int) -> None:
    data = (indexed if by is None else indexed.shuffle(by)).map(number_of)
    assert flat(given(data.enumerate(), num_workers=workers)) == list(enumerate(flat(given(data))))


@pytest.mark.parametrize("world", [2, 3])
def test_numbers_do_not_depend_on_ranks(indexed: hr.Stream, world: int) -> None:
    data = indexed.shuffle().map(number_of).enumerate()
    alone = flat(given(data, batch_size=6))
    ranks = [given(data, batch_size=6 // world, ranks=hr.Ranks(rank=rank, world_size=world)) for rank in range(world)]
    steps = [list(itertools.chain(*step)) for step in zip(*ranks, strict=True)]
    assert sorted(flat(steps)) == sorted(alone)
    for k, step in enumerate(steps[:-2]):  # the last ones share what is left
        assert sorted(step) == alone[6 * k : 6 * k + 6]


def test_excluded_samples_keep_their_numbers() -> None:
    data, left_out = hr.from_map(range(10)).enumerate(), hr.Exclude(samples=[3, 4])
    ranks = [given(data, batch_size=1, ranks=hr.Ranks(rank=rank, world_size=2), exclude=left_out) for rank in range(2)]
    alone = flat(given(data, batch_size=2, exclude=left_out))
    assert alone == [(n, n) for n in range(10) if n not in (3, 4)]
    assert sorted(flat(ranks[0] + ranks[1])) == alone


def test_later_filter_leaves_the_numbers_as_they_are(indexed: hr.Stream) -> None:
    data = indexed.map(number_of).enumerate().filter(lambda pair: pair[1] % 2)
    assert list(data) == [(n, n) for n in range(1, sum(COUNTS), 2)]
    kept = indexed.filter(lambda key: int(key) % 2, field="__key__").map(number_of).enumerate()
    assert list(kept) == [(k, 2 * k + 1) for k in range(sum(COUNTS) // 2)]  # the index filters before the order


def test_numbers_of_an_iterable_count_what_it_gives_and_are_refused_on_several_ranks() -> None:
    def letters() -> Any:
        part = hr.shard_info()
        return list("abcdef")[part.rank :: part.world]

    data = hr.from_iterable(letters, ranks_by="shard_info").epoch(samples=6).enumerate()
    assert list(data) == list(enumerate("abcdef"))
    with pytest.raises(hr.OptionError, match=r"enumerate\(\).* needs numbers of samples on all 2 ranks"):
        on_two_ranks(data, last_batch=None)
    assert flat(given(data, ranks=hr.Ranks.none)) == list(enumerate("abcdef"))


def on_two_ranks(data: hr.Stream, last_batch: Any = "uneven") -> Any:
    return first_of(data, batch_size=None, ranks=hr.Ranks(rank=0, world_size=2, last_batch=last_batch))


def test_padding_repeats_numbers_and_carried_samples_have_negative_ones() -> None:
    data = hr.from_map(range(5)).enumerate()
    assert sorted(flat(given(data, batch_size=2, ranks=hr.Ranks(last_batch="pad")))) == [(0, 0), *enumerate(range(5))]
    with hr.DataLoader(data, batch_size=2, collate_fn=list, ranks=hr.Ranks(last_batch="carry")) as loader:
        assert flat(list(loader)) == list(enumerate(range(4)))
        assert flat(list(loader)) == [(-1, 4), *enumerate(range(5))]


def test_prefetch_of_the_stream_is_an_option_of_the_loader_and_changes_no_sample() -> None:
    data = hr.from_map(range(9)).shuffle(seed=2)
    for most in (0, 1, 7):
        assert list(data.prefetch(most)) == iterated_later(data.prefetch(most)) == list(data)
        assert hr.DataLoader(data.prefetch(most), batch_size=2).options["prefetch_factor"] == most
    assert hr.DataLoader(data.prefetch(3), prefetch_factor=3).options["prefetch_factor"] == 3
    assert ".prefetch(7)  [loader]" in data.prefetch(7).describe()
    assert len(data.prefetch(1)) == 9


@pytest.mark.parametrize("batch_size", [1, 2])
def test_on_every_rank_gives_each_rank_all_samples_and_one_state(batch_size: int) -> None:
    data = hr.from_map(range(7)).shuffle().on_every_rank().map(abs)
    options: dict[str, Any] = {"batch_size": batch_size, "collate_fn": list}
    alone = loaded(data, **options)
    assert sorted(flat(alone)) == list(range(7))
    for rank in range(3):
        assert loaded(data, **options, ranks=hr.Ranks(rank=rank, world_size=3)) == alone
    state = state_after(hr.DataLoader(data, **options, ranks=hr.Ranks(rank=1, world_size=2)), 1)
    assert rest_of(hr.DataLoader(data, **options, ranks=hr.Ranks(rank=4, world_size=5)), state) == alone[1:]


def image(index: int) -> torch.Tensor:
    return torch.full((3, 64, 64), index)


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "dropped"])
@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "data set"])
def test_end_during_copies_leaks_nothing(is_stream: bool, is_closed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.delivery.device.mover_to", lambda device: Mover(FakeBackend()))
    data = hr.from_map(range(640)).map(image) if is_stream else [image(k) for k in range(640)]
    loader = hr.DataLoader(data, batch_size=32, num_workers=2, device="cuda")
    iterator = iter(loader)
    for _ in range(7):
        next(iterator)
    if is_closed:
        loader.close()
