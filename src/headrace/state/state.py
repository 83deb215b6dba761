"""Saved states of a loader, and their compatibility with a loader that resumes.

`docs/reference/state.md` specifies the fields.
"""

from __future__ import annotations

import copy
import hashlib
import json
import operator
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex, get_args

import numpy as np

from headrace.errors import StateMismatchError
from headrace.order.cursor import Cursor, pack_ranges, united, unpack_ranges
from headrace.order.orders import ENDLESS, ORDER_VERSION
from headrace.order.steps import Steps, share
from headrace.types import Ints, Ranges, Tail

if TYPE_CHECKING:
    from headrace.order.row_states import RowProgress

VERSION = 2
Json = Mapping[str, Any]
JsonObject = dict[str, Any]
_CHECKED_MOST, _LANES_MOST = 1024, 2**16
_DEFAULTS: Json = {  # fields that a state lacks if they have this value
    "count": None,
    "order": [],
    "steps": [],
    "world_size": 1,
    "rank": None,
    "batch_size": 0,
    "last_batch": "short",
    "resplit": {},
    "end": ENDLESS,
    "lanes": 1,
    "pending": [],
    "received": [],
    "carried": [],
    "stages": [],
    "skip": 0,
    "used": [],
    "emitted": 0,
    "rows": None,
    "skipped": [0, 0],
    "skip_batches": 0,
}


