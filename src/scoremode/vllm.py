"""vLLM's own way of asking, for scores: ``from scoremode.vllm import LLM, SamplingParams``.

The code is in scoremode/engines/vllm/llm.py; this is the short name that people import it by.
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
