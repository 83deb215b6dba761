"""The bottleneck of a loader, in one sentence and a table."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from headrace.observe import Stats, WorkStats

_ENOUGH_BATCHES = 3
_ENOUGH_S = 0.2
_FREE_SHARE = 0.1  # if the trainer waits less than this share of its time, the trainer is the limit
_THROTTLED_SHARE = 0.01  # if the store refuses more than this share of requests, the store is the limit
_BUSY_SHARE = 0.6  # if workers are busy more than this share of the time, they are the limit
_IDLE_SHARE = 0.5  # if workers are busy less than this, they are not the limit
_READ_SHARE = 0.4  # if reads take more than this share of the time, they are the limit
_HELD_SHARE = 0.4  # if the user's coroutines or threads take more than this share, they are the limit
_START_SHARE = 0.5  # if the workers' start takes more than this share, nothing else can be concluded
_TOO_FEW = "Too few batches have come to find the limit of the loader."
_NAMED = 3  # skipped samples shown
_LINE = 100  # characters of an error

BoundBy = Literal["unknown", "trainer", "fetch", "loop", "work", "collate"]


@dataclass(frozen=True)
class Verdict:
    """The bottleneck of a loader.

    Attributes:
        bound_by: "trainer" (the loader is ahead), "fetch", "loop" (your own code on the event loop, or in the threads
            of `from_map` and `from_iterable`), "work" (the functions in workers, or their start), "collate", or
            "unknown" (too few batches, or no clear bottleneck).
        sentence: Description of the bottleneck, with advice.
    """

    bound_by: BoundBy
    sentence: str


def verdict(stats: Stats) -> Verdict:
    """Determine the bottleneck from a snapshot, without first batches."""
    deliver, work = stats.deliver, stats.work
    if deliver.batches < _ENOUGH_BATCHES or deliver.active_s < _ENOUGH_S:
        return Verdict("unknown", _TOO_FEW)
    if (text := _own_code(stats)) is not None:
        return Verdict("loop", text)
    if stats.start_s > _START_SHARE * deliver.active_s:
        return Verdict("work", _start(stats))
    loop_s = deliver.wait_s + deliver.trainer_s
    if loop_s < _ENOUGH_S:
        return Verdict("unknown", _TOO_FEW)
    waiting = deliver.wait_s / loop_s
    if waiting < _FREE_SHARE:
        return Verdict(
            "trainer",
            f"The trainer is the limit: it waits {waiting:.0%} of its time for batches. Nothing to gain in the loader.",
        )
    if work.is_inline:
        return _inline(work, waiting)
    busy_s = {step: seconds for step, seconds in work.busy_s.items() if step != "start"}
    busy = sum(busy_s.values())
    share = stats.busy_share
    reading = stats.fetch.reading_s / max(1e-9, deliver.active_s)
    if share < _BUSY_SHARE and reading > share and stats.fetch.throttled > _THROTTLED_SHARE * stats.fetch.requests:
        return Verdict(
            "fetch",
            f"The store is the limit: it has asked for fewer requests {stats.fetch.throttled:,} times. Try larger "
            "objects, other prefixes or fewer loaders; more requests at once would not help.",
        )
    if share < _BUSY_SHARE and (text := _waiting_calls(stats)) is not None:
        return Verdict("fetch", text)
    if share < _BUSY_SHARE and reading > max(share, _READ_SHARE):
        return Verdict(
            "fetch",
            f"Reading is the limit: the trainer waits {waiting:.0%} of its time while the workers are busy only "
            f"{share:.0%} of theirs. Try a larger hr.Fetch(concurrency=) or memory_budget, or data that is nearer.",
        )
    if not busy:
        return Verdict("unknown", "The workers have done nothing yet.")
    collate, write = work.busy_s.get("collate", 0.0), work.busy_s.get("write", 0.0)
    ratio = _collation_ratio(work)
    wanted = 1 + min(work.workers, math.ceil(ratio))  # the batches being collated meanwhile, and one being made
    more = [f"prefetch_factor={wanted}"] if wanted > work.batches_at_once else []
    more += [f"num_batch_workers={wanted - 1}"] if wanted - 1 > work.collations_at_once else []
    if ratio and more and share < _BUSY_SHARE:
        return Verdict(
            "collate",
            f"Collating is the limit: a batch takes {ratio:.1f} times as long as its samples do when all workers make "
            f"them, and they are busy only {share:.0%} of the time. Try {' and '.join(more)}.",
        )
    if collate + write > busy / 2:
        advice = "Try the default collate_fn with samples of one shape: they are written straight into place."
        if write > collate:
            advice = (
                "It is copying samples into batches: try smaller ones (uint8 in place of float32), or fewer copies."
            )
        return Verdict(
            "collate", f"Collating is the limit: {(collate + write) / busy:.0%} of the workers' time. {advice}"
        )
    if share < _IDLE_SHARE:
        return Verdict(
            "unknown",
            f"The loader is the limit, and no stage explains it: the trainer waits {waiting:.0%} of its time, while "
            f"the workers are busy only {share:.0%} of theirs and reads are under way {min(1.0, reading):.0%} of it"
            + (f"; {stats.start_s:.1f} s of {deliver.active_s:.1f} s were the workers' start" if stats.start_s else "")
            + ". Ask again after more batches, then try a larger prefetch_factor, or see what else runs here.",
        )
    slowest = max((s for s in busy_s if s not in ("collate", "write")), key=lambda s: busy_s[s])
    return Verdict(
        "work",
        f"The workers are the limit: busy {share:.0%} of the time, most of it in {slowest} "
        f"({busy_s[slowest] / busy:.0%}). Try more workers, or make {slowest} cheaper.",
    )


def _inline(work: WorkStats, waiting: float) -> Verdict:
    """Determine the bottleneck of a loader that makes its batches inside `next`."""
    slowest = max(work.busy_s, key=lambda step: work.busy_s[step])
    return Verdict(
        "collate" if slowest == "collate" else "work",
        f"The training loop makes its own batches (num_workers=0), {waiting:.0%} of its time, most of it in {slowest} "
        f"({work.busy_s[slowest] / max(1e-9, sum(work.busy_s.values())):.0%}). Try num_workers=1 or more.",
    )


def _own_code(stats: Stats) -> str | None:
    """Return the sentence for user code that takes most of the reading time, or None."""
    deliver, functions = stats.deliver, stats.fetch.functions
    time_s = max(1e-9, deliver.active_s - stats.start_s)
    taken = dict.fromkeys(("loop", "threads"), 0.0)
    for function in functions.values():
        taken[function.where] += function.seconds
    where = max(taken, key=lambda place: taken[place])
    waiting = (deliver.first_wait_s + deliver.wait_s) / max(1e-9, deliver.active_s)
    least_s = min(
        _HELD_SHARE * deliver.active_s, max(_HELD_SHARE * time_s, stats.start_s)
    )  # the start also waits for the user's code
    if waiting < _FREE_SHARE or taken[where] < least_s or taken[where] < stats.busy_share * time_s:
        return None
    name = max((name for name in functions if functions[name].where == where), key=lambda n: functions[n].seconds)
    most = functions[name]
    a_call = (
        f"{1000 * most.seconds / max(1, most.calls):.1f} ms a call, {min(1.0, most.seconds / time_s):.0%} of the time"
    )
    if where == "loop":
        return (
            f"Your coroutine {name} is the limit: it holds the event loop {a_call}, and nothing is read meanwhile. "
            "Move what it computes, or waits for without await, to .map(a plain function), which runs in the workers."
        )
    return (
        f"Your {name} is the limit: it computes {a_call}, in threads of this process, which share its interpreter with "
        "the trainer. Move what it computes to .map(a plain function), which runs in the workers, or give the data set "
        "itself to the loader."
    )


def _waiting_calls(stats: Stats) -> str | None:
    """Return the sentence for `from_map` calls that mostly wait; None if there are none."""
    calls = {name: held for name, held in stats.fetch.functions.items() if name.endswith(".__getitem__")}
    name = max(calls, key=lambda name: calls[name].waited, default="")
    time_s = max(1e-9, stats.deliver.active_s - stats.start_s)
    if not name or calls[name].waited < _READ_SHARE * time_s:
        return None
    a_call = 1000 * calls[name].waited / max(1, calls[name].calls)
    return (
        f"Your {name} is the limit: it waits {a_call:.1f} ms a call, and one call at a time is made by default. "
        "Where it is safe to call from several threads, try hr.from_map(…, threads=16)."
    )


def _start(stats: Stats) -> str:
    loaded_s = stats.start_s - (stats.started_s or 0.0)
    return (
        f"The start of the workers is the limit so far: {stats.start_s:.1f} s of {stats.deliver.active_s:.1f} s; "
        f"{loaded_s:.1f} s of it went into loading your functions, with all that they import, and worker_init_fn. It "
        "comes once for a loader: keep the loader for further epochs, and ask again after more batches."
    )


def _collation_ratio(work: WorkStats) -> float:
    """Collation time of a batch, relative to the time of all workers for its samples.

    0: one worker does both. Collation keeps up only if as many batches run at once.
    """
    samples = sum(seconds for step, seconds in work.busy_s.items() if step not in ("start", "collate", "write", "read"))
    if not work.batches_at_once or not samples:
        return 0.0
    return work.busy_s.get("collate", 0.0) * work.workers / samples


def report(stats: Stats) -> str:
    """Return a table of the stages and the verdict."""
    fetch, work, deliver = stats.fetch, stats.work, stats.deliver
    waited = deliver.wait_s / max(1e-9, deliver.wait_s + deliver.trainer_s)
    rate = deliver.samples / max(1e-9, deliver.active_s)
    again = f"{fetch.requests:,} requests ({fetch.retries:,} again) in {fetch.active_s:.1f} s"
    done = f"{deliver.samples:,} samples in {deliver.batches:,} batches"
    workers = "the training loop itself" if work.is_inline else f"{work.workers} workers"
    lines = [
        f"headrace: {done}, {deliver.active_s:.1f} s, {rate:,.0f} samples/s",
        *([f"  fetch    {again}, {_size(fetch.bytes)}"] if stats.budget_bytes else []),
        f"  work     {workers}, busy {stats.busy_share:.0%}: " + (_steps(work.busy_s) or "nothing yet"),
        f"  deliver  waited {deliver.first_wait_s:.2f} s for first batches, then {waited:.0%} of the time",
    ]
    if stats.budget_bytes:
        lines.append(f"  memory   {_size(stats.shared_bytes)} shared of a budget of {_size(stats.budget_bytes)}")
    else:  # torch data sets: headrace does not budget their reads and memory
        lines.append(f"  memory   {_size(stats.shared_bytes)} shared; {_size(deliver.bytes)} came from workers")
    if fetch.functions:
        lines.append(f"  yours    {_functions(stats)}")
    if fetch.throttled:
        held = f", down to {fetch.lowest_level} requests at once" if fetch.lowest_level else ""
        lines.append(f"  store    asked for fewer requests {fetch.throttled:,} times{held}")
    if fetch.hedges:
        lines.append(f"  late     {fetch.hedges:,} second requests, {fetch.hedges_won:,} of them answered first")
    if fetch.coalesced or fetch.cached:
        lines.append(f"  saved    {fetch.coalesced:,} reads joined to others, {fetch.cached:,} from the cache")
    if fetch.shards_in_part:
        lines.append(f"  shards   {fetch.shards_whole:,} read whole, {fetch.shards_in_part:,} only where it was wanted")
    if work.deaths:
        lines.append(f"  deaths   {work.deaths} workers ended and were replaced; their work was done again")
    if stats.repeated or stats.left_out or stats.unread:
        unread = f", {stats.unread:,} were not looked at" if stats.unread else ""
        lines.append(f"  tail     {stats.repeated:,} samples came twice, {stats.left_out:,} were dropped{unread}")
    if stats.tokens:
        whole = max(1, sum(stats.tokens.values()))
        shares = ", ".join(f"{name} {count / whole:.2%}" for name, count in stats.tokens.items())
        lines.append(f"  mixture  {sum(stats.tokens.values()):,} tokens: {shares}")
    if stats.skipped:
        lines.append(f"  skipped  {_skipped(stats)}")
    return "\n".join([*lines, verdict(stats).sentence])


def _functions(stats: Stats) -> str:
    most = sorted(stats.fetch.functions.items(), key=lambda item: -item[1].seconds)[:_NAMED]
    lines = []
    for name, (where, calls, seconds, _) in most:
        held = "holds the loop" if where == "loop" else "computes in threads"
        lines.append(f"{name} {held} {1000 * seconds / max(1, calls):.2f} ms a call, {calls:,} calls")
    return "; ".join(lines)


def _skipped(stats: Stats) -> str:
    named = stats.skipped_samples[:_NAMED]
    lines = [f"{sample.name or f'sample {sample.position}'} ({_line(sample.error)})" for sample in named]
    more = [f"and {stats.skipped - len(named):,} more"] if stats.skipped > len(named) else []
    return f"{stats.skipped:,} sample{'s' if stats.skipped > 1 else ''}: " + ", ".join(lines + more)


def _line(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _LINE else text[: _LINE - 1] + "…"


def _steps(busy_s: dict[str, float]) -> str:
    total = sum(busy_s.values()) or 1e-9
    largest = sorted(busy_s.items(), key=lambda item: -item[1])[:5]
    return ", ".join(f"{step} {seconds / total:.0%}" for step, seconds in largest)


def _size(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError
