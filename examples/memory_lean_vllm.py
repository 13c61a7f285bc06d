"""Sliding-window perplexity through the interface of ``vllm.LLM``, one window in memory at a time.

    python examples/memory_lean_vllm.py MODEL [--file text.txt] [--quantization compressed-tensors]
    python examples/memory_lean_vllm.py                                 the embedded model and the license of scoremode

This is code for ``vllm.LLM``, with the import changed and ``score_mode=True``. Nothing is generated, and
nothing of the size of the vocabulary leaves the device. Only running sums are kept here, so the text may have any
length; vLLM is faster when it gets many windows at once, as ``sm.ppl(engine="vllm")`` sends them.

Needs vLLM: see docs/vllm.md.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def windows(ids: list[int], length: int, stride: int) -> Iterator[tuple[list[int], int]]:
    """Windows of ``length`` tokens, each with its first position that no earlier window has scored."""
    scored = 1  # token 0 has no context
    for start in range(0, len(ids), stride):
        part = ids[start : start + length]
        if start + len(part) > scored:
            yield part, scored - start
            scored = start + len(part)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--file", type=Path, default=Path(__file__).parent.parent / "LICENSE")
    parser.add_argument("--quantization")
    parser.add_argument("--context-length", type=int, default=512)
    parser.add_argument("--stride", type=int, default=256)
    given = parser.parse_args()

    from scoremode.core.models.facts import resolve
    from scoremode.engines.vllm.llm import LLM, SamplingParams, TokensPrompt

    more: dict[str, Any] = {"quantization": given.quantization} if given.quantization else {}
    with LLM(model=str(resolve(given.model)), max_model_len=given.context_length, **more) as llm:
        params = SamplingParams(score_mode=True, temperature=0.0)
        token_ids = llm.get_tokenizer().encode(given.file.read_text(encoding="utf-8"))
        total, count = 0.0, 0
        for window, first in windows(token_ids, given.context_length, given.stride):
            prompt = TokensPrompt(prompt_token_ids=window, target_token_ids=window[1:])
            out = llm.generate(prompts=[prompt], sampling_params=params)[0]
            for i in range(first, len(window)):
                entry = out.prompt_logprobs[i]
                assert entry is not None  # only entry 0 is None
                total -= entry[window[i]].logprob
                count += 1
    print(f"perplexity {math.exp(total / count):.4f} over {count:,} targets of {given.file.name}")


if __name__ == "__main__":
    main()
