"""Methods of data sets that combine several data sets."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from headrace._util import check
from headrace.dataset.methods.adding import AddsOperators

if TYPE_CHECKING:
    from headrace.dataset.stream import Stream


class InputMethods(AddsOperators):
    """Combinations of several streams; each keeps its own order and steps.

    If the samples of all inputs have numbers, so have those of the combined stream. Otherwise, as after `.filter()` or
    without an index, samples are counted as they come, on one rank, and each input runs in a loader of its own.
    """

    def concat(self, *others: object) -> Stream:
        """Concatenate this stream and the others.

        Each shuffled input keeps its own order. `.concat(…).shuffle()` shuffles all samples together.

        Args:
            *others: Streams or data sets; a list is one, too. Only the last one may be endless.

        Raises:
            OptionError: An input is not supported.

        Examples:
            >>> import headrace as hr
            >>> letters, digits = hr.from_map(["a", "b", "c"]), hr.from_map([1, 2])
            >>> list(letters.concat(digits))
            ['a', 'b', 'c', 1, 2]
        """
        from headrace.ops.combine import concat

        return concat((self, *others))

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
            >>> import headrace as hr
            >>> images, texts = hr.from_map(["image 0", "image 1"]), hr.from_map(["text 0", "text 1"])
            >>> list(images.zip(texts.map(str.upper)))
            [('image 0', 'TEXT 0'), ('image 1', 'TEXT 1')]
        """
        from headrace.ops.combine import zipped

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
            >>> import headrace as hr
            >>> images = hr.from_map([{"id": 3, "size": 8}, {"id": 1, "size": 9}, {"id": 2, "size": 7}])
            >>> labels = hr.from_map([{"id": 1, "label": "cat"}, {"id": 3, "label": "dog"}])
            >>> [(image["size"], label["label"]) for image, label in images.join(labels, on="id")]
            [(8, 'dog'), (9, 'cat')]
        """
        from headrace.ops.combine import join

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
            >>> import headrace as hr
            >>> image, label = hr.from_map([{"n": 1}, {"n": 2}]).fork(2)
            >>> list(image.map(lambda sample: sample["n"] * 10).zip(label.map(lambda sample: sample["n"] % 2)))
            [(10, 1), (20, 0)]
        """
        from headrace.ops.fork_branch import Branch

        check.whole(".fork(): n", n, 1)
        name = uuid.uuid4().hex
        return tuple([self._with(Branch(name, number, n)) for number in range(n)])

    def interleave(self, *others: object, block: int = 1) -> Stream:
        """Take blocks of samples from the streams in turn, starting with this one.

        An exhausted input is skipped, so each sample of each input occurs once. `hr.mix` goes by weights instead.

        Args:
            *others: Streams or data sets; a list is one, too. Any may be endless.
            block: Samples that an input contributes in its turn. Its last block may be shorter.

        Raises:
            OptionError: An input or the block is not supported.

        Examples:
            >>> import headrace as hr
            >>> letters, digits = hr.from_map(["a", "b", "c"]), hr.from_map([1, 2])
            >>> list(letters.interleave(digits))
            ['a', 1, 'b', 2, 'c']
        """
        from headrace.ops.combine import interleave

        return interleave((self, *others), block=block)
