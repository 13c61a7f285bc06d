"""vLLM's own Python interface, for scores: ``from scoremode.vllm import LLM, SamplingParams``.

The code is in scoremode/engines/vllm/llm.py. This module is a short name to import it by.
"""

from scoremode.engines.vllm.llm import (
    LLM,
    Logprob,
    PromptLogprobs,
    SamplingParams,
    ScoreOutput,
    TextPrompt,
    TokensPrompt,
)

__all__ = ["LLM", "Logprob", "PromptLogprobs", "SamplingParams", "ScoreOutput", "TextPrompt", "TokensPrompt"]
