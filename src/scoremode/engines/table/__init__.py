"""An engine whose answers are known in closed form: ``table:uniform`` and ``table:successor``; tokens are bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from scoremode.engines.options import Options
from scoremode.engines.plugin import EVERYTHING, Capabilities, EnginePlugin, Work
from scoremode.errors import OptionError
from scoremode.plan.path import PATHS

if TYPE_CHECKING:
    from scoremode.engines.table.engine import TableEngine
    from scoremode.engines.writing import DrawingRules, Writer
    from scoremode.models.subject import Subject

PREFIX = "table:"


class TablePlugin(EnginePlugin):
    """The engine for models named ``table:NAME``."""

    contract = 1
    name = "table"
    summary = "answers known in closed form: table:uniform and table:successor, over bytes"
    capabilities: ClassVar[Capabilities] = replace(EVERYTHING, writes=True, paths=PATHS)

    def claims(self, model: str) -> bool:
        return model.startswith(PREFIX)

    def subject(self, model: str, options: Options, tokenizer: str | None) -> Subject:
        from scoremode.engines.table.engine import require_table
        from scoremode.models.subject import Subject
        from scoremode.text.tokenizer import ByteTokenizer

        require_table(model.removeprefix(PREFIX))
        if tokenizer:
            raise OptionError(
                "--tokenizer does not apply to a table: its tokens are bytes", fix="leave --tokenizer out"
            )
        return Subject(model, ByteTokenizer(), fingerprint=model, vocabulary=256)

    def open(self, subject: Subject, options: Any, work: Work) -> TableEngine:
        from scoremode.engines.table.engine import TableEngine

        return TableEngine.named(subject.name.removeprefix(PREFIX))

    def open_writer(self, subject: Subject, options: Any, work: Work, rules: DrawingRules) -> Writer:
        from scoremode.engines.table.writer import TableWriter

        return TableWriter(self.open(subject, options, work), rules)


PLUGIN = TablePlugin