class StagePoint(NamedTuple):
    """Where a stage resumes. Its units are source samples or groups, which may give several outputs or none.

    Attributes:
        skip: Outputs of the first repeated unit that are not emitted again.
        used: Ranges of inputs, counted from the first repeated one, whose groups are not made again.
        emitted: Outputs of the epoch before the repeated ones. Counted only if a later stage needs this number.
    """

    skip: int = 0
    used: Ranges = ()
    emitted: int = 0


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where an epoch resumes, on this rank. Numbers count from the start of the epoch's plan.

    Attributes:
        covers: Ranges of consumed source samples.
        used: Samples that batches were cut from, failed ones included.
        mark: Resume mark of a source whose samples have no numbers.
        skipped: Failed samples that were skipped in the epoch: (in total, directly before this point).
        stages: Resume points of the stages. Empty if all are at the start of a unit.
        rows: Progress of packed rows. None: at the start.
        repeated: Samples that belong to a second or later pass over the data, if counted.
        batches, samples: Numbers received in the epoch, counted by the trainer.
        is_over: True if the trainer has received the end of the epoch.
    """

    covers: Ranges = ()
    used: int = 0
    mark: Any = None
    skipped: tuple[int, int] = (0, 0)
    stages: tuple[StagePoint, ...] = ()
    rows: RowProgress | None = None
    repeated: int = 0
    batches: int = 0
    samples: int = 0
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class EvenPoints:
    """The points after each of `count` consecutive batches of `size` samples, without skipped ones.

    Attributes:
        before: The point before the first batch. All batches before it are covered.
        marks: Resume mark after each batch. Empty if there are none.
    """

    before: ResumePoint
    count: int
    size: int
    marks: Sequence[object] = ()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, batch: int) -> ResumePoint:
        if not 0 <= batch < self.count:
            raise IndexError(batch)
        size, (_, end) = (batch + 1) * self.size, (self.before.covers or ((0, 0),))[-1]
        mark = self.marks[batch] if self.marks else None
        return replace(self.before, covers=((0, end + size),), used=self.before.used + size, mark=mark)


ResumePoints = Sequence[ResumePoint] | EvenPoints


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
    count: int | None = None
    order: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()

    def to_json(self) -> JsonObject:
        own = {"seed": self.seed, "data": self.data, "count": self.count}
        return _given(order_version=ORDER_VERSION, **own, order=list(self.order), steps=list(self.steps))

    def compare(self, saved: Fingerprint) -> None:
        """Raise StateMismatchError, which names the property, if a state has another fingerprint."""
        for name, meaning in _MEANING.items():
            mine, other = getattr(self, name), getattr(saved, name)
            if other != mine:
                raise StateMismatchError(f"{meaning}: the state has {other!r}, this loader {mine!r}", field=name)


_MEANING = {
    "data": "the data differ (names and numbers of samples of the shards, or their revision)",
    "count": "the number of samples of an epoch differs",
    "order": "the order differs",
    "steps": "the operators that drop samples differ",
    "seed": "the seed differs",
}


class ResplitBase(NamedTuple):
    """Where the current split of a counted epoch among ranks began.

    Attributes:
        samples: Samples received by all ranks together until then.
        rank_samples: Samples received by this rank until then.
        global_batch_size: Samples per global batch since then. 0: as in the state.
        batches: Batches received by each rank until then.
    """

    samples: int = 0
    rank_samples: int = 0
    global_batch_size: int = 0
    batches: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The position of a loader in its data.

    Attributes:
        cursor: Samples of the epoch to come, after the last step that all ranks have received.
        received: Samples that this rank has received since the cursor, as ranges of numbers counted from there.
        end: End of the epoch, as a position.
        step: Samples per global batch, by which positions are planned.
        batch_size: Samples per rank, if the loader was given it. 0: the global batch size was given.
        carried: Samples of the previous epoch that this epoch began with.
        rank, world: The rank of the state. None: valid for all ranks.
        batches: Batches received in this epoch, per rank.
        samples: Samples received, on all ranks together. In a state of one rank: on this rank.
        mark: State of a source whose samples have no numbers.
        skipped: Failed samples that were skipped: (in total, directly before this point).
        skip: Number of batches to discard on resume.
        resplit: Set if the global batch size has changed in an epoch whose samples are counted as they come.
        stages: Resume points of stages that hold or count samples. Empty: all are at the start.
        rows: Progress of packed rows: this rank's, or all. None: at the start.
    """

    fingerprint: Fingerprint
    epoch: int = 0
    cursor: Cursor = field(default_factory=Cursor.at)
    received: Ranges = ()
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
    resplit: ResplitBase = field(default_factory=ResplitBase)
    stages: tuple[StagePoint, ...] = ()
    rows: RowProgress | None = None

    @property
    def step_now(self) -> int:
        """Samples of the last global batches. `step` is the number that the plan's positions use."""
        return self.resplit.global_batch_size or self.step

    def to_json(self, last: Ints | None) -> JsonObject:
        """Convert to JSON. `last` are the numbers of the samples directly before the state. None: without check."""
        packed = {"version": VERSION, "regime": "headrace", "fingerprint": self.fingerprint.to_json()}
        packed |= _given(
            epoch=self.epoch,
            batches=self.batches,
            samples=self.samples,
            ranks=_given(
                global_batch_size=self.step,
                batch_size=self.batch_size,
                world_size=self.world,
                rank=self.rank,
                last_batch=self.tail,
                resplit={name: number for name, number in self.resplit._asdict().items() if number},
            ),
            source=_given(
                position=self.cursor.position,
                end=self.end,
                lanes=self.lanes,
                pending=pack_ranges(self.cursor.holes),
                received=_packed(self.received),
                carried=_packed(self.carried),
            ),
            stages=[_given(skip=skip, used=_packed(used), emitted=emitted) for skip, used, emitted in self.stages],
            rows=None if self.rows is None else self.rows.to_json(),
            skipped=list(self.skipped),
            skip_batches=self.skip,
        )
        if self.mark is not None:
            packed["source_state"] = copy.deepcopy(self.mark)
        return packed if last is None else {**packed, "check": whole_check(packed, last)}

    @staticmethod
    def from_json(packed: Json) -> State:
        """Parse a saved state, or raise StateMismatchError."""
        from headrace.order.row_states import RowProgress

        check_kind(packed, "headrace")
        try:
            facts, ranks, source = (_Group(packed[name]) for name in ("fingerprint", "ranks", "source"))
            whole, order = _Group(packed), facts["order_version"]
            total, consecutive = map(_whole, whole["skipped"])
            rank, tail, rows = ranks["rank"], ranks["last_batch"], whole["rows"]
            state = State(
                fingerprint=Fingerprint(
                    seed=facts["seed"],
                    data=facts["data"],
                    count=facts["count"],
                    order=tuple(facts["order"]),
                    steps=tuple(facts["steps"]),
                ),
                epoch=whole.number("epoch"),
                cursor=Cursor(source.number("position"), unpack_ranges(source["pending"])),
                received=_unpacked(source["received"]),
                end=source.number("end"),
                step=ranks.number("global_batch_size"),
                batch_size=ranks.number("batch_size"),
                carried=_unpacked(source["carried"]),
                lanes=source.number("lanes"),
                tail=tail,
                rank=None if rank is None else _whole(rank),
                world=ranks.number("world_size"),
                batches=whole.number("batches"),
                samples=whole.number("samples"),
                mark=copy.deepcopy(packed.get("source_state")),
                skipped=(total, consecutive),
                skip=whole.number("skip_batches"),
                resplit=ResplitBase(*(_whole(dict(ranks["resplit"]).get(name, 0)) for name in ResplitBase._fields)),
                stages=tuple(
                    StagePoint(one.number("skip"), _unpacked(one["used"]), one.number("emitted"))
                    for one in map(_Group, whole["stages"])
                ),
                rows=None if rows is None else RowProgress.from_json(rows),
            )
            known, position = state.fingerprint, state.cursor.position
            if type(known.seed) is not int or type(known.data) is not str or type(known.count) not in (int, type(None)):
                raise TypeError("the fingerprint has values of other types")
            if any(
                start < 0 for ranges in (state.received, *(one.used for one in state.stages)) for start, _ in ranges
            ):
                raise ValueError("numbers counted from the state are below 0")
            if any(stop > position for _, stop in state.cursor.holes) or any(stop > 0 for _, stop in state.carried):
                raise ValueError("samples are both pending and to come")
            is_of_this_order = bool(order == ORDER_VERSION)
            if not 1 <= state.world <= min(state.step, state.step_now) or not 1 <= state.lanes <= _LANES_MOST:
                raise ValueError("numbers make no sense together")
            if tail not in get_args(Tail) or not (state.rank is None or 0 <= state.rank < state.world):
                raise ValueError("there is no such last_batch, or no such rank")
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise StateMismatchError(f"this is no whole state of a loader: {error!r}", field="version") from error
        if not is_of_this_order:
            text = f"the state follows order {order!r}, and this release knows order {ORDER_VERSION}"
            raise StateMismatchError(text, field="order_version")
        return state


