"""Resolution of loader options: checks, and every "auto"."""

from __future__ import annotations

import operator
import os
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, SupportsIndex, TypedDict

import torch
from torch.utils.data import default_convert

from headrace._util import check
from headrace._util.functions import as_it_is, name_of
from headrace._util.shared_memory import ADVICE, free_descriptors, memory_bytes, reads_at_most
from headrace.errors import LateOptionError
from headrace.options import Economic, Exclude, Fetch, Ranks, Settings, Skip
from headrace.pipeline.pipeline import Pipeline
from headrace.torch_compat.collate import default_collate, is_extended, of_single, unchanged_by

_FIRST_READS, _MOST_READS = 128, 1024  # start and maximum of Fetch(concurrency="auto")
_MEMORY_SHARE = 4  # memory_budget="auto" is the machine's memory divided by this
_PREFETCH_BATCHES = 4
_TOGETHER = 64  # batches per message
_FOR_OURS: dict[str, tuple[tuple[str, ...], str]] = {  # name: values if unset, and why others have no such option
    "fetch": ((), "does its own reading"),
    "errors": ((), "fails by whole batches"),
    "workers": (("process", "thread"), "is loaded by torch's kind of workers"),
    "ranks": ((), "has a sampler, which sets the samples of each rank"),
    "exclude": ((), "has a sampler, which sets the samples of each rank"),
}
_RENAMED = {
    **{name: f"ranks=hr.Ranks({name}=…)" for name in ("rank", "world_size", "global_batch_size", "balance")},
    "device_mesh": "ranks=hr.Ranks(mesh=…)",
    "data_dims": "ranks=hr.Ranks(dims=…)",
    "tail": "ranks=hr.Ranks(last_batch=…)",
    **{name: f"ranks=hr.Ranks({name}=…)" for name in ("mesh", "dims", "last_batch", "compare")},
    "shard": "ranks=hr.Ranks.none for False, and omitted for True",
    "on_error": "errors=hr.Skip() or errors=hr.Skip(when=…), and omitted for 'raise'",
    "max_skips": "errors=hr.Skip(max_in_epoch=…, max_in_row=None)",
    **{name: f"errors=hr.Skip({name}=…)" for name in ("max_in_epoch", "max_in_row", "log", "when")},
    "quarantine": "errors=hr.Skip(log=…)",
    "fetch_concurrency": "fetch=hr.Fetch(concurrency=…)",
}
_OPTIONS = {"ranks": (Ranks,), "errors": (Skip,), "fetch": (Fetch,), "exclude": (Exclude, str, os.PathLike)}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", re.IGNORECASE)


class Aliases(TypedDict, total=False):
    """Names that the RFC "DataLoader-Economic" has for an option of `Economic`."""

    num_batch_workers: int | None
    num_workers_batches: int | None


def economy(economic: bool | Economic, others: Mapping[str, Any]) -> bool | Economic:
    """Return the economic mode, with the RFC's names as options of it. Refuse other keyword arguments.

    Raises:
        OptionError: an option has another name by now, or several exclude each other.
        TypeError: a name is unknown, as by Python.
    """
    for name in others.keys() - Aliases.__annotations__.keys():
        if name in _RENAMED:
            raise check.invalid(name, others[name], f"given as {_RENAMED[name]}")
        raise TypeError(f"DataLoader.__init__() got an unexpected keyword argument {name!r}")
    if type(economic) not in (bool, Economic):
        raise check.invalid("economic", economic, "True, False or hr.Economic(…)")
    given = {name: value for name, value in others.items() if value is not None}
    if not given:
        return economic
    names = " and ".join(f"{name}={value!r}" for name, value in given.items())
    if not economic:
        raise check.lacking(names, "economic=True")
    if len(given) > 1:
        raise check.conflict("num_batch_workers=", "num_workers_batches=")
    if economic is not True:
        raise check.conflict(names, f"economic={economic!r}")
    return Economic(num_batch_workers=next(iter(given.values())))


def check_workers(workers: object, num_workers: SupportsIndex, collate_fn: object) -> None:
    """Check arguments that torch or Python would check only when the loader is iterated over."""
    is_executor = callable(getattr(workers, "start", None)) and callable(getattr(workers, "aclose", None))
    if not is_executor:
        check.one_of("workers", workers, ("process", "thread"), ", or an executor")
    if is_executor and num_workers == 0:
        raise check.lacking("workers is an executor, and it", "num_workers above 0, the workers to start")
    try:
        operator.index(num_workers)
    except TypeError:
        raise TypeError(f"num_workers={num_workers!r} must be a whole number") from None
    if collate_fn is not None and not callable(collate_fn):
        raise TypeError(f"collate_fn={collate_fn!r} must be callable")


