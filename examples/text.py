"""Real text that every machine has: the source of the running interpreter's standard library.

Two machines with the same Python have the same text; the digest tells whether they do.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

BYTES_MAX = 4 << 20
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "__pycache__", "idlelib"}


@dataclass(frozen=True)
class Text:
    """A text and where it came from.

    Attributes:
        content: the bytes.
        files: number of files it is made of.
        sha256: digest of the content, hexadecimal.
        source: folder it was read from.
    """

    content: bytes
    files: int
    sha256: str
    source: str


def standard_library(bytes_max: int = BYTES_MAX, folder: str | None = None) -> Text:
    """The standard library's Python files in sorted order, one after the other.

    Args:
        bytes_max: the text is cut here.
        folder: read this folder instead.

    Returns:
        The text.

    Raises:
        FileNotFoundError: there is no Python source (some images ship byte code only).
    """
    root = Path(folder or sysconfig.get_paths()["stdlib"])
    content, files = bytearray(), 0
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        if LEFT_OUT & set(path.relative_to(root).parts):
            continue
        try:
            content += path.read_bytes() + b"\n"
        except OSError:  # a file this user may not read
            continue
        files += 1
        if len(content) >= bytes_max:
            break
    if not files:
        raise FileNotFoundError(f"no Python source below {root}; give the example a text of your own with --text")
    text = bytes(content[:bytes_max])
    return Text(text, files, hashlib.sha256(text).hexdigest(), str(root))
