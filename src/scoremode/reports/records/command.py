"""What records add to commands: ``compare --records DIR``, ``record.json`` in runs, ``report FILE.json …``.

Nothing heavy is imported before it is used: the help of these commands must stay instant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from scoremode.errors import InputError, OptionError

if TYPE_CHECKING:
    import argparse

    from scoremode.core.statistics.comparison import Comparison

NAME = "record.json"  # of the record in a run's folder
MARK = b'"scoremode": "'  # every record has it
FLAG = "--records"


class RecordsOutput:
    """The record of each candidate: in the folder of its run with ``--out``, in a folder of its own otherwise."""

    flags: Mapping[str, str] = {f"{FLAG} DIR": "leave the record of each candidate there (with --out: in its run)"}

    def check(self, parsed: argparse.Namespace) -> None:
        if parsed.records is not None:
            from scoremode.core.verbs.outputs import check_output

            if Path(parsed.records).is_file():
                raise InputError(f"{parsed.records} is a file", fix=f"give a folder to {FLAG}")
            check_output(Path(parsed.records, NAME), FLAG, is_ours=lambda output: True, made_later=parsed.records)

    def write(self, parsed: argparse.Namespace, found: Sequence[Comparison]) -> None:
        from scoremode.core.verbs.outputs import write_files
        from scoremode.reports.publish import published_files

        if parsed.records is None and parsed.out is None:
            return
        files = published_files("json", found, None)
        if parsed.records is None:
            for c, text in zip(found, files.values(), strict=True):
                _write_beside_run(parsed.out, c.path, text.encode())
            return
        texts = {Path(parsed.records, name): text for name, text in files.items()}
        for output in write_files(texts, FLAG, "a record of scoremode", MARK.decode()):
            for_machines = any(getattr(parsed, flag) for flag in ("json", "markdown", "model_index"))
            output.announce(f"record written to {output}", quiet=for_machines)


def _write_beside_run(out: str, run: str | None, data: bytes) -> None:
    """Writes a record into a run's folder, if this command made that folder below ``out``."""
    from scoremode.core.disk.uri import RemotePath, located
    from scoremode.core.verbs.outputs import Output

    where = None if run is None else located(run)
    if where is None or str(where.parent) != str(located(out)):
        return  # a run that was finished before: its folder is not ours to write
    file = where / NAME
    if isinstance(file, RemotePath):
        output = Output(str(file), "--out", Path(), place=file)
    else:
        output = Output(str(file), "--out", file)
    if output.exists and MARK not in output.beginning(len(data)):
        raise InputError(f"{file} exists and is not a record of scoremode", fix=f"move it away, or give {FLAG} DIR")
    output.write(data)


class RecordsInput:
    """Files of records, from anybody, for ``scoremode report``."""

    about = "records, as in records/*.json"

    def claims(self, names: Sequence[str]) -> bool:
        files = [name.endswith(".json") and not Path(name).is_dir() for name in names]
        if any(files) and not all(files):
            raise InputError(
                f"{names[files.index(True)]} is a record and {names[files.index(False)]} is not",
                fix="show records and runs in two reports",
            )
        return all(files)

    def show(self, parsed: argparse.Namespace) -> None:
        from scoremode.core.verbs.outputs import check_report
        from scoremode.reports.command.output import print_json, show
        from scoremode.reports.records.grouping import blocks, facts, grouped
        from scoremode.reports.records.reading import read

        names, page = parsed.run_folders, getattr(parsed, "output", None)
        if parsed.worst is not None or parsed.columns is not None:
            raise OptionError("--worst and --columns are about runs", fix="leave them out: these are records")
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

        return render(read(names), page)


OUTPUT = RecordsOutput()
INPUT = RecordsInput()