def check_torch(loader: Any) -> None:
    """Check the arguments of a loader in the torch regime."""
    kind = type(loader.dataset).__name__
    for name in ("sampler", "batch_sampler"):
        value = getattr(loader, name)
        if value is not None and not (hasattr(value, "__iter__") or hasattr(value, "__getitem__")):
            raise TypeError(f"{name}={value!r} must be iterable")
    if loader.timeout > 0 and loader.num_workers == 0:
        raise LateOptionError(f"timeout={loader.timeout} needs workers, and num_workers is 0")
    if loader.prefetch_factor == 0:
        raise LateOptionError(f"prefetch_factor=0 must be more than 0 for {kind}")
    for name, (unset, why) in _FOR_OURS.items():
        value = getattr(loader, name)
        if value is not None and value not in unset:
            remedy = "hr.from_map(data) and hr.from_iterable(data) make one of it"
            raise check.lacking(f"{name}=", f"a data set of headrace, and {kind} {why}: {remedy}")
    check.whole_or_none("snapshot_every_n_steps", loader.snapshot_every_n_steps)
    if loader.workers == "thread" and loader.multiprocessing_context is not None:
        raise check.conflict("multiprocessing_context", "workers='thread'")
    _check_economic(loader, kind)


def check_ours(loader: Any, kind: str, *, multiprocessing_context: object, prefetch_factor: int | None) -> None:
    """Refuse arguments that are for torch's data sets only."""
    for name, value, why in (
        ("multiprocessing_context", multiprocessing_context, "has workers of the loader's"),
        ("economic", loader.economic, "is always loaded like that"),
        ("snapshot_every_n_steps", loader.snapshot_every_n_steps, "has states without snapshots"),
    ):
        if value is not None and value is not False:
            raise check.lacking(f"{name}={value!r}", f"a data set of torch, and {kind} {why}")
    for name, options in _OPTIONS.items():
        value = getattr(loader, name)
        if value is not None and not isinstance(value, options):
            file = ", or a file written by hr.Skip(log=)" if name == "exclude" else ""
            raise check.invalid(name, value, f"hr.{options[0].__name__}(…){file}")
    if prefetch_factor is not None and prefetch_factor < 0:
        raise ValueError("prefetch_factor option should be non-negative")


def _check_economic(loader: Any, kind: str) -> None:
    given = {} if loader.seed is None else {"seed": loader.seed}
    if loader.memory_budget != "auto":
        given["memory_budget"] = loader.memory_budget
        budget_bytes(loader.memory_budget)
    _seed(loader.seed)
    if not loader.economic:
        for name, value in given.items():
            raise check.lacking(f"{name}={value!r}", f"economic=True for {kind}")
        return
    if isinstance(loader.dataset, torch.utils.data.IterableDataset):
        raise check.lacking("economic=True", f"a data set with __getitem__, and {kind} is iterated over")
    if loader.num_workers == 0:
        raise check.lacking("economic=True", "workers, and num_workers is 0")
    if loader.multiprocessing_context is not None:
        raise check.conflict("economic=True", "multiprocessing_context", "its workers start from a clean process")


