"""Scores with the interface of ``vllm.LLM``: change the import and add ``score_mode=True``.

>>> from scoremode.vllm import LLM, SamplingParams, TokensPrompt                                  # doctest: +SKIP
>>> llm = LLM(model="…-W4A16", quantization="compressed-tensors")                                  # doctest: +SKIP
>>> token_ids = llm.get_tokenizer().encode("Your text here")                                       # doctest: +SKIP
>>> params = SamplingParams(score_mode=True, temperature=0.0)                                      # doctest: +SKIP
>>> prompt = TokensPrompt(prompt_token_ids=token_ids, target_token_ids=token_ids[1:])              # doctest: +SKIP
>>> out = llm.generate(prompts=[prompt], sampling_params=params)[0]                                # doctest: +SKIP
>>> -sum(out.prompt_logprobs[i][token_ids[i]].logprob for i in range(1, len(token_ids)))           # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import msgspec
import numpy as np

from scoremode.core.scores.answers import Answers, Window, WindowList, measured
from scoremode.engines.vllm.engine import VllmEngine
from scoremode.engines.vllm.support import LaunchArguments
from scoremode.errors import InputError, OptionError
from scoremode.values import Ids

__all__ = ["LLM", "Logprob", "PromptLogprobs", "SamplingParams", "ScoreOutput", "TextPrompt", "TokensPrompt"]

STEERS_SAMPLING = {
    *("n", "best_of", "temperature", "top_p", "top_k", "min_p", "seed", "min_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "repetition_detection", "watermarking"),
    *("stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "thinking_token_budget", "logprobs"),
    *("detokenize", "skip_special_tokens", "spaces_between_special_tokens", "output_kind", "stream_interval"),
    *("flat_logprobs", "skip_clone", "skip_reading_prefix_cache"),
}
"""Fields of vLLM's SamplingParams that change no score: they control how tokens are sampled, stopped or shown."""


class _Tokens(TypedDict):
    prompt_token_ids: Sequence[int]


class TokensPrompt(_Tokens, total=False):
    """A prompt as ids, and one token to score at each of its positions but the first, which has no score."""

    target_token_ids: Sequence[int]  # default: the prompt's own tokens
    prompt: str  # as in vLLM: the text of the ids; only the ids are scored


class TextPrompt(TypedDict):
    """A prompt as text, which the model's tokenizer encodes."""

    prompt: str


Prompt = str | TokensPrompt | TextPrompt


@dataclass(frozen=True, slots=True)
class Logprob:
    """Like vLLM's ``Logprob``: the score of one token at one position."""

    logprob: float  # nats
    rank: int  # 1 = the model's first choice
    decoded_token: str | None = None


class SamplingParams:
    """Like vLLM's SamplingParams, with ``score_mode=True``. Options that control sampling are accepted, without effect.

    >>> SamplingParams(score_mode=True, temperature=0.7)
    SamplingParams(score_mode=True)
    >>> SamplingParams(score_mode=True, logit_bias={5: 1.0})
    Traceback (most recent call last):
    ...
    scoremode.errors.OptionError: score mode does not honour logit_bias; leave logit_bias out
    """

    def __init__(self, *, score_mode: bool = False, max_tokens: int | None = None, **sampling: Any) -> None:
        if score_mode and max_tokens not in (None, 0):
            raise OptionError(
                f"score mode generates nothing, but max_tokens is {max_tokens}", fix="leave max_tokens out"
            )
        if not score_mode and max_tokens == 0:
            raise OptionError("max_tokens=0 without score mode", fix="SamplingParams(score_mode=True)")
        if not score_mode:
            raise OptionError("this LLM only scores", fix="SamplingParams(score_mode=True), or vllm.LLM to generate")
        for name, value in sampling.items():
            only_targets = name == "prompt_logprobs" and value in (None, 0)  # score mode returns exactly the targets
            if name not in STEERS_SAMPLING and not only_targets:
                raise OptionError(f"score mode does not honour {name}", fix=f"leave {name} out")
        self.score_mode = score_mode
        self.max_tokens = 0
        self.sampling = sampling

    def __repr__(self) -> str:
        return "SamplingParams(score_mode=True)"


