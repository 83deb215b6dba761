"""Makes parts for workers from Python objects."""

from __future__ import annotations

from headrace._util.shared_memory import Arena
from headrace.torch_compat import serialize
from headrace.workers.failures import Failure, failures_among
from headrace.workers.sample_chunks import KeyPart, ListPart, PackedPart, Part

_PLAIN = {int, str}
"""Types of keys that always pickle."""


class PartPacker:
    """Makes parts from objects. Objects that cannot be sent to workers become Failures."""

    def __init__(self, arena: Arena, *, shares_objects: bool) -> None:
        self._arena, self._shares_objects = arena, shares_objects

    def of_samples(self, samples: list[object]) -> Part:
        if self._shares_objects:
            return ListPart(samples)
        try:
            parts = serialize.pack(samples)
        except Exception:
            samples = [_sendable(sample) for sample in samples]
            parts = serialize.pack(samples)
        lease = self._arena.lease(serialize.packed_size(parts))
        failures = [k for k, _ in failures_among(samples)]
        return PackedPart(lease, serialize.write(parts, lease.view), 0, len(samples), failures)

    def of_keys(self, keys: list[object]) -> Part:
        """Make a part of samples that workers read by key."""
        if self._shares_objects:
            return ListPart(keys)
        if set(map(type, keys)) <= _PLAIN:
            return KeyPart(keys, None, 0, len(keys))
        try:
            serialize.pack(keys)
        except Exception:
            keys = [_sendable_key(key) for key in keys]
        return KeyPart(keys, serialize.pack_bytes, 0, len(keys))


def _sendable_key(key: object) -> object:
    from headrace.torch_compat.why_unpicklable import cannot_carry_index

    try:
        serialize.pack(key)
    except Exception as error:
        refusal = cannot_carry_index(error, key)
        refusal.__cause__ = error
        return Failure(serialize.pack_error(refusal))
    return key


def _sendable(sample: object) -> object:
    try:
        serialize.pack(sample)
    except Exception as error:
        error.add_note(f"stage: fetch; a sample of type {type(sample).__name__} cannot be sent to a worker")
        return Failure(serialize.pack_error(error))
    return sample
