"""Documents packed into sequences: as plain Python packs them, on any ranks, with any workers, resumed anywhere."""

import asyncio
import itertools
import os
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from builders.loops import assert_refused, first_of, state_after
from builders.numbers import Made
from builders.ranks import elastic_run
from builders.token_files import megatron
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import headrace as hr
from headrace.errors import OptionError
from headrace.fetch.stores import memory
from headrace.testing import FaultServer

pytestmark = pytest.mark.usefixtures("warm_server")

RESUMES = int(os.environ.get("HEADRACE_RESUMES", "40"))
EOS = 7


def document(number: int, length: int) -> dict[str, Any]:
    tokens = 1000 * (number + 1) + np.arange(length, dtype=np.int32)
    return {"input_ids": tokens, "weight": tokens / 8, "number": number}


class Documents(Made):
    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__(lambda key: document(key, lengths[key]), len(lengths))


def epochs(data: Any, count: int = 1, **options: Any) -> list[list[Any]]:
    with hr.DataLoader(data, **{"batch_size": None, "num_workers": 0, **options}) as loader:
        return [list(loader) for _ in range(count)]


def concatenated(order: Sequence[int], lengths: Sequence[int], length: int) -> list[dict[str, list[Any]]]:
    flat = [(number, at) for number in order for at in range(lengths[number])]
    sequences = []
    for begin in range(0, len(flat), length):
        part = flat[begin : begin + length]
        numbers = [number for number, _ in part]
        ids, positions = [], []
        for k, number in enumerate(numbers):
            is_new = k == 0 or numbers[k - 1] != number
            ids.append((ids[-1] + 1 if ids else 0) if is_new else ids[-1])
            positions.append(0 if is_new else positions[-1] + 1)
        rest = length - len(part)
        sequences.append(
            {
                "input_ids": [1000 * (number + 1) + at for number, at in part] + [0] * rest,
                "document_ids": ids + [-1] * rest,
                "position_ids": positions + list(range(rest)),
            }
        )
    return sequences


def plain(sequences: Sequence[dict[str, Any]]) -> list[dict[str, list[Any]]]:
    return [{name: values.tolist() for name, values in one.items()} for one in sequences]