class PromptLogprobs(list["dict[int, Logprob] | None"]):
    """A list whose entry i has the scores of token i; entry 0 is None."""

    def __init__(self, targets: Ids, answers: Answers) -> None:
        self.answers = answers
        columns = (targets, answers.logprob[:, 0], measured(answers.rank)[:, 0])
        each = zip(*(column.tolist() for column in columns), strict=True)
        super().__init__([None, *({token: Logprob(logprob, rank)} for token, logprob, rank in each)])


@dataclass(frozen=True, slots=True, eq=False)
class ScoreOutput:
    """Like vLLM's RequestOutput, but nothing is generated."""

    request_id: str
    prompt_token_ids: list[int]
    prompt_logprobs: PromptLogprobs
    outputs: tuple[()] = ()
    finished: bool = True

    @property
    def logprob(self) -> float:
        """Log-probability of all targets together, in nats."""
        return float(self.prompt_logprobs.answers.logprob.sum())


class LLM:
    """A ``vllm.LLM`` that scores: it takes the same arguments, and ``generate`` returns prompt log-probabilities."""

    def __init__(self, model: str, **arguments: Any) -> None:
        if (caching := arguments.pop("enable_prefix_caching", None)) is not None:
            arguments["prefix_caching"] = bool(caching)
        self.engine = VllmEngine(model, LaunchArguments.named(arguments), tokenizer=True)

    def get_tokenizer(self) -> Any:
        return self.engine.llm.get_tokenizer()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | None = None,
        *,
        use_tqdm: object = True,
        **others: Any,
    ) -> list[ScoreOutput]:
        """Scores every prompt; returns outputs in the prompts' order. ``use_tqdm`` is accepted and has no effect."""
        for name in (name for name, value in others.items() if value is not None):
            raise OptionError(f"score mode does not honour {name}", fix=f"leave {name} out, or use vllm.LLM")
        if not isinstance(sampling_params, SamplingParams):
            raise OptionError("this LLM only scores", fix="pass one scoremode.vllm.SamplingParams(score_mode=True)")
        listed = [prompts] if isinstance(prompts, str | dict) else list(prompts)
        windows = [self._window(prompt, i) for i, prompt in enumerate(listed)]
        answers = dict(self.engine.score(WindowList(tuple(windows)), np.zeros(len(windows), bool)))
        return [
            ScoreOutput(str(i), window.ids.tolist(), PromptLogprobs(window.targets[:, 0], answers[i]))
            for i, window in enumerate(windows)
        ]

    def _window(self, prompt: Any, index: int) -> Window:
        content = read_prompt(prompt, index)
        prompt_ids = content.prompt_token_ids
        ids = token_ids(self.get_tokenizer().encode(content.prompt) if prompt_ids is None else prompt_ids, index)
        if len(ids) == 0:
            raise InputError(f"prompt {index} has no tokens", fix="leave it out")
        targets = ids[1:] if content.target_token_ids is None else token_ids(content.target_token_ids, index)
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


class GivenPrompt(msgspec.Struct, forbid_unknown_fields=True):
    prompt: str | None = None
    prompt_token_ids: Any = None
    target_token_ids: Any = None


def read_prompt(prompt: Any, index: int) -> GivenPrompt:
    """Reads a prompt; raises an error if it contains anything that score mode would ignore.

    >>> read_prompt("some text", 0).prompt
    'some text'
    """
    mapping = {"prompt": prompt} if isinstance(prompt, str) else prompt
    try:
        content = msgspec.convert({name: value for name, value in mapping.items() if value is not None}, GivenPrompt)
    except (AttributeError, msgspec.ValidationError) as error:
        raise InputError(f"prompt {index} cannot be scored: {error}", fix="give a text, or TokensPrompt(…)") from None
    if content.prompt is None and content.prompt_token_ids is None:
        raise InputError(f"prompt {index} has neither a text nor ids", fix="give prompt or prompt_token_ids")
    return content


def token_ids(values: Any, index: int) -> Ids:
    """Converts token ids to an array; raises an error if they are not integers: NumPy would convert almost anything."""
    ids = np.asarray(values)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise InputError(f"prompt {index} has ids that are not integers", fix="give a list of token ids")
    if ids.size and not (ids.min() >= 0 and ids.max() < 2**31):
        raise InputError(f"prompt {index} has ids that no model has", fix="check the tokenizer")
    return ids.astype(np.int32)
