"""Which rows of an unfinished reference are written: records of a range of rows and the checksum of its bytes.

A record counts only if the rows still have its checksum. A later record of the same rows overrides an earlier one.
"""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np

from scoremode.store.reference import CHUNK, bytes_of, read_rows
from scoremode.store.reference_format import ShardLayout
from scoremode.values import Bools

RECORD = struct.Struct("<QQII")  # first row, rows, crc32 of the rows, crc32 of the three before
Record = tuple[int, int, int]  # first row, rows, crc32 of the rows


def packed(first: int, count: int, checksum: int) -> bytes:
    body = RECORD.pack(first, count, checksum, 0)[:-4]
    return body + struct.pack("<I", zlib.crc32(body))


def records_in(data: bytes, layout: ShardLayout) -> tuple[list[Record], int]:
    """The records in a file's bytes, up to the first that is incomplete because of a kill, and where they end."""
    records, at = list[Record](), 0
    while at + RECORD.size <= len(data):
        first, count, checksum, own = RECORD.unpack_from(data, at)
        if own != zlib.crc32(data[at : at + RECORD.size - 4]) or first + count > layout.targets:
            break
        records.append((first, count, checksum))
        at += RECORD.size
    return records, at


def checksum_of(folder: Path, layout: ShardLayout, first: int, count: int) -> int:
    checksum, step = 0, max(1, CHUNK // layout.row_bytes)
    for at in range(first, first + count, step):
        rows = read_rows(folder, layout, at, min(step, first + count - at))
        checksum = zlib.crc32(bytes_of(rows), checksum)
    return checksum


def is_complete(folder: Path, layout: ShardLayout, shard: int, records: list[Record]) -> bool:
    """Does a shard's file have all its rows, by those records that concern it alone?"""
    begin = shard * layout.rows_per_shard
    end = begin + layout.shard_rows(shard)
    sound: Bools = np.zeros(end - begin, np.bool_)
    for first, count, checksum in records:
        if begin <= first and first + count <= end:
            sound[first - begin : first + count - begin] = checksum_of(folder, layout, first, count) == checksum
        elif first < end and first + count > begin:  # of two shards
            sound[max(first - begin, 0) : first + count - begin] = False
    return bool(sound.all())
