"""lm-eval-rolling against lm-evaluation-harness itself."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

import scoremode as sm
from scoremode.core.text.documents import detokenised, wikitext_pages

lm_eval = pytest.importorskip("lm_eval", reason="needs lm-eval")


def rolling(folder: Path, texts: list[str], **settings: Any) -> list[float]:
    """The harness's own log-likelihoods of whole texts."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    lm = HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=1, **settings)
    requests = [Instance("loglikelihood_rolling", {}, (text,), i) for i, text in enumerate(texts)]
    return [float(x) for x in lm.loglikelihood_rolling(requests, disable_tqdm=True)]


def task_module() -> Any:
    """The wikitext task's own functions, loaded by file: importing lm_eval.tasks needs packages that they do not."""
    path = Path(lm_eval.__file__).parent / "tasks" / "wikitext" / "preprocess_wikitext.py"
    spec = importlib.util.spec_from_file_location("preprocess_wikitext", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ours(folder: Path, texts: list[str], tmp_path: Path, **settings: Any) -> sm.Run:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return sm.ppl(str(folder), corpus=str(path), method="lm-eval-rolling", **settings)


@pytest.mark.parametrize("which", ["tiny", "tiny_bos"])
@pytest.mark.parametrize("context", [128, 24])
def test_log_likelihoods_equal_the_harnesss(
    which: str, context: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder = request.getfixturevalue(which)
    texts = ["The quick brown fox jumps over the lazy dog. " * 9, "A model", "x", "naïve 東京 " * 5]
    run = ours(folder, texts, tmp_path, context_length=context)
    by_document = [float(run.scores.logprob[run.facts.document == d].sum()) for d in range(len(texts))]
    assert by_document == pytest.approx(rolling(folder, texts, max_length=context), rel=1e-5)


def test_a_trained_model_on_real_text(stories: Path, wikitext_file: Path, tmp_path: Path) -> None:
    texts = [
        "Once upon a time, there was a little girl named Lily. She loved to play outside.",
        wikitext_file.read_text(encoding="utf-8")[:3000],
    ]
    run = ours(stories, texts, tmp_path)
    by_document = [float(run.scores.logprob[run.facts.document == d].sum()) for d in range(2)]
    assert by_document == pytest.approx(rolling(stories, texts), rel=1e-5)
    assert by_document == pytest.approx([-16.084974, -9065.93726], rel=1e-5), "the figures recorded from lm-eval 0.4.13"


def pages_of(wikitext_file: Path) -> list[str]:
    """``tests/core/text/test_documents.py`` compares them with the rows that the task reads."""
    with wikitext_file.open(encoding="utf-8") as lines:
        return list(wikitext_pages(lines))


def test_pages_are_detokenised_as_the_wikitext_task_does(wikitext_file: Path) -> None:
    wikitext_detokenizer = task_module().wikitext_detokenizer
    pages = pages_of(wikitext_file)
    assert len(pages) == 6
    for page in [*pages, "{ a } ! ' b ' ? [ 1 , 2 ] ; the dogs ' tails / ' 5 / : N = = = = C = = = = \n"]:
        assert detokenised(page) == wikitext_detokenizer({"page": page})


def test_words_and_bytes_are_those_of_the_wikitext_task(stories: Path, wikitext_file: Path) -> None:
    """Counts only, without scoring the pages: what the task divides by, from the plan's tokens."""
    from tests.makers import ask

    process_results = task_module().process_results
    asked = ask(str(stories), corpus=f"wikitext2:{wikitext_file}", method="lm-eval-rolling")
    counted = [process_results({"page": page}, (0.0,)) for page in pages_of(wikitext_file)]
    assert asked.tokens.doc_words.tolist() == [c["word_perplexity"][1] for c in counted]
    assert asked.tokens.doc_bytes.tolist() == [c["byte_perplexity"][1] for c in counted]