LENGTHS = st.lists(st.integers(0, 25), min_size=1, max_size=12)
NONE: dict[str, Any] = {"lengths": [0, 0], "length": 4}
BARE = settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.slow
@BARE
@example(**NONE, by=None)
@given(lengths=LENGTHS, length=st.integers(1, 12), by=st.sampled_from([None, "global"]))
def test_concatenated_documents_come_in_the_order_of_the_epoch(lengths: list[int], length: int, by: Any) -> None:
    data = Documents(lengths) if by is None else Documents(lengths).shuffle(by)
    packed = data.pack(length, lengths=lengths)
    assert len(packed) == -(-sum(lengths) // length)
    orders = epochs(data.map(lambda sample: sample["number"]), 2)
    for order, found in zip(orders, epochs(packed, 2), strict=True):
        assert plain(found) == concatenated(order, lengths, length)
        for one in found:
            assert {str(values.dtype) for values in one.values()} == {"torch.int32"}


@BARE
@example(**NONE, is_shuffled=False)
@given(lengths=LENGTHS, length=st.integers(1, 12), is_shuffled=st.booleans())
def test_best_fit_gives_each_document_once_and_whole(lengths: list[int], length: int, is_shuffled: bool) -> None:
    data = Documents(lengths).shuffle() if is_shuffled else Documents(lengths)
    packed = data.pack(length, lengths=lengths, method="best_fit")
    for found in epochs(packed, 2):
        assert len(found) == len(packed)
        come = []
        for one in plain(found):
            filled = one["document_ids"].index(-1) if -1 in one["document_ids"] else length
            tokens = zip(*(one[name][:filled] for name in ("input_ids", "document_ids", "position_ids")), strict=True)
            assert one["input_ids"][filled:] == [0] * (length - filled)
            assert one["document_ids"][filled:] == [-1] * (length - filled)
            assert one["position_ids"][filled:] == list(range(length - filled))
            pieces = [list(piece) for _, piece in itertools.groupby(tokens, lambda token: token[1])]
            assert [piece[0][1] for piece in pieces] == list(range(len(pieces)))
            assert all([position for _, _, position in piece] == list(range(len(piece))) for piece in pieces)
            come += [(piece[0][0], len(piece)) for piece in pieces]
        whole = [
            (1000 * (number + 1) + start, min(length, size - start))
            for number, size in enumerate(lengths)
            for start in range(0, size, length)
        ]
        assert sorted(come) == sorted(whole)


def test_documents_go_together_with_others_in_each_epoch_where_they_are_shuffled() -> None:
    lengths = np.random.default_rng(1).integers(1, 30, 60).tolist()
    first, second = (
        {tuple(one["input_ids"].tolist()) for one in found}
        for found in epochs(Documents(lengths).shuffle().pack(32, lengths=lengths, method="best_fit"), 2)
    )
    assert len(first & second) < len(first) // 2
    first, second = (
        [one["input_ids"].tolist() for one in found]
        for found in epochs(Documents(lengths).pack(32, lengths=lengths, method="best_fit").shuffle(), 2)
    )
    assert first != second
    assert sorted(first) == sorted(second)


def test_further_fields_are_packed_with_the_tokens_and_ids_are_optional() -> None:
    data = Documents([3, 4]).map(lambda one: {**one, "labels": one["input_ids"].astype(np.int64)})
    data = data.pack(5, lengths=[3, 4], fields=["weight", "labels"], pad_value={"input_ids": 9, "labels": -100})
    first, second = data
    assert first["weight"].tolist() == [125.0, 125.125, 125.25, 250.0, 250.125]
    assert second["weight"].tolist() == [250.25, 250.375, 0, 0, 0]
    assert second["input_ids"].tolist() == [2002, 2003, 9, 9, 9]
    assert second["labels"].tolist() == [2002, 2003, -100, -100, -100]
    assert set(first) == {"input_ids", "weight", "labels", "document_ids", "position_ids"}
    (one,) = Documents([3]).pack(4, lengths=[3], document_ids=False, pad_value=5)
    assert {name: values.tolist() for name, values in one.items()} == {"input_ids": [1000, 1001, 1002, 5]}


async def later(sample: dict[str, Any]) -> dict[str, Any]:
    await asyncio.sleep(0)
    return {**sample, "input_ids": sample["input_ids"] + 1}


def doubled(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "input_ids": (sample["input_ids"] * 2).tolist()}


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_steps_before_are_done_to_documents_and_those_behind_to_sequences(num_workers: int) -> None:
    lengths = [5, 2, 9, 4]
    data = Documents(lengths).map(later).map(doubled).pack(4, lengths=lengths)
    data = data.map(lambda one: {"sum": int(one["input_ids"].sum())}).batch(2)
    flat = [2 * (1000 * (number + 1) + at + 1) for number, length in enumerate(lengths) for at in range(length)]
    sums = [sum(flat[at : at + 4]) for at in range(0, len(flat), 4)]
    (batches,) = epochs(data, num_workers=num_workers)
    assert [batch["sum"].tolist() for batch in batches] == [sums[0:2], sums[2:4], sums[4:]]


# Files of tokens.


def stored(kind: str, lengths: Sequence[int], server: FaultServer | None = None) -> Any:
    made = [document(number, length)["input_ids"] % 50_000 for number, length in enumerate(lengths)]
    half, files = len(made) // 2, []
    for k, some in enumerate((made[:half], made[half:])):
        name = f"pack/{kind}{k}.bin"
        if kind == "megatron":
            bodies = dict(zip((name, name.replace(".bin", ".idx")), megatron([[one] for one in some]), strict=True))
        else:
            bodies = {name: np.concatenate([np.append(one, EOS) for one in some]).astype("uint16").tobytes()}
        for each, body in bodies.items():
            if server is None:
                memory.put(f"memory://{each}", body)
            else:
                server.add(each, body)
        files.append(f"memory://{name}" if server is None else f"{server.url}/{name}")
    if kind == "megatron":
        return hr.tokens(files, documents="samples")
    return hr.tokens(files, "uint16", 1000, eos=EOS, documents="separate", tail="short")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["megatron", "eos"])
