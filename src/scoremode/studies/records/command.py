"""What records add to verbs: ``record.json`` in runs, ``compare --records DIR``, ``report FILE.json …``.

Nothing heavy is imported before it is used: the help of these commands must stay instant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from scoremode.core.disk.folders import MANIFEST
from scoremode.core.extensions import Format
from scoremode.errors import InputError, OptionError, print_line

if TYPE_CHECKING:
    import argparse

    from scoremode.core.disk.uri import RemotePath
    from scoremode.core.statistics.comparison import Comparison
    from scoremode.core.verbs.place import Place

NAME = "record.json"  # of the record in a run's folder
FLAG = "--records"


class RecordsFormat(Format):
    """Records: ``compare`` leaves them in runs and in a folder that is named, ``report`` shows anybody's."""

    def check(self, folder: str | Path | None, candidates: Mapping[str, Path | RemotePath | None]) -> None:
        from scoremode.core.verbs.outputs import check_output
        from scoremode.reports.publish import RECORD_FILE, file_stems

        if folder is not None and Path(folder).is_file():
            raise InputError(f"{folder} is a file", fix=f"give a folder to {FLAG}")
        for stem in file_stems(candidates) if folder is not None else ():
            check_output(Path(folder or "", f"{stem}.json"), FLAG, RECORD_FILE, made_later=folder)
        for run in candidates.values():
            if isinstance(run, Path):  # what lies behind a URI is looked at when it is written
                check_output(run / NAME, "--out", RECORD_FILE, made_later=run, in_run=True)

    def write(self, comparisons: Sequence[Comparison], place: Place, folder: str | Path | None) -> None:
        from scoremode.core.disk.uri import located
        from scoremode.core.verbs.outputs import write_files
        from scoremode.reports.publish import RECORD_FILE, record_files

        # a run that was finished before lies elsewhere: its folder is not ours to write
        runs = [None if c.path is None or place.out is None else located(c.path) for c in comparisons]
        paths = [run if run is not None and str(run.parent) == str(place.out) else None for run in runs]
        if folder is None and not any(paths):
            return
        files = record_files(comparisons)
        beside_runs = {run / NAME: text for run, text in zip(paths, files.values(), strict=True) if run is not None}
        write_files(beside_runs, "--out", RECORD_FILE, in_run=True, fresh=place.fresh)
        if folder is not None:
            texts = {Path(folder, name): text for name, text in files.items()}
            for output in write_files(texts, FLAG, RECORD_FILE):
                print_line(f"record written to {output}")

    def claims(self, names: Sequence[str]) -> bool:
        files = [_is_file(name) or bool(_inside(name)) for name in names]
        if any(files) and not all(files):
            raise InputError(
                f"{names[files.index(True)]} is a record and {names[files.index(False)]} is not",
                fix="show records and runs in two reports",
            )
        return all(files)

    def show(self, parsed: argparse.Namespace) -> None:
        from scoremode.console.output import print_json, show
        from scoremode.core.verbs.outputs import check_report
        from scoremode.studies.records.reading import blocks, facts, grouped, read

        names, page = _files(parsed.run_folders), getattr(parsed, "output", None)
        if parsed.columns is not None or parsed.worst:
            raise OptionError("--columns and --worst are about runs", fix="leave them out: these are records")
        if page is None:
            listing = grouped(read(names))
            show(parsed, lambda: facts(listing), lambda: blocks(listing))
            return
        check_report(page)  # before records are read
        html = self.render(names, page)
        output = check_report(page, page=html)
        output.write(html.encode())
        if parsed.json:
            print_json({"report": page, "records": len(names)})
        output.announce(f"written to {output}", quiet=parsed.json)

    def render(self, names: Sequence[str], page: str) -> str:
        from scoremode.studies.records.page import render
        from scoremode.studies.records.reading import read

        return render(read(_files(names)), page)


def _is_file(name: str) -> bool:
    return name.lower().endswith(".json") and not Path(name).is_dir()


def _inside(name: str) -> list[str]:
    """The records in a folder; none if it has runs."""
    folder = Path(name)
    if not folder.is_dir() or any(folder.glob(MANIFEST)) or any(folder.glob(f"*/{MANIFEST}")):
        return []
    return sorted(str(path) for path in folder.iterdir() if _is_file(str(path)))


def _files(names: Sequence[str]) -> list[str]:
    return [file for name in names for file in (_inside(name) or [name])]


RECORDS = RecordsFormat()
