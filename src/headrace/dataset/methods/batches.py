"""Methods of data sets that group samples."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from numpy.typing import ArrayLike

from headrace._util import check
from headrace._util.check import is_whole
from headrace._util.functions import name_of
from headrace.dataset.methods.adding import AddsOperators
from headrace.ops.bucket import BucketBatcher, Length
from headrace.ops.operator import Batch, EachSample, GroupOperator
from headrace.ops.prefetch import Prefetch
from headrace.workers.tasks import Step

if TYPE_CHECKING:
    from headrace.dataset.stream import Stream


class BatchMethods(AddsOperators):
    """Operators that group samples."""

    def batch(self, n: int, *, drop_last: bool = False, max_wait_s: float | None = None) -> Stream:
        """Group `n` samples into a collated batch. A later `map` gets whole batches.

        If anything but functions of batches follows, such as `unbatch` or another `batch`, the stream itself makes
        these batches, with the default collation.

        With `max_wait_s` a batch does not wait for slow samples, such as those of a queue: it has from 1 to `n`
        samples. A resumed run yields the same samples in the same order, but may cut batches elsewhere.

        Args:
            n: Samples in a batch.
            drop_last: Drop a short last batch.
            max_wait_s: Seconds that the first sample of a batch waits for others, once the steps before `batch` are
                done with it. The batch is then made of the available samples as soon as it could be delivered, so a
                slower trainer gets fuller batches. Only `map`, `collate`, `take` and `epoch` may follow. On several
                ranks, a following `.epoch(samples=N)` sets how many batches they make together.

        Raises:
            OptionError: An argument is invalid, or `drop_last` is combined with `max_wait_s`.

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
        check.whole(".batch(): n", n, 1)
        batch = Batch(n, drop_last)
        return self._with(batch if max_wait_s is None else batch.within(max_wait_s))

    def collate(self, fn: Callable[[list[Any]], Any] | None = None) -> Stream:
        """Set the function that makes a batch of a list of samples.

        Use it directly after `.batch(n)`, or where each sample is a list of samples.

        Args:
            fn: Function of a list of samples; by default torch's `default_collate`. It runs in workers.

        Examples:
            >>> import headrace as hr
            >>> list(hr.DataLoader(hr.from_map(["a", "bc", "d"]).batch(2).collate("+".join)))
            ['a+bc', 'd']
        """
        if fn is None:
            from headrace.torch_compat.collate import default_collate

            fn = default_collate
        check.function(".collate(): fn", fn, is_plain=True)
        return self._with(EachSample(Step(f"collate({name_of(fn)})", "map", fn), is_collate=True))

    def padded_batch(self, n: int, *, pad_value: float | Mapping[str, float] = 0, drop_last: bool = False) -> Stream:
        """Batch `n` samples whose arrays differ in length, padded to the longest of the batch.

        Arrays and tensors of a field are padded at the end, in each dimension in which they differ. A list of numbers
        counts as an array. Everything else is collated like torch's `default_collate`.

        Args:
            n: Samples in a batch.
            pad_value: Padding value, or a mapping from field name to value; other fields get 0. Fields of tuples are
                "0", "1", and so on.
            drop_last: Drop a short last batch.

        Examples:
            >>> import headrace as hr
            >>> data = hr.from_map([{"ids": [5, 6, 7]}, {"ids": [8]}])
            >>> next(iter(hr.DataLoader(data.padded_batch(2, pad_value=-1))))
            {'ids': tensor([[ 5,  6,  7],
                    [ 8, -1, -1]])}
        """
        check.whole(".padded_batch(): n", n, 1)
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
        """Batch samples of similar length, with little padding, which is as in `padded_batch`.

        A sample waits in the bucket of its length until that is full. Batches come in the order in which buckets become
        full. Up to a batch of samples waits in each bucket. States list the waiting samples, so they are exact.

        Args:
            length: Field whose `len` is the length, or a function of the sample. It is computed in workers.
            edges: Greatest length of each bucket, ascending. Longer samples have one more bucket.
            batch_size: Samples in a batch.
            batch_tokens: Alternative to `batch_size`: maximum size of a batch, padding included, which is the number of
                samples times the length of the longest. A single sample that is longer is an error.
            pad_value: As in `padded_batch`.
            drop_last: Drop the samples in buckets that are not full at the end.

        Raises:
            OptionError: An argument is invalid.

        Examples:
            >>> import headrace as hr
            >>> data = hr.from_map([[1, 1], [2] * 5, [3], [4] * 6, [5, 5]])
            >>> [tuple(batch.shape) for batch in hr.DataLoader(data.bucket(len, [3], batch_size=2))]
            [(2, 2), (2, 6), (1, 2)]
        """
        edges = [*edges]
        if not all(map(is_whole, edges)) or any(one >= other for one, other in itertools.pairwise(edges)):
            raise check.invalid(
                ".bucket(): edges", edges, "the greatest length of each bucket: ascending whole numbers"
            )
        sizes = {"batch_size": batch_size, "batch_tokens": batch_tokens}
        given = {name: size for name, size in sizes.items() if size is not None}
        if len(given) != 1:
            raise check.lacking(".bucket()", "either batch_size= or batch_tokens=")
        for argument, size in given.items():
            check.whole(f".bucket(): {argument}", size, 1)
        name = name_of(length) if callable(length) else repr(length)
        if callable(length):
            check.function(".bucket(): length", length, is_plain=True)
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
        """Make at most `n` results ahead of the trainer: batches after `.batch()`, else samples.

        It is a loader's `prefetch_factor`, set by the stream. If a loader makes the batches, it counts those. Reads
        ahead of them are limited by the loader's memory budget. It must be the last operator.

        Args:
            n: Number of results. 0: nothing is made before it is requested.

        Raises:
            OptionError: `n` is negative, or `.prefetch()` is repeated. Raised by a loader with another
                `prefetch_factor`.

        Examples:
            >>> import headrace as hr
            >>> made = []
            >>> first = next(iter(hr.from_map(range(100)).map(made.append).prefetch(3)))
            >>> len(made) <= 4
            True
        """
        check.whole(".prefetch(): n", n)
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
        """Pack documents into sequences of `length` tokens.

        Packed global batches are the same on any number of ranks.

        A sequence is a dict with the tokens, `[length]`, in the dtype of the documents. `document_ids`, `[length]`
        int32, numbers the documents in the sequence from 0; padding has -1. `position_ids`, `[length]` int32, starts at
        0 with each document, each part of a cut document, and the padding.

        **If lengths are known**, the packing is planned before any document is read, and a sequence is a sample with a
        number. Files of tokens know lengths, with `hr.tokens(…, documents="samples")` or "separate"; only the parts in
        a sequence are read. For other numbered documents, pass `lengths`. After `.shuffle()`, documents are packed
        differently in each epoch. With `.shuffle()` after `.pack()`, the sequences stay the same.

        **Otherwise**, as after `.tokenize()`, `.filter()` or `.flat_map()`, documents are packed in rows. Row j of G in
        the global batch holds only the documents at the positions j, j + G, j + 2 G, … of the epoch. So sequences
        depend on G, and so does a state; a stream without a loader has one row. Documents must have numbers; shards
        without an index get one. Only `.map()` and `.batch()` may follow. On several ranks an epoch must be
        endless, by `.repeat()` before it, or have whole steps, by `.epoch(samples=N)` after it. With `tail="uneven"`
        each document occurs once, and each rank ends with its own rows.

        Args:
            length: Tokens of a sequence.
            tokens: Field of a document that has the tokens.
            method: "concat" concatenates documents and cuts every `length` tokens; the last sequence is padded.
                "best_fit" keeps documents whole, except that longer ones are first cut every `length` tokens, and
                combines those that leave little padding. In rows, the oldest waiting document is combined with those of
                the next 12 that fill its sequence best. Planned packing takes some 20 bytes of memory per document
                ("concat" 8), 4 more if shuffled, and three times as much during planning.
            document_ids: Add `document_ids` and `position_ids` to sequences.
            lengths: Token count of each document, by its number in the data set. A document with another length is an
                error.
            fields: Other fields with a number for each token, such as loss masks. They are packed alike.
            pad_value: Padding of the tokens, or a mapping from field name to padding. By default 0.

        Raises:
            OptionError: An argument is invalid; or documents have no numbers; or `lengths` were given, but the
                documents or their lengths are known only after reading.

        Examples:
            >>> import headrace as hr
            >>> texts = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
            >>> data = hr.from_map([{"input_ids": text} for text in texts])
            >>> [sequence["input_ids"].tolist() for sequence in data.pack(4, lengths=[3, 1, 5])]
            [[1, 2, 3, 4], [5, 6, 7, 8], [9, 0, 0, 0]]
            >>> next(iter(hr.DataLoader(data.pack(4), batch_size=2)))["input_ids"].tolist()  # row 0: texts 0 and 2
            [[1, 2, 3, 5], [4, 0, 0, 0]]
        """
        from headrace.ops.pack import packed_stream

        return packed_stream(
            self._as_stream().indexed(".pack() needs"),
            length,
            tokens=tokens,
            method=method,
            document_ids=document_ids,
            lengths=lengths,
            fields=fields,
            pad_value=pad_value,
        )


def _padded(pad_value: float | Mapping[str, float]) -> Callable[[list[Any]], object]:
    from headrace.torch_compat.padded import PaddedCollate

    return PaddedCollate(pad_value)
