"""Finds how much memory this process may still use: the minimum of what machine, container and ``ulimit`` allow."""

from __future__ import annotations

import re
import sys
from pathlib import Path

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
NO_LIMIT = 1 << 60  # cgroups version 1 use a number near 2**63 for "no limit"


def available() -> int | None:
    """Returns the bytes that this process may still use; None if the system does not report them."""
    limits = (_kibibytes(PROC / "meminfo", "MemAvailable:"), _address_space(), *_containers())
    known = [limit for limit in limits if limit is not None]
    return max(0, min(known)) if known else None


def _address_space() -> int | None:
    """Returns the bytes that ``ulimit -v`` leaves. The limit counts reserved addresses, even if they are not used."""
    if sys.platform == "win32":
        return None
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    taken = _kibibytes(PROC / "self" / "status", "VmSize:")
    return None if limit == resource.RLIM_INFINITY or taken is None else limit - taken


def _containers() -> list[int]:
    """Returns the bytes that each cgroup of this process leaves, from its own up to the root, for cgroups v1 and v2."""
    found: list[int] = []
    for line in _read(PROC / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        root, names = CGROUPS, ("memory.max", "memory.current")
        if controllers:
            root, names = CGROUPS / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        folder = root / path.lstrip("/")
        for place in (folder, *folder.parents):
            limit, taken = (_read(place / name).strip() for name in names)
            if limit.isdigit() and taken.isdigit() and int(limit) < NO_LIMIT:
                cached = re.search(r"^(?:total_)?inactive_file (\d+)$", _read(place / "memory.stat"), re.MULTILINE)
                dropped = int(cached[1]) if cached else 0  # cached pages of files: freed when memory is needed
                found.append(int(limit) - int(taken) + dropped)
            if place == root:
                break
    return found


def _kibibytes(file: Path, name: str) -> int | None:
    found = re.search(rf"^{name}\s+(\d+)", _read(file), re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, ValueError):
        return ""
