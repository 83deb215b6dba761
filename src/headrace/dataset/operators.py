"""The operators of every data set, with their documentation. `headrace.ops` has a module for each."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from numpy.typing import ArrayLike, NDArray

from headrace.formats.limits import DEFAULTS, Limits

if TYPE_CHECKING:
    from headrace.dataset.stream import Stream
    from headrace.ops.operator import Operator


class Operators:
    """The operators of every headrace data set. Each returns a new stream; none reads anything.

    An `async def` runs on the event loop, with many samples at once. Any other function runs in the worker processes.

    Several streams keep their own orders and steps when they are combined. If the samples of all have numbers, so have
    those of the combined stream. Otherwise, as after `.filter()` or without an index, samples are counted as they come.
    Inputs share the workers and the memory of the loader.
    """

    announced_epoch: tuple[int] | None = None  # a new tuple for each call, so that a repeated epoch is noticed

    def _as_stream(self) -> Stream:
        raise NotImplementedError

    def _with(self, operator: Operator) -> Stream:
        raise NotImplementedError

    def set_epoch(self, epoch: int) -> None:
        """Make the loader of this data set start this epoch next, like the loader's own `set_epoch`.

        Examples:
            >>> data = hr.from_map(range(3))
            >>> data.set_epoch(2)
            >>> hr.DataLoader(data).epoch
            2
        """
        self.announced_epoch = (epoch,)

    def map(self, fn: Callable[[Any], Any], *, field: str | int | None = None, random: bool = True) -> Stream:
        """Replace each sample by `fn(sample)`.

        Args:
            fn: A plain function runs in workers, an `async def` on the event loop.
            field: Apply `fn` to this field only.
            random: In workers, seed the generators of Python, numpy and torch from (seed, epoch, position) before each
                call. False saves 7 µs a sample. `hr.rng()` is specific to the sample in either case.

        Examples:
            >>> list(hr.from_map(["a", "b"]).map(str.upper))
            ['A', 'B']
        """
        from headrace.ops.map import map_samples

        return self._with(map_samples(fn, field, random=random))

    def filter(self, fn: Callable[[Any], Any], *, field: str | int | None = None, random: bool = True) -> Stream:
        """Keep the samples for which `fn(sample)` is true. Batches stay full.

        Args:
            fn: A plain function runs in workers, an `async def` on the event loop.
            field: Pass only this field to `fn`. With "__key__", and shards with an index, dropped samples are not read.
            random: As in `map`.

        Examples:
            >>> list(hr.from_map(range(6)).filter(lambda n: n % 2))
            [1, 3, 5]
        """
        from headrace.ops.filter import filter_samples

        return self._with(filter_samples(fn, field, random=random))

    def flat_map(self, fn: Callable[[Any], Any], *, random: bool = True) -> Stream:
        """Replace each sample by the samples of `fn(sample)`: many, one or none. Batches stay full.

        States are exact, even between the results of one sample: `fn` is then called again for it, and must return the
        same. If `fn` raises, the sample yields only the error.

        Args:
            fn: Returns a list or another iterable, or is a generator function. A plain function runs in workers, an
                `async def` on the event loop.
            random: As in `map`. In later steps, each result has random numbers of its own.

        Examples:
            >>> data = hr.from_map(["a b", "", "c d e"]).flat_map(str.split)
            >>> list(hr.DataLoader(data, batch_size=4))
            [['a', 'b', 'c', 'd'], ['e']]
        """
        from headrace.ops.flat_map import flat_map

        return self._with(flat_map(fn, random=random))

    def apply(self, fn: Callable[[Any], Any]) -> Stream:
        """Pass an iterator over all samples through a generator function, for steps across samples.

        `fn` runs in the process of the loader, in a thread of its own. An asynchronous generator function gets an
        asynchronous iterator, and runs on the event loop. Earlier steps run in workers of their own, as many as the
        loader has. Each of several ranks passes its own samples to `fn`. Several ranks need `.epoch(samples=N)` after
        it, because the number of results is unknown.

        States are refused, unless `fn` is an object with `state_dict()` and `load_state_dict(state)`. States are then
        exact if these cover what `fn` holds of the samples it has consumed.

        Args:
            fn: Called once an epoch.

        Examples:
            >>> def rises(numbers):
            ...     last = next(numbers)
            ...     for number in numbers:
            ...         yield number - last
            ...         last = number
            >>> list(hr.from_map([1, 4, 9, 16]).apply(rises))
            [3, 5, 7]
        """
        from headrace.ops.apply import apply

        return apply(self._as_stream(), fn)

    def apply_op(self, name: str, *args: Any, **named: Any) -> Stream:
        """Apply an operator registered by `hr.plugins.register_operator`.

        Args:
            name: Name of the operator.
            *args: Positional arguments of the registered function.
            **named: Keyword arguments of the registered function.

        Raises:
            OptionError: There is no such operator.

        Examples:
            >>> hr.plugins.register_operator("doubled", lambda: hr.plugins.SampleOp(fn=lambda n: 2 * n))
            >>> list(hr.from_map([1, 2]).apply_op("doubled"))
            [2, 4]
        """
        from headrace.ops.registry import made_operator

        return self._with(made_operator(name, args, named))

    def enumerate(self) -> Stream:
        """Replace each sample by (number, sample), where the number is its position in the epoch.

        Positions count from 0 over all ranks together, so they depend on neither ranks nor workers, and continue when a
        state is loaded. After operators that drop, make or group samples, the samples that come out of these are
        counted, on one rank. With `hr.Ranks(last_batch="pad")`, the number of a padding sample repeats. With "carry",
        samples carried over from another epoch have negative numbers. Samples skipped by `exclude=` keep their numbers.

        Raises:
            OptionError: When a loader starts: several ranks share samples that are counted only while reading, so that
                no rank knows the counts of the others.

        Examples:
            >>> list(hr.from_map(["a", "b", "c"]).slice(1).enumerate())
            [(0, 'b'), (1, 'c')]
        """
        from headrace.ops.map import number_samples

        return self._with(number_samples())

    def decode(
        self,
        spec: str | None = None,
        /,
        *,
        size: tuple[int, int] | None = None,
        limits: Limits = DEFAULTS,
        allow_pickle: bool = False,
        **by_field: Any,
    ) -> Stream:
        """Decode images, numbers, text, JSON and arrays by field name, also gzipped.

        Unknown fields stay bytes. If `.to_tuple()` or `.select()` follows, only fields that it names are decoded.

        Args:
            spec: Form of images: "rgb8" (uint8 array [H, W, 3]), "l8" (uint8 [H, W]), "torch" (uint8 [3, H, W]), "pil".
                None leaves them as bytes.
            size: (height, width) in pixels to which images are scaled.
            limits: Limits on the resources that files may demand.
            allow_pickle: Also decode pickles: fields set to them by `**by_field`, and those that end in pkl or pickle.
                Pickles execute code from the data, so use it only for data from trusted sources.
            **by_field: Decoder of a field: a name such as "rgb8", "text", "json", "bytes"; a protobuf message class; or
                a function of bytes.

        Raises:
            OptionError: There is no such decoder; or pickles are requested, but not allowed.

        Examples:
            >>> list(hr.from_map([{"txt": b"a", "cls": b"3"}]).decode())
            [{'txt': 'a', 'cls': 3}]
        """
        from headrace.ops.decode import decode

        return self._with(decode(spec, by_field, size=size, limits=limits, allow_pickle=allow_pickle))

    def select(self, *names: str) -> Stream:
        """Keep only the named fields of each sample. With an index, other fields are not read.

        "jpg;png" is the first of the two that a sample has. A sample without such a field is a FormatError that names
        it.

        Examples:
            >>> list(hr.from_map([{"a": 1, "b": 2}]).select("b"))
            [{'b': 2}]
        """
        from headrace.ops.select import select

        return self._with(select(names))

    def to_tuple(self, *names: str) -> Stream:
        """Replace each sample by a tuple of the named fields.

        "jpg;png" is the first of the two that a sample has. A sample without such a field is a FormatError that names
        it.

        Examples:
            >>> list(hr.from_map([{"jpg": 1, "cls": 2}]).to_tuple("jpg;png", "cls"))
            [(1, 2)]
        """
        from headrace.ops.select import to_tuple

        return self._with(to_tuple(names))

    def rename(self, **new_by_old: str) -> Stream:
        """Rename fields: `.rename(jpg="image", cls="label")`.

        "jpg;png" is the first of the two that a sample has: `.rename(**{"jpg;png": "image"})`. A sample without such a
        field is a FormatError.

        Before `.select()` or `.to_tuple()`, it causes unused fields to be read. Put it after `.select()`, and use the
        old names in `.to_tuple()`.

        Examples:
            >>> list(hr.from_map([{"jpg": 1}]).rename(jpg="image"))
            [{'image': 1}]
        """
        from headrace.ops.select import rename

        return self._with(rename(new_by_old))

    def tokenize(
        self,
        tokenizer: Any,
        field: str | int = "text",
        *,
        into: str = "input_ids",
        dtype: Literal["int64", "int32", "uint16"] = "int64",
    ) -> Stream:
        """Replace a text by its tokens: an array [tokens] in the field `into`. `field` is removed.

        Args:
            tokenizer: A tokenizer of Hugging Face (`tokenizers.Tokenizer`, or of transformers), a tiktoken `Encoding`,
                or a function that returns the ids of a text. tiktoken treats special tokens in a text as plain text;
                others follow their configuration. It runs in workers, and must be deterministic.
            field: The text: str, or bytes of UTF-8.
            into: Name of the field with the tokens. In samples that are tuples, the tokens replace the text.
            dtype: dtype of the array. An id that does not fit is an error.

        Examples:
            >>> next(iter(hr.from_map([{"text": "abc"}]).tokenize(lambda text: [ord(sign) for sign in text])))
            {'input_ids': array([97, 98, 99])}
        """
        from headrace.ops.tokenize import tokenize

        return self._with(tokenize(tokenizer, field, into, dtype))

    def cache(
        self,
        place: str | os.PathLike[str] | None = None,
        *,
        max_bytes: int | None = None,
        version: str | int | None = None,
    ) -> Stream:
        """Cache samples at this step: later epochs neither read nor make them again.

        Samples are cached by number, so shuffles, ranks and states may change. Shards need an index. Failed samples,
        and those without space in the cache, are made again. Samples are read individually, in the order of
        `.shuffle(by="global")`.

        A cache is found by a digest of the data, the functions before `.cache()` and the versions of packages, computed
        in each epoch. `docs/how_to/cache.md` lists what the digest does not cover. Put random steps after `.cache()`.

        Args:
            place: A folder, which other loaders, processes and ranks of this machine and later runs share. It holds
                pickles, so only your user should have access. None: memory, for the loaders of this stream and their
                workers.
            max_bytes: Size limit. Memory: for this stream, by default a quarter of the machine's memory, in addition to
                the loader's `memory_budget`. A folder: for all streams, by default its current size and half of the
                free disk space.
            version: Identifies functions and data that have no digest. Change it whenever they change.

        Raises:
            OptionError: Samples have no numbers, or are batches; or an earlier function draws random numbers, or has no
                digest.

        Examples:
            >>> squares = hr.from_map(range(4)).map(lambda n: n * n).cache()
            >>> [list(squares), list(squares.map(str))]
            [[0, 1, 4, 9], ['0', '1', '4', '9']]
        """
        from headrace.ops.cache import cache

        return cache(self._as_stream(), place, max_bytes, version)

    def shuffle(
        self,
        by: Literal["auto", "shards", "within", "window", "global", "buffer"] = "auto",
        *,
        window: int | None = None,
        buffer: int | None = None,
        seed: int | None = None,
    ) -> Stream:
        """Permute the samples of each epoch. The order depends on (seed, epoch) only.

        Args:
            by: "shards" permutes whole shards. "within" permutes the samples of each shard, which is held in memory.
                "window" permutes shards, and samples within windows. With an index, a window holds stretches of many
                shards; without, one stretch of the shards. "global" permutes all samples, and reads each individually.
                "buffer" draws from a buffer of waiting samples: nothing needs to be known, and states are refused.
                "auto" is "window" for shards and "global" for data sets with keys. Samples made by operators such as
                `.flat_map()`, `.unbatch()` and `.batch()` are permuted within windows of consecutive ones.
            window: Samples in a window. Default: 16,384, or as many as fit in 128 MiB. Without an index 2,048, or as
                many as fit in 64 MiB. For derived samples 2,048, for batches 16. Twice as much is held in memory.
            buffer: Samples in the buffer; by default 4,096.
            seed: Seed of the order; by default the loader's. Windows of samples without numbers, and of what other
                operators made, combine it with the loader's.

        Raises:
            OptionError: An argument is out of range.

        Examples:
            >>> sorted(hr.from_map(range(5)).shuffle(seed=1))
            [0, 1, 2, 3, 4]
        """
        from headrace.ops.shuffle import shuffled

        return shuffled(self._as_stream(), by, window, buffer, seed)

    def take(self, n: int) -> Stream:
        """Keep the first `n` samples (or batches, after `batch`) of each epoch.

        Examples:
            >>> list(hr.from_map(range(5)).take(2))
            [0, 1]
        """
        from headrace.ops.slice import take

        return self._with(take(n))

    def skip(self, n: int) -> Stream:
        """Skip the first `n` samples: equivalent to `.slice(n)`.

        Examples:
            >>> list(hr.from_map(range(5)).skip(2))
            [2, 3, 4]
        """
        from headrace.ops.slice import skip

        return self._with(skip(n))

    def slice(self, start: int, stop: int | None = None, step: int = 1) -> Stream:
        """Select the samples with numbers in `range(start, stop, step)`.

        After operators that drop, make or group samples, the samples that come out of these are counted, on one rank.

        Examples:
            >>> list(hr.from_map(range(9)).slice(1, 8, 3))
            [1, 4, 7]
        """
        from headrace.ops.slice import slice_of

        return self._with(slice_of(start, stop, step))

    def shard(self, *, index: int, count: int) -> Stream:
        """Keep one of `count` parts of the samples. Needs samples with numbers.

        Part sizes differ by at most 1. A part has consecutive samples, so few shards are read for it. For a random
        part, shuffle before, with a seed that is the same for all parts. A loader divides samples among ranks by
        itself.

        Args:
            index: Number of the part, from 0.
            count: Number of parts.

        Examples:
            >>> list(hr.from_map(range(7)).shard(index=1, count=3))
            [2, 3]
        """
        from headrace.ops.slice import shard

        return self._with(shard(index, count))

    def sample(
        self,
        sampler: Iterable[int] | None = None,
        *,
        weights: Sequence[float] | NDArray[Any] | None = None,
        count: int | None = None,
        replacement: bool = True,
        seed: int | None = None,
    ) -> Stream:
        """Select the samples that a sampler lists, or draw samples at random.

        Args:
            sampler: A sampler of torch, or a list or array of sample numbers, which may repeat. It is iterated again
                for each epoch. A sampler that differs between processes needs a fixed seed of its own.
            weights: Relative probability of each sample; by default equal.
            count: Samples drawn in an epoch; by default the number of samples.
            replacement: Whether a sample may be drawn several times.
            seed: Seed of the draws, which depend on (seed, epoch, position); by default the loader's.

        Raises:
            OptionError: An argument is invalid.

        Examples:
            >>> list(hr.from_map(range(5)).sample([4, 0, 4]))
            [4, 0, 4]
        """
        from headrace.ops.sample import sample

        return self._with(sample(sampler, weights, count, replacement, seed))

    def repeat(self, n: int | None = None) -> Stream:
        """Repeat all samples `n` times in an epoch, reshuffled each time. None: without end.

        Batches, numbers of `.enumerate()`, limits and iterable data sets are repeated pass by pass: each pass starts
        batches and numbers again.

        Examples:
            >>> list(hr.from_map(range(2)).repeat(2))
            [0, 1, 0, 1]
        """
        from headrace.ops.repeat import repeat

        return repeat(self._as_stream(), n)

    def epoch(self, *, samples: int) -> Stream:
        """Set the samples of an epoch, over all ranks together. The data are repeated or cut.

        Iterables, and combinations of inputs without numbers, are only cut: put `.repeat()` before it. All ranks make
        the same number of steps. Each rank reads its own shards; for an iterable data set, `ranks_by` sets how samples
        are divided. Then some samples may repeat and others be skipped; `stats()` counts both. Without `.epoch()`, and
        with `hr.Ranks(last_batch="uneven")`, each occurs once. After `.batch()`, batches are counted, as by `.take()`.

        Examples:
            >>> list(hr.from_map(range(3)).epoch(samples=5))
            [0, 1, 2, 0, 1]
        """
        from headrace.ops.repeat import epoch

        return epoch(self._as_stream(), samples)

    def on_every_rank(self) -> Stream:
        """Give every rank all samples in the same order, like a loader's `hr.Ranks.none`.

        It applies to a whole stream. Such a stream cannot be an input of one that ranks divide, as the combination of
        samples would then depend on the number of ranks.

        Examples:
            >>> data = hr.from_map(range(3)).on_every_rank()
            >>> [list(hr.DataLoader(data, None, ranks=hr.Ranks(rank=rank, world_size=2))) for rank in range(2)]
            [[0, 1, 2], [0, 1, 2]]
        """
        from headrace.ops.prefetch import OnEveryRank

        return self._with(OnEveryRank())

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
            >>> made = []
            >>> first = next(iter(hr.from_map(range(100)).map(made.append).prefetch(3)))
            >>> len(made) <= 4
            True
        """
        from headrace.ops.prefetch import prefetch

        return self._with(prefetch(n))

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
                slower trainer gets fuller batches. Only `take`, `epoch` and operators that make one result of each may
                follow. On several ranks, a following `.epoch(samples=N)` sets how many batches they make together.

        Raises:
            OptionError: An argument is invalid, or `drop_last` is combined with `max_wait_s`.

        Examples:
            >>> import asyncio
            >>> class Messages(hr.AsyncIterableDataset):
            ...     async def aiter(self):
            ...         for number in range(3):
            ...             yield number
            ...         await asyncio.Event().wait()  # no other one comes
            >>> len(next(iter(hr.DataLoader(Messages().batch(100, max_wait_s=0.1))))) <= 3
            True
        """
        from headrace.ops.batch import batch

        return self._with(batch(n, drop_last, max_wait_s))

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
            >>> data = hr.from_map([{"ids": [5, 6, 7]}, {"ids": [8]}])
            >>> next(iter(hr.DataLoader(data.padded_batch(2, pad_value=-1))))
            {'ids': tensor([[ 5,  6,  7],
                    [ 8, -1, -1]])}
        """
        from headrace.ops.batch import padded_batch

        return self._with(padded_batch(n, pad_value, drop_last))

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
            >>> data = hr.from_map([[1, 1], [2] * 5, [3], [4] * 6, [5, 5]])
            >>> [tuple(batch.shape) for batch in hr.DataLoader(data.bucket(len, [3], batch_size=2))]
            [(2, 2), (2, 6), (1, 2)]
        """
        from headrace.ops.bucket import bucket

        return self._with(bucket(length, edges, batch_size, batch_tokens, pad_value, drop_last))

    def collate(self, fn: Callable[[list[Any]], Any] | None = None) -> Stream:
        """Set the function that makes a batch of a list of samples.

        Use it directly after `.batch(n)`, or where each sample is a list of samples.

        Args:
            fn: Function of a list of samples; by default torch's `default_collate`. It runs in workers.

        Examples:
            >>> list(hr.DataLoader(hr.from_map(["a", "bc", "d"]).batch(2).collate("+".join)))
            ['a+bc', 'd']
        """
        from headrace.ops.batch import collate

        return self._with(collate(fn))

    def unbatch(self) -> Stream:
        """Split each batch into its samples: arrays, tensors, texts, and dicts and tuples of them.

        A stream can so have batches of several sizes: `.batch(64).map(model).unbatch()` and then `.batch(32)`, or the
        loader's `batch_size`. Collated numbers become tensors without dimensions.

        Examples:
            >>> list(hr.from_map([1, 2, 3]).batch(2).unbatch().map(int))
            [1, 2, 3]
        """
        from headrace.ops.batch import unbatch

        return self._with(unbatch())

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
        without an index get one. Only `.batch()`, `.take()`, `.epoch()` and operators that make one sample of each may
        follow. Several ranks need `.repeat()` before it, for an endless epoch, or `.epoch(samples=N)` after it, for
        whole steps. With `hr.Ranks(last_batch="uneven")` each document occurs once, and each rank ends with its rows.

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
            >>> texts = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
            >>> data = hr.from_map([{"input_ids": text} for text in texts])
            >>> [sequence["input_ids"].tolist() for sequence in data.pack(4, lengths=[3, 1, 5])]
            [[1, 2, 3, 4], [5, 6, 7, 8], [9, 0, 0, 0]]
            >>> next(iter(hr.DataLoader(data.pack(4), batch_size=2)))["input_ids"].tolist()  # row 0: texts 0 and 2
            [[1, 2, 3, 5], [4, 0, 0, 0]]
        """
        from headrace.ops.pack import pack

        return pack(self._as_stream(), length, tokens, method, document_ids, lengths, fields, pad_value)

    def concat(self, *others: object) -> Stream:
        """Concatenate this stream and the others.

        Each shuffled input keeps its own order. `.concat(…).shuffle()` shuffles all samples together.

        Args:
            *others: Streams or data sets; a list is one, too. Only the last one may be endless.

        Raises:
            OptionError: An input is not supported.

        Examples:
            >>> letters, digits = hr.from_map(["a", "b", "c"]), hr.from_map([1, 2])
            >>> list(letters.concat(digits))
            ['a', 'b', 'c', 1, 2]
        """
        from headrace.ops.concat import concat

        return concat((self, *others))

    def interleave(self, *others: object, block: int = 1) -> Stream:
        """Take blocks of samples from the streams in turn, starting with this one.

        An exhausted input is skipped, so each sample of each input occurs once. `hr.mix` goes by weights instead.

        Args:
            *others: Streams or data sets; a list is one, too. Any may be endless.
            block: Samples that an input contributes in its turn. Its last block may be shorter.

        Raises:
            OptionError: An input or the block is not supported.

        Examples:
            >>> letters, digits = hr.from_map(["a", "b", "c"]), hr.from_map([1, 2])
            >>> list(letters.interleave(digits))
            ['a', 1, 'b', 2, 'c']
        """
        from headrace.ops.interleave import interleave

        return interleave((self, *others), block=block)

    def zip(self, *others: object, strict: bool = True) -> Stream:
        """Combine samples at the same position of each stream into a tuple.

        To shuffle samples that belong together, zip first: `.zip(…).shuffle()`. Each shuffled input keeps its own
        order. The samples of a tuple are fetched individually, at the same time.

        Args:
            *others: Streams or data sets; a list is one, too.
            strict: Refuse inputs with different numbers of samples. False: the shortest ends the stream.

        Raises:
            OptionError: An input is not supported. When a loader starts: the numbers of samples differ.

        Examples:
            >>> images, texts = hr.from_map(["image 0", "image 1"]), hr.from_map(["text 0", "text 1"])
            >>> list(images.zip(texts.map(str.upper)))
            [('image 0', 'TEXT 0'), ('image 1', 'TEXT 1')]
        """
        from headrace.ops.zip import zipped

        return zipped((self, *others), strict=strict)

    def join(self, other: object, on: str | tuple[str, str] | None = None) -> Stream:
        """Pair each sample with the one of `other` that has the same key, in this stream's order.

        Without `on`, it merges the samples of both as they arrive. Inputs may then be any streams. The order differs
        between runs, so states are refused. Several ranks need `.epoch(samples=N)` after it.

        Samples without a partner are dropped. Keys are read when a loader starts, or by `len`: the keys of an index, or
        that field of every sample. They are held in memory. After that, everything works as for `.zip()`.

        Args:
            other: Each key occurs once in it; in this stream keys may repeat. A key of None has no partner. Keys are
                equal if Python compares them as equal: 1, 1.0, True.
            on: Key field, as in the source before any `.map()`, or as cached by `.cache()`. A field that is not there
                is read after all steps, which run once more for that. Two names, if they differ. A pair whose keys have
                changed when it is read is an error. "__key__" is the name of the sample: for shards with an index
                nothing else is read to get it.

        Raises:
            OptionError: An input is not supported, for instance because it is shuffled; `.join(…).shuffle()` keeps
                pairs together. When a loader starts: a key repeats in `other`, or no keys match.

        Examples:
            >>> images = hr.from_map([{"id": 3, "size": 8}, {"id": 1, "size": 9}, {"id": 2, "size": 7}])
            >>> labels = hr.from_map([{"id": 1, "label": "cat"}, {"id": 3, "label": "dog"}])
            >>> [(image["size"], label["label"]) for image, label in images.join(labels, on="id")]
            [(8, 'dog'), (9, 'cat')]
        """
        from headrace.ops.join import join

        return join((self, other), on=on)

    def fork(self, n: int) -> tuple[Stream, ...]:
        """Split the stream into `n` branches, whose `.zip()` reads each sample once.

        Each branch gets a copy of the sample, so a change in place is not visible in other branches. Operators that
        reorder, drop or group samples must precede `.fork()`, or follow `.zip()`. A branch used alone is the stream
        with the branch's steps.

        Args:
            n: Number of branches.

        Raises:
            OptionError: `n` is less than 1. Raised by `.zip()` and other combinations if the branches would not stay
                aligned, so that samples would be read once per branch.

        Examples:
            >>> image, label = hr.from_map([{"n": 1}, {"n": 2}]).fork(2)
            >>> list(image.map(lambda sample: sample["n"] * 10).zip(label.map(lambda sample: sample["n"] % 2)))
            [(10, 1), (20, 0)]
        """
        from headrace.ops.fork import fork

        return fork(self._as_stream(), n)
