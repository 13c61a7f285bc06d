"""A fault that few targets feel is "changed", with the worst one named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import scoremode as sm
from scoremode.core.statistics.comparison import Comparison
from scoremode.errors import InputError, readable
from scoremode.reports.verdicts import CHANGED, NONE, changed_targets, verdicts
from tests.makers import SENTENCES, make_mixture, with_changed_tensors

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


def assert_changed(c: Comparison) -> set[int]:
    """The sentence says "changed", how many targets did, and which one most. Returns the targets."""
    (verdict,) = verdicts([c])
    targets = changed_targets(c)
    assert verdict.level == CHANGED, verdict.sentence
    assert targets is not None
    assert c.kl is not None
    facts, worst = c.candidate.facts, int(c.kl.argmax())
    named = f"{readable(str(facts.text[worst]))!r} in document {facts.document[worst] + 1}"
    if len(targets) < len(c.kl):
        assert f" {len(targets):,} of {len(c.kl):,} targets, by up to" in verdict.sentence
        assert named in verdict.sentence
    else:
        assert "every target" in verdict.sentence
    return set(targets.tolist())


@pytest.mark.parametrize("change", [one_row, one_head, one_scale])
def test_a_local_fault_is_changed_whatever_the_error_of_the_mean(
    change: Change, stories: Path, corpus: str, tmp_path: Path
) -> None:
    c = compared(stories, with_changed_tensors(stories, tmp_path / "faulty", change), corpus)
    targets = assert_changed(c)
    if change is one_row:  # the targets that the fault can reach: where the token is fed, or is likely
        assert c.kl is not None
        moved = set((c.kl > 1e-6).nonzero()[0].tolist())
        assert moved
        assert moved <= targets


def test_a_rotary_base_that_is_off_by_a_hundredth_is_changed(stories: Path, corpus: str, tmp_path: Path) -> None:
    faulty = with_changed_tensors(stories, tmp_path / "faulty", lambda name, tensor: tensor)
    config = json.loads((faulty / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] *= 1.01
    (faulty / "config.json").write_text(json.dumps(config))
    assert_changed(compared(stories, faulty, corpus))


def test_an_exchanged_expert_is_changed_on_the_targets_that_are_routed_to_it(tmp_path: Path) -> None:
    """Two of twelve experts of the last layer change places: no other target can feel it."""
    folder = make_mixture(tmp_path / "mixture", num_local_experts=12)
    tensors: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")

    def exchanged(name: str, tensor: torch.Tensor) -> torch.Tensor:
        experts = {"layers.2.block_sparse_moe.experts.3.": "7", "layers.2.block_sparse_moe.experts.7.": "3"}
        other = next(
            (name.replace(part, f"{part[:-2]}{number}.") for part, number in experts.items() if part in name), name
        )
        return tensors[other]

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(SENTENCES[0], return_tensors="pt").input_ids
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    routes = model(ids, output_router_logits=True).router_logits[2].topk(2).indices
    reached = {i for i, experts in enumerate(routes[:-1].tolist()) if {3, 7} & set(experts)}
    faulty = with_changed_tensors(folder, tmp_path / "faulty", exchanged)
    targets = assert_changed(sm.compare(str(folder), str(faulty), text=SENTENCES[0], context_length=128)[0])
    assert 0 < len(targets) < len(ids[0]) - 1
    assert targets == reached


@pytest.mark.parametrize("fault", ["splits", "exchanges"])
def test_a_tokenizer_that_has_other_ids_for_a_word_is_refused_if_the_text_has_it(
    fault: str, stories: Path, corpus: str, tmp_path: Path
) -> None:
    """Other ids are another question. What no text has changes nothing."""

    def faulty(*words: str) -> Path:
        folder = Path(shutil.copytree(stories, tmp_path / words[0]))
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        model = tokenizer["model"]
        if fault == "splits":
            model["merges"] = [pair for pair in model["merges"] if "".join(pair) != words[0]]
        else:
            ids = model["vocab"]
            ids[words[0]], ids[words[1]] = ids[words[1]], ids[words[0]]
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        return folder

    with pytest.raises(InputError, match="different tokenizers: they give other ids from character"):
        compared(stories, faulty("▁the", "▁was"), corpus)
    (verdict,) = verdicts([compared(stories, faulty("▁Lily", "▁Timmy"), corpus)])
    assert verdict.level == NONE
