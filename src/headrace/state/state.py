"""Saved states of a loader, and their compatibility with a loader that resumes.

`docs/reference/state.md` specifies the fields.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import numpy as np

from headrace.errors import StateMismatchError
from headrace.order.cursor import Cursor, pack_ranges, united, unpack_ranges
from headrace.order.orders import ORDER_VERSION
from headrace.order.steps import Steps, share
from headrace.types import Ints, Ranges, Tail

if TYPE_CHECKING:
    from headrace.order.row_states import RowProgress

VERSION = 1
_OLDEST = 1
_CHECKED_MOST, _LANES_MOST = 1024, 2**16
_FACTS = ("seed", "data", "count", "order", "steps")
_ALIKE = (*_FACTS, "epoch", "position", "holes", "end", "step", "lanes", "tail", "world", "skip")
_AS_THEY_ARE = ("end", "step", "batch_size", "lanes", "tail", "world", "batches", "samples")
_NUMBERS = ("epoch", "position", "end", "step", "batch_size", "lanes", "world", "batches", "samples")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """Properties in which a state and the loader that resumes from it must agree.

    Attributes:
        data: Identifies the data.
        count: Samples of an epoch. None: not known.
        order: Operators that determine the order.
        steps: Operators that may skip samples.
    """

    seed: int
    data: str
    count: int | None
    order: tuple[str, ...]
    steps: tuple[str, ...]

    def pack(self) -> dict[str, object]:
        lists = {"order": list(self.order), "steps": list(self.steps)}
        return {"seed": self.seed, "data": self.data, "count": self.count, **lists}

    def compare(self, state: Mapping[str, object]) -> None:
        """Raise StateMismatchError, which names the property, if a state has another fingerprint."""
        facts = self.pack()
        for name in ("data", "count", "order", "steps", "seed"):
            mine, saved = facts[name], state.get(name)
            if saved != mine:
                raise StateMismatchError(f"{_MEANING[name]}: the state has {saved!r}, this loader {mine!r}", field=name)


_MEANING = {
    "data": "the data are others (names and numbers of samples of the shards, or their revision)",
    "count": "the number of samples of an epoch differs",
    "order": "the order is another one",
    "steps": "the operators that leave samples out are others",
    "seed": "the seed is another one",
}


class ResplitBase(NamedTuple):
    """Where the current split of a counted epoch among ranks began.

    Attributes:
        everywhere: Samples received by all ranks together until then.
        here: Samples received by this rank until then.
        step: Samples per global batch since then. 0: as in the state.
        batches: Batches received by each rank until then.
    """

    everywhere: int = 0
    here: int = 0
    step: int = 0
    batches: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The position of a loader in its data.

    Attributes:
        cursor: Samples of the epoch to come, after the last step that all ranks have received.
        done: Samples that this rank has received since the cursor, as ranges of numbers counted from there.
        batch_size: Samples per rank, if the loader was given it. 0: the global batch size was given.
        carried: Samples of the previous epoch that this epoch began with.
        rank, world: The rank of the state. None: valid for all ranks.
        batches: Batches received in this epoch, per rank.
        samples: Samples received, on all ranks together. In a state of one rank: on this rank.
        skipped: Failed samples that were skipped: (in total, directly before this point).
        skip: Number of batches to discard on resume.
        parts: Number of samples already emitted of the first source sample to come, and of each group made from them.
            Empty if none is partly emitted.
        passed: For each group level: input samples that repeat although their groups do not. Empty if there are none.
        given: For each level but the last: samples emitted before those that repeat. Empty without limits on these
            levels, and at the start.
        progress: Progress of packed rows: this rank's, or all. None: at the start.
    """

    epoch: int = 0
    cursor: Cursor
    done: Ranges = ()
    end: int = 0
    step: int = 0
    batch_size: int = 0
    carried: Ranges = ()
    lanes: int = 1
    tail: Tail = "short"
    rank: int | None = None
    world: int = 1
    batches: int = 0
    samples: int = 0
    mark: Any = None
    skipped: tuple[int, int] = (0, 0)
    skip: int = 0
    since: ResplitBase = field(default_factory=ResplitBase)
    parts: tuple[int, ...] = ()
    passed: tuple[Ranges, ...] = ()
    given: tuple[int, ...] = ()
    progress: RowProgress | None = None

    @property
    def step_now(self) -> int:
        """Samples of the last global batches. `step` is the number that the plan's positions use."""
        return self.since.step or self.step

    def pack(self, facts: Fingerprint, last: Ints) -> dict[str, Any]:
        """Convert to JSON. `last` are the numbers of the samples directly before the state."""
        packed: dict[str, object] = {
            "version": VERSION,
            "regime": "headrace",
            "order_version": ORDER_VERSION,
            **facts.pack(),
            "epoch": self.epoch,
            "position": self.cursor.position,
            **{name: getattr(self, name) for name in _AS_THEY_ARE},
        }
        if self.carried:
            packed["carried"] = pack_ranges(np.array(self.carried, np.int64))
        if len(self.cursor.holes):
            packed["holes"] = pack_ranges(self.cursor.holes)
        if self.done:
            packed["done"] = pack_ranges(np.array(self.done, np.int64))
        if self.rank is not None:
            packed["rank"] = self.rank
        if self.mark is not None:
            packed["mark"] = copy.deepcopy(self.mark)
            if (marked := mark_check(self.mark)) is not None:
                packed["marked"] = marked
        if any(self.skipped):
            packed["skipped"] = list(self.skipped)
        if self.skip:
            packed["skip"] = self.skip
        if any(self.since):
            packed["since"] = list(self.since)
        if any(self.parts) or any(self.passed):
            packed["parts"] = list(self.parts)
        if any(self.passed):
            packed["passed"] = [pack_ranges(np.array(ranges, np.int64).reshape(-1, 2)) for ranges in self.passed]
        if any(self.given):
            packed["given"] = list(self.given)
        if self.progress is not None:
            packed["packing"] = self.progress.to_json()
        packed["check"] = check_of(packed, last)
        return packed

    @staticmethod
    def unpack(packed: Mapping[str, Any]) -> State:
        """Parse a saved state, or raise StateMismatchError."""
        from headrace.order.row_states import RowProgress

        check_kind(packed, "headrace")
        order = packed.get("order_version")
        if order != ORDER_VERSION:
            raise StateMismatchError(
                f"the state follows order {order}, and this release knows order {ORDER_VERSION}", field="order_version"
            )
        try:
            number = {name: int(packed[name]) for name in _NUMBERS}
            done = unpack_ranges(packed.get("done", ()))
            in_all, in_a_row = packed.get("skipped", (0, 0))
            skip, since = int(packed.get("skip", 0)), ResplitBase(*map(int, packed.get("since", ())))
            rank, parts = packed.get("rank"), tuple(map(int, packed.get("parts", ())))
            given = tuple(map(int, packed.get("given", ())))
            passed = [unpack_ranges(one).tolist() for one in packed.get("passed", ())]
            begins = (a for ranges in passed for a, _ in ranges)
            is_positive = min(skip, *since, *parts, *given, *number.values(), *begins) >= 0
            if not (is_positive and 1 <= number["world"] <= number["step"] and 1 <= number["lanes"] <= _LANES_MOST):
                raise ValueError("numbers make no sense together")
            if packed["tail"] not in get_args(Tail) or not (rank is None or 0 <= rank < number["world"]):
                raise ValueError("there is no such tail, or no such rank")
            progress = RowProgress.from_json(packed["packing"]) if "packing" in packed else None
            if passed and len(passed) != len(parts) - 1:
                raise ValueError("parts are of other levels of groups than what is passed")
            return State(
                epoch=number["epoch"],
                cursor=Cursor(number["position"], unpack_ranges(packed.get("holes", ()))),
                done=tuple((int(a), int(b)) for a, b in done),
                end=number["end"],
                step=number["step"],
                batch_size=number["batch_size"],
                carried=tuple((int(a), int(b)) for a, b in unpack_ranges(packed.get("carried", ()))),
                lanes=number["lanes"],
                tail=packed["tail"],
                rank=None if rank is None else int(rank),
                world=number["world"],
                batches=number["batches"],
                samples=number["samples"],
                mark=copy.deepcopy(packed.get("mark")),
                skipped=(int(in_all), int(in_a_row)),
                skip=skip,
                since=since,
                parts=parts,
                passed=tuple(tuple((a, b) for a, b in ranges) for ranges in passed),
                given=given,
                progress=progress,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise StateMismatchError(f"this is no whole state of a loader: {error!r}", field="version") from error


def check_kind(packed: Mapping[str, Any], regime: str) -> None:
    """Raise StateMismatchError if a state is of another regime or an unsupported release."""
    if not hasattr(packed, "get") or "version" not in packed:
        raise StateMismatchError(f"{packed!r:.200} is no state of a headrace loader", field="version")
    version = packed["version"]
    if not isinstance(version, int) or not _OLDEST <= version <= VERSION:
        raise StateMismatchError(
            f"the state has version {version!r}, and this release reads {_OLDEST} to {VERSION}", field="version"
        )
    if packed.get("regime") != regime:
        raise StateMismatchError(
            f"the state is of the {packed.get('regime')!r} regime, and this loader's is {regime!r}: "
            "the data set is of another kind",
            field="regime",
        )


def last_positions(state: State) -> Ints:
    """Return the last positions before the state, whose sample numbers enter the checksum."""
    most = min(_CHECKED_MOST, max(1, state.step))
    if state.progress is not None:
        first, _ = (0, 0) if state.rank is None else share(state.step, state.rank, state.world)
        rounds = np.array(
            [[one.round for one in cursor.inputs] or [cursor.round] for cursor in state.progress.cursors], np.int64
        )
        rows, inputs = np.indices(rounds.shape)
        positions = ((rounds - 1) * state.step + first + rows) * rounds.shape[1] + inputs
        chosen: Ints = positions[rounds > 0][:most]
        return chosen
    if state.done:
        start, stop = state.done[-1]
        return _steps_of(state).positions(max(start, stop - most), stop)
    end = state.cursor.position
    return np.arange(max(0, end - most), end)


def merge_states(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the states of all ranks, saved after one step, into one for any number of ranks.

    Needed if the states of ranks differ: with `in_order=False`, or with operators that skip samples. Samples that no
    rank has received come first on resume.

    Args:
        states: States of every rank, in any order.

    Raises:
        StateMismatchError: the states belong to different runs, or one is missing or repeated; or some ranks have ended
            the epoch with `last_batch="uneven"`, and others have not.
    """
    from headrace.order.row_states import RowProgress

    packed = list(states)
    if not packed:
        raise StateMismatchError("there are no states to merge", field="rank")
    first = packed[0]
    parts = [State.unpack(one) for one in packed]
    for one in packed[1:]:
        for name in _ALIKE:
            if one.get(name) != first.get(name):
                if name == "epoch" and first["tail"] == "uneven":
                    raise _some_have_ended(parts)
                raise StateMismatchError(
                    f"the states are of different runs: {name} is {first.get(name)!r} and {one.get(name)!r}", field=name
                )
    if all(part.rank is None for part in parts):
        return dict(first)
    ranks, world = sorted(-1 if part.rank is None else part.rank for part in parts), parts[0].world
    if ranks != list(range(world)):
        raise StateMismatchError(f"one state of each of {world} ranks is needed; these are of {ranks}", field="rank")
    if any(part.mark is not None for part in parts) or (
        first["count"] is None and any(part.done or part.cursor.position for part in parts)
    ):
        raise StateMismatchError("states of samples without numbers are each rank's own", field="mark")
    if any(part.parts or part.given for part in parts):
        raise StateMismatchError(
            "a state in the middle of what .flat_map() or .batch() made of some samples, or of what .take() before a "
            "batch leaves, is one rank's own",
            field="parts",
        )
    try:
        progress = RowProgress.joined([part.progress for part in sorted(parts, key=lambda part: part.rank or 0)])
    except ValueError as error:
        raise StateMismatchError(f"states of lanes must be of one step: {error}", field="packing") from error
    cursor = merged(parts)
    whole = State(
        epoch=parts[0].epoch,
        cursor=cursor,
        end=parts[0].end,
        step=parts[0].step_now,
        batch_size=parts[0].batch_size,
        carried=parts[0].carried,
        lanes=parts[0].lanes,
        tail=parts[0].tail,
        world=world,
        batches=max(part.batches for part in parts),
        samples=sum(part.samples for part in parts),
        skipped=(max(part.skipped[0] for part in parts), 0),  # each rank continues to count from there
        skip=parts[0].skip,
        progress=progress,
    )
    names = ("seed", "data", "count")
    facts = Fingerprint(
        **{name: first[name] for name in names}, order=tuple(first["order"]), steps=tuple(first["steps"])
    )
    result = whole.pack(facts, np.zeros(0, np.int64))
    result["check"] = ""  # the order, which it needs, is not known here
    return result


def _some_have_ended(parts: Sequence[State]) -> StateMismatchError:
    epoch = min(part.epoch for part in parts)
    ended = sorted(part.rank or 0 for part in parts if part.epoch > epoch)
    others = sorted(part.rank or 0 for part in parts if part.epoch == epoch)
    return StateMismatchError(
        f"of epoch {epoch} the ranks {ended} have received all, and the ranks {others} have not: with "
        "hr.Ranks(last_batch='uneven') ranks end after different numbers of steps, and such states cannot be merged.\n"
        "Merge the states of a step that gave every rank a batch, or of the end of the epoch on all ranks; "
        "or resume with as many ranks, each from its own state",
        field="epoch",
    )


def merged(parts: Sequence[State]) -> Cursor:
    """Return the samples still to come after the union of some ranks' states."""
    ranks = [(_steps_of(part), united(part.done)) for part in parts]
    # Most samples are in complete steps of all ranks: only the samples beyond these are listed.
    whole = min(steps.within(done[0][1] if done and done[0][0] == 0 else 0) for steps, done in ranks)
    if len(ranks) < parts[0].world:
        whole = 0  # the progress of the other ranks is not known
    received = [np.zeros(0, np.int64)]
    for steps, done in ranks:
        first = steps.samples(whole)
        received += [steps.positions(max(start, first), stop) for start, stop in done if stop > first]
    return ranks[0][0].after(whole).without(np.concatenate(received))


def _steps_of(state: State) -> Steps:
    return Steps(state.cursor, state.end, state.step, state.tail, state.rank or 0, state.world, state.lanes)


def check_of(packed: Mapping[str, Any], last: Ints) -> str:
    """Hash a state, without its mark, and the numbers of the samples directly before it."""
    checked = {name: value for name, value in packed.items() if name not in ("check", "mark")}
    digest = hashlib.blake2b(json.dumps(checked, sort_keys=True).encode(), digest_size=8)
    digest.update(np.ascontiguousarray(last, "<i8").tobytes())
    return digest.hexdigest()


def mark_check(mark: object) -> str | None:
    """Hash a mark. None if it is not JSON, as marks of user data sets may be."""
    try:
        plain = json.loads(json.dumps(mark))  # after a round trip, keys of dicts are text
    except (TypeError, ValueError, RecursionError):
        return None
    return hashlib.blake2b(json.dumps(plain, sort_keys=True).encode(), digest_size=4).hexdigest()


def whole_check(state: Mapping[str, Any]) -> str:
    """Hash a state without its `check`, and append the names of values that are not JSON."""
    left_out = {name for name, value in state.items() if name != "check" and _plain(value) is _NO_JSON}
    return "-".join([_hash_without(state, left_out), *sorted(left_out)])


def is_as_saved(state: Mapping[str, Any]) -> bool:
    """True if a state has no check, or matches it."""
    check = state.get("check")
    if not isinstance(check, str):
        return check is None
    digest, *left_out = check.split("-")
    return digest == _hash_without(state, set(left_out))


def _hash_without(state: Mapping[str, Any], left_out: AbstractSet[str]) -> str:
    plain = {name: _plain(value) for name, value in state.items() if name != "check" and name not in left_out}
    if _NO_JSON in plain.values():
        return ""
    return hashlib.blake2b(json.dumps(plain, sort_keys=True).encode(), digest_size=8).hexdigest()


_NO_JSON = object()


def _plain(value: object) -> object:
    try:
        return json.loads(json.dumps(value, default=_number))
    except (TypeError, ValueError, RecursionError):
        return _NO_JSON


def _number(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError
