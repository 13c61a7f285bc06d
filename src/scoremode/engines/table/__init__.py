"""An engine whose answers are known in closed form: ``table:uniform`` and ``table:successor``; tokens are bytes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

from scoremode.core.engine.options import Options
from scoremode.core.engine.plugin import Capabilities, EnginePlugin, SelfTest, Work
from scoremode.core.plan.path import PATHS
from scoremode.errors import OptionError

if TYPE_CHECKING:
    from pathlib import Path

    from scoremode.core.models.subject import Subject
    from scoremode.engines.table.engine import TableEngine

PREFIX = "table:"


class TablePlugin(EnginePlugin):
    contract = 1
    name = "table"
    summary = "answers known in closed form: table:uniform and table:successor, over bytes"
    capabilities: ClassVar[Capabilities] = Capabilities.all(paths=PATHS)

    def claims(self, model: str) -> bool:
        return model.startswith(PREFIX)

    def subject(self, model: str, options: Options, tokenizer: str | None) -> Subject:
        from scoremode.core.models.subject import Subject
        from scoremode.core.text.tokenizer import ByteTokenizer
        from scoremode.engines.table.engine import require_table

        require_table(model.removeprefix(PREFIX))
        if tokenizer:
            raise OptionError(
                "--tokenizer does not apply to a table: its tokens are bytes", fix="leave --tokenizer out"
            )
        return Subject(model, ByteTokenizer(), fingerprint=model, vocabulary=256)

    def open(self, subject: Subject, options: Any, work: Work) -> TableEngine:
        from scoremode.engines.table.engine import TableEngine

        return TableEngine.named(subject.name.removeprefix(PREFIX))

    def self_test(self, checkpoint: Path) -> SelfTest:
        return SelfTest(f"{PREFIX}uniform", dtype="float64", logprob=-math.log(256))


PLUGIN = TablePlugin
