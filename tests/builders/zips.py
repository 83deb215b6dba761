"""Zip archives, as Python writes them."""

import io
import zipfile
from collections.abc import Mapping


def zipped(files: Mapping[str, bytes | str], method: int = zipfile.ZIP_STORED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "a", method) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return out.getvalue()