class _Group(JsonObject):
    """A JSON object of a state. Fields that are missing have their default."""

    def __missing__(self, name: str) -> Any:
        return _DEFAULTS[name]

    def number(self, name: str) -> int:
        return _whole(self[name])


def _given(**fields: Any) -> JsonObject:
    """Return the fields that differ from their defaults."""
    return {name: value for name, value in fields.items() if name not in _DEFAULTS or value != _DEFAULTS[name]}


def _whole(value: SupportsIndex) -> int:
    number = operator.index(value)
    if type(value) is bool or not 0 <= number <= ENDLESS:
        raise ValueError(f"{value!r} is no whole number from 0 to 2^62")
    return number


def _packed(ranges: Ranges) -> list[int] | str:
    return pack_ranges(np.array(ranges, np.int64).reshape(-1, 2))


def _unpacked(packed: Sequence[int] | str) -> Ranges:
    return tuple((int(start), int(stop)) for start, stop in unpack_ranges(packed))


def check_kind(packed: Json, regime: str) -> None:
    """Raise StateMismatchError if a state is of another regime or an unsupported release."""
    if not hasattr(packed, "get") or "version" not in packed:
        raise StateMismatchError(f"{packed!r:.200} is no state of a headrace loader", field="version")
    if type(version := packed["version"]) is not int or version != VERSION:
        text = f"the state has version {version!r:.100}, and this release reads version {VERSION} only: "
        raise StateMismatchError(text + "resume with the release that saved it, or start an epoch", field="version")
    if packed.get("regime") != regime:
        raise StateMismatchError(
            f"the state is of the {packed.get('regime')!r} regime, and this loader's is {regime!r}: "
            "the data set is of another kind",
            field="regime",
        )


def last_positions(state: State) -> Ints:
    """Return the last positions before the state, whose sample numbers enter the checksum."""
    most = min(_CHECKED_MOST, max(1, state.step))
    if state.rows is not None:
        first, _ = (0, 0) if state.rank is None else share(state.step, state.rank, state.world)
        rounds = np.array(
            [[one.round for one in cursor.inputs] or [cursor.round] for cursor in state.rows.cursors], np.int64
        )
        rows, inputs = np.indices(rounds.shape)
        positions = ((rounds - 1) * state.step + first + rows) * rounds.shape[1] + inputs
        chosen: Ints = positions[rounds > 0][:most]
        return chosen
    if state.received:
        start, stop = state.received[-1]
        return _steps_of(state).positions(max(start, stop - most), stop)
    end = state.cursor.position
    return np.arange(max(0, end - most), end)


