"""Methods of data sets that process each sample."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from headrace._util import check
from headrace._util.functions import as_it_is, is_async, name_of
from headrace.dataset.methods.adding import AddsOperators
from headrace.formats.limits import DEFAULTS, Limits
from headrace.ops.operator import EachSample
from headrace.ops.select import AsyncFieldFilter, FieldFilter, Rename, Select, ToTuple, on_field
from headrace.workers.tasks import Step

if TYPE_CHECKING:
    from headrace.dataset.stream import Stream


class SampleMethods(AddsOperators):
    """Operators on each sample.

    An `async def` runs on the event loop, with many samples at once. Any other function runs in the worker processes.
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
        """
        from headrace.formats.decoders import decoder

        name = f"decode({spec})" if spec else "decode"
        decodes = decoder(spec, size=size, limits=limits, allow_pickle=allow_pickle, **by_field)
        may_draw = any(callable(how) and not isinstance(how, type) for how in by_field.values())
        return self._with(EachSample(Step(name, "map", decodes, may_draw or None), decoder=decodes))

    def map(self, fn: Callable[[Any], Any], *, field: str | int | None = None, random: bool = True) -> Stream:
        """Replace each sample by `fn(sample)`.

        Args:
            fn: A plain function runs in workers, an `async def` on the event loop.
            field: Apply `fn` to this field only.
            random: In workers, seed the generators of Python, numpy and torch from (seed, epoch, position) before each
                call. False saves 7 µs a sample. `hr.rng()` is specific to the sample in either case.
        """
        fn = check.function(".map(): fn", fn)
        if field is not None:
            fn = on_field(fn, field)
        return self._with(EachSample(Step(f"map({name_of(fn)})", "map", fn, random)))

    def filter(self, fn: Callable[[Any], Any], *, field: str | int | None = None, random: bool = True) -> Stream:
        """Keep the samples for which `fn(sample)` is true. Batches stay full.

        Args:
            fn: A plain function runs in workers, an `async def` on the event loop.
            field: Pass only this field to `fn`. With "__key__", and shards with an index, dropped samples are not read.
            random: As in `map`.
        """
        asks, fn = None, check.function(".filter(): fn", fn)
        if field is not None:
            asks = fn if field == "__key__" and not is_async(fn) else None
            fn = AsyncFieldFilter(fn, field) if is_async(fn) else FieldFilter(fn, field)
        return self._with(EachSample(Step(f"filter({name_of(fn)})", "filter", fn, random), keeps_key=asks))

    def flat_map(self, fn: Callable[[Any], Any], *, random: bool = True) -> Stream:
        """Replace each sample by the samples of `fn(sample)`: many, one or none. Batches stay full.

        States are exact, even between the results of one sample: `fn` is then called again for it, and must return the
        same. If `fn` raises, the sample yields only the error.

        Args:
            fn: Returns a list or another iterable, or is a generator function. A plain function runs in workers, an
                `async def` on the event loop.
            random: As in `map`. In later steps, each result has random numbers of its own.

        Examples:
            >>> import headrace as hr
            >>> data = hr.from_map(["a b", "", "c d e"]).flat_map(str.split)
            >>> list(hr.DataLoader(data, batch_size=4))
            [['a', 'b', 'c', 'd'], ['e']]
        """
        from headrace.ops.flat_map import gives_many

        fn = check.function(".flat_map(): fn", fn)
        return self._with(EachSample(Step(f"flat_map({name_of(fn)})", "many", gives_many(fn), random)))

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
            >>> import headrace as hr
            >>> def rises(numbers):
            ...     last = next(numbers)
            ...     for number in numbers:
            ...         yield number - last
            ...         last = number
            >>> list(hr.from_map([1, 4, 9, 16]).apply(rises))
            [3, 5, 7]
        """
        from headrace.ops.combine import applied

        return applied((self,), fn=fn)

    def enumerate(self) -> Stream:
        """Replace each sample by (number, sample), where the number is its position in the epoch.

        Positions count from 0 over all ranks together, so they depend on neither ranks nor workers, and continue when a
        state is loaded. After operators that drop, make or group samples, the samples that come out of these are
        counted, on one rank. With tail="pad", the number of a padding sample repeats. With tail="carry", samples
        carried over from another epoch have negative numbers. Samples skipped by `exclude=` keep their numbers.

        Raises:
            OptionError: When a loader starts: several ranks share samples that are counted only while reading, so that
                no rank knows the counts of the others.

        Examples:
            >>> import headrace as hr
            >>> list(hr.from_map(["a", "b", "c"]).slice(1).enumerate())
            [(0, 'b'), (1, 'c')]
        """
        return self._with(EachSample(Step("enumerate()", "map", as_it_is, is_numbered=True)))

    def unbatch(self) -> Stream:
        """Split each batch into its samples: arrays, tensors, texts, and dicts and tuples of them.

        A stream can so have batches of several sizes: `.batch(64).map(model).unbatch()` and then `.batch(32)`, or the
        loader's `batch_size`. Collated numbers become tensors without dimensions.
        """
        from headrace.ops.flat_map import Unbatch

        return self._with(EachSample(Step("unbatch()", "many", Unbatch()), is_unbatch=True))

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
            >>> import headrace as hr
            >>> squares = hr.from_map(range(4)).map(lambda n: n * n).cache()
            >>> [list(squares), list(squares.map(str))]
            [[0, 1, 4, 9], ['0', '1', '4', '9']]
        """
        from headrace.ops.combine import cached

        return cached((self,), place=place, max_bytes=max_bytes, version=version)

    def select(self, *names: str) -> Stream:
        """Keep only the named fields of each sample. With an index, other fields are not read.

        "jpg;png" is the first of the two that a sample has. A sample without such a field is a FormatError that names
        it.
        """
        check.names(".select(): names", {*names})
        selection = Select(names)
        return self._with(EachSample(Step(f"select({', '.join(names)})", "map", selection), selection=selection))

    def to_tuple(self, *names: str) -> Stream:
        """Replace each sample by a tuple of the named fields.

        "jpg;png" is the first of the two that a sample has. A sample without such a field is a FormatError that names
        it.
        """
        check.names(".to_tuple(): names", {*names})
        selection = ToTuple(names)
        return self._with(EachSample(Step(f"to_tuple({', '.join(names)})", "map", selection), selection=selection))

    def rename(self, **new_by_old: str) -> Stream:
        """Rename fields: `.rename(jpg="image", cls="label")`.

        "jpg;png" is the first of the two that a sample has: `.rename(**{"jpg;png": "image"})`. A sample without such a
        field is a FormatError.

        Before `.select()` or `.to_tuple()`, it causes unused fields to be read. Put it after `.select()`, and use the
        old names in `.to_tuple()`.
        """
        check.names(".rename(): new names", [*new_by_old.values()])
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
        """Replace a text by its tokens: an array [tokens] in the field `into`. `field` is removed.

        Args:
            tokenizer: A tokenizer of Hugging Face (`tokenizers.Tokenizer`, or of transformers), a tiktoken `Encoding`,
                or a function that returns the ids of a text. tiktoken treats special tokens in a text as plain text;
                others follow their configuration. It runs in workers, and must be deterministic.
            field: The text: str, or bytes of UTF-8.
            into: Name of the field with the tokens. In samples that are tuples, the tokens replace the text.
            dtype: dtype of the array. An id that does not fit is an error.

        Examples:
            >>> import headrace as hr
            >>> next(iter(hr.from_map([{"text": "abc"}]).tokenize(lambda text: [ord(sign) for sign in text])))
            {'input_ids': array([ 97,  98,  99])}
        """
        from headrace.ops.tokenize import Tokenize, ids_by

        check.one_of(".tokenize(): dtype", dtype, ("int64", "int32", "uint16"))
        tokenizes = Tokenize(ids_by(tokenizer), field, into, dtype)
        return self._with(EachSample(Step(f"tokenize({field!r})", "map", tokenizes)))
