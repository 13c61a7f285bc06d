"""A progress bar on standard error, with tokens a second and the time left; silent where nobody watches."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from scoremode.verbs.progress import Progress


@contextmanager
def progress_bar(label: str, unit: str = "tokens") -> Iterator[Progress | None]:
    """A callback for the scoring loop, or None where standard error is not a terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(compact=True),
    )
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None, speed="")
        began: list[tuple[float, int]] = []

        def update(done: int, total: int) -> None:
            began.append((time.perf_counter(), done)) if not began else None
            seconds, fed = time.perf_counter() - began[0][0], done - began[0][1]
            speed = f"{fed / seconds:,.0f} {unit}/s" if seconds > 0 and fed else ""
            bar.update(task, completed=done, total=total, speed=speed)

        yield update
