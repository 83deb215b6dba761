"""Rules for failed samples: skip or raise. Files that list skipped samples, one line of JSON each."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from headrace._util.context import divided
from headrace.delivery.channel import RaisedError
from headrace.engine.epoch_plan import EpochPlan
from headrace.errors import OptionError, StageError, printable
from headrace.observe import LoaderMeters
from headrace.options import Skip, open_file
from headrace.types import Ints
from headrace.workers.failures import ErrorPacker, Origin, PackedError, Scope

_LOGGED = 10  # samples per epoch
_KNOWN_MOST = 4096  # errors
_SHOWN_MOST = 1000  # characters of an error
_TEXT_MOST = 500  # characters of a name or error in a file, so that one write takes a line

log = logging.getLogger("headrace")


class Skips:
    """Decisions on the failed samples of one epoch.

    Args:
        policy: Its function must not hold the loader, as this object outlives it.
        before: Samples skipped in this epoch before: (in total, directly before the next one).
        needs_batches: True if an empty batch is an error, as other ranks have theirs and would wait.
    """

    def __init__(
        self,
        policy: Skip,
        epoch: int,
        meters: LoaderMeters | Quarantine,
        unpack: Callable[[PackedError], BaseException],
        pack: ErrorPacker,
        before: tuple[int, int] = (0, 0),
        *,
        needs_batches: bool = False,
    ) -> None:
        self._policy, self._epoch, self._meters = policy, epoch, meters
        self._unpack, self._pack = unpack, pack
        self._in_all, self._in_a_row = before
        self._needs_batches = needs_batches
        self._logged = 0
        self._known: set[int] = set()  # hashes of counted errors

    @property
    def counts(self) -> tuple[int, int]:
        return self._in_all, self._in_a_row

    def rule(
        self,
        positions: Callable[[], Sequence[int]],
        count: int,
        errors: Mapping[int, PackedError],
        left_out: Sequence[tuple[int, PackedError]] = (),
    ) -> RaisedError | None:
        """Return the error to raise in place of a batch. None: its failed samples are skipped.

        To be called for every batch, in the order of delivery.

        Args:
            positions: Returns the positions of the batch's samples.
            count: Number of its samples, failed ones included.
            errors: Errors of failed samples, by slot.
            left_out: (position, error) of inputs that failed before and are missing in the batch's samples.
        """
        for position, error in left_out:
            raised = self._rule_on(position, error)
            if raised is not None:
                return raised
        following = 0
        at = positions() if errors else ()
        for slot in sorted(errors):
            if slot > following:
                self._in_a_row = 0
            following = slot + 1
            raised = self._rule_on(int(at[slot]), errors[slot])
            if raised is not None:
                return raised
        if following < count:
            self._in_a_row = 0
        if self._needs_batches and len(errors) == count:
            return RaisedError(errors[min(errors)], "no sample of this batch is left, and other ranks have theirs")
        return None

    def _rule_on(self, position: int, packed: PackedError) -> RaisedError | None:
        if packed.scope is not Scope.SAMPLE:
            return RaisedError(packed)
        try:
            error = self._unpack(packed)
        except Exception:  # unpickling fails in the trainer too, which reports it
            return RaisedError(packed)
        raised = self._rule_on_error(position, packed, error)
        if raised is not None and packed.original is not None:
            packed.original.put_back(error)
        return raised

    def _rule_on_error(self, position: int, packed: PackedError, error: BaseException) -> RaisedError | None:
        policy = self._policy
        if isinstance(error, OptionError):  # such as an invalid address: not the fault of a sample
            return RaisedError(packed)
        is_known = hash(packed.blob) in self._known  # one read failed for several samples
        for made, most in (
            () if is_known else ((self._in_all, policy.max_in_epoch), (self._in_a_row, policy.max_in_row))
        ):
            if most is not None and made >= most:
                return RaisedError(packed, self._describe())
        if policy.when is not None:
            try:
                answer = policy.when(error)
                is_left_out = isinstance(answer, bool | np.bool_) and bool(answer)
            except BaseException as own:  # no exception may end the loop
                return RaisedError(self._pack(own))
            if not is_left_out:
                return RaisedError(packed)
        self._count(position, error, packed.origin, is_known=is_known)
        if not is_known:
            self._in_all += 1
            self._in_a_row += 1
            if len(self._known) < _KNOWN_MOST:
                self._known.add(hash(packed.blob))
        return None

    def _describe(self) -> str:
        policy = self._policy
        row = f", {self._in_a_row} of them right before it" if self._in_a_row else ""
        return (
            f"{self._in_all} samples of this epoch were skipped before it{row}: "
            f"hr.Skip(max_in_epoch={policy.max_in_epoch}, max_in_row={policy.max_in_row})"
        )

    def _count(self, position: int, error: BaseException, origin: Origin, *, is_known: bool) -> None:
        name = _shown(lambda: _name_of(error, origin), "")
        text = _shown(lambda: f"{type(error).__name__}: {error}", type(error).__name__)
        self._meters.count_skip(self._epoch, position, name, text)
        if is_known:
            return  # logged with the first sample of the same read
        self._logged += 1
        if self._logged <= _LOGGED:
            last = "; further ones of this epoch are only counted" if self._logged == _LOGGED else ""
            named = f" ({name})" if name else ""
            log.warning("skipped sample %d%s of epoch %d: %s%s", position, named, self._epoch, text, last)


def _shown(text: Callable[[], str], otherwise: str) -> str:
    """Return a text made by user code, shortened. Its failure must not end the epoch."""
    try:
        return printable(text()[:_SHOWN_MOST])
    except Exception:
        return otherwise


def _name_of(error: BaseException, origin: Origin) -> str:
    if isinstance(error, StageError):
        if error.key is not None:
            return repr(error.key)
        if error.url is not None:
            return error.url
    return origin.name


class Quarantine:
    """Logs each skipped sample to a file, and forwards it to the meters.

    Several processes may write to one file: each line is appended by one write.
    """

    def __init__(self, path: str, plan: EpochPlan, meters: LoaderMeters) -> None:
        self._path, self._plan, self._meters = path, plan, meters

    def count_skip(self, epoch: int, position: int, name: str, error: str) -> None:
        self._meters.count_skip(epoch, position, name, error)
        plan = self._plan
        line: dict[str, object] = {"data": plan.facts.data, "epoch": epoch}
        if plan.order is not None:
            line["number"] = int(plan.numbers(plan.order, np.array([divided(position)[0]]))[0])
        line |= {"name": name[:_TEXT_MOST], "error": error[:_TEXT_MOST]}
        try:
            self._append(json.dumps(line).encode() + b"\n")
        except OSError as why:
            path = printable(self._path)
            log.error("hr.Skip(log=%r) cannot be written, and lacks a sample of epoch %d: %s", path, epoch, why)

    def _append(self, line: bytes) -> None:
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
        try:
            os.write(file, line)
        finally:
            os.close(file)


def numbers_in(paths: Iterable[str | os.PathLike[str]], data: str) -> Ints:
    """Read the numbers of the listed samples, in any order.

    Raises:
        OptionError: a file cannot be read, or its samples have no numbers or belong to other data.
    """
    numbers: list[int] = []
    for path in map(Path, paths):
        try:
            with open(path, opener=open_file) as file:  # pathlib takes no opener
                lines = file.read().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(f"exclude={str(path)!r} cannot be read: {error}") from error
        for row, line in enumerate(lines, 1):
            numbers.append(_number(line, data, f"exclude={str(path)!r}, line {row}"))
    return np.array(numbers, np.int64)


def _number(line: str, data: str, where: str) -> int:
    try:
        found = json.loads(line)
        of_data, number = found["data"], found.get("number")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise OptionError(f"{where}: this is no line that hr.Skip(log=) has written: {line!r:.100}") from error
    if not isinstance(number, int) or not 0 <= number < 2**63:
        raise OptionError(
            f"{where}: that sample has no number, as it was counted while it was read: only samples with numbers, "
            "such as those of shards with an index, can be excluded"
        )
    if of_data != data:
        raise OptionError(
            f"{where}: it is of other data ({of_data}; here they are {data}), where other samples have these numbers"
        )
    return number
