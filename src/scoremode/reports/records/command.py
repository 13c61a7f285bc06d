"""What records add to verbs: ``record.json`` in runs, ``compare --records DIR``, ``report FILE.json …``.

Nothing heavy is imported before it is used: the help of these commands must stay instant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from scoremode.core.disk.folders import MANIFEST
from scoremode.errors import InputError, OptionError, print_line

if TYPE_CHECKING:
    import argparse

    from scoremode.core.disk.uri import RemotePath
    from scoremode.core.statistics.comparison import Comparison

NAME = "record.json"  # of the record in a run's folder
MARK = b'"scoremode": "'  # every record has it
FLAG = "--records"
LARGEST = 1 << 20  # bytes in which a record has its mark


class RecordsOutput:
    """The record of each candidate: in its run's folder with ``out``, and in another folder if one is named."""

    name = "records"
    flags: Mapping[str, str] = {f"{FLAG} DIR": "leave the record of each candidate there (with --out: in its run too)"}

    def check(self, place: str | Path | None) -> None:
        if place is not None:
            from scoremode.core.verbs.outputs import check_output

            if Path(place).is_file():
                raise InputError(f"{place} is a file", fix=f"give a folder to {FLAG}")
            check_output(Path(place, NAME), FLAG, is_ours=lambda output: True, made_later=place)

    def write(self, found: Sequence[Comparison], out: Path | RemotePath | None, place: str | Path | None) -> None:
        from scoremode.core.disk.uri import located
        from scoremode.core.verbs.outputs import write_files
        from scoremode.reports.publish import record_files

        # a run that was finished before lies elsewhere: its folder is not ours to write
        runs = [None if c.path is None or out is None else located(c.path) for c in found]
        own = [run if run is not None and str(run.parent) == str(out) else None for run in runs]
        if place is None and not any(own):
            return
        files = record_files(found)
        for run, text in zip(own, files.values(), strict=True):
            if run is not None:
                _write_beside_run(run / NAME, text.encode())
        if place is not None:
            texts = {Path(place, name): text for name, text in files.items()}
            for output in write_files(texts, FLAG, "a record of scoremode", MARK.decode()):
                print_line(f"record written to {output}")


def _write_beside_run(file: Path | RemotePath, data: bytes) -> None:
    """Writes a record into a run's folder, if no other file has its name."""
    from scoremode.core.verbs.outputs import Output

    place = None if isinstance(file, Path) else file
    output = Output(str(file), "--out", file if isinstance(file, Path) else Path(), place=place)
    if output.exists and MARK not in output.beginning(LARGEST):
        print_line(f"scoremode: {file} is not a record of scoremode, so it stays, and none is written there")
    else:
        output.write(data)


class RecordsInput:
    """Files of records, from anybody, for ``scoremode report``."""

    about = "records, as in records/*.json, or folders of them"

    def claims(self, names: Sequence[str]) -> bool:
        files = [_is_file(name) or bool(_inside(name)) for name in names]
        if any(files) and not all(files):
            raise InputError(
                f"{names[files.index(True)]} is a record and {names[files.index(False)]} is not",
                fix="show records and runs in two reports",
            )
        return all(files)

    def show(self, parsed: argparse.Namespace) -> None:
        from scoremode.core.verbs.outputs import check_report
        from scoremode.reports.command.output import print_json, show
        from scoremode.reports.records.reading import blocks, facts, grouped, read

        names, page = _files(parsed.run_folders), getattr(parsed, "output", None)
        if parsed.columns is not None or parsed.worst:
            raise OptionError("--columns and --worst are about runs", fix="leave them out: these are records")
        if page is None:
            found = grouped(read(names))
            show(parsed, lambda: facts(found), lambda: blocks(found))
            return
        output = check_report(page)
        output.write(self.render(names, page).encode())
        if parsed.json:
            print_json({"report": page, "records": len(names)})
        output.announce(f"written to {output}", quiet=parsed.json)

    def render(self, names: Sequence[str], page: str) -> str:
        from scoremode.reports.records.page import render
        from scoremode.reports.records.reading import read

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


OUTPUT = RecordsOutput()
INPUT = RecordsInput()
