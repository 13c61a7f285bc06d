"""Opens and reads what comes from outside: plain files alone, and never more than a limit, or than memory holds.

A FIFO would be waited for without end, and a device or a sparse file would fill the memory. Limits are far above every
honest file. OSError means that a file cannot be read, ValueError that it is too large.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from stat import S_ISDIR, S_ISFIFO, S_ISREG, S_ISSOCK
from termios import FIONREAD
from typing import BinaryIO

from scoremode.core import free_memory
from scoremode.errors import CorpusError

LARGEST = 64 << 20  # bytes of a file that is read whole: a manifest, a config, a tokenizer
LONGEST_LINE = 256 << 20  # bytes
BLOCK = 1 << 20  # bytes that are read at once of a text
COPIES = 3  # of a text that are in memory at once: its bytes, its characters, and what is hashed of it
READ_BY_LIBRARIES = re.compile(r"(.*config|tokenizer.*|.*tokens.*|vocab|merges|chat_template)\.(json|jinja|txt|model)")


def open_regular(path: Path) -> BufferedReader:
    """Opens a plain file to read; OSError for anything else."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(handle).st_mode
    if S_ISREG(mode):
        return os.fdopen(handle, "rb")
    os.close(handle)
    wrong = errno.EISDIR if S_ISDIR(mode) else errno.EINVAL
    raise OSError(wrong, os.strerror(wrong) if S_ISDIR(mode) else "it is not a plain file", str(path))


def text_waits() -> bool:
    """Does standard input have unread text? It is not waited for: an idle pipe or a terminal has none."""
    try:
        info = os.fstat(0)
        if S_ISREG(info.st_mode):
            return info.st_size > os.lseek(0, 0, os.SEEK_CUR)
        return (S_ISFIFO(info.st_mode) or S_ISSOCK(info.st_mode)) and any(fcntl.ioctl(0, FIONREAD, bytes(4)))
    except OSError:
        return False


def read_file(path: Path, most: int = LARGEST) -> bytes:
    """Returns the content of a plain file of at most so many bytes."""
    with open_regular(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"larger than {most >> 20} MiB")
    return data


def numbered_lines(path: Path, *, kept: bool = False) -> Iterator[tuple[int, bytes]]:
    """Yields the lines of a plain file with their numbers; CorpusError for one that is longer than a row can be.

    ``kept``: what is in the lines will be kept in memory, so a file that is too large for that is refused.
    """
    number = 0
    try:
        with open_regular(path) as file:
            if kept:
                size = os.fstat(file.fileno()).st_size
                require_memory(f"reading {path}", COPIES * size, free_memory.available())
            while line := file.readline(LONGEST_LINE + 1):
                number += 1
                if len(line) > LONGEST_LINE:
                    message = f"{path} line {number} is longer than {LONGEST_LINE >> 20} MiB"
                    raise CorpusError(message, fix="give rows of JSON, one on each line")
                yield number, line
    except OSError as error:
        message = f"{path} cannot be read ({error.strerror})"
        raise CorpusError(message, fix="check the path and its permissions") from None


def read_text(file: BinaryIO, name: str, size: int = 0) -> bytearray:
    """Returns all of a text, up to its first NUL, after which it is no text. CorpusError if memory cannot hold it."""
    left, data = free_memory.available(), bytearray()
    require_memory(f"reading {name}", COPIES * size, left)
    while block := file.read(BLOCK):
        data += block
        require_memory(f"reading {name}", COPIES * len(data), left)
        if (at := data.find(b"\0", len(data) - len(block))) >= 0:
            return data[: at + 1]
    return data


def require_memory(task: str, needed: int, left: int | None) -> None:
    """Raises CorpusError if something needs more bytes of memory than are left."""
    if left is not None and needed > left:
        raise CorpusError(
            f"{task} needs about {megabytes(needed)} of memory, and {megabytes(left)} are free",
            fix="give a smaller file, fewer lines with --num-samples, or the text as many rows of a .jsonl file",
        )


def megabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def require_plain_files(folder: Path) -> None:
    """Raises OSError if a library that reads a folder would wait without end, or would read a file that is too large.

    Such a library reads FIFOs and devices as it reads files, and tokenizers and configs of any size.
    """
    for path in folder.iterdir():
        if path.is_fifo() or path.is_socket() or path.is_char_device():
            raise OSError(errno.EINVAL, "it is not a plain file", str(path))
        if READ_BY_LIBRARIES.fullmatch(path.name) and path.is_file() and path.stat().st_size > LARGEST:
            raise OSError(errno.EFBIG, f"it is larger than {LARGEST >> 20} MiB", str(path))