def merge_states(states: Iterable[Json]) -> JsonObject:
    """Merge the states of all ranks, saved after one step, into one for any number of ranks.

    Needed if the states of ranks differ: with `in_order=False`, or with operators that skip samples. Samples that no
    rank has received come first on resume.

    Args:
        states: States of every rank, in any order.

    Raises:
        StateMismatchError: the states belong to different runs, or one is missing or repeated; or some ranks have ended
            the epoch with `last_batch="uneven"`, and others have not.
    """
    packed = list(states)
    if not packed:
        raise StateMismatchError("there are no states to merge", field="rank")
    parts = [State.from_json(one) for one in packed]
    first = parts[0]
    for part in parts[1:]:
        for (name, value), other in zip(_of_all_ranks(first).items(), _of_all_ranks(part).values(), strict=True):
            if value != other:
                if name == "epoch" and first.tail == "uneven":
                    raise _some_have_ended(parts)
                raise StateMismatchError(
                    f"the states are of different runs: {name} is {value!r} and {other!r}", field=name
                )
    if all(part.rank is None for part in parts):
        return dict(packed[0])
    ranks, world = sorted(-1 if part.rank is None else part.rank for part in parts), first.world
    if ranks != list(range(world)):
        raise StateMismatchError(f"one state of each of {world} ranks is needed; these are of {ranks}", field="rank")
    are_counted = first.fingerprint.count is not None
    has_begun = any(part.received or part.cursor.position for part in parts)
    if any(part.mark is not None for part in parts) or (has_begun and not are_counted):
        raise StateMismatchError("states of samples without numbers are each rank's own", field="source_state")
    if any(part.stages for part in parts):
        raise StateMismatchError(
            "a state in the middle of what .flat_map() or .batch() made of some samples, or of what .take() before a "
            "batch leaves, is one rank's own",
            field="stages",
        )
    from headrace.order.row_states import RowProgress

    try:
        rows = RowProgress.joined([part.rows for part in sorted(parts, key=lambda part: part.rank or 0)])
    except ValueError as error:
        raise StateMismatchError(f"states of packed rows must be of one step: {error}", field="rows") from error
    whole = replace(
        first,
        cursor=merged(parts),
        received=(),
        step=first.step_now,
        resplit=ResplitBase(),
        rank=None,
        batches=max(part.batches for part in parts),
        samples=sum(part.samples for part in parts),
        skipped=(max(part.skipped[0] for part in parts), 0),  # each rank continues to count from there
        rows=rows,
    )
    return whole.to_json(None)  # the order, which a check needs, is not known here


def _of_all_ranks(state: State) -> dict[str, object]:
    """Return the fields in which the states of all ranks must agree."""
    return asdict(state.fingerprint) | {
        "epoch": state.epoch,
        "position": state.cursor.position,
        "pending": state.cursor.holes.tolist(),
        "end": state.end,
        "lanes": state.lanes,
        "global_batch_size": state.step,
        "world_size": state.world,
        "batch_size": state.batch_size,
        "resplit": state.resplit.global_batch_size,
        "last_batch": state.tail,
        "carried": state.carried,
        "skip_batches": state.skip,
    }


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
    ranks = [(_steps_of(part), united(part.received)) for part in parts]
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


def whole_check(state: Json, last: Ints | None = None) -> str:
    """Hash a state without its `check`, and append the names of fields that are not JSON, as of user data sets.

    `last` are the numbers of the samples directly before the state, which are hashed, too.
    """
    left_out = {name for name, value in state.items() if name != "check" and _plain(value) is _NO_JSON}
    return "-".join([_hash_without(state, left_out, last), *sorted(left_out)])


def is_as_saved(state: Json, last: Ints | None = None) -> bool:
    """True if a state has no check, or matches it."""
    check = state.get("check")
    if not isinstance(check, str):
        return check is None
    digest, *left_out = check.split("-")
    return digest == _hash_without(state, set(left_out), last)


def _hash_without(state: Json, left_out: AbstractSet[str], last: Ints | None) -> str:
    plain = {name: _plain(value) for name, value in state.items() if name != "check" and name not in left_out}
    if _NO_JSON in plain.values():
        return ""
    digest = hashlib.blake2b(json.dumps(plain, sort_keys=True).encode(), digest_size=8)
    if last is not None:
        digest.update(np.ascontiguousarray(last, "<i8").tobytes())
    return digest.hexdigest()


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
