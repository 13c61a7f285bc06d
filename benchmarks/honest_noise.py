"""How often is a model called "changed" against itself, computed in another way?

Each reference has a model, the dtype of the scores and of the noise floor, texts, a context, tokens of a batch and
threads; its candidates have other batches and threads. Weights are the same, so every "changed" is false: at most 1 in
100 may be.

    python benchmarks/honest_noise.py [--references 50] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.makers import make_mixture, make_tiny_model

import scoremode as sm
from scoremode.reports.verdicts import CHANGED, NOISE, NONE, UNKNOWN, Verdict, verdicts

DATA = Path(__file__).resolve().parents[1] / "tests" / "data"
BATCHES = (1, 64, 256, 1024)  # tokens
DTYPES = ("float32", "bfloat16")


def models(folder: Path) -> list[Path]:
    """A trained Llama, a wider one whose products are summed in blocks, and experts whose routes flip."""
    wide = {"hidden_size": 256, "intermediate_size": 512, "initializer_range": 0.1}
    llama = make_tiny_model(folder / "wide", adds_bos=False, **wide)
    return [DATA / "stories260K", llama, make_mixture(folder / "mixture")]


def repetitions(models: Sequence[Path], seed: int, folder: Path) -> Iterator[tuple[str, Verdict]]:
    """The conditions in words, and what is said of the model: for one reference, and candidates in all BATCHES."""
    random, text = np.random.default_rng(seed), (DATA / "wiki.test.part.raw").read_text()
    model, dtype = str(models[seed % len(models)]), DTYPES[seed // len(models) % len(DTYPES)]
    lengths, context = random.integers(100, 700, random.integers(5, 13)), int(random.choice([32, 64, 125]))
    starts = random.integers(0, len(text) - 700, len(lengths))
    rows = [json.dumps({"text": text[a : a + length]}) for a, length in zip(starts, lengths, strict=True)]
    corpus, reference, batch = folder / f"{seed}.jsonl", folder / f"{seed}-reference", int(random.choice(BATCHES))
    corpus.write_text("\n".join(rows))
    threads, other_threads = random.permutation([1, 2]).tolist()
    usual = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        sm.reference(
            model,
            reference,
            corpus=str(corpus),
            context_length=context,
            stride=context,
            dtype=dtype,
            batch_tokens=batch,
        )
        torch.set_num_threads(other_threads)
        for other in BATCHES:
            runs = folder / f"{seed}-{other}"
            comparisons = sm.compare(str(reference), model, out=runs, dtype=dtype, batch_tokens=other)
            words = f"{Path(model).name} {dtype}, {len(rows)} documents, context {context}, batches of {batch} and "
            yield f"{words}{other} tokens, {threads} and {other_threads} threads", verdicts(comparisons)[0]
    finally:
        torch.set_num_threads(usual)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--references", type=int, default=50, help="each is compared with four candidates")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    levels = Counter[str]()
    with tempfile.TemporaryDirectory() as name:
        drawn = models(Path(name))
        for seed in range(options.seed, options.seed + options.references):
            for conditions, verdict in repetitions(drawn, seed, Path(name)):
                levels[verdict.level] += 1
                print(f"{seed} {conditions}: {verdict.sentence}", flush=True)
    for level in (NONE, NOISE, UNKNOWN, CHANGED):
        print(f"{levels[level]:>4} of {levels.total()}  {level}")
    return int(levels[CHANGED] > max(1, 0.01 * levels.total()))


if __name__ == "__main__":
    sys.exit(main())
