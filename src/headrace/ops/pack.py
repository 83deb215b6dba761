"""The implementation of `.pack()`: validation, and a choice of planned or row packing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from numpy.typing import ArrayLike

from headrace.dataset.methods.adding import AddsOperators
from headrace.dataset.stream import Stream
from headrace.errors import OptionError
from headrace.ops.lengths import checked_lengths
from headrace.ops.operator import EachSample, GroupOperator
from headrace.ops.pack_planned import PackDataset
from headrace.ops.pack_sequences import PackStep
from headrace.ops.run_inline import split_steps
from headrace.order.packing import Packing
from headrace.pipeline.needs import refusal
from headrace.pipeline.pipeline import Pipeline
from headrace.workers.tasks import Step

_IDS = ("document_ids", "position_ids")


def packed_stream(
    data: AddsOperators,
    length: int,
    *,
    tokens: str,
    method: str,
    document_ids: bool,
    lengths: ArrayLike | None,
    fields: Sequence[str],
    pad_value: float | Mapping[str, float],
) -> Stream:
    """Return the stream of `.pack()`.

    Raises:
        OptionError: An argument is invalid; or for planned packing, the documents or their lengths are not known.
    """
    call = f".pack({length!r})"
    if not hasattr(length, "__index__") or length < 1:
        raise OptionError(f"{call}: a sequence has 1 token or more")
    if method not in ("concat", "best_fit"):
        raise OptionError(f".pack(method={method!r}): 'concat' or 'best_fit' is meant")
    fields = [fields] if isinstance(fields, str) else fields
    names = (tokens, *fields)
    if len({*names, *_IDS}) < len(names) + len(_IDS):
        raise OptionError(
            f".pack(tokens={tokens!r}, fields={fields!r}): each field is named once, and none of them is called as "
            "document_ids and position_ids are"
        )
    pads = dict(pad_value) if isinstance(pad_value, Mapping) else {tokens: pad_value}
    unknown = next((name for name in pads if name not in names), None)
    if unknown is not None:
        raise OptionError(f".pack(pad_value={pads!r}): field {unknown!r} is none of {', '.join(names)}")
    if not all(hasattr(pad, "__float__") for pad in pads.values()):
        raise OptionError(f".pack(pad_value={pad_value!r}): a number is needed, or one for each field by its name")
    given = None if lengths is None else checked_lengths(lengths, ".pack(lengths=…)")
    stream, length = data._as_stream(), int(length)
    pipeline = stream.pipeline()
    _check_documents(pipeline, call)
    is_planned = given is not None or (pipeline.source.has_lengths and pipeline.keeps_count)
    if is_planned:
        _check_planned(pipeline, call)
    # Documents that are read for rows go through all steps before they are packed.
    steps = [(step.name, step.fn) for step in split_steps(pipeline.narrowed_steps)[1]] if is_planned else []
    makes = PackStep(length, tokens, names[1:], pads, document_ids, tuple(steps))
    if is_planned:
        is_random = any(step.random for step in pipeline.steps)
        packed = PackDataset(stream, Packing(length, method), given)
        return Stream(packed, (EachSample(Step("pack", "map", makes, is_random, is_implied=True)),))
    source, mixing = pipeline.source.drawn_by_tokens or (stream.source, None)
    packing = Packing(length, method, mixing)
    _check_rows(pipeline, packing, call)
    rows = GroupOperator(packing.text, batcher=None, measure=makes.count, collate=makes, packing=packing)
    return Stream(source, stream.operators)._with(rows)


def _check_documents(pipeline: Pipeline, call: str) -> None:
    source = pipeline.source
    if source.without_numbers is not None:
        raise OptionError(
            f"{call}: the documents of {source.name} have no numbers before they are read, and sequences would be "
            f"others on other ranks; {source.without_numbers}"
        )
    if pipeline.is_batched or pipeline.group is not None:
        raise OptionError(f"{call} behind .batch(): it is about documents; put .batch() behind .pack()")


def _check_rows(pipeline: Pipeline, packing: Packing, call: str) -> None:
    """Check that documents have numbers, and an order that all ranks know."""
    if pipeline.regroups or pipeline.limit is not None:
        before = pipeline.regroups[0].name if pipeline.regroups else f"take({pipeline.limit})"
        raise OptionError(
            f"{call} behind .{before}: which documents come would follow from those of all ranks; put it behind .pack()"
        )
    if packing.mixing is not None and pipeline.numbered is not None:
        raise OptionError(
            f"{call} behind .{pipeline.numbered.name} of a mixture by tokens: its documents have no places in the "
            "epoch before they are drawn; put it behind .pack()"
        )


def _check_planned(pipeline: Pipeline, call: str) -> None:
    """Check that the documents are known before they are read, and are the same in each pass."""
    source, order = pipeline.source, pipeline.order
    if source.only_in_order is not None:
        raise refusal("random access", call, source.name, remedy=source.only_in_order)
    if source.draws or not source.keeps_numbers:
        why = (
            "its inputs take turns, and sequences are planned of documents as they lie"
            if source.is_steady and source.keeps_numbers
            else "its documents are others in each epoch"
        )
        raise OptionError(
            f"{call} behind {source.name}: {why}; pack each of its sources, and mix "
            "what comes of that: sequences are equally long, so that their shares are shares of tokens"
        )
    if not pipeline.keeps_count:
        raise OptionError(
            f"{call} behind {pipeline.changing[0]}: how many documents come is known only once they are read; leave "
            "them out of the data first, or by their numbers: .sample(numbers)"
        )
    if pipeline.of_all is not None:
        raise OptionError(f"{call} behind .{pipeline.of_all}: that is about what a loader gives; put it behind .pack()")
    if order.passes is not None:
        raise OptionError(f"{call} behind .{order.passes.text}: put it in front of that")
    drawn = next(
        (one for one in order.one_pass if one is not order.shuffle and not (one.is_constant and one.is_fixed)), None
    )
    if drawn is not None or (order.shuffle is not None and len(order.one_pass) > 1):
        one = drawn or next(one for one in order.one_pass if one is not order.shuffle)
        raise OptionError(
            f"{call} behind .{one.text}: each epoch would have other documents, and other numbers of sequences; put "
            f".{one.text} behind .pack()" + ("" if drawn else ", or .shuffle()")
        )
    split_steps(pipeline.steps, "a document", ".pack()")
