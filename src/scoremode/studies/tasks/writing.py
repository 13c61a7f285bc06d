"""Generates texts after contexts (``generate_until``), by the rules of the harness's own Transformers back end.

A context is cut from the left so that the longest allowed answer fits. An answer ends before the first stop in it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from tqdm import tqdm

from scoremode.core.engine.plugin import Work
from scoremode.core.engine.registry import open_for, require
from scoremode.core.verbs.model import LazyModel
from scoremode.errors import EngineError, InputError, ModelError, print_line
from scoremode.studies.tasks.encoding import HarnessEncoder
from scoremode.studies.tasks.generation import Generator, Sampling
from scoremode.studies.tasks.model_arguments import AdapterSettings
from scoremode.values import Ids

CHUNK = 1024  # requests whose prompts are held as ids at a time


def request_bar(total: int, what: str, disabled: bool) -> Any:
    """Returns the harness's own progress bar for requests of one kind."""
    return tqdm(total=total, desc=f"Running {what} requests", disable=disabled or not total)


class GeneratingModel(TemplateLM):  # type: ignore[misc]
    held: LazyModel
    settings: AdapterSettings
    encoder: HarnessEncoder
    max_length: int | None
    tokenizer: Any  # a tokenizer of Transformers; None if there is none

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Generates a text after each context, up to a stop. Requests with equal settings are generated together."""
        self.require_generation()
        if not requests:
            return []
        self.held.close()  # closes the scoring engine, because both models would not fit into a device's memory
        texts: list[str | None] = [None] * len(requests)
        alike: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            alike.setdefault(json.dumps(request.args[1], sort_keys=True, default=str), []).append(number)
        how = [self._sampling(requests[numbers[0]].args[1]) for numbers in alike.values()]  # errors come before loading
        groups = list(zip(how, alike.values(), strict=True))
        longest = max(s.max_tokens + len(self._prompt(requests[i].args[0], s)[0]) for s, own in groups for i in own)
        opened = open_for(self.held.chosen, "generates", Work(longest))
        with request_bar(len(requests), "generate_until", disable_tqdm) as bar, closing(opened) as generator:
            for sampling, numbers in groups:
                for begin in range(0, len(numbers), CHUNK):
                    part = numbers[begin : begin + CHUNK]
                    written = self._write(generator, [requests[i].args[0] for i in part], sampling, bar)
                    for number, text in zip(part, written, strict=True):
                        texts[number] = text
                        self.cache_hook.add_partial("generate_until", requests[number].args, text)
        return [text for text in texts if text is not None]

    def require_generation(self) -> None:
        require(self.held.plugin, "generates", "generate text, which generate_until tasks need")
        if self.tokenizer is None:
            raise ModelError("generate_until needs a Hugging Face tokenizer", fix="give tokenizer=FOLDER")

    def _sampling(self, given: Any) -> Sampling:
        """Returns the sampling settings of a request, from its keyword arguments."""
        if not isinstance(given, dict):
            raise InputError(f"generation_kwargs are {type(given).__name__}, not a mapping", fix="correct the task")
        known = normalize_gen_kwargs(given, self.max_gen_toks)
        eos = None if self.eot_token_id is None else self.tok_decode([self.eot_token_id], skip_special_tokens=False)
        until = handle_stop_sequences(known.pop("until", None), eos=eos)
        room, most = self.max_length, known.pop("max_gen_toks")
        if room is not None and most >= room:
            raise InputError(
                f"max_gen_toks {most} leaves no room for a context in the model's {room} tokens",
                fix="give a smaller one: --gen_kwargs max_gen_toks=N",
            )
        samples, temperature = bool(known.pop("do_sample", False)), float(known.pop("temperature", 0.0) or 0.0)
        if samples and not temperature:
            temperature = 1.0  # the default of Transformers
        return Sampling(most, tuple(stop for stop in until if stop), temperature if samples else 0.0, known)

    def _write(self, generator: Generator, contexts: list[str], sampling: Sampling, bar: Any) -> list[str]:
        prompts = [self._prompt(context, sampling) for context in contexts]
        cut = sum(lost > 0 for _, lost in prompts)
        if cut:
            print_line(
                f"scoremode: {cut} of {len(contexts)} contexts were cut on their left, to make room for the "
                f"{sampling.max_tokens} tokens of an answer"
            )
        found: list[str | None] = [None] * len(prompts)
        for index, ids in generator.generate([ids for ids, _ in prompts], sampling):
            found[index] = postprocess_generated_text(self.tok_decode(ids.tolist()), list(sampling.stop), None)
            bar.update(1)
        missing = found.count(None)
        if missing:
            what = f"the engine left {missing} of {len(found)} contexts without an answer"
            raise EngineError(what, fix="run it again")
        return [text for text in found if text is not None]

    def _prompt(self, context: str, sampling: Sampling) -> tuple[Ids, int]:
        """Encodes a context; returns its ids and how many ids were cut from its left."""
        ids = self.encoder.text(context)
        if not len(ids):
            ids = self.encoder.text("", special=True)
        if not len(ids):
            raise InputError("a context has no token", fix="give add_bos_token=True, or correct the task")
        room = len(ids) if self.max_length is None else self.max_length - sampling.max_tokens
        lost = max(0, len(ids) - room)
        return ids[lost:], lost

    # ── the tokenizer ────────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def eot_token_id(self) -> int | None:
        return self.held.subject.tokenizer.facts.eos

    @property
    def max_gen_toks(self) -> int:
        return self.settings.max_gen_toks

    def tok_decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        if self.tokenizer is not None:
            return str(self.tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens))
        return self.held.subject.tokenizer.decode(list(tokens))
