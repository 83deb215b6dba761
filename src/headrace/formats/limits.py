"""Limits on the resources that data may claim."""

from __future__ import annotations

from dataclasses import dataclass, fields

from headrace._util import check
from headrace.errors import LimitError, masked


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits on sizes that archives and the files in them may claim.

    They are active by default, as a few damaged or malicious bytes may claim any size. An archive beyond a limit raises
    a LimitError, a field of a sample a DecodeError.

    Attributes:
        member_bytes: Size of one member of an archive.
        header_bytes: Size of the body of one extended header.
        name_bytes: Size of the name of one member.
        extension_chain: Number of extended headers before one member.
        fields: Number of members of one sample.
        unpacked_ratio: Decompressed bytes per compressed byte, after the first `unpacked_free_bytes`.
        unpacked_free_bytes: Decompressed bytes that are exempt from the ratio.
        window_bytes: Memory of a decompressor's window.
        pixels: Pixels of one image. The default equals Pillow's own limit, twice PIL.Image.MAX_IMAGE_PIXELS.

    Examples:
        >>> data = hr.stream("https://example.org/{0..3}.tar", limits=hr.Limits(member_bytes=2**20))
    """

    member_bytes: int = 2**30
    header_bytes: int = 2**20
    name_bytes: int = 4096
    extension_chain: int = 16
    fields: int = 1000
    unpacked_ratio: int = 200
    unpacked_free_bytes: int = 64 * 2**20
    window_bytes: int = 128 * 2**20
    pixels: int = 178_956_970

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            check.number(field.name, value, 1, 2**53)

    def unpacked(self, packed: int) -> int:
        """Maximum decompressed bytes of `packed` compressed bytes."""
        return max(self.unpacked_free_bytes, self.unpacked_ratio * packed)

    def check_unpacked(self, packed: int, unpacked: int, kind: str = "packed") -> None:
        if unpacked > self.unpacked(packed):
            raise LimitError(
                f"{packed} bytes of {kind} data would unpack to {unpacked} or more; the limit is {self.unpacked_ratio} "
                f"bytes for each (unpacked_ratio), once {self.unpacked_free_bytes} came out (unpacked_free_bytes)"
            )

    def check_pixels(self, width: int, height: int) -> None:
        if width * height > self.pixels:
            raise ValueError(f"it has {width} x {height} pixels, over the limit of {self.pixels}")


DEFAULTS = Limits()


def check_bytes(what: str, nbytes: int, most: int, *, url: str | None = None) -> None:
    """Raise a LimitError, about the object at `url` if given, if `what` has more than `most` bytes."""
    if nbytes > most:
        what = what if url is None else f"{masked(url)}: {what}"
        raise LimitError(f"{what} has {nbytes} bytes, over the limit of {most}", url=url)
