"""Streams of tokens of known lengths, and their plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from scoremode.core.plan.build import make_plan
from scoremode.core.plan.plan import Plan
from scoremode.core.plan.recipes import find_method
from scoremode.core.text.tokenizer import TokenizerFacts
from scoremode.core.text.tokens import Tokens

FACTS = TokenizerFacts(fingerprint="f", size=1000, bos=7, eos=8, adds_bos=True)


def tokens_of(*lengths: int, facts: TokenizerFacts = FACTS) -> Tokens:
    n = sum(lengths)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    ones = np.ones(n, np.int32)
    counts = np.array(lengths, dtype=np.int64)
    ends = np.arange(1, n + 1, dtype=np.int64)
    ids = (np.arange(n) % 900 + 10).astype(np.int32)
    return Tokens(ids, starts, ends, ones, ones, counts, counts, facts)


def plan_for(name: str, *lengths: int, context: int | None, **more: Any) -> Plan:
    """A method's plan of documents of these lengths; fields of ``Tokens`` may be given besides sizes."""
    columns = {name: more.pop(name) for name in ("target_mask", "joined_at") if name in more}
    return make_plan(find_method(name), replace(tokens_of(*lengths), **columns), context_length=context, **more)
