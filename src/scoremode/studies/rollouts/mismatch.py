"""``sm.mismatch``: what a trainer thinks of sampled tokens, beside the engine that sampled them.

rollouts ──ids──▶ trainer: a name, sm.open, sm.wrap ──prefill──▶ log-probabilities ──▶ Mismatch
                  or a finished run on the rollouts, by any path, with KL if it was compared with their writer
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Unpack

import numpy as np

from scoremode.core.statistics.comparison import Comparison
from scoremode.core.store.run import Run
from scoremode.core.verbs.arguments import ModelArguments, spelled_out
from scoremode.core.verbs.model import GivenModel, GivenTokenizer
from scoremode.core.verbs.progress import Progress
from scoremode.core.verbs.progress_display import shows_progress
from scoremode.core.verbs.session import Model, open
from scoremode.errors import InputError
from scoremode.studies.rollouts.mismatch_statistics import CLIP, Mismatch
from scoremode.studies.rollouts.texts import Rollouts
from scoremode.values import Floats, Ids, Ints

SAME = 1e-3  # nats: a token's two log-probabilities differ by more if it was drawn from a changed distribution

NOT_OWN = "texts were drawn with a temperature or filters: k1, k2 and k3 are means over them, not estimates of KL"


class SampledTexts(Protocol):
    """Texts that an engine sampled: rollouts, or your own arrays."""

    @property
    def prompt(self) -> Ints: ...  # (texts,)
    @property
    def sample(self) -> Ints: ...  # (texts,)
    @property
    def prompt_ids(self) -> Sequence[Ids]: ...  # of each text
    @property
    def written(self) -> Sequence[Ids]: ...  # the sampled tokens of each text
    @property
    def logprob(self) -> Sequence[Floats]: ...  # in the distribution that each token was drawn from
    @property
    def raw_logprob(self) -> Sequence[Floats]: ...  # in the model's own distribution
    @property
    def manifest(self) -> Mapping[str, Any]: ...  # ``model`` is its name, ``model_fingerprint`` may say which


@spelled_out(ModelArguments)
@shows_progress
def mismatch(
    rollouts: SampledTexts | str | Path,
    trainer: GivenModel | Model | Run | Comparison,
    *,
    clip: tuple[float, float] = CLIP,
    engine: str | None = None,
    tokenizer: GivenTokenizer | None = None,
    progress: Progress | None = None,
    **options: Unpack[ModelArguments],
) -> Mismatch:
    """Compares the log-probabilities of sampled tokens when they were sampled with those of a trainer.

    ``rollouts`` are texts of ``sm.rollouts``, their folder, or your own arrays under the same names.
    ``trainer`` is a model that reads the texts by prefill (a name, ``sm.open``, ``sm.wrap``), a run that scored the
    rollouts, or a comparison of their writer with the trainer on them, which has the exact KL.

    >>> sm.mismatch(rollouts, sm.wrap(hf_model, tokenizer)).failures("k3 > 0.015 surely")      # doctest: +SKIP
    []
    """
    if isinstance(rollouts, str | Path):
        rollouts = Rollouts.open(rollouts)
    slices = kl = None
    notes = [] if drawn_from_own(rollouts) else [NOT_OWN]
    if isinstance(trainer, Comparison):
        trainer = trainer.candidate
    if isinstance(trainer, Run):
        name, order = str(trainer.manifest["model"]), in_order_of(rollouts, trainer)
        scored = np.asarray(trainer.scores.logprob)[order]
        if trainer.facts.has("slice"):
            slices = np.concatenate([labels for (labels,) in trainer.facts.blocks("slice")])[order]
        kl, said = _exact_kl(rollouts, trainer)
        kl, notes = None if kl is None else kl[order], notes + said
    elif isinstance(trainer, Model):
        name, scored = trainer.name, _scored(rollouts, trainer, notes, progress)
    else:
        with open(trainer, engine=engine, tokenizer=tokenizer, **options) as model:
            name, scored = model.name, _scored(rollouts, model, notes, progress)
    lengths = [len(ids) for ids in rollouts.written]
    return Mismatch(
        rollout=_joined(rollouts.raw_logprob),
        trainer=scored,
        prompt=np.repeat(rollouts.prompt, lengths),
        sample=np.repeat(rollouts.sample, lengths),
        position=np.concatenate([np.zeros(0, np.int64), *map(np.arange, lengths)]),
        slices=slices,
        kl=kl,
        clip=clip,
        names=(str(rollouts.manifest.get("model", "rollout")), name),
        notes=tuple(notes),
    )


def _joined(columns: Sequence[Floats]) -> Floats:
    return np.concatenate([np.zeros(0), *columns])


def _scored(rollouts: SampledTexts, model: Model, notes: list[str], progress: Progress | None) -> Floats:
    if isinstance(rollouts, Rollouts):  # your own arrays do not say which tokenizer they have
        notes += rollouts.tokenizer_notes(model.text_tokenizer)
    return _joined(model.logprobs(rollouts.prompt_ids, rollouts.written, progress=progress))


def drawn_from_own(rollouts: SampledTexts) -> bool:
    """Was every token drawn from the model's own distribution, without a temperature or filters?"""
    drawn, own = _joined(rollouts.logprob), _joined(rollouts.raw_logprob)
    return len(drawn) == len(own) and not (np.abs(drawn - own) > SAME).any()


def in_order_of(rollouts: SampledTexts, run: Run) -> Ints:
    """Returns the targets of a run in the order of the sampled tokens; refuses a run of other tokens."""
    document, token, ids = (np.asarray(getattr(run.facts, name)) for name in ("document", "token", "id"))
    order: Ints = np.lexsort((token, document)).astype(np.int64)
    lengths = [len(written) for written in rollouts.written]
    expected = np.concatenate([np.zeros(0, np.int32), *rollouts.written])
    same_texts = np.array_equal(document[order], np.repeat(np.arange(len(lengths)), lengths))
    if not same_texts or not np.array_equal(ids[order], expected):
        raise InputError(
            f"the run of {run.manifest['model']} did not score exactly these sampled tokens",
            fix="score the rollouts as a corpus, all of them, or give the model itself",
        )
    return order


def _exact_kl(rollouts: SampledTexts, run: Run) -> tuple[Floats | None, list[str]]:
    """Returns the KL of a run that was compared with the writer of the rollouts, and why it cannot be used."""
    against = run.manifest.get("against")
    if run.kl is None or against is None:
        return None, []
    writer = rollouts.manifest.get("model_fingerprint")
    if writer is not None and writer != against["fingerprint"]:
        return None, [f"KL of the run is left out: it is against {against['model']}, which did not write these texts"]
    return run.kl, []
