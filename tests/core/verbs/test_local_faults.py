"""A fault that few targets feel is "changed", with the targets named; computing again in another way is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import scoremode as sm
from scoremode.core.statistics.comparison import Comparison
from scoremode.reports.verdicts import CHANGED, NOISE, NONE, changed_targets, verdicts
from tests.makers import with_changed_tensors

TEXT = Path(__file__).parents[2] / "data" / "wiki.test.part.raw"
DOCUMENTS, LENGTH = 6, 900  # characters
Change = Callable[[str, torch.Tensor], torch.Tensor]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    file, text = tmp_path_factory.mktemp("texts") / "six.jsonl", TEXT.read_text()
    rows = [json.dumps({"text": text[5000 * i : 5000 * i + LENGTH]}) for i in range(DOCUMENTS)]
    file.write_text("\n".join(rows))
    return str(file)


def compared(baseline: Path, candidate: Path, corpus: str, **options: Any) -> Comparison:
    return sm.compare(str(baseline), str(candidate), corpus=corpus, context_length=256, stride=256, **options)[0]


def one_row(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The embedding of one token, negated; it is the head's row, too."""
    if "embed_tokens" in name:
        tensor[ROW] = -tensor[ROW]
    return tensor


def one_head(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if "layers.2.self_attn.o_proj" in name:
        tensor[:, 8:16] = 0
    return tensor


def one_scale(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if "layers.1.mlp.down_proj" in name:
        tensor[:8, :32] *= 1.25
    return tensor


ROW = 470  # a token of which the texts have a few


@pytest.mark.parametrize("change", [one_row, one_head, one_scale])
def test_a_local_fault_is_changed_whatever_the_error_of_the_mean(
    change: Change, stories: Path, corpus: str, tmp_path: Path
) -> None:
    c = compared(stories, with_changed_tensors(stories, tmp_path / "faulty", change), corpus)
    (verdict,) = verdicts([c])
    targets = changed_targets(c)
    assert verdict.level == CHANGED, verdict.sentence
    assert targets is not None
    assert c.kl is not None
    assert f" {len(targets):,} of {len(c.kl):,} targets" in verdict.sentence or "every target" in verdict.sentence
    if change is one_row:  # the targets that the fault can reach: where the token is fed, or is likely
        moved = set((c.kl > 1e-6).nonzero()[0].tolist())
        assert moved
        assert moved <= set(targets.tolist())


def test_a_rotary_base_that_is_off_by_a_hundredth_is_changed(stories: Path, corpus: str, tmp_path: Path) -> None:
    faulty = with_changed_tensors(stories, tmp_path / "faulty", lambda name, tensor: tensor)
    config = json.loads((faulty / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] *= 1.01
    (faulty / "config.json").write_text(json.dumps(config))
    assert verdicts([compared(stories, faulty, corpus)])[0].level == CHANGED


@pytest.mark.parametrize("batch_tokens", [256, 1024])
def test_other_batches_of_the_same_weights_are_no_change(batch_tokens: int, stories: Path, corpus: str) -> None:
    options = {"baseline_options": {"batch_tokens": 512}, "batch_tokens": batch_tokens}
    (verdict,) = verdicts([compared(stories, stories, corpus, **options)])
    assert verdict.level in (NONE, NOISE), verdict.sentence
