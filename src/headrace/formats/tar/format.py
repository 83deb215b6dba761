"""The tar format."""

from __future__ import annotations

from headrace.errors import FormatError
from headrace.formats.format import Format
from headrace.formats.limits import Limits
from headrace.formats.tar.headers import BLOCK, read_header
from headrace.formats.tar.scanner import TarScanner


class TarFormat(Format):
    """Tar archives in WebDataset's layout; see `tar.samples`."""

    name = "tar"
    suffixes = (".tar",)
    fields_are_members = True

    def sniff(self, name: str, head: bytes) -> float:
        if len(head) < BLOCK or not any(head[:BLOCK]):
            return 0.0
        try:
            read_header(head[:BLOCK], 0)
        except FormatError:
            return 0.0
        return 1.0 if head[257:262] == b"ustar" else 0.6

    def scanner(self, url: str, limits: Limits) -> TarScanner:
        return TarScanner(url, limits)


TAR = TarFormat()
