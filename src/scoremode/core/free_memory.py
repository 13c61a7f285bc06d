"""Finds how much memory this process may still use: the minimum of what machine, container and ``ulimit`` allow."""

from __future__ import annotations

import re
from pathlib import Path

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


def available() -> int | None:
    """Returns the bytes that this process may still use; None if the system does not report them."""
    limits = (_kibibytes(PROC / "meminfo", "MemAvailable:"), _address_space(), *_containers())
    bytes_left = [limit for limit in limits if limit is not None]
    return max(0, min(bytes_left)) if bytes_left else None


def _address_space() -> int | None:
    """Returns the bytes that ``ulimit -v`` leaves. The limit counts reserved addresses, even if they are not used."""
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    taken = _kibibytes(PROC / "self" / "status", "VmSize:")
    return None if limit == resource.RLIM_INFINITY or taken is None else limit - taken


def _containers() -> list[int]:
    """Returns the bytes that each cgroup (version 2) of this process leaves, from its own up to the root."""
    bytes_left: list[int] = []
    entry = next((line for line in _read(PROC / "self" / "cgroup").splitlines() if line.startswith("0::")), "")
    folder = CGROUPS / entry.removeprefix("0::").lstrip("/")
    for place in (folder, *folder.parents):
        limit, taken = (_read(place / name).strip() for name in ("memory.max", "memory.current"))
        if limit.isdigit() and taken.isdigit():
            cached = re.search(r"^inactive_file (\d+)$", _read(place / "memory.stat"), re.MULTILINE)
            dropped = int(cached[1]) if cached else 0  # cached pages of files: freed when memory is needed
            bytes_left.append(int(limit) - int(taken) + dropped)
        if place == CGROUPS:
            break
    return bytes_left


def _kibibytes(file: Path, name: str) -> int | None:
    match = re.search(rf"^{name}\s+(\d+)", _read(file), re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, ValueError):
        return ""
