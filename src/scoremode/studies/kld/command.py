"""What files of base logits add to commands: ``reference --kld FILE``, ``compare --llamacpp``, ``card --dialect``.

Nothing heavy is imported before it is used: the help of these commands must stay instant.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from scoremode.core.extensions import Format

if TYPE_CHECKING:
    from scoremode.core.plan.question import Question
    from scoremode.core.statistics.comparison import Comparison
    from scoremode.core.store.run import Run
    from scoremode.core.verbs.model import LazyModel
    from scoremode.core.verbs.place import Place


class KldFormat(Format):
    """The file that ``reference --kld`` writes; see writing.py."""

    def used_by(self, file: str) -> list[str]:
        return [
            f"written to {file}; scoremode compare {file} CANDIDATE, or",
            f"llama-perplexity --kl-divergence-base {file} --kl-divergence -m CANDIDATE.gguf",
        ]

    def score(
        self,
        model: LazyModel,
        file: str | Path,
        question: Question,
        place: Place,
    ) -> Run:
        from scoremode.studies.kld.writing import write_kld

        return write_kld(model, file, question, place)


class LlamacppLayout(Format):
    """The statistics that llama.cpp's tool prints, by its formulas and in its layout; see statistics.py."""

    def text(self, comparison: Comparison) -> str:
        from scoremode.studies.kld.statistics import llamacpp_statistics, llamacpp_text

        return llamacpp_text(llamacpp_statistics(comparison))


KLD = KldFormat()
LAYOUT = LlamacppLayout()
