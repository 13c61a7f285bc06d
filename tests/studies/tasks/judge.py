"""The judges: the harness's own Transformers back end, and float64 from the same logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from scoremode.studies.tasks.encoding import HarnessEncoder
from scoremode.values import Ids

PER_TOKEN = 5e-5
"""Nats. PyTorch's float32 log_softmax alone can be 3.4e-5 off, in one direction, at a vocabulary of 49,152."""


def harness_model(folder: Path | str, **settings: Any) -> Any:
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(folder), device="cpu", dtype="float32", **{"batch_size": 1, **settings})


def instances(pairs: list[tuple[str, str]], task: str = "own") -> list[Any]:
    """Requests as a task makes them: pairs with the same context are choices of one document."""
    from lm_eval.api.instance import Instance

    documents = {context: i for i, context in enumerate(dict.fromkeys(context for context, _ in pairs))}
    return [Instance("loglikelihood", {}, pair, i, (task, documents[pair[0]], 1)) for i, pair in enumerate(pairs)]


class Float64:
    """Log-likelihoods in float64 from float32 logits: the definition."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def of(self, ids: Ids, first: int) -> tuple[float, bool]:
        with torch.inference_mode():
            logits = self.model(input_ids=torch.tensor(ids[:-1].astype(np.int64))[None]).logits[0, first - 1 :]
        targets = torch.tensor(ids[first:].astype(np.int64))
        rows = logits.double().log_softmax(-1)
        best = (logits == logits.max(-1, keepdim=True).values).int().argmax(-1)  # the lowest id of those that tie
        return float(rows.gather(1, targets[:, None]).sum()), bool((best == targets).all())


def check(lm: Any, theirs: Any, requests: list[Any], encoder: HarnessEncoder) -> None:
    """Every answer of ours against both judges."""
    ours, harness = lm.loglikelihood(requests, disable_tqdm=True), theirs.loglikelihood(requests, disable_tqdm=True)
    definition = Float64(theirs.model)
    for request, own, other in zip(requests, ours, harness, strict=True):
        encoded = encoder.pair(*request.args).continuation
        tokens = len(encoded.ids) - encoded.first
        exact, greedy = definition.of(encoded.ids, encoded.first)
        assert abs(own[0] - exact) <= PER_TOKEN * tokens, request.args
        assert abs(own[0] - other[0]) <= PER_TOKEN * tokens, request.args
        assert own[1] == other[1] == greedy, request.args
