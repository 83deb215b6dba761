"""The operators of data sets for each sample."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from headrace.datasets.methods.adding import AddsOperators
from headrace.datasets.operators.fields import AsyncFieldFilter, FieldFilter, Rename, Select, ToTuple, on_field
from headrace.datasets.operators.many import Unbatch, gives_many
from headrace.datasets.operators.tokenizing import Tokenize, ids_by
from headrace.datasets.operators.values import EachSample
from headrace.errors import OptionError
from headrace.formats.limits import DEFAULTS, Limits
from headrace.functions import as_it_is, checked, is_async, name_of
from headrace.tasks import Step

if TYPE_CHECKING:
    from headrace.datasets.stream import Stream


class SampleMethods(AddsOperators):
    """What is done to each sample.

    Where a function runs follows from its colour: an `async def` on the event loop, with many samples at once, any
    other in the worker processes.
    """

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
        """Decode fields by their names: images, numbers, text, JSON, arrays, also in gzip. Unknown ones stay bytes.

        Where `.to_tuple()` or `.select()` follows, fields that it does not name are not decoded.

        Args:
            spec: what images become: "rgb8" (uint8 array [H, W, 3]), "l8" (uint8 [H, W]), "torch" (uint8 [3, H, W]),
                "pil"; None leaves them as bytes.
            size: (height, width) in pixels to which images are scaled.
            limits: how much files may ask for.
            allow_pickle: also read pickles: fields that are called so by `**by_field`, and those that end in pkl or
                pickle. It runs what the data say, so it is only for data of those whom you trust.
            **by_field: for single fields a name such as "rgb8", "text", "json", "bytes"; a class of protobuf's
                messages; or a function of bytes.

        Raises:
            OptionError: there is no such decoder; or pickles are asked for, and not allowed.
        """
        from headrace.formats.values import decoder

        name = f"decode({spec})" if spec else "decode"
        decodes = decoder(spec, size=size, limits=limits, allow_pickle=allow_pickle, **by_field)
        may_draw = any(callable(how) and not isinstance(how, type) for how in by_field.values())
        return self._with(EachSample(Step(name, "map", decodes, may_draw or None), decoder=decodes))

    def map(self, fn: Callable[[Any], Any], *, field: str | int | None = None, random: bool = True) -> Stream:
        """`fn(sample)` in the place of each sample.

        Args:
            fn: a plain function runs in workers, an `async def` on the event loop.
            field: give `fn` this field only, and put its result there.
            random: in workers, seed the generators of Python, numpy and torch from (seed, epoch, position) before each
                call. False saves 7 µs a sample; `hr.rng()` is the sample's own in any case.
        """
        fn = checked(fn, "map")
        if field is not None:
            fn = on_field(fn, field)
        return self._with(EachSample(Step(f"map({name_of(fn)})", "map", fn, random)))

    def filter(self, fn: Callable[[Any], Any], *, field: str | int | None = None, random: bool = True) -> Stream:
        """Only the samples for which `fn(sample)` is true; batches stay full.

        Args:
            fn: a plain function runs in workers, an `async def` on the event loop.
            field: give `fn` this field only. With "__key__", where shards have an index, nothing is read of what is
                left out.
            random: as in `map`.
        """
        asks, fn = None, checked(fn, "filter")
        if field is not None:
            asks = fn if field == "__key__" and not is_async(fn) else None
            fn = AsyncFieldFilter(fn, field) if is_async(fn) else FieldFilter(fn, field)
        return self._with(EachSample(Step(f"filter({name_of(fn)})", "filter", fn, random), keeps_key=asks))

    def flat_map(self, fn: Callable[[Any], Any], *, random: bool = True) -> Stream:
        """The samples that `fn(sample)` gives, in the place of each sample: many, one or none; batches stay full.

        A state is exact also in the middle of what comes of one sample: `fn` is called again for it then, and must give
        the same. Where it raises, nothing comes of the sample but the error.

        Args:
            fn: gives a list, or another iterable; a generator function is one, too. A plain one runs in workers, an
                `async def` on the event loop.
            random: as in `map`; each of the samples has random numbers of its own in what follows.

        Examples:
            >>> import headrace as hr
            >>> data = hr.from_map(["a b", "", "c d e"]).flat_map(str.split)
            >>> list(hr.DataLoader(data, batch_size=4))
            [['a', 'b', 'c', 'd'], ['e']]
        """
        fn = checked(fn, "flat_map")
        return self._with(EachSample(Step(f"flat_map({name_of(fn)})", "many", gives_many(fn), random)))

    def apply(self, fn: Callable[[Any], Any]) -> Stream:
        """What `fn` gives for an iterator over all samples: any generator function, for what a sample alone cannot say.

        `fn` runs in the process of the loader, in a thread of its own; an asynchronous generator function gets an
        asynchronous iterator, and runs on the event loop. What is before it goes through workers of its own, as many as
        the loader has. Several ranks give it each its own samples of the stream before it, and need `.epoch(samples=N)`
        behind it, for nobody knows how many come out.

        States are refused, unless `fn` is an object that has `state_dict()` and `load_state_dict(state)`: then they are
        exact, as far as these say what it holds of the samples that it has taken.

        Args:
            fn: called once an epoch.

        Examples:
            >>> import headrace as hr
            >>> def rises(numbers):
            ...     last = next(numbers)
            ...     for number in numbers:
            ...         yield number - last
            ...         last = number
            >>> list(hr.from_map([1, 4, 9, 16]).apply(rises))
            [3, 5, 7]
        """
        from headrace.datasets.inputs.combined import applied

        return applied((self,), fn=fn)

    def enumerate(self) -> Stream:
        """(number, sample) in the place of each sample: its place in the epoch, counted from 0 over all ranks together.

        So it does not depend on ranks and workers, and goes on where a state does. It comes behind what decides the
        order, and before `.filter()` and whatever else leaves samples out or puts them together: else ranks could not
        know it. Of samples that are filled up by tail="pad" a number comes twice; of those that tail="carry" has left
        for another epoch it is negative. Those that `exclude=` leaves out have theirs all the same.

        Raises:
            OptionError: it comes behind such an operator. When a loader begins: several ranks share samples that are
                counted while they are read, so that none knows how many the others have.

        Examples:
            >>> import headrace as hr
            >>> list(hr.from_map(["a", "b", "c"]).slice(1).enumerate())
            [(0, 'b'), (1, 'c')]
        """
        return self._with(EachSample(Step("enumerate()", "map", as_it_is, is_numbered=True)))

    def unbatch(self) -> Stream:
        """The samples of each batch, one by one: of arrays, tensors, texts, and dicts and tuples of them.

        With it batches can be of several sizes in a stream: `.batch(64).map(model).unbatch()` and then `.batch(32)`, or
        the loader's `batch_size`. Numbers that were collated come as tensors without dimensions.
        """
        return self._with(EachSample(Step("unbatch()", "many", Unbatch()), is_unbatch=True))

    def cache(
        self,
        place: str | os.PathLike[str] | None = None,
        *,
        max_bytes: int | None = None,
        version: str | int | None = None,
    ) -> Stream:
        """Keep samples as they are here: later epochs neither read nor make them again.

        Samples are kept by their numbers, so shuffles, ranks and states may be any. Shards need an index. Samples that
        failed, or have no room, are made again. Samples are read one by one, in the order of `.shuffle(by="global")`.

        Kept samples are found by a digest of the data, the functions before `.cache()` and the versions of packages. It
        is computed for each epoch. `docs/how_to/cache.md` lists what it cannot see. Put random steps behind `.cache()`.

        Args:
            place: A folder, which other loaders, processes and ranks of this machine and later runs use too. It holds
                pickles: it is for your user alone. None: memory, for the loaders of this stream and their workers.
            max_bytes: Limit of what is kept. Memory: of this stream, by default a quarter of the machine's memory,
                beside the loader's `memory_budget`. A folder: of all streams, by default what is there and half of what
                the disk has free.
            version: Stands for functions and data that have no digest. Give another one whenever they change.

        Raises:
            OptionError: samples have no numbers, or are batches; a function before it draws random numbers, or has no
                digest.

        Examples:
            >>> import headrace as hr
            >>> squares = hr.from_map(range(4)).map(lambda n: n * n).cache()
            >>> [list(squares), list(squares.map(str))]
            [[0, 1, 4, 9], ['0', '1', '4', '9']]
        """
        from headrace.datasets.inputs.combined import cached

        return cached((self,), place=place, max_bytes=max_bytes, version=version)

    def select(self, *names: str) -> Stream:
        """The named fields of each sample only; where shards have an index, the others are not read.

        "jpg;png" is the first of the two that a sample has; one that lacks a field is a FormatError, which names it.
        """
        if not names:
            raise OptionError(".select(): name at least one field")
        selection = Select(names)
        return self._with(EachSample(Step(f"select({', '.join(names)})", "map", selection), selection=selection))

    def to_tuple(self, *names: str) -> Stream:
        """A tuple of the named fields; "jpg;png" is the first of the two that a sample has.

        A sample that lacks a field is a FormatError, which names it.
        """
        if not names:
            raise OptionError(".to_tuple(): name at least one field")
        selection = ToTuple(names)
        return self._with(EachSample(Step(f"to_tuple({', '.join(names)})", "map", selection), selection=selection))

    def rename(self, **new_by_old: str) -> Stream:
        """Other names for fields: `.rename(jpg="image", cls="label")`; a sample that lacks one is a FormatError.

        "jpg;png" is the first of the two that a sample has: `.rename(**{"jpg;png": "image"})`.

        Fields that nobody needs are read all the same where it comes before `.select()` or `.to_tuple()`: put it behind
        the one, and give the other the old names.
        """
        if not new_by_old:
            raise OptionError(".rename(): give old names, and what they become: .rename(jpg='image')")
        if not all(isinstance(new, str) for new in new_by_old.values()):
            raise OptionError(f".rename({new_by_old}): new names are texts, as in .rename(jpg='image')")
        if len(set(new_by_old.values())) < len(new_by_old):
            raise OptionError(f".rename({new_by_old}): two fields would have one name")
        named = ", ".join(f"{old}={new}" for old, new in new_by_old.items())
        return self._with(EachSample(Step(f"rename({named})", "map", Rename(new_by_old))))

    def tokenize(
        self,
        tokenizer: Any,
        field: str | int = "text",
        *,
        into: str = "input_ids",
        dtype: Literal["int64", "int32", "uint16"] = "int64",
    ) -> Stream:
        """A text's tokens in its place: `into` holds them as an array [tokens], and `field` is gone.

        Args:
            tokenizer: one of Hugging Face's (`tokenizers.Tokenizer`, or of transformers), a tiktoken `Encoding`, or a
                function that gives the ids of a text. Special tokens that a text spells out are text for tiktoken's;
                others do as they are set up. It runs in workers, and must give the same for the same text.
            field: the text: str, or bytes of UTF-8.
            into: what the tokens' field is called; where samples are tuples they stay in the text's place.
            dtype: of the array. An id that it cannot hold is an error.

        Examples:
            >>> import headrace as hr
            >>> next(iter(hr.from_map([{"text": "abc"}]).tokenize(lambda text: [ord(sign) for sign in text])))
            {'input_ids': array([ 97,  98,  99])}
        """
        if dtype not in ("int64", "int32", "uint16"):
            raise OptionError(f".tokenize(dtype={dtype!r}): 'int64', 'int32' or 'uint16' is meant")
        tokenizes = Tokenize(ids_by(tokenizer), field, into, dtype)
        return self._with(EachSample(Step(f"tokenize({field!r})", "map", tokenizes)))
