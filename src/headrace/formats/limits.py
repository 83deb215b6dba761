"""How much data may ask of whoever reads it."""

from __future__ import annotations

from dataclasses import dataclass, fields

from headrace.errors import OptionError


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds on what archives and the files in them may ask for.

    They are on by default, because shards come from elsewhere: a few damaged or hostile bytes may claim any size. An
    archive that asks for more is a LimitError, a field of a sample a DecodeError.

    Attributes:
        member_bytes: bytes of one member of an archive.
        header_bytes: bytes of the body of one extended header.
        name_bytes: bytes of one member's name.
        extension_chain: extended headers before one member.
        fields: members of one sample.
        unpacked_ratio: bytes that one compressed byte may become, once `unpacked_free_bytes` have come out.
        unpacked_free_bytes: bytes for which the ratio is not asked.
        window_bytes: memory that a decompressor may use for its window.
        pixels: of one image. Pillow has a bound of its own, PIL.Image.MAX_IMAGE_PIXELS, which is twice this.
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
            if not 0 < value <= 2**53:
                raise OptionError(f"{field.name}={value} must be 1 to 2**53")


DEFAULTS = Limits()
