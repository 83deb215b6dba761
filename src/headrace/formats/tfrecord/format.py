"""TFRecord files as a format."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.formats.format import Block, Format
from headrace.formats.limits import Limits
from headrace.formats.tfrecord.examples import sample_of
from headrace.formats.tfrecord.scanner import AROUND, HEAD, TAIL, RecordScanner, masked_crc


class TFRecord(Format):
    """Records, each a tf.train.Example whose features are the fields.

    Args:
        raw: give each record's bytes, as the field "record", whatever they are.
        lists: the features whose bytes are lists, also where there is one value; else one value is just that.
    """

    name = "tfrecord"
    suffixes = (".tfrecord", ".tfrecords")

    def __init__(self, *, raw: bool = False, lists: Sequence[str] = ()) -> None:
        self.raw = raw
        self.lists = frozenset((lists,) if isinstance(lists, str) else lists)

    def sniff(self, name: str, head: bytes) -> float:  # noqa: ARG002
        return 0.95 if len(head) >= HEAD.size and masked_crc(head[:8]) == HEAD.unpack_from(head)[1] else 0.0

    def scanner(self, url: str, limits: Limits) -> RecordScanner:
        return RecordScanner(url, limits)

    def open_block(self, block: Block, bodies: Sequence[bytes]) -> Sequence[dict[str, object]]:
        (data,) = bodies
        if len(data) < AROUND or HEAD.unpack_from(data)[0] != len(data) - AROUND:
            raise ValueError(f"its record has {len(data)} bytes, and says otherwise")
        body = data[HEAD.size : -TAIL.size]
        if masked_crc(body) != TAIL.unpack_from(data, len(data) - TAIL.size)[0]:
            raise ValueError("its bytes are not what their checksum says")
        return [{"record": body} if self.raw else sample_of(body, self.lists, block.limits)]


TFRECORD = TFRecord()
