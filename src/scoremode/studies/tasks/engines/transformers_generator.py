"""Generates text with ``model.generate`` of Transformers, in batches of prompts of similar length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from scoremode.core.engine.plugin import Work
from scoremode.core.models.subject import Subject
from scoremode.core.text.tokenizer import HuggingFaceTokenizer
from scoremode.engines.transformers import TransformersPlugin
from scoremode.engines.transformers.choices import TransformersOptions, choose_batch_tokens
from scoremode.engines.transformers.loading import load_model
from scoremode.errors import EngineError, OptionError
from scoremode.studies.tasks.generation import Generator, Sampling
from scoremode.values import Ids

LOOKS_BACK = 4  # tokens that are searched beyond the length of a stop, because it may begin and end inside of tokens


def open_generator(
    plugin: TransformersPlugin, subject: Subject, options: TransformersOptions, work: Work
) -> TransformersGenerator:
    assert subject.checkpoint is not None
    assert isinstance(subject.tokenizer, HuggingFaceTokenizer)
    model, _ = load_model(subject.checkpoint, options)
    return TransformersGenerator(model, subject.tokenizer.hf, options.batch_tokens)


class TransformersGenerator(Generator):
    """Generates text with a loaded causal LM."""

    def __init__(self, model: Any, tokenizer: Any, batch_tokens: int | None = None) -> None:
        self.model, self.tokenizer = model.eval(), tokenizer
        self.batch_tokens = choose_batch_tokens(batch_tokens, model.device.type)
        known = (tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.eos_token_id, 0)
        self.pad = next(i for i in known if i is not None)

    def generate(self, prompts: Sequence[Ids], sampling: Sampling) -> Iterator[tuple[int, Ids]]:
        order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
        while order:
            longest = len(prompts[order[0]]) + sampling.max_tokens
            size = max(1, self.batch_tokens // longest)
            batch, order = order[:size], order[size:]
            yield from zip(batch, self._write([prompts[i] for i in batch], sampling), strict=True)

    def _write(self, prompts: list[Ids], sampling: Sampling) -> list[Ids]:
        from transformers import StoppingCriteriaList

        longest = max(map(len, prompts))
        ids = np.full((len(prompts), longest), self.pad, dtype=np.int64)
        seen = np.zeros((len(prompts), longest), dtype=np.int64)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = prompt
            seen[row, longest - len(prompt) :] = 1
        device = self.model.device
        chosen: dict[str, Any] = {"do_sample": bool(sampling.temperature), **sampling.more}
        if sampling.temperature:
            chosen["temperature"] = sampling.temperature
        stops = [Stops(self.tokenizer, sampling.stop, longest)] if sampling.stop else []
        try:
            with torch.inference_mode():
                written = self.model.generate(
                    input_ids=torch.from_numpy(ids).to(device),
                    attention_mask=torch.from_numpy(seen).to(device),
                    max_length=longest + sampling.max_tokens,
                    pad_token_id=self.pad,
                    use_cache=True,
                    stopping_criteria=StoppingCriteriaList(stops),
                    **chosen,
                )
        except torch.OutOfMemoryError:
            raise EngineError(
                "the prompts of a batch do not fit in memory", fix="give a smaller batch_tokens"
            ) from None
        except (TypeError, ValueError) as error:
            reason = str(error).strip().split("\n")[0][:200]
            raise OptionError(f"Transformers cannot generate like this ({reason})", fix="check --gen_kwargs") from None
        return [self._without_padding(row) for row in written[:, longest:].cpu().numpy().astype(np.int32)]

    def _without_padding(self, row: Ids) -> Ids:
        """Returns the tokens up to the first end of text; later tokens are padding to the batch's longest text."""
        ends = self.model.generation_config.eos_token_id
        at = np.flatnonzero(np.isin(row, [] if ends is None else ends))
        return row[: at[0] + 1] if len(at) else row

    def close(self) -> None:
        self.model = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


class Stops:
    """Tells Transformers to end the texts whose last tokens, decoded, contain a stop."""

    def __init__(self, tokenizer: Any, stops: Sequence[str], prompt: int) -> None:
        self.tokenizer, self.stops, self.prompt = tokenizer, tuple(stops), prompt
        longest = max(len(tokenizer.encode(stop, add_special_tokens=False)) for stop in stops)
        self.last = longest + LOOKS_BACK

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        begin = max(self.prompt, input_ids.shape[1] - self.last)
        texts = self.tokenizer.batch_decode(input_ids[:, begin:])
        ended = [any(stop in text for stop in self.stops) for text in texts]
        return torch.tensor(ended, dtype=torch.bool, device=input_ids.device)
