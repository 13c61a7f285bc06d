"""vLLM's own way of asking, for scores: change the import, add ``score_mode=True``.

>>> from scoremode.vllm import LLM, SamplingParams, TokensPrompt                                  # doctest: +SKIP
>>> llm = LLM(model="…-W4A16", quantization="compressed-tensors")                                  # doctest: +SKIP
>>> token_ids = llm.get_tokenizer().encode("Your text here")                                       # doctest: +SKIP
>>> params = SamplingParams(score_mode=True, temperature=0.0)                                      # doctest: +SKIP
>>> prompt = TokensPrompt(prompt_token_ids=token_ids, target_token_ids=token_ids[1:])              # doctest: +SKIP
>>> out = llm.generate(prompts=[prompt], sampling_params=params)[0]                                # doctest: +SKIP
>>> -sum(out.prompt_logprobs[i][token_ids[i]].logprob for i in range(1, len(token_ids)))           # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypedDict, overload

import numpy as np

from scoremode.engines.vllm.engine import VllmEngine
from scoremode.engines.vllm.options import VllmOptions
from scoremode.errors import InputError, OptionError
from scoremode.types import Answers, Ids, Window, WindowList

__all__ = ["LLM", "Logprob", "PromptLogprobs", "SamplingParams", "ScoreOutput", "TokensPrompt"]


class _Tokens(TypedDict):
    prompt_token_ids: Sequence[int]


class TokensPrompt(_Tokens, total=False):
    """A prompt by its ids, and the tokens to score at positions 1, 2, …: one fewer than the prompt has."""

    target_token_ids: Sequence[int]  # left out: the prompt's own


@dataclass(frozen=True, slots=True)
class Logprob:
    """As vLLM's: what the model says of one token at one position."""

    logprob: float  # nats
    rank: int  # 1 = the model's first choice
    decoded_token: str | None = None


class SamplingParams:
    """``score_mode=True`` and nothing to generate; what steers sampling is accepted, because it changes no score."""

    def __init__(self, *, score_mode: bool = False, max_tokens: int | None = None, **sampling: Any) -> None:
        if score_mode and max_tokens not in (None, 0):
            raise OptionError(f"score mode generates nothing, max_tokens={max_tokens}", fix="leave max_tokens out")
        if not score_mode and max_tokens == 0:
            raise OptionError("max_tokens=0 without score mode", fix="SamplingParams(score_mode=True)")
        if not score_mode:
            raise OptionError("this LLM only scores", fix="SamplingParams(score_mode=True), or vllm.LLM to generate")
        self.score_mode = score_mode
        self.max_tokens = 0
        self.sampling = sampling

    def __repr__(self) -> str:
        return "SamplingParams(score_mode=True)"


class PromptLogprobs(Sequence["dict[int, Logprob] | None"]):
    """Entry i belongs to token i; entry 0 is None. Held as columns: an entry is made when it is looked at."""

    def __init__(self, targets: Ids, answers: Answers) -> None:
        self.targets, self.answers = targets, answers

    def __len__(self) -> int:
        return len(self.targets) + 1

    @overload
    def __getitem__(self, index: int) -> dict[int, Logprob] | None: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[int, Logprob] | None]: ...
    def __getitem__(self, index: int | slice) -> dict[int, Logprob] | list[dict[int, Logprob] | None] | None:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        at = range(len(self))[index] - 1
        if at < 0:
            return None
        return {int(self.targets[at]): Logprob(float(self.answers.logprob[at, 0]), int(self.answers.rank[at, 0]))}

    def __iter__(self) -> Iterator[dict[int, Logprob] | None]:
        return (self[i] for i in range(len(self)))


@dataclass(frozen=True, slots=True, eq=False)
class ScoreOutput:
    """As vLLM's RequestOutput, with nothing generated."""

    request_id: str
    prompt_token_ids: list[int]
    prompt_logprobs: PromptLogprobs
    outputs: tuple[()] = ()
    finished: bool = True

    @property
    def logprob(self) -> float:
        """Of all targets together, in nats."""
        return float(self.prompt_logprobs.answers.logprob.sum())


class LLM:
    """``vllm.LLM`` that scores: the same arguments, ``generate`` returns prompt log-probabilities and no text."""

    def __init__(self, model: str, **arguments: Any) -> None:
        known = {f.name for f in fields(VllmOptions)} - {"extra"}
        named = {name: value for name, value in arguments.items() if name in known}
        extra = {name: value for name, value in arguments.items() if name not in known}
        if extra.pop("enable_prefix_caching", False):
            named["prefix_caching"] = True
        self.engine = VllmEngine(model, VllmOptions(**named, extra=extra), tokenizer=True)

    def get_tokenizer(self) -> Any:
        return self.engine.llm.get_tokenizer()

    def generate(
        self,
        prompts: str | TokensPrompt | Sequence[str | TokensPrompt],
        sampling_params: SamplingParams | None = None,
        **_: Any,
    ) -> list[ScoreOutput]:
        """Score every prompt; outputs in the order of the prompts."""
        if sampling_params is None or not getattr(sampling_params, "score_mode", False):
            raise OptionError("this LLM only scores", fix="pass SamplingParams(score_mode=True)")
        listed = [prompts] if isinstance(prompts, str | dict) else list(prompts)
        windows = [self._window(prompt, i) for i, prompt in enumerate(listed)]
        found = dict(self.engine.score(WindowList(tuple(windows)), np.zeros(len(windows), bool)))
        return [
            ScoreOutput(str(i), window.ids.tolist(), PromptLogprobs(window.targets[:, 0], found[i]))
            for i, window in enumerate(windows)
        ]

    def _window(self, prompt: str | TokensPrompt, index: int) -> Window:
        given: TokensPrompt = (
            {"prompt_token_ids": self.get_tokenizer().encode(prompt)} if isinstance(prompt, str) else prompt
        )
        ids = np.asarray(given["prompt_token_ids"], np.int32)
        if len(ids) == 0:
            raise InputError(f"prompt {index} has no tokens")
        targets = np.asarray(given.get("target_token_ids", ids[1:]), np.int32)
        if len(targets) != len(ids) - 1:
            raise InputError(
                f"prompt {index} has {len(ids)} tokens and {len(targets)} targets, it needs {len(ids) - 1}",
                fix="target_token_ids=token_ids[1:] scores the prompt's own tokens",
            )
        return Window(ids=ids, rows=np.arange(len(targets), dtype=np.int32), targets=targets[:, None])

    def close(self) -> None:
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
