"""Pairs in a file: any part of it in any order, in the memory of a few; encoded together as each alone."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scoremode.core.verbs.prob import many_pairs
from scoremode.core.verbs.prob.many_pairs import EncodedChunks, PairFile, digest_of
from scoremode.core.verbs.prob.sequence import SequenceProbability, SequenceScore, TokenScore
from scoremode.errors import BoundaryError, InputError

ODD = [
    ("a", "b"),
    ("The quick brown fox", " jumps over"),
    ("The quick brown fox ", "jumps"),  # a token may span the boundary
    ("naïve 東", "京 👩‍🔬"),
    ("x", " " * 9),
    ("The quick brown fox", " jumps over"),
    *((f"prompt {i % 3}", f" target {i}") for i in range(40)),
]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\n \n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_pairs, "STEP", 4)
    monkeypatch.setattr(many_pairs, "KEPT", 8)


@pytest.fixture
def several(tmp_path: Path) -> tuple[PairFile, list[tuple[str, str]]]:
    """Rows of one, few and many targets, so that a step begins inside a row."""
    rows = {f"p{i}": [f" t{i}.{j}" for j in range(1 + i * i % 11)] for i in range(9)}
    pairs = [(prompt, target) for prompt, targets in rows.items() for target in targets]
    written = write(tmp_path / "pairs.jsonl", [{"prompt": p, "targets": targets} for p, targets in rows.items()])
    return PairFile(written), pairs


def test_any_part_of_a_file_is_that_part_of_the_list(several: tuple[PairFile, list[tuple[str, str]]]) -> None:
    found, pairs = several
    assert len(found) == len(pairs)
    for begin in range(len(pairs) + 1):
        for end in range(len(pairs) + 2):
            assert found[begin:end] == pairs[begin:end]
    assert found[-3:] == pairs[-3:]
    assert found.digest == digest_of(pairs)
    lines = "".join(json.dumps(pair) + "\n" for pair in pairs)
    assert found.digest == hashlib.sha256(lines.encode()).hexdigest(), "what results are known by"


@pytest.mark.parametrize(
    "change", [lambda data: data.replace(b"t5.2", b"t5.9"), lambda data: data[:-60], lambda _: b""]
)
def test_a_file_that_changes_meanwhile_is_scored_as_it_was_checked(
    several: tuple[PairFile, list[tuple[str, str]]], change: Any
) -> None:
    found, pairs = several
    found.path.write_bytes(change(found.path.read_bytes()))
    assert found[:] == pairs


@pytest.mark.parametrize("model", ["table", "tiny", "tiny_bos"])
@pytest.mark.parametrize("rule", [{}, {"leading_space": "add"}])
def test_pairs_encoded_together_are_those_encoded_alone(
    model: str, rule: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    name = "table:uniform" if model == "table" else str(request.getfixturevalue(model))
    lm = SequenceProbability(name, **rule)
    together = lm.encoder.cut(ODD)
    for pair, given in zip(together, ODD, strict=True):
        (alone,) = lm.encoder.cut([given])
        assert np.array_equal(pair.ids, alone.ids)
        assert pair.ids.dtype == alone.ids.dtype
        for field in ("prompt", "target", "texts", "first", "condition"):
            assert getattr(pair, field) == getattr(alone, field), field


@pytest.mark.parametrize("kept", [0, many_pairs.KEPT])
def test_a_refused_pair_is_named_by_its_number_in_the_whole_file(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_pairs, "KEPT", kept)
    lm = SequenceProbability("table:uniform")
    pairs = [*ODD, ("no target", ""), *ODD]
    with pytest.raises(InputError, match=f"^pair {len(ODD) + 1}: a target is empty"):
        EncodedChunks(lm, pairs, 4)


def test_a_spanning_token_may_begin_with_any_piece(tiny: Path) -> None:
    encoder = SequenceProbability(str(tiny)).encoder
    pieces = encoder.tokenizer.pieces()
    for beginning in (" ", " t", "q", "th"):
        expected = [i for i, piece in enumerate(pieces) if piece.startswith(beginning.encode())]
        if expected:
            assert encoder.beginning_with(beginning, expected[0]).tolist() == expected
    with pytest.raises(BoundaryError, match="inside a character"):
        encoder.beginning_with("no piece begins like this", 0)


@pytest.mark.parametrize("kept", [0, many_pairs.KEPT])
def test_chunks_are_encoded_again_as_they_were(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_pairs, "KEPT", kept)
    lm = SequenceProbability("table:uniform")
    chunks = EncodedChunks(lm, ODD, 4)
    assert chunks.longest == max(pair.fed for pair in lm.encode(ODD))
    assert chunks.fed == sum(pair.fed for pair in lm.encode(ODD))
    found = [pair for number in range(chunks.count) for pair in chunks[number]]
    assert [(p.prompt, p.target, p.ids.tolist()) for p in found] == [(*o, list("".join(o).encode())) for o in ODD]


@pytest.mark.parametrize("rank", [1, None])
@pytest.mark.parametrize("logprob", [-5.545177444479562, -0.0, 1e-7, float("-inf")])
def test_the_fast_line_is_the_line_of_json(rank: int | None, logprob: float) -> None:
    tokens = (TokenScore(3, 'é"\\\n\u2028', -1.5, rank), TokenScore(4, "", logprob, rank))
    total = min(0.0, -1.5 + logprob)
    result = SequenceScore("p\x00", "t", total, 0.25, float("inf"), "clean", tokens)
    assert result.as_line() == json.dumps(result.as_json(), ensure_ascii=False, allow_nan=False)
    assert SequenceScore.from_json(json.loads(result.as_line())) == result


PEAK = """
import re, sys
from scoremode.cli.main import main
assert main(sys.argv[1:]) == 0
print("peak", re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1], file=sys.stderr)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
@pytest.mark.parametrize("flags", [["--out", "results.jsonl"], ["--json"]])
def test_memory_does_not_grow_with_the_rows(tmp_path: Path, flags: list[str]) -> None:
    """60,000 rows more once took 220 MB more. Without --out, the results of two sections are in memory at once."""

    def peak(rows: int) -> int:
        pairs = tmp_path / f"{rows}.jsonl"
        pairs.write_text("".join(f'{{"prompt": "Question {i}: a", "target": " {i % 7}"}}\n' for i in range(rows)))
        given = [flag.replace("results", f"results{rows}") for flag in flags]
        child = subprocess.run(
            [sys.executable, "-c", PEAK, "prob", "table:uniform", "--file", pairs.name, *given],
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            check=True,
        )
        found = re.search(r"peak (\d+)", child.stderr)
        assert found is not None
        return int(found[1])

    assert peak(80_000) - peak(20_000) < 40_000, "kB"
