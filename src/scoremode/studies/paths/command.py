"""``scoremode paths``: its flags, and what it prints."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from scoremode.console import flags
from scoremode.console.flags import Verb
from scoremode.console.output import checked_report, command_line, progress_bar, show, write_report
from scoremode.errors import OptionError

if TYPE_CHECKING:
    from scoremode.core.statistics.comparison import Comparison


class PathsVerb(Verb):
    examples = (
        "scoremode paths model.gguf --vary decode,chunked --corpus wikitext2",
        "scoremode paths org/model --vary dtype=float32,bfloat16 --corpus wikitext2",
    )
    everyday = (
        *(*flags.EVERYDAY_TEXT, "--context-length", "--vary", "--sequences", "--chunk-tokens"),
        *(*flags.EVERYDAY_ENGINE, "--out", "--report", "--json"),
    )
    epilog = (
        "decode and chunked are compared with prefill, and a few windows are computed again, to tell "
        "differences from noise. noise scores the same several times, FLAG=A,B under each value; the first values are "
        "the reference, and nothing is read from the cache."
    )
    renamed: ClassVar[Mapping[str, tuple[str, str]]] = {"noise": ("paths {} --vary noise", "MODEL")}

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        flags.add_model(parser, several_sequences=True)
        group = parser.add_argument_group("comparison")
        ways = "decode (default), chunked; or noise; or flags, as in dtype=float32,bfloat16"
        flags.add(group, {"--vary WAYS …": ways})
        flags.add(group, {"--chunk-tokens N,…": "of chunked (default: 256)"})
        flags.add(group, {"--repeat N": "of noise and flags: passes over each setting (default: 2)"})
        output_flags = {
            "--out DIR": "keep all runs there; an interrupted one resumes",
            "--fresh": "score again even if runs are there, and replace them",
            **flags.REPORT,
        }
        flags.add(group, output_flags)
        flags.add(parser, flags.JSON)

    def run(self, parsed: argparse.Namespace) -> None:
        from scoremode.core.verbs.baselines import require_none
        from scoremode.studies.paths.noise import noise, noise_blocks
        from scoremode.studies.paths.paths import paths

        vary = _read_vary(parsed.vary or [])
        output = checked_report(parsed)
        how = {**flags.question(parsed), **flags.model_arguments(parsed)}
        arguments = {name: getattr(parsed, name) for name in ("chunk_tokens", "out", "fresh")}
        with progress_bar("scoring") as progress:
            if isinstance(vary, dict):
                require_none({**arguments, "report": output}, "noise is computed anew, is not kept, and has no page")
                repeat = 2 if parsed.repeat is None else parsed.repeat
                noisy = noise(parsed.model, vary=vary, repeat=repeat, progress=progress, **how)
            else:
                require_none({"repeat": parsed.repeat}, "each way is compared once, with a rerun of a few windows")
                comparisons = paths(parsed.model, vary=vary, progress=progress, **arguments, **how)
        if isinstance(vary, dict):
            show(parsed, noisy.as_json, lambda: noise_blocks(noisy))
        else:
            _show_paths(parsed, comparisons, output)


def _read_vary(texts: Sequence[str]) -> list[str] | dict[str, list[Any]]:
    """Reads what is varied: ways to feed a model, or settings with their values; none of these for noise alone."""
    from scoremode.core.plan.path import DECODE
    from scoremode.studies.paths.noise import may_vary, parse_vary
    from scoremode.studies.paths.paths import NOISE

    settings = [text for text in texts if "=" in text or text.replace("-", "_") in may_vary()]
    ways = [way for text in texts if text not in settings for way in text.split(",")]
    if (settings or ways) and set(ways) <= {NOISE}:
        return parse_vary(settings)
    if settings or NOISE in ways:
        raise OptionError("--vary has ways to feed a model and settings of it", fix="measure them one after the other")
    return ways or [DECODE]


def _show_paths(parsed: argparse.Namespace, made: Sequence[Comparison], output: Any) -> None:
    from scoremode.reports.comparisons import comparison_json, summary

    comparisons = [replace(c, manifest={**c.manifest, "command": command_line()}) for c in made]
    show(parsed, lambda: comparison_json(comparisons), lambda: summary(comparisons).blocks())
    if output:
        from scoremode.reports.html.page import render

        write_report(parsed, output, render(comparisons))
