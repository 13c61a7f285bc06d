"""``generate_until``: contexts ─▶ texts, by the rules of the harness's own Transformers back end.

A context is cut from the left so that the longest allowed answer fits. An answer ends before the first of its stops.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from typing import Any, Protocol

from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text

from scoremode.engines.generation import Generator, Sampling
from scoremode.engines.plugin import Work
from scoremode.errors import EngineError, InputError, print_line
from scoremode.harness.encoding import HarnessEncoder
from scoremode.values import Ids
from scoremode.verbs.model import LazyModel

CHUNK = 1024  # requests whose prompts are held as ids at a time


class GeneratingModel(Protocol):
    """What is needed of the harness's model."""

    held: LazyModel
    encoder: HarnessEncoder
    max_length: int | None
    cache_hook: Any

    @property
    def eot_token_id(self) -> int | None: ...

    @property
    def max_gen_toks(self) -> int: ...

    def tok_decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str: ...


def write_texts(lm: GeneratingModel, requests: Sequence[Any], bar: Any) -> list[str]:
    """The text that follows each context. Requests with equal settings are written together."""
    texts: list[str | None] = [None] * len(requests)
    alike: dict[str, list[int]] = {}
    for number, request in enumerate(requests):
        alike.setdefault(json.dumps(request.args[1], sort_keys=True, default=str), []).append(number)
    how = {key: sampling(lm, requests[numbers[0]].args[1]) for key, numbers in alike.items()}  # refused before loading
    held = lm.held
    work = Work(max((_longest(lm, [requests[i] for i in alike[key]], how[key]) for key in alike), default=None))
    with closing(held.plugin.open_generator(held.subject, held.chosen.options, work)) as generator:
        for key, numbers in alike.items():
            for begin in range(0, len(numbers), CHUNK):
                part = numbers[begin : begin + CHUNK]
                written = _write(lm, generator, [requests[i].args[0] for i in part], how[key], bar)
                for number, text in zip(part, written, strict=True):
                    texts[number] = text
                    lm.cache_hook.add_partial("generate_until", requests[number].args, text)
    return [text for text in texts if text is not None]


def sampling(lm: GeneratingModel, given: Any) -> Sampling:
    """How a request is written, from its keywords."""
    if not isinstance(given, dict):
        raise InputError(f"generation_kwargs are {type(given).__name__}, not a mapping", fix="correct the task")
    known = normalize_gen_kwargs(given, lm.max_gen_toks)
    eos = None if lm.eot_token_id is None else lm.tok_decode([lm.eot_token_id], skip_special_tokens=False)
    until = handle_stop_sequences(known.pop("until", None), eos=eos)
    room, most = lm.max_length, known.pop("max_gen_toks")
    if room is not None and most >= room:
        raise InputError(
            f"max_gen_toks {most} leaves no room for a context in the model's {room} tokens",
            fix="give a smaller one: --gen_kwargs max_gen_toks=N",
        )
    samples, temperature = bool(known.pop("do_sample", False)), float(known.pop("temperature", 0.0) or 0.0)
    if samples and not temperature:
        temperature = 1.0  # Transformers' own
    return Sampling(most, tuple(stop for stop in until if stop), temperature if samples else 0.0, known)


def _longest(lm: GeneratingModel, requests: Sequence[Any], how: Sampling) -> int:
    """Tokens of the longest prompt with its answer."""
    return how.max_tokens + max(len(_prompt(lm, request.args[0], how.max_tokens)[0]) for request in requests)


def _write(lm: GeneratingModel, generator: Generator, contexts: list[str], how: Sampling, bar: Any) -> list[str]:
    prompts = [_prompt(lm, context, how.max_tokens) for context in contexts]
    cut = sum(lost > 0 for _, lost in prompts)
    if cut:
        print_line(
            f"scoremode: {cut} of {len(contexts)} contexts were cut on their left, to make room for the "
            f"{how.max_tokens} tokens of an answer"
        )
    found: list[str | None] = [None] * len(prompts)
    for index, ids in generator.generate([ids for ids, _ in prompts], how):
        found[index] = postprocess_generated_text(lm.tok_decode(ids.tolist()), list(how.stop), None)
        bar.update(1)
    missing = found.count(None)
    if missing:
        raise EngineError(f"the engine left {missing} of {len(found)} contexts without an answer", fix="run it again")
    return [text for text in found if text is not None]


def _prompt(lm: GeneratingModel, context: str, most: int) -> tuple[Ids, int]:
    """A context as ids, and how many were cut from its left."""
    ids = lm.encoder.text(context)
    if not len(ids):
        ids = lm.encoder.text("", special=True)
    if not len(ids):
        raise InputError("a context has no token", fix="give add_bos_token=True, or correct the task")
    lost = 0 if lm.max_length is None else max(0, len(ids) - (lm.max_length - most))
    return ids[lost:], lost
