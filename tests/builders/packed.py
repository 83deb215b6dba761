"""Compressed objects, as the tools of their formats make them."""

import zstandard


def seekable(data: bytes, frame: int, *, write_checksum: bool = False) -> bytes:
    """In the seekable format of Zstandard: frames of so many bytes, and a table of them."""
    pieces = [data[at : at + frame] for at in range(0, len(data), frame)]
    packed = [zstandard.ZstdCompressor(write_checksum=write_checksum).compress(piece) for piece in pieces]
    table = b"".join(
        len(a).to_bytes(4, "little") + len(b).to_bytes(4, "little") for a, b in zip(packed, pieces, strict=True)
    )
    table += len(pieces).to_bytes(4, "little") + b"\0" + (0x8F92EAB1).to_bytes(4, "little")
    return b"".join(packed) + (0x184D2A5E).to_bytes(4, "little") + len(table).to_bytes(4, "little") + table