def resolve(loader: Any, pipeline: Pipeline) -> Settings:
    """Return the settings of a loader over a headrace data set, or raise OptionError."""
    batch_size, drop_last = loader.batch_size, loader.drop_last
    processes = loader.num_workers if loader.workers == "process" else 0
    function: Callable[[Any], object] = loader.collate_fn
    collate: Callable[[list[Any]], object] | None = function
    if pipeline.group is not None:
        if batch_size not in (None, 1):
            raise check.conflict(f"batch_size={batch_size}", f".{pipeline.group.text}")
        batch_size, drop_last = pipeline.group.size, pipeline.group.drop_last
        if collate is default_convert:  # torch's default where the loader itself makes no batches
            collate = default_collate
        if pipeline.group.collate is not None:
            if collate is not default_collate:
                raise check.conflict(f"collate_fn={name_of(function)}", f".{pipeline.group.text}")
            collate = pipeline.group.collate
    elif pipeline.is_batched:
        if batch_size not in (None, 1):
            also = ", or put .unbatch() last" if pipeline.timed is None else ""
            raise check.conflict(
                f"batch_size={batch_size}", f".{pipeline.batched_by}", f"leave the loader's batch_size out{also}"
            )
        if pipeline.timed is not None and function not in (default_collate, default_convert, as_it_is):
            name = name_of(function)
            raise check.conflict(f"collate_fn={name}", f".{pipeline.timed}", f"put .collate({name}) right after that")
        batch_size, collate = None, of_single(default_convert if function is default_collate else function)
    elif batch_size is None:
        collate = of_single(function)
    if pipeline.gives_many is not None and not loader.in_order:
        why = "a state could not record how many results of a sample were received; leave in_order out"
        raise check.conflict("in_order=False", f".{pipeline.gives_many}", why)
    ranks, skips, fetch, exclude = loader.ranks or Ranks(), loader.errors, loader.fetch or Fetch(), loader.exclude
    if isinstance(exclude, str | os.PathLike):
        exclude = Exclude(files=[exclude])
    if pipeline.puts_together is not None and skips is not None and skips.log is not None:
        raise check.conflict(
            "hr.Skip(log=)", f".{pipeline.puts_together}", "which sample of a group failed is not known"
        )
    if pipeline.separate is not None and (loader.workers == "thread" or not loader.num_workers):
        raise check.lacking(f".{pipeline.separate} has is_separate_process=True, and it", "processes: give num_workers")
    if skips is not None:
        skips.check_log()
    use_slots = collate is default_collate and not pipeline.after and not is_extended()
    has_several = loader.in_order and (pipeline.group is None or pipeline.group.size is not None)
    most = _prefetch(loader.prefetch_factor, pipeline.prefetch)
    prefetch_factor, together = _ahead(loader, most, use_slots=use_slots, has_several=has_several)
    if drop_last and ranks.last_batch not in (None, "drop"):
        raise check.conflict("drop_last=True", f"hr.Ranks(last_batch={ranks.last_batch!r})")
    tail = "drop" if drop_last else ranks.last_batch or "short"
    if ranks.global_batch_size is not None and (pipeline.group is not None or batch_size != 1):
        given = f".{pipeline.group.text}" if pipeline.group is not None else f"batch_size={batch_size}"
        raise check.conflict(f"hr.Ranks(global_batch_size={ranks.global_batch_size})", given)
    return Settings(
        batch_size=batch_size or 1,
        global_batch_size=ranks.global_batch_size and int(ranks.global_batch_size),
        is_single=batch_size is None,
        tail=tail,
        drop_last=tail == "drop",
        num_workers=loader.num_workers,
        prefetch_factor=prefetch_factor,
        collate=collate,
        use_slots=use_slots,
        init=loader.worker_init_fn if loader.num_workers else None,
        seed=_seed(loader.seed),
        in_order=loader.in_order,
        timeout_s=loader.timeout,
        fetch_concurrency=(reads := _concurrency(fetch.concurrency, processes)),
        first_reads=min(_FIRST_READS, reads) if fetch.concurrency == "auto" else reads,
        memory_budget=budget_bytes(loader.memory_budget),
        fetch=fetch,
        skips=skips,
        exclude=exclude,
        balance=ranks.balance,
        ranks=replace(ranks, last_batch=tail),
        pin_memory=loader.pin_memory,
        device=loader.device,
        together=together,
        unchanged=unchanged_by(collate),
    )


def _prefetch(factor: int | None, of_stream: int | None) -> int | None:
    if None not in (factor, of_stream) and factor != of_stream:
        raise check.conflict(f"prefetch_factor={factor}", f".prefetch({of_stream})")
    return of_stream if factor is None else factor


def _ahead(loader: Any, most: int | None, *, use_slots: bool, has_several: bool) -> tuple[int, int]:
    """Return (messages made ahead, maximum batches per message).

    Cheap batches are sent several per message. If the user limits how many are made ahead, the limit covers all
    messages, the one that the trainer has opened included.
    """
    messages = _PREFETCH_BATCHES if use_slots else max(_PREFETCH_BATCHES, 2 * loader.num_workers)
    if most is None:
        return messages, _TOGETHER if has_several else 1
    together = min(_TOGETHER, (most + 1) // (messages + 1))
    return (messages, together) if has_several and together > 1 else (most, 1)


def _seed(seed: SupportsIndex | None) -> int:
    """Return the seed as an int. Floats are refused: states would distinguish 1 and 1.0."""
    if not (seed is None or hasattr(seed, "__index__")):
        raise check.invalid("seed", seed, "a whole number")
    return 0 if seed is None else operator.index(seed)


def _concurrency(asked: Any, processes: int) -> int:
    """Return the maximum number of concurrent reads. Each may need a descriptor."""
    count = _MOST_READS if asked == "auto" else int(asked)
    most = reads_at_most(processes)
    if asked != "auto" and count > most:
        warnings.warn(
            f"hr.Fetch(concurrency={asked}): no more than {most} reads are made at once, as this process can open "
            f"{free_descriptors()} more files: {ADVICE}",
            RuntimeWarning,
            stacklevel=2,
        )
    return min(count, most)


def budget_bytes(budget: int | str) -> int:
    """Parse a number of bytes, or raise OptionError."""
    if budget == "auto":
        return memory_bytes() // _MEMORY_SHARE
    if isinstance(budget, str):
        match = _SIZE.fullmatch(budget)
        if match is None:
            raise check.invalid("memory_budget", budget, "bytes, text such as '2GiB', or 'auto'")
        base = 1024 if match[3] or not match[2] else 1000
        budget = int(float(match[1]) * base ** (" KMGT".index(match[2].upper()) if match[2] else 0))
    check.number("memory_budget", budget, is_open=True)
    return budget
