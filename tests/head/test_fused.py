"""The fused head's checks, in a process of their own: on the GPU, or on a CPU by Triton's interpreter."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.makers import with_triton

CHECKS = Path(__file__).with_name("fused_checks.py")
AT_LEAST = 150  # tests: fewer means that something was not collected


@pytest.mark.slow
@pytest.mark.timeout(1800)  # of all of them
def test_the_fused_head_answers_to_the_definition() -> None:
    environment = with_triton()
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
        environment["OMP_NUM_THREADS"] = "1"  # arrays are tiny, so threads would only wait for each other
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", str(CHECKS)]
    done = subprocess.run(command, cwd=CHECKS.parents[2], env=environment, capture_output=True, text=True, check=False)
    passed = sum(int(count) for count in re.findall(r"(\d+) passed", done.stdout))
    assert (done.returncode, passed >= AT_LEAST) == (0, True), done.stdout[-5000:] + done.stderr[-2000:]


CHECK = """
import torch
from scoremode.head.columns import Columns, combine, define_columns, finish, reduced_by, target_logits
from scoremode.head.rows_triton import reduce_rows, write_logprobs

def columns(x, targets, cuts=()):
    edges = [0, *cuts, x.shape[1]]
    slices = [x[:, a:b].clone() for a, b in zip(edges, edges[1:])]
    at = torch.stack([target_logits(s, targets, a) for s, a in zip(slices, edges)]).amax(0)
    return finish(combine([reduced_by(reduce_rows, s, targets, at, a) for s, a in zip(slices, edges)]), at)

generator = torch.Generator().manual_seed(0)
for v, k in ((1, 1), (2, 1), (300, 1), (2048, 1), (2053, 3), (4500, 1), (700, 9)):
    for ties in (False, True):
        x = torch.randn(3, v, generator=generator) * 5
        x = x.round() if ties else x
        targets = torch.randint(0, v, (3, k), generator=generator)
        for cuts in ((), (v // 2,)) if v > 1 else ((),):
            ours, truth = columns(x, targets, cuts), define_columns(x, targets)
            for name in [name for name in Columns.__slots__ if name not in ("rank", "top")]:
                gap = (getattr(ours, name) - getattr(truth, name)).abs().max()
                assert gap < 2e-5, (v, k, ties, cuts, name, gap)
            assert torch.equal(ours.rank, truth.rank), (v, k, ties, cuts)
            assert torch.equal(ours.top, truth.top), (v, k, ties, cuts)
x = torch.full((2, 900), -torch.inf)
x[0, 899] = 1.0
x[1, :2] = 5.0
targets = torch.tensor([[899], [1]])
ours, truth = columns(x, targets), define_columns(x, targets)
assert (ours.entropy - truth.entropy).abs().max() < 1e-6 and torch.equal(ours.rank, truth.rank)
assert (ours.logprob - truth.logprob).abs().max() < 1e-6
x[1, 700] = torch.nan
assert columns(x, targets).logprob[1].isnan().all() and not columns(x, targets).logprob[0].isnan().any()
for v in (1, 2, 300, 2048, 4500):
    for dtype in (torch.float32, torch.bfloat16):
        x = (torch.randn(4, v + 3, generator=generator) * 5).to(dtype)[:, :v]
        x[1, : v // 2] = -torch.inf  # filtered
        chosen = torch.randint(v // 2, v, (4, 1), generator=generator)
        lines = torch.full((7, 3), 7.0)
        write_logprobs(x, None, chosen, lines, range(2, 6))
        truth = x.double().log_softmax(1).gather(1, chosen)[:, 0]
        found = lines[2:6].clone()
        assert torch.equal(found[:, 0], found[:, 1]) and (found[:, 0] - truth).abs().max() < 2e-5, (v, dtype)
        assert torch.equal(found[:, 2].contiguous().view(torch.int32), chosen[:, 0].int())
        write_logprobs(x, torch.zeros(3, v), chosen, lines, range(2, 5))
        assert torch.equal(lines[2:5, 1:], found[:3, 1:]) and torch.equal(lines[5], found[3])
        assert (lines[2:5, 0] + torch.tensor(float(v)).log()).abs().max() < 2e-5
        assert (lines[[0, 1, 6]] == 7).all()
        x[0, v - 1] = torch.nan
        write_logprobs(x, None, chosen, lines, range(4))
        assert lines[0, 0].isnan() and not lines[2, 0].isnan()
x = torch.tensor([[0.0, 300.0, 200.0], [-torch.inf, 1.0, 1.0], [-200.0, -300.0, -200.0]])
write_logprobs(x, None, torch.tensor([[0], [0], [1]]), lines, range(3))
assert lines[:2, 0].tolist() == [-300.0, -torch.inf] and abs(lines[2, 0].item() + 100.693147) < 1e-5
write_logprobs(x, None, chosen, lines, range(0))
print("all the same")
"""


def test_the_kernel_answers_to_the_definition() -> None:
    """Shapes, ties, shards, several targets, minus infinity and NaN, in a process that interprets the kernel."""
    done = subprocess.run(
        [sys.executable, "-c", CHECK],
        env={**with_triton(), "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "all the same\n", done.stderr[-2000:]