@pytest.mark.parametrize("method", ["concat", "best_fit"])
@pytest.mark.parametrize("by", [None, "auto", "global", "shards", "within"])
def test_files_of_tokens_give_what_the_same_documents_in_memory_give(kind: str, method: Any, by: Any) -> None:
    lengths = np.random.default_rng(2).integers(1, 90, 40).tolist()
    data = stored(kind, lengths)
    last = [EOS] if kind == "eos" else []
    inside = [[*(document(number, length)["input_ids"] % 50_000), *last] for number, length in enumerate(lengths)]
    texts = hr.from_map([{"tokens": np.array(one, np.uint16)} for one in inside])
    if by is not None:
        data = data.shuffle(by)
        (found,) = epochs(data)
        numbers = {tuple(one): number for number, one in enumerate(inside)}
        order = [numbers[tuple(one["tokens"].tolist())] for one in found]
        texts = texts.sample(order)
    packed = data.pack(64, tokens="tokens", method=method)
    if by is not None and method == "best_fit":
        found, known = epochs(packed)[0], sum(map(len, inside))
        assert sum((one["document_ids"] >= 0).sum() for one in found) == known
        assert len(found) == len(packed) <= -(-known // 64) + 1
        return
    wanted = texts.pack(64, tokens="tokens", method=method, lengths=list(map(len, inside)))
    assert plain(epochs(packed)[0]) == plain(epochs(wanted)[0])
    if by is None:
        assert packed[3]["tokens"].tolist() == list(packed)[3]["tokens"].tolist()


def test_of_long_documents_just_the_parts_of_a_sequence_are_read() -> None:
    with FaultServer() as server:
        data = stored("megatron", [70_000, 3, 4, 60_000], server).pack(1000, tokens="tokens")
        assert len(data) == 131
        before = len(server.requests_for("pack/megatron0.bin"))
        assert data[20]["tokens"].tolist() == (np.arange(21_000, 22_000) % 50_000).tolist()
        ranges = [one.headers["range"] for one in server.requests_for("pack/megatron0.bin")[before:]]
        assert "bytes=40000-41999" in ranges
        assert all(int(b) - int(a) < 20_000 for a, b in (one[6:].split("-") for one in ranges))


def test_packed_files_are_read_from_their_own_store_beside_inputs_of_others() -> None:
    with FaultServer() as here, FaultServer() as there:
        urls = [
            server.add(f"bucket/{k}.bin", bytes([k, number]))
            for number, server in enumerate((here, there))
            for k in (4, 5)
        ]
        assert len(urls) == 4  # of one name on both servers, and of other contents
        stores = [{"endpoint": server.url, "skip_signature": True} for server in (here, there)]
        shards = hr.tokens("s3://bucket/{4,5}.bin", "uint8", 2, storage_options=stores[0])
        files = [hr.files("s3://bucket/{4,5}.bin", storage_options=options) for options in stores]
        sequences = (
            files[1]
            .map(lambda one: {"input_ids": np.frombuffer(one["bin"], np.uint8)})
            .pack(4, lengths=[2, 2], document_ids=False)
        )
        for data in (
            shards.concat(sequences),
            hr.mix({"a": shards, "b": sequences}),
            shards.concat(shards.concat(sequences)),
        ):
            assert [one["input_ids"].tolist() for one in data if "input_ids" in one] == [[4, 1, 5, 1]]
        with pytest.raises(OptionError, match=r"hr\.files\(\) with storage_options= and others"):
            files[0].concat(sequences)


# Ranks, workers and states.


def drawn(rng: random.Random) -> tuple[str, Callable[[], Any], dict[str, Any]]:
    lengths = [rng.choice([0, 1, 3, 9, 20, 41]) for _ in range(rng.randint(5, 60))] + [30]
    kind, method = rng.choice(["map", "megatron", "eos", "mix"]), rng.choice(["concat", "best_fit"])
    before, behind = rng.choice([None, "auto", "global"]), rng.choice(["", "shuffle", "repeat", "take", "epoch"])
    length, size = rng.choice([4, 16, 33]), rng.choice([4, 6, 12])
    tail = rng.choice(["short", "drop", "pad", "carry"])
    if kind in ("megatron", "eos"):
        lengths = [max(1, one) for one in lengths]
    if kind == "mix":
        before = None
    options = {"ranks": hr.Ranks(global_batch_size=size, last_batch=tail), "num_workers": 0}

    def make() -> Any:
        data = Documents(lengths) if kind in ("map", "mix") else stored(kind, lengths)
        if before is not None and (kind != "map" or before == "auto"):
            data = data.shuffle(before)
        known: dict[str, Any] = {"lengths": lengths} if kind in ("map", "mix") else {"tokens": "tokens"}
        data = data.pack(length, method=method, **known)
        if kind == "mix":
            data = hr.mix({"a": data.shuffle(), "b": data}, {"a": 2, "b": 1}, until="all")
            data = data.map(lambda one: {k: v for k, v in one.items() if k != "__source__"})
        ways = {
            "": lambda: data,
            "shuffle": lambda: data.shuffle(),
            "repeat": lambda: data.repeat(2),
            "take": lambda: data.take(40),
            "epoch": lambda: data.shuffle().epoch(samples=37),
        }
        return ways[behind]()

    return f"{kind} {lengths}, {before}, {method} {length}, {behind}; {options}", make, options


@pytest.mark.slow
def test_packed_global_batches_are_the_same_on_other_ranks_resumed_anywhere() -> None:
    resumes, number = 0, 0
    while resumes < RESUMES:
        rng = random.Random(f"packed {number}")
        case, make, options = drawn(rng)
        resumes += elastic_run(case, rng, make, 4, **options)
        number += 1


def test_sources_of_a_mixture_are_packed_so_that_weights_are_shares_of_tokens() -> None:
    long, short = [200] * 10, [3] * 900
    parts = {
        "long": Documents(long).pack(32, lengths=long).shuffle(),
        "short": Documents(short).pack(32, lengths=short).shuffle(),
    }
    batch = first_of(hr.mix(parts, {"long": 0.5, "short": 0.5}), batch_size=20)
    assert batch["input_ids"].shape == (20, 32)
    assert batch["__source__"].count("long") == 10
    with pytest.raises(OptionError, match=r"of source .long.: .* put \.shuffle\(\) after"):
        hr.mix({"long": Documents(long).shuffle().pack(32, lengths=long)})


# What cannot be packed.


def test_states_of_other_documents_lengths_and_ways_are_refused() -> None:
    lengths = [5, 2, 9, 4, 30]

    def loader(data: Any) -> hr.DataLoader[Any]:
        return hr.DataLoader(data, batch_size=2, num_workers=0)

    first = Documents(lengths).shuffle()
    state = state_after(loader(first.pack(8, lengths=lengths)), 1)
    others = [
        Documents([2, 5, 9, 4, 30]).shuffle().pack(8, lengths=[2, 5, 9, 4, 30]),
        first.pack(9, lengths=lengths),
        first.pack(8, lengths=lengths, method="best_fit"),
        Documents(lengths).pack(8, lengths=lengths).shuffle(),
        Documents(lengths).pack(8, lengths=lengths),
        first,
    ]
    states = [(state, other) for other in others]
    equal, other = (Documents([4] * 6).sample([k, 1, 2, 3]).pack(8, lengths=[4] * 6) for k in (0, 5))
    for saved, data in [*states, (state_after(loader(equal), 1), other)]:
        assert_refused(loader(data), saved)


def slow_by_turns(lengths: Sequence[int], *, is_backwards: bool) -> Made:
    """Documents of random numbers. Each is ready after the next one, or before it."""

    async def make(key: int) -> dict[str, Any]:
        for _ in range(len(lengths) - key if is_backwards else key):
            await asyncio.sleep(0)
        return {"input_ids": hr.rng().integers(0, 1000, lengths[key])}

    return Made(make, len(lengths))


async def drawn_again(one: dict[str, Any]) -> dict[str, Any]:
    await asyncio.sleep(0)
    return {"input_ids": np.concatenate([one["input_ids"][:1], hr.rng().integers(0, 1000, len(one["input_ids"]) - 1)])}


def test_random_numbers_of_documents_do_not_depend_on_which_comes_first() -> None:
    lengths = [3, 2, 4, 3, 2, 6]
    made = [
        plain(list(slow_by_turns(lengths, is_backwards=is_backwards).map(drawn_again).pack(10, lengths=lengths)))
        for is_backwards in (False, True)
    ]
    assert made[0] == made[1]


def of_files(change: Callable[[Any], Any] = dict, **options: Any) -> Any:
    return stored("megatron", [3, 5]).map(change).pack(90, tokens="tokens", **options)


def shorter(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda one: {**one, name: one[name][1:]}


def listed(*values: Any) -> Any:
    return hr.from_map([{"input_ids": value, "hash": [1, 2**63]} for value in values])


WRONG: list[tuple[Callable[[Any], Any], type[Exception], str]] = [  # of documents with 3 and 5 tokens
    (lambda data: data.pack(0, lengths=[1]), OptionError, "length=0 must be a whole number, 1 or more"),
    (lambda data: data.pack(8.0, lengths=[1]), OptionError, "length=8.0 must be a whole number"),
    (lambda data: data.pack(8, lengths=[1], pad_value=None), OptionError, "pad_value of .*=None must be a number"),
    (lambda data: data.pack(8, lengths=np.array([1, 2**63], np.uint64)), OptionError, r"lengths\[1\]=92233720368"),
    (lambda data: data.pack(8, lengths=[1], method="first_fit"), OptionError, "one of 'concat', 'best_fit'"),
    (lambda data: data.pack(8, lengths=[[1]]), OptionError, r"array of int64, shape \(1, 1\)"),
    (lambda data: data.pack(8, lengths=[1.5]), OptionError, "must be whole numbers in one dimension"),
    (lambda data: data.pack(8, lengths=[4, -1]), OptionError, r"lengths\[1\]=-1 must be a whole number, 0 or more"),
    (lambda data: data.pack(8, lengths=[1], fields=["a", "a"]), OptionError, "different names of fields"),
    (lambda data: data.pack(8, lengths=[1], fields="document_ids"), OptionError, "names of fields, with document_ids"),
    (lambda data: data.pack(8, lengths=[1], pad_value={"b": 1}), OptionError, "pad_value='b' must be one of 'input"),
    (lambda data: data.batch(2).pack(8, lengths=[1]), OptionError, "takes single samples"),
    (lambda data: data.filter(bool).pack(8, lengths=[1]), OptionError, "is known only after they are read"),
    (lambda data: data.flat_map(list).pack(8, lengths=[1]), OptionError, "is known only after they are read"),
    (lambda data: data.repeat(2).pack(8, lengths=[1]), OptionError, r"put \.pack\(8\) before \.repeat\(2\)"),
    (lambda data: data.epoch(samples=3).pack(8, lengths=[1]), OptionError, r"put \.pack\(8\) before \.epoch"),
    (lambda data: data.sample(weights=[1, 2]).pack(8, lengths=[1]), OptionError, "each epoch would have other doc"),
    (lambda data: data.shuffle().take(1).pack(8, lengths=[1]), OptionError, r"put \.take\(1\) after \.pack\(\), or"),
    (lambda data: data.map(doubled).map(later).pack(8, lengths=[1]), OptionError, "`async def` functions before pla"),
    (lambda data: hr.mix({"a": data}).pack(8, lengths=[1]), OptionError, "pack each of its inputs"),
    (lambda data: data.interleave(data).pack(8, lengths=[1, 1]), OptionError, "its inputs alternate"),
    (lambda data: data.shuffle().pack(8, lengths=[1]).pack(8, lengths=[1]), OptionError, "each epoch would have other"),
    (lambda data: data.shuffle().pack(4, lengths=[3, 5])[0], TypeError, "sequences of it are others in each epoch"),
    (lambda data: hr.from_iterable([1]).pack(8, lengths=[1]), OptionError, "have no numbers before they are read"),
    (lambda data: data.pack(8, lengths=[3, 4]), ValueError, "of document 1 has 5 values, and the document has 4"),
    (lambda data: data.pack(8, lengths=[3, 4], method="best_fit"), ValueError, "'input_ids' of document 1 has 5"),
    (lambda data: of_files(lengths=[4, 4]), ValueError, "of document 0 has 3 values, and the document has 4 tokens by"),
    (lambda data: of_files(lengths=[4, 4], method="best_fit"), ValueError, "'tokens' of document 0 has 3 values, and"),
    (lambda data: of_files(shorter("tokens")), ValueError, r"or a step before \.pack\(\) changes how many there are"),
    (lambda data: data.map(shorter("weight")).pack(8, lengths=[3, 5], fields="weight"), ValueError, "'weight' of docu"),
    (lambda data: data.pack(8, lengths=[3, 5, 1]), OptionError, r"lengths has 3 values, and the stream has 2 doc"),
    (lambda data: data.pack(8, lengths=[3, 5], tokens="ids"), KeyError, "'ids'; it has: input_ids, weight, number"),
    (lambda data: data.pack(8, lengths=[3, 5], fields="mask"), KeyError, r"fields=\('mask',\)\): a document has no"),
    (lambda data: hr.from_map([[1, 2]]).pack(8, lengths=[2]), KeyError, "it is a list"),
    (lambda data: data.pack(8, lengths=[3, 5], tokens="weight"), TypeError, r"array of float64 of shape \(3,\): whole"),
    (lambda data: listed(np.ones(2, "int32"), np.ones(2, "uint16")).pack(4, lengths=[2, 2]), TypeError, "of uint16 in"),
    (lambda data: listed([1, 2]).pack(4, lengths=[2], fields="hash"), OverflowError, "808, which int64 cannot hold"),
    *((lambda data, pad=pad: of_files(pad_value=pad), ValueError, "field 'tokens' is of uint16, which cannot hold")
      for pad in (-100, np.int64(-100), 1.5, float("nan"), 2**16)),
]  # fmt: skip


@pytest.mark.parametrize(("make", "error", "message"), WRONG)
def test_documents_that_cannot_be_packed_are_an_error(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        list(make(Documents([3, 5])))


def test_some_documents_in_an_order_that_is_given_are_packed() -> None:
    lengths = [3, 5, 2, 6]
    data = Documents(lengths).sample([3, 0, 3]).take(2).pack(5, lengths=lengths)
    assert plain(list(data)) == concatenated([3, 0], lengths, 5)
