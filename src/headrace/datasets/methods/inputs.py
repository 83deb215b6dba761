"""The operators of data sets that put several of them together."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from headrace.datasets.methods.adding import AddsOperators
from headrace.datasets.operators.forking import Branch
from headrace.errors import OptionError
from headrace.numbers import is_whole

if TYPE_CHECKING:
    from headrace.datasets.stream import Stream


class InputMethods(AddsOperators):
    """Several streams as one; each keeps its own order and its own steps.

    The inputs' samples have numbers: shards need an index. They are neither filtered (but by keys that an index knows)
    nor batched: both is done to what comes of these.
    """

    def concat(self, *others: AddsOperators) -> Stream:
        """The samples of this stream, and then those of the others, one after the other.

        Inputs that are shuffled have each an order of its own; `.concat(…).shuffle()` shuffles all together.

        Args:
            *others: streams, or data sets of headrace's. Only the last one may have no end.

        Raises:
            OptionError: an input cannot be used.

        Examples:
            >>> import headrace as hr
            >>> letters, digits = hr.from_map(["a", "b", "c"]), hr.from_map([1, 2])
            >>> list(letters.concat(digits))
            ['a', 'b', 'c', 1, 2]
        """
        from headrace.datasets.inputs.combined import concat

        return concat((self, *others))

    def zip(self, *others: AddsOperators, strict: bool = True) -> Stream:
        """A tuple of a sample of each stream: of the first ones, of the second ones, and so on.

        To shuffle samples that belong together, put them together first: `.zip(…).shuffle()`. Inputs that are shuffled
        have each an order of its own. The samples of a tuple are got one by one, at the same time.

        Args:
            *others: streams, or data sets of headrace's.
            strict: refuse inputs that have not as many samples as each other; else the shortest one ends them all.

        Raises:
            OptionError: an input cannot be used. When a loader begins: their numbers of samples differ.

        Examples:
            >>> import headrace as hr
            >>> images, texts = hr.from_map(["image 0", "image 1"]), hr.from_map(["text 0", "text 1"])
            >>> list(images.zip(texts.map(str.upper)))
            [('image 0', 'TEXT 0'), ('image 1', 'TEXT 1')]
        """
        from headrace.datasets.inputs.combined import zipped

        return zipped((self, *others), strict=strict)

    def join(self, other: AddsOperators, on: str | tuple[str, str] | None = None) -> Stream:
        """A tuple of each sample of this stream and the one of `other` that has the same key, in this one's order.

        Without `on` it gives the samples of both as they come, whichever is there first: inputs may be any streams,
        and the order is another one in each run, so that states are refused. Several ranks need `.epoch(samples=N)`
        behind it.

        Samples without a partner are left out. Keys are asked for when a loader begins, or `len`: all of an index, or
        that field of every sample, from which everything else follows as for `.zip()`. They are held in memory then.

        Args:
            other: each key comes once in it; here it may come several times. A key that is None is nobody's partner.
                Keys are the same where Python says so: 1, 1.0 and True are.
            on: the field that is the key, as the source has it, before any `.map()`, or as `.cache()` keeps it; two
                names, where they differ. A pair whose keys are other ones by then is an error.
                "__key__" is what the sample is called: for shards with an index nothing else is read to know it.

        Raises:
            OptionError: an input cannot be used: it is shuffled, say; `.join(…).shuffle()` keeps pairs together. When
                a loader begins: a key comes twice in `other`, or no two are the same.

        Examples:
            >>> import headrace as hr
            >>> images = hr.from_map([{"id": 3, "size": 8}, {"id": 1, "size": 9}, {"id": 2, "size": 7}])
            >>> labels = hr.from_map([{"id": 1, "label": "cat"}, {"id": 3, "label": "dog"}])
            >>> [(image["size"], label["label"]) for image, label in images.join(labels, on="id")]
            [(8, 'dog'), (9, 'cat')]
        """
        from headrace.datasets.inputs.combined import join

        return join((self, other), on=on)

    def fork(self, n: int) -> tuple[Stream, ...]:
        """`n` branches of the stream, to which different things are done; `.zip()` of them gets each sample once.

        Each branch gets a copy of the sample: what one changes in place no other one sees. What decides the order, what
        leaves samples out and what puts them together comes before it, or behind `.zip()`. A branch that is used by
        itself is the stream with the branch's steps.

        Args:
            n: branches.

        Raises:
            OptionError: there is to be none. By `.zip()`, and all else that puts streams together: branches would not
                stay together, so that samples would be got once for each.

        Examples:
            >>> import headrace as hr
            >>> image, label = hr.from_map([{"n": 1}, {"n": 2}]).fork(2)
            >>> list(image.map(lambda sample: sample["n"] * 10).zip(label.map(lambda sample: sample["n"] % 2)))
            [(10, 1), (20, 0)]
        """
        if not is_whole(n, 1):
            raise OptionError(f".fork({n!r}): 1 branch or more, a whole number")
        name = uuid.uuid4().hex
        return tuple([self._with(Branch(name, number, n)) for number in range(n)])

    def interleave(self, *others: AddsOperators, block: int = 1) -> Stream:
        """Blocks of the streams in turn: some samples of this one, as many of the next one, and so on.

        One that is used up takes part no more: each sample of each input comes once. `hr.mix` goes by weights instead.

        Args:
            *others: streams, or data sets of headrace's; any may have no end.
            block: samples that come of an input in its turn; the last block of each may have fewer.

        Raises:
            OptionError: an input or the block cannot be used.

        Examples:
            >>> import headrace as hr
            >>> letters, digits = hr.from_map(["a", "b", "c"]), hr.from_map([1, 2])
            >>> list(letters.interleave(digits))
            ['a', 1, 'b', 2, 'c']
        """
        from headrace.datasets.inputs.combined import interleave

        return interleave((self, *others), block=block)
