"""Loads the data of tasks from local files: ``--task-data DIR``.

DIR/NAME_SPLIT.jsonl, DIR/NAME_SPLIT_ANYTHING.jsonl    one split; NAME is the task, or its dataset's configuration
DIR/NAME.jsonl                                         the split that the task is evaluated on

A task names its splits: ``test`` is evaluated, else ``validation``. If the folder lacks the test split, the task is
evaluated on validation, and a note says so. No other split is ever evaluated. Few-shot examples come from the split
that the task names; without that split, the task is refused. Files are data: no code is loaded with them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scoremode.disk.files import file_sha256
from scoremode.errors import InputError, harmless
from scoremode.strict_json import parse

ROWS = 'as in {"question": "…", "answer": "…"}'


@dataclass(slots=True)
class TaskData:
    """A folder with the data of tasks; notes and files are collected while tasks are loaded."""

    folder: Path
    notes: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)  # name -> sha256

    def __post_init__(self) -> None:
        if not self.folder.is_dir():
            raise InputError(f"--task-data {self.folder} is not a folder", fix="name a folder with JSONL files")

    def load(self, task: Any, shots: int) -> Any:
        """Loads the dataset of a task, and changes the task's configuration to name only splits that the folder has."""
        import datasets

        config, evaluated = task.config, self._evaluated(task)
        examples = task.fewshot_cfg.split or config.training_split or config.validation_split or config.test_split
        given = task.fewshot_cfg.samples is not None and task.fewshot_cfg.split is None
        wanted = {config.training_split, config.validation_split, config.test_split, task.fewshot_cfg.split} - {None}
        there = {split: path for split in wanted if (path := self._file(task, split)) is not None} | evaluated
        if shots and not given and examples not in there:
            name = config.task
            raise InputError(
                f"few-shot examples of {name} come from its split {examples}, which is not in {self.folder}",
                fix=f"add {name}_{examples}.jsonl, or give --num-fewshot 0",
            )
        for split in ("training_split", "validation_split", "test_split"):
            if getattr(config, split) not in there:
                setattr(config, split, None)
        if task.fewshot_cfg.split not in there:
            task.fewshot_cfg.split = None
        return datasets.DatasetDict({split: self._rows(path) for split, path in there.items()})

    def _evaluated(self, task: Any) -> dict[str, Path]:
        """Returns the split that is evaluated, and its file."""
        config = task.config
        wanted = config.test_split or config.validation_split
        if wanted is None:
            raise InputError(f"the task {config.task} has no test or validation split", fix="name another task")
        path = self._file(task, wanted)
        if path is None:
            bare = [self.folder / f"{name}.jsonl" for name in self._names(task)]
            path = next((file for file in bare if file.is_file()), None)
        if path is not None:
            return {wanted: path}
        other = config.validation_split
        if wanted != other and other is not None and (path := self._file(task, other)) is not None:
            self.notes.append(f"{config.task}: evaluated on {other}, because {self.folder} has no {wanted} split")
            return {other: path}
        raise InputError(
            f"{self.folder} has no data of the task {config.task}",
            fix=f"add {config.task}_{wanted}.jsonl, one JSON object per line",
        )

    def _names(self, task: Any) -> list[str]:
        given = (task.config.task, task.config.dataset_name)
        return list(dict.fromkeys(name for name in given if isinstance(name, str) and name and "/" not in name))

    def _file(self, task: Any, split: str) -> Path | None:
        found = [path for name in self._names(task) for path in self._matching(f"{name}_{split}")]
        if len(set(found)) > 1:
            names = ", ".join(sorted({path.name for path in found}))
            raise InputError(
                f"{self.folder} has several files for {task.config.task}: {names}", fix="leave one of them there"
            )
        return found[0] if found else None

    def _matching(self, beginning: str) -> list[Path]:
        return [
            path
            for path in sorted(self.folder.iterdir())
            if path.suffix == ".jsonl" and (path.stem == beginning or path.stem.startswith(f"{beginning}_"))
        ]

    def _rows(self, path: Path) -> Any:
        """Reads the rows of a file as a dataset; errors name the line of each defect."""
        import datasets

        rows: list[dict[str, Any]] = []
        if not path.is_file():  # reading a pipe would wait forever
            raise InputError(f"{path} is not a file", fix="put a file with one JSON object per line there")
        try:
            with path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        rows.append(_row(line, f"{path} line {number}"))
                        _require_same_fields(rows[0], rows[-1], f"{path} line {number}")
            self.files[path.name] = file_sha256(path)
        except OSError as error:
            raise InputError(f"{path} cannot be read ({error.strerror})", fix="check its permissions") from None
        if not rows:
            raise InputError(f"{path} is empty", fix="give one JSON object per line")
        try:
            return datasets.Dataset.from_list(rows)
        except Exception as error:  # pyarrow raises many kinds of errors
            reason = str(error).strip().split("\n")[0][:160]
            raise InputError(f"the rows of {path} do not fit together ({reason})", fix="correct the rows") from None


def _row(line: bytes, where: str) -> dict[str, Any]:
    try:
        value = parse(line)
    except ValueError as error:
        raise InputError(f"{where} is not JSON ({error})", fix="fix or remove the line") from None
    if not isinstance(value, dict) or not value:
        raise InputError(f"{where} is not a JSON object", fix=f"give one object per line, {ROWS}")
    return value


def _require_same_fields(first: dict[str, Any], row: dict[str, Any], where: str) -> None:
    """Refuses a row with other fields than the first: datasets would drop new ones and fill missing ones with None."""
    name = next((name for name in (*first, *row) if name not in first or name not in row), None)
    if name is None:
        return
    if name in first:
        what, fix = "has no field '{}', and the first row has one", "add it, with null where it has no value"
    else:
        what, fix = "has a field '{}', and the first row has none", "give all rows the same fields"
    raise InputError(f"{where} {what.format(harmless(name))}", fix=fix)
