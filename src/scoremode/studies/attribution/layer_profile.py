"""``sm.layer_profile``: a served model's hidden states after each layer against the baseline's, on the same tokens.

candidate, as it is served ──▶ states between its layers ──▶ a temporary file, in float32, of a size that is told
baseline, by Transformers  ──▶ the same places; its layers on the candidate's states; itself, in another way
                                                 └──▶ sums per layer and group, window by window ──▶ DepthProfile

One model is in memory at a time.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from scoremode.core.arguments import whole_number
from scoremode.core.cache.units import size_words
from scoremode.core.engine.base import EngineFacts
from scoremode.core.engine.plugin import Work
from scoremode.core.engine.registry import open_for, require
from scoremode.core.plan.plan import Plan
from scoremode.core.scores.answers import Window
from scoremode.core.statistics.groups import grouping
from scoremode.core.verbs.arguments import AllArguments, EngineOptionArguments, spelled_out, split_arguments
from scoremode.core.verbs.baselines import comparable_facts, require_same_question
from scoremode.core.verbs.compared_models import CompareRequest, assign_engines, name_of
from scoremode.core.verbs.model import TOLD_FROM, GivenTokenizer, LazyModel
from scoremode.core.verbs.progress import Progress, announce
from scoremode.core.verbs.progress_display import shows_progress
from scoremode.core.verbs.scoring import check_fits
from scoremode.errors import EngineError, InputError, OptionError, print_line
from scoremode.studies.attribution.depth_profile import DepthProfile, ProfileSums
from scoremode.studies.attribution.layer_states import LayerStates, fed_tokens
from scoremode.values import Ints

if TYPE_CHECKING:
    from scoremode.studies.attribution.engines.transformers_layers import TransformersLayers

TOKENS = 4096  # tokens of a profile: a layer's error needs few
TOGETHER = 256 << 20  # bytes of states that are asked for at once
NOISE_WINDOWS = 4  # windows that the baseline computes a second time


@spelled_out(AllArguments)
@shows_progress
def layer_profile(
    baseline: str,
    candidate: str,
    *,
    tokens: int = TOKENS,
    engine: str | None = None,
    tokenizer: GivenTokenizer | None = None,
    baseline_options: EngineOptionArguments | None = None,
    progress: Progress | None = None,
    **arguments: Unpack[AllArguments],
) -> DepthProfile:
    """Compares hidden states after each layer of a served model with those of the baseline, and names a broken layer.

    ``baseline`` is a checkpoint that Transformers loads; ``engine`` serves the candidate. ``tokens`` bounds the tokens
    that are compared: whole windows, spread over the text. ``arguments`` are those of a question, and options of the
    candidate's engine; the baseline gets those that Transformers has, and ``baseline_options``.

    >>> sm.layer_profile("org/model", "model-Q4_K_M.gguf", corpus="wikitext2").verdict    # doctest: +SKIP
    'no layer is out of line'
    """
    question, options = split_arguments(arguments, needs_text=True)
    if question.get("path") not in (None, "prefill"):
        raise OptionError("hidden states between layers are computed by prefill", fix="leave --path out")
    wanted = CompareRequest(engine, options, "transformers", baseline_options, tokenizer)
    its, candidates = assign_engines(baseline, [candidate], wanted, divergence=False)
    if its is None or not candidates or its.plugin.name != "transformers":
        which = candidate if its is not None and its.plugin.name == "transformers" else baseline
        raise InputError(
            f"a profile of layers needs two models, the baseline in a format of Transformers, and {which} is not one",
            fix="give a checkpoint as the baseline",
        )
    with closing(its.prepare()) as first, closing(candidates[candidate].prepare()) as second:
        return profile_of(first, second, question, tokens=tokens, progress=progress)


def profile_of(
    baseline: LazyModel,
    candidate: LazyModel,
    question: Mapping[str, Any],
    *,
    tokens: int = TOKENS,
    progress: Progress | None = None,
) -> DepthProfile:
    """The profile of a candidate against a baseline that Transformers loads; neither is open yet."""
    from scoremode.studies.attribution.engines.transformers_layers import TransformersLayers

    if (whole_number("tokens", tokens) or 0) < 1:
        raise OptionError(f"tokens={tokens} leaves nothing to compare", fix="give a number of at least 1")
    for model in (baseline, candidate):
        require(model.plugin, "layer_states", "give hidden states between layers")
        if model.spread is not None:
            raise OptionError("hidden states between layers come from one engine", fix="leave --replicas out")
    asked = baseline.ask(question, progress)
    require_same_question(comparable_facts(asked), candidate.ask(question, progress), asked.tokens.ids)
    check_fits(asked.plan, asked.subject.vocabulary, asked.subject.context_length)
    text = _ProfiledText.of(asked.plan, tokens)
    with tempfile.TemporaryFile(prefix="scoremode-states-") as file:
        with closing(_open_layers(candidate, text.longest, progress)) as served:
            _require_alike(*_known_shape(baseline), served)
            kept = _KeptStates.of(file, text, served)
            kept.fill(served, progress)
            facts = served.facts
        with closing(_open_layers(baseline, text.longest, progress)) as layers:
            assert isinstance(layers, TransformersLayers)
            _require_alike(layers.layers, layers.width, served)
            sums = _compared(layers, kept, progress)
            unusual = layers.unusual_way
            both = layers.facts, facts
    return DepthProfile(
        names=(name_of(baseline), name_of(candidate)),
        engines=(_served_by(both[0]), _served_by(both[1])),
        places=sums.places(),
        tokens=sums.tokens,
        windows=sums.windows,
        groups=text.kind,
        unusual_way=unusual,
        notes=tuple(dict.fromkeys((*text.notes(asked.plan), *both[0].notes, *both[1].notes))),
    )


def _open_layers(model: LazyModel, longest: int, progress: Progress | None) -> LayerStates:
    """Opens a model to give hidden states between its layers (the ability "layer_states")."""
    announce(progress, f"loading {model.subject.name} with {model.engine_name}")
    layers: LayerStates = open_for(model.chosen, "layer_states", Work(longest=longest))
    return layers


def _require_alike(layers: int | None, width: int | None, candidate: LayerStates) -> None:
    """Refuses a candidate whose layers do not correspond to those of a baseline with these sizes, if they are known."""
    for what, its, other in (
        ("decoder layers", layers, candidate.layers),
        ("numbers per hidden state", width, candidate.width),
    ):
        if its is not None and its != other:
            raise EngineError(
                f"the baseline has {its:,} {what} and the candidate {other:,}", fix="compare models of one architecture"
            )


def _served_by(facts: EngineFacts) -> str:
    return f"{facts.engine}, {facts.dtype}, {facts.device}"


def _known_shape(baseline: LazyModel) -> tuple[int | None, int | None]:
    """Layers and width of a baseline as its config says them, before it is loaded."""
    checkpoint = baseline.subject.checkpoint
    config = checkpoint.config if checkpoint is not None else {}
    text = config.get("text_config", config)
    found = text.get("num_hidden_layers") if isinstance(text, dict) else None
    return found if isinstance(found, int) else None, baseline.subject.hidden_size


# ── the text ─────────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True, eq=False)
class _ProfiledText:
    """The windows of a plan that are compared, with the group of each of their targets."""

    windows: list[Window]
    groups: list[Ints]
    kind: str  # of the groups, in words
    group_count: int

    @staticmethod
    def of(plan: Plan, tokens: int) -> _ProfiledText:
        """Chooses whole windows, spread over the plan, with at most ``tokens`` targets; at least one window."""
        with_targets = np.flatnonzero(plan.target_counts > 0)
        count = max(1, int(tokens // max(1.0, plan.target_counts[with_targets].mean())))
        chosen = with_targets[
            np.unique(np.linspace(0, len(with_targets) - 1, min(count, len(with_targets))).astype(int))
        ]
        groups, offsets = grouping(plan), plan.target_offsets
        numbers = np.concatenate([groups.of(block) for block in plan.blocks()])
        return _ProfiledText(
            [plan.window(int(index)) for index in chosen],
            [numbers[offsets[index] : offsets[index + 1]] for index in chosen],
            groups.kind,
            groups.count,
        )

    @property
    def longest(self) -> int:
        return max(len(window.ids) for window in self.windows)

    @property
    def fed(self) -> list[int]:
        return [fed_tokens(window) for window in self.windows]

    def notes(self, plan: Plan) -> list[str]:
        if len(self.windows) == len(plan):
            return []
        return [f"{len(self.windows):,} of {len(plan):,} windows are compared, spread over the text"]


# ── the states ───────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True, eq=False)
class _KeptStates:
    """The candidate's states of all windows, in a mapped temporary file."""

    text: _ProfiledText
    starts: Ints  # (windows + 1,) of the tokens of each window
    numbers: Any  # (places, tokens, width) float32

    @staticmethod
    def of(file: Any, text: _ProfiledText, served: LayerStates) -> _KeptStates:
        places, width = served.layers + 1, served.width
        size = 4 * sum(text.fed) * places * width
        free = shutil.disk_usage(tempfile.gettempdir()).free
        if size > free:
            raise EngineError(
                f"the states between layers take {size_words(size)}, and {tempfile.gettempdir()} has "
                f"{size_words(free)} left",
                fix="give a smaller --max-windows or --context-length, or set TMPDIR",
            )
        if size >= TOLD_FROM:
            print_line(f"scoremode: the states between layers take {size_words(size)}, in {tempfile.gettempdir()}")
        starts = np.cumsum([0, *text.fed])
        return _KeptStates(text, starts, np.memmap(file, np.float32, "w+", shape=(places, int(starts[-1]), width)))

    def of_window(self, index: int) -> Any:
        """The part of the file for one window, (places, tokens, width)."""
        return self.numbers[:, self.starts[index] : self.starts[index + 1]]

    def fill(self, served: LayerStates, progress: Progress | None) -> None:
        """Asks for as many windows at a time as TOGETHER allows. All count as the longest: a batch may be padded."""
        places, tokens, width = self.numbers.shape
        count = max(1, TOGETHER // (4 * places * width * max(self.text.fed)))
        for begin in range(0, len(self.text.windows), count):
            for index, states in enumerate(served.states(self.text.windows[begin : begin + count]), begin):
                own = self.of_window(index)
                if states.shape != own.shape:
                    raise EngineError("the engine gave states of another size", fix="this is a fault of the engine")
                own[:] = states
                if progress is not None:
                    progress(int(self.starts[index + 1]), 2 * tokens)


def _compared(layers: TransformersLayers, kept: _KeptStates, progress: Progress | None) -> ProfileSums:
    """Adds up the errors of all windows, and the noise floor of a few that are spread over them."""
    text = kept.text
    sums = ProfileSums(layers.layers, text.group_count)
    noisy = set(np.linspace(0, len(text.windows) - 1, min(NOISE_WINDOWS, len(text.windows))).astype(int).tolist())
    fed = int(kept.starts[-1])
    for index, (window, groups) in enumerate(zip(text.windows, text.groups, strict=True)):
        served, rows = np.array(kept.of_window(index)), window.rows
        (own,) = layers.states([window])
        replayed = layers.replayed(window, served)
        sums.add(groups, served[:, rows], own[:, rows], replayed[:, rows])
        if index in noisy:
            sums.add_noise(groups, own[:, rows], layers.states_otherwise(window)[:, rows])
        if progress is not None:
            progress(fed + int(kept.starts[index + 1]), 2 * fed)
    return sums
