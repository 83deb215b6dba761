"""The operators of data sets that put samples together."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from numpy.typing import ArrayLike

from headrace.datasets.methods.adding import AddsOperators
from headrace.datasets.methods.packing import Packing
from headrace.datasets.operators.batchers import BucketBatcher, Length
from headrace.datasets.operators.delivering import Prefetch
from headrace.datasets.operators.values import Batch, EachSample, GroupOperator
from headrace.errors import OptionError
from headrace.functions import checked, is_async, name_of
from headrace.numbers import is_whole
from headrace.tasks import Step

if TYPE_CHECKING:
    from headrace.datasets.stream import Stream


class BatchMethods(AddsOperators):
    """How samples are put together."""

    def batch(self, n: int, *, drop_last: bool = False, max_wait_s: float | None = None) -> Stream:
        """Batches of `n` samples, collated; a `map` behind it gets whole batches.

        Where more follows than functions of batches, such as `unbatch` or another `batch`, it is made on the way, by
        the default collation.

        With `max_wait_s` a batch does not wait for samples that are slow to come, as those of a queue may be: it has
        from 1 to `n` of them. A resumed run gives the same samples in the same order, but may cut them elsewhere.

        Args:
            n: samples in a batch.
            drop_last: leave a last batch out that has fewer.
            max_wait_s: seconds that the first sample of a batch waits for others, once the steps before `batch` are
                done with it. Then the batch is made of those that are there, as soon as it could be given on: a
                trainer that is slower than that gets fuller ones. Behind it come `map`, `collate`, `take` and `epoch`.
                On several ranks `.epoch(samples=N)` behind it says how many batches they make together.

        Raises:
            OptionError: an argument is of no use, or `drop_last` is given with `max_wait_s`.

        Examples:
            >>> import asyncio
            >>> import headrace as hr
            >>> class Messages(hr.AsyncIterableDataset):
            ...     async def aiter(self):
            ...         for number in range(3):
            ...             yield number
            ...         await asyncio.Event().wait()  # no other one comes
            >>> len(next(iter(hr.DataLoader(Messages().batch(100, max_wait_s=0.1))))) <= 3
            True
        """
        if not is_whole(n, 1):
            raise OptionError(f".batch({n!r}): a batch has 1 sample or more, a whole number")
        batch = Batch(n, drop_last)
        return self._with(batch if max_wait_s is None else batch.within(max_wait_s))

    def collate(self, fn: Callable[[list[Any]], Any] | None = None) -> Stream:
        """What `fn` makes of the samples of a batch: right behind `.batch(n)`, or where each sample is a list of some.

        Args:
            fn: of a list of samples; by default torch's `default_collate`. It runs in workers.

        Examples:
            >>> import headrace as hr
            >>> list(hr.DataLoader(hr.from_map(["a", "bc", "d"]).batch(2).collate("+".join)))
            ['a+bc', 'd']
        """
        if fn is None:
            from headrace.torch_compat.collate import default_collate

            fn = default_collate
        if is_async(checked(fn, "collate")):
            raise OptionError(f".collate({name_of(fn)}): a plain function is needed, and no `async def`")
        return self._with(EachSample(Step(f"collate({name_of(fn)})", "map", fn), is_collate=True))

    def padded_batch(self, n: int, *, pad_value: float | Mapping[str, float] = 0, drop_last: bool = False) -> Stream:
        """Batches of `n` samples whose arrays differ in length: each is filled up to the longest one of the batch.

        Arrays and tensors of a field are filled up behind their own numbers, in each dimension in which they differ;
        a list of numbers counts as an array. All else is collated as torch's `default_collate` does it.

        Args:
            n: samples in a batch.
            pad_value: what they are filled up with; or one for each field by its name, where others get 0. Fields of
                tuples are "0", "1", and so on.
            drop_last: leave a last batch out that has fewer.

        Examples:
            >>> import headrace as hr
            >>> data = hr.from_map([{"ids": [5, 6, 7]}, {"ids": [8]}])
            >>> next(iter(hr.DataLoader(data.padded_batch(2, pad_value=-1))))
            {'ids': tensor([[ 5,  6,  7],
                    [ 8, -1, -1]])}
        """
        if not is_whole(n, 1):
            raise OptionError(f".padded_batch({n!r}): a batch has 1 sample or more, a whole number")
        return self._with(Batch(n, drop_last, _padded(pad_value), "padded_batch"))

    def bucket(
        self,
        length: str | int | Callable[[Any], int],
        edges: Sequence[int],
        *,
        batch_size: int | None = None,
        batch_tokens: int | None = None,
        pad_value: float | Mapping[str, float] = 0,
        drop_last: bool = False,
    ) -> Stream:
        """Batches of samples that are about as long, padded as by `padded_batch`: little of them is padding.

        A sample waits in the bucket of its length until that is full; batches come in the order in which buckets are.
        Up to a batch of samples waits in each bucket, and states say which, so that they are exact.

        Args:
            length: of a sample: a field, whose `len` it is, or a function of the sample. It is taken in workers.
            edges: the greatest length of each bucket, ascending; what is longer has one more.
            batch_size: samples in a batch.
            batch_tokens: instead: how large a batch may be, padding included: the number of its samples times the
                length of the longest one. A sample that is longer by itself is an error.
            pad_value: as in `padded_batch`.
            drop_last: leave out what waits at the end in buckets that are not full.

        Raises:
            OptionError: an argument is of no use.

        Examples:
            >>> import headrace as hr
            >>> data = hr.from_map([[1, 1], [2] * 5, [3], [4] * 6, [5, 5]])
            >>> [tuple(batch.shape) for batch in hr.DataLoader(data.bucket(len, [3], batch_size=2))]
            [(2, 2), (2, 6), (1, 2)]
        """
        edges = [*edges]
        if not all(map(is_whole, edges)) or any(one >= other for one, other in itertools.pairwise(edges)):
            raise OptionError(f".bucket(edges={edges}): greatest lengths are needed, whole numbers that ascend")
        sizes = {"batch_size": batch_size, "batch_tokens": batch_tokens}
        given = {name: size for name, size in sizes.items() if size is not None}
        if len(given) != 1 or not all(is_whole(size, 1) for size in given.values()):
            raise OptionError(
                f".bucket({given or ''}): one of batch_size= and batch_tokens= is needed, a whole number of 1 or more"
            )
        name = name_of(length) if callable(length) else repr(length)
        if callable(length) and is_async(length):
            raise OptionError(f".bucket({name}): a plain function is needed, and no `async def`")
        described = ", ".join([name, repr(edges), *(f"{name}={size}" for name, size in given.items())])
        buckets = GroupOperator(
            f"bucket({described})",
            functools.partial(BucketBatcher, edges, batch_size, batch_tokens, drop_last=False),
            Length(length, batch_tokens),
            _padded(pad_value),
            makes_batches=True,
        )
        whole = replace(
            buckets,
            name=f"bucket({described}, drop_last=True)",
            batcher=functools.partial(BucketBatcher, edges, batch_size, batch_tokens, drop_last=True),
        )
        return self._with(whole if drop_last else replace(buckets, without_short=whole))

    def prefetch(self, n: int) -> Stream:
        """No more than `n` of what comes out is made before it is asked for: of batches behind `.batch()`, or samples.

        It is a loader's `prefetch_factor`, said by the stream: where a loader makes the batches, it counts these. What
        is read ahead of that is bounded by the loader's memory budget. It comes last.

        Args:
            n: 0: nothing is made before it is asked for.

        Raises:
            OptionError: it is negative, or was said before. By a loader: its `prefetch_factor` says something else.

        Examples:
            >>> import headrace as hr
            >>> made = []
            >>> first = next(iter(hr.from_map(range(100)).map(made.append).prefetch(3)))
            >>> len(made) <= 4
            True
        """
        if not is_whole(n):
            raise OptionError(f".prefetch({n!r}): 0 or more, a whole number")
        return self._with(Prefetch(n))

    def pack(
        self,
        length: int,
        *,
        tokens: str = "input_ids",
        method: Literal["concat", "best_fit"] = "concat",
        document_ids: bool = True,
        lengths: ArrayLike | None = None,
        fields: Sequence[str] = (),
        pad_value: float | Mapping[str, float] = 0,
    ) -> Stream:
        """Sequences of `length` tokens, made of documents; packed global batches are the same on any number of ranks.

        A sequence is a dict: the tokens, as `[length]`, of the type that documents have; `document_ids`, `[length]`
        int32, counts the documents in the sequence from 0, and is -1 where it is filled up; `position_ids`, `[length]`
        int32, begins at 0 with each document, with each part of one that was cut, and where the sequence is filled up.

        **Where lengths are known**, what goes together is planned before any document is read, and a sequence is a
        sample with a number. Files of tokens know them, with `hr.tokens(…, documents="samples")` or "separate": of them
        just those parts are read that a sequence has. For other documents with numbers, `lengths` may be given.
        Behind `.shuffle()` documents are packed in another way in each epoch; with `.shuffle()` behind it, sequences
        stay what they are.

        **Otherwise**, as behind `.tokenize()`, `.filter()` or `.flat_map()`, documents are packed in lanes: row j of G
        in the global batch has the documents at the positions j, j + G, j + 2 G, … of the epoch, and is made of these
        alone. So sequences depend on G, and a state belongs to it; a stream by itself has one lane. Documents must have
        numbers, as those of shards with an index have. Behind it come `.map()` and `.batch()`. On several ranks an
        epoch has no end, by `.repeat()` before it, or whole steps: `.epoch(samples=N)` behind it.

        Args:
            length: tokens of a sequence.
            tokens: the field of a document that has them.
            method: "concat": documents one behind the other, cut every `length` tokens; the last sequence is filled up.
                "best_fit": documents stay whole, those longer than a sequence are cut every `length` tokens first, and
                what goes together leaves little room, which is filled up. In lanes the oldest document that waits goes
                with those of the next 12 that fill its sequence up best. Planned, it takes some 20 bytes of memory for
                each document ("concat" 8), 4 more if they are shuffled, and thrice as much while it is planned.
            document_ids: whether sequences have `document_ids` and `position_ids`.
            lengths: how many tokens each document has, by its number in the data set. A document that has others is an
                error.
            fields: others that have a number for each token, such as masks of the loss: they are packed alike.
            pad_value: what tokens are filled up with; or for each field another value. By default it is 0.

        Raises:
            OptionError: an argument is of no use; or which documents come, or how long they are, is known only once
                they are read, where `lengths` were given; or documents have no numbers.

        Examples:
            >>> import headrace as hr
            >>> texts = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
            >>> data = hr.from_map([{"input_ids": text} for text in texts])
            >>> [sequence["input_ids"].tolist() for sequence in data.pack(4, lengths=[3, 1, 5])]
            [[1, 2, 3, 4], [5, 6, 7, 8], [9, 0, 0, 0]]
            >>> next(iter(hr.DataLoader(data.pack(4), batch_size=2)))["input_ids"].tolist()  # row 0: texts 0 and 2
            [[1, 2, 3, 5], [4, 0, 0, 0]]
        """
        from headrace.datasets.packing.streams import packed_stream

        packing = Packing(
            length=length,
            tokens=tokens,
            method=method,
            document_ids=document_ids,
            lengths=lengths,
            fields=fields,
            pad_value=pad_value,
        )
        return packed_stream(self, packing)


def _padded(pad_value: float | Mapping[str, float]) -> Callable[[list[Any]], object]:
    from headrace.torch_compat.padded import PaddedCollate

    return PaddedCollate(pad_value)
