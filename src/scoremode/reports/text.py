"""Words that several reports share, and corpus text made safe and short: it may contain even escape sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from scoremode.core.statistics.groups import FEWEST
from scoremode.core.text.corpus import DEFAULT_NOTE
from scoremode.errors import harmless, listed
from scoremode.values import rounded

if TYPE_CHECKING:
    from scoremode.core.statistics.comparison import Comparison
    from scoremode.core.store.run import Run

NOT_MEASURED = "not measured"
# settings of a method: those that are shown first, and what they are called
SETTINGS = {"context_length": "context", "stride": "stride", "path": "path", "sequences": "sequences"}
UNSAID = {"max_windows": 0, "special_tokens": True}  # settings that limit and change nothing
VISIBLE = {"\n": "⏎", "\t": "⇥", "\r": "␍"}


def counted(number: int, plural: str) -> str:
    """A number and what it counts.

    >>> counted(1, "windows"), counted(1200, "windows")
    ('1 window', '1,200 windows')
    """
    return f"{number:,} {plural.removesuffix('s') if number == 1 else plural}"


def too_few(groups: int | None, kind: str = "groups") -> str:
    """Says why a number has no error.

    >>> too_few(3, "documents")
    '3 documents give no ± (5 are needed)'
    """
    gives = "gives" if groups == 1 else "give"
    return f"{counted(groups or 0, kind)} {gives} no ± ({FEWEST} are needed)"


def in_title(names: Sequence[str]) -> str:
    """Names for a title: ``a, b and c``; only their number if there are more than three."""
    return f"{len(names)} candidates" if len(names) > 3 else listed(names)


def shown(text: str) -> str:
    """Text on one line, without control characters that a terminal would interpret."""
    return harmless("".join(VISIBLE.get(c, c) for c in text))


def middle_cut(text: str, width: int) -> str:
    """Shortens a text to ``width`` by cutting its middle: names mostly differ at their ends.

    >>> middle_cut("Qwen3-30B-A3B-Instruct-Q4_K_M.gguf", 21)
    'Qwen3-30B-…4_K_M.gguf'
    """
    if len(text) <= width:
        return text
    end = (width - 1) // 2
    return f"{text[: width - 1 - end]}…{text[len(text) - end :]}"


def method_words(manifest: Mapping[str, Any], *, brief: bool = False) -> str:
    """A method and its settings, as in ``sliding-once (context 2048, stride 512)``; ``brief``: the main ones."""
    settings = manifest.get("method_settings", {})
    ordered = [name for name in SETTINGS if name in settings]
    others = [] if brief else sorted(settings.keys() - SETTINGS.keys())
    ordered += [name for name in others if settings[name] != UNSAID.get(name)]
    labels = {name: SETTINGS.get(name, name.replace("_", " ")) for name in ordered}
    details = ", ".join(f"no {labels[n]}" if settings[n] is False else f"{labels[n]} {settings[n]}" for n in ordered)
    return f"{manifest.get('method')} ({details})" if details else str(manifest.get("method"))


def top_words(comparison: Comparison) -> str:
    """Why the share of equal first choices is missing, in one line; '' if it is not missing."""
    sides = (("the baseline", comparison.baseline), (comparison.name, comparison.candidate))
    names = [name for name, run in sides if not run.scores.has("top")]
    return f"same top: {NOT_MEASURED} (no first choices from {' and '.join(names)})" if names else ""


def model_notes(run: Run) -> list[str]:
    """What a reader must know about a model as it was loaded; runs of other versions may have no such notes."""
    notes = run.manifest.get("model_notes")
    return [str(note) for note in notes] if isinstance(notes, list) else []


def default_text(run: Run) -> list[str]:
    """The note that says which text was taken where none was given."""
    return [note for note in run.manifest.get("notes") or [] if str(note).startswith(DEFAULT_NOTE)]


def noise_words(comparison: Comparison) -> str:
    """The noise floor in one line: its size and what was computed in a different way, or why it was not measured."""
    if comparison.kl is None:
        return ""  # two finished runs: there is no divergence to judge by it
    floor, perturbed = comparison.statistics().get("noise_floor_kl_mean"), comparison.noise_perturbed
    if floor is None:
        return f"noise floor: not measured ({perturbed or 'the run does not say why'})"
    return f"noise floor: KL mean {rounded(floor)[0]}" + (f" under: {perturbed}" if perturbed else "")


def path_notes(comparisons: Sequence[Comparison]) -> list[str]:
    """What to know of the paths of a model that is compared with itself, in lines; none about other comparisons."""
    lines = list[str]()
    for c in (c for c in comparisons if c.is_of_paths):
        lines = lines or ["Δ: logprob minus that of prefill, in nats"]
        settings = c.candidate.manifest["method_settings"]
        if settings.get("prefill_tokens", 1) > 1:
            lines.append(f"{c.name}: {settings['prefill_tokens']:,} tokens of each window prefilled")
        baseline_notes = c.baseline.manifest["notes"]
        lines += [f"{c.name}: {note}" for note in c.candidate.manifest["notes"] if note not in baseline_notes]
        lines += [f"{c.name}: {c.manifest['promise']}"] if c.manifest.get("promise") else []
    return lines
