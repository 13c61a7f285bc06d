"""Stock vLLM as a writer, against Transformers."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from scoremode.core.engine.plugin import Work
from scoremode.core.engine.registry import can, choose, open_for
from scoremode.errors import OptionError
from scoremode.studies.tasks.generation import Sampling

PROMPTS = [[5, 6, 7, 8], [9, 10], [11, 12, 13]]


def test_greedy_texts_are_those_of_transformers(small_llama: Path) -> None:
    found: dict[str, list[list[int]]] = {}
    how = Sampling(12, more={})
    prompts = [np.array(prompt, np.int32) for prompt in PROMPTS]
    for engine in ("transformers", "vllm"):
        chosen = choose(str(small_llama), engine, {"dtype": "float32"})
        assert can(chosen.plugin, "generates")
        work = Work(longest=64)
        with closing(open_for(chosen, "generates", work)) as generator:
            written = dict(generator.generate(prompts, how))
            found[engine] = [written[i].tolist() for i in range(len(prompts))]
            with pytest.raises(OptionError, match="cannot generate like this"):
                list(generator.generate(prompts, Sampling(4, more={"no_such_setting": 1})))
    assert found["vllm"] == found["transformers"]
    assert all(len(text) == 12 or text[-1] == 1 for text in found["vllm"])
