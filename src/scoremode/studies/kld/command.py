"""What files of base logits add to commands: ``reference --kld FILE``, ``compare --llamacpp``, ``card --dialect``.

Nothing heavy is imported before it is used: the help of these commands must stay instant.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scoremode.core.plan.question import Question
    from scoremode.core.statistics.comparison import Comparison
    from scoremode.core.store.run import Run
    from scoremode.core.verbs.model import LazyModel
    from scoremode.core.verbs.place import Place


class KldOutput:
    """The file that ``reference --kld`` writes; see writing.py."""

    name = "kld"
    flag: Mapping[str, str] = {
        "--kld FILE": "its distributions in 16 bits for llama.cpp's tool, by the method llamacpp"
    }
    instead_of_states = (
        "keep the baseline's distributions first, rounded to 16 bits and by the method llamacpp: "
        "scoremode reference MODEL --kld FILE"
    )

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


class LlamacppLayout:
    """The statistics that llama.cpp's tool prints, by its formulas and in its layout; see statistics.py."""

    name = "llamacpp"
    about = "print what llama.cpp's tool prints, by its formulas"
    by = "By the formulas of llama.cpp's tool"

    def text(self, comparison: Comparison) -> str:
        from scoremode.studies.kld.statistics import llamacpp_statistics, llamacpp_text

        return llamacpp_text(llamacpp_statistics(comparison))


OUTPUT = KldOutput()
LAYOUT = LlamacppLayout()
