"""A model for lm-evaluation-harness that runs on any engine of scoremode.

requests ─▶ chunks of whole documents ─▶ encoding.py ─▶ likelihoods ─▶ (log-likelihood, greedy?) for the harness

It scores texts and writes none: tasks with generated answers are run by the harness's own back ends.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from itertools import chain, groupby
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
from lm_eval.api.model import LM
from tqdm import tqdm

from scoremode.core.disk.manifests import differing_fields
from scoremode.core.engine.base import Engine
from scoremode.core.engine.plugin import Work
from scoremode.core.engine.registry import all_options, require_read
from scoremode.core.plan.path import PREFILL
from scoremode.core.text.files import Message
from scoremode.core.typed import checked
from scoremode.core.verbs.model import LazyModel
from scoremode.core.verbs.planned import identify
from scoremode.core.verbs.run_contents import describe_engine, describe_model
from scoremode.core.verbs.scoring import Continuation, Likelihood, likelihoods
from scoremode.errors import (
    EngineError,
    InputError,
    ModelError,
    OptionError,
    RunError,
    UnknownArgumentError,
    did_you_mean,
    print_line,
)
from scoremode.studies.tasks.encoding import Encoded, HarnessEncoder
from scoremode.values import Ints

T = TypeVar("T")

CHUNK = 2048  # requests that are encoded and scored at a time, extended to the end of the last document
OWNER = "scoremode"  # where the model of a cache of answers is kept in it; other keys are hashes
COUNTED = {
    "spanning": "a token spans the end of the context, and the harness's rule scores other tokens than the text has",
    "truncated": "the context was cut on its left to fit the model",
}
OTHER_NAMES = {"pretrained": "model", "peft": "adapter"}  # names that the harness's own back ends use
TEXTS = ("model", "engine", "tokenizer")
TOKEN = "the harness writes its model arguments into its results, so an access token must not be among them"


class AdapterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the adapter itself, not of an engine."""

    max_length: int | None = None  # the most tokens that are fed; None: the model's context
    add_bos_token: bool | None = None  # None: the tokenizer's own rule
    prefix_token_id: int | None = None  # the token before texts without context; None: BOS, else EOS
    greedy: Literal["measured", "unknown-is-false"] = "measured"  # unknown: the engine does not measure ranks
    enable_thinking: bool | None = None  # for chat templates that have this setting; never True for log-likelihoods
    chat_template_args: dict[str, object] | None = None


class ScoremodeLM(LM):  # type: ignore[misc]
    """Scores requests of lm-evaluation-harness with any engine. Nothing is loaded before the first request.

    >>> from lm_eval.api.instance import Instance
    >>> lm = ScoremodeLM(model="table:uniform")
    >>> lm.loglikelihood([Instance("loglikelihood", {}, ("ab", "cd"), 0)], disable_tqdm=True)
    [(-11.090354888959125, False)]
    """

    def __init__(
        self,
        pretrained: str | None = None,
        *,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        **arguments: Any,
    ) -> None:
        """``arguments`` are the fields of ``AdapterSettings``, and the engine's options by their names."""
        super().__init__()
        del max_batch_size
        if batch_size is not None and str(batch_size) not in ("1", "auto"):
            print_line(f"scoremode: batch_size {batch_size} is not used: engines fill batches by tokens")
        if device not in (None, _usual_device()):
            raise OptionError(f"--device {device} is not for scoremode", fix="give device=… in --model_args")
        self.held, self.settings = read_arguments({"pretrained": pretrained, **arguments})
        self.subject = self.held.subject
        self.max_length = self._choose_max_length()
        self.encoder = HarnessEncoder(
            self.subject.tokenizer,
            max_length=self.max_length,
            add_bos=self.settings.add_bos_token,
            prefix=self.settings.prefix_token_id,
        )
        # the Transformers tokenizer inside ours, or None: the harness uses it for chat templates
        self.tokenizer: Any = getattr(getattr(self.subject.tokenizer, "local", self.subject.tokenizer), "hf", None)
        self.counts = Counter[str]()  # of requests, and of those that were cut or split oddly
        self._facts: Any = None  # facts of the engine, after it was opened

    def _choose_max_length(self) -> int | None:
        chosen, limit, context = self.settings.max_length, self.held.chosen.options.limit, self.subject.context_length
        most = min((n for n in (limit[1] if limit else None, context) if n is not None), default=None)
        if chosen is not None and most is not None and chosen > most:
            raise OptionError(f"max_length {chosen} is more than the {most} tokens of this model", fix=f"give {most}")
        return chosen if chosen is not None else most

    # ── methods that the harness calls ───────────────────────────────────────────────────────────────────────────────
    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Returns (log-likelihood, is every token the model's first choice?) for each continuation."""
        answers: list[tuple[float, bool]] = []
        counts = Counter(loglikelihood=len(requests))
        with self._call(len(requests), "loglikelihood", disable_tqdm) as bar:
            for documents in chunks((list(document) for _, document in groupby(requests, _document)), len):
                chunk = [request for document in documents for request in document]
                encoded = list(map(self._encoded, chunk))
                scores = self._score([encoding.continuation for encoding in encoded], _groups(chunk, encoded), bar)
                for request, encoding, likelihood in zip(chunk, encoded, scores, strict=True):
                    answers.append((likelihood.log_prob, self._greedy(likelihood)))
                    self.cache_hook.add_partial("loglikelihood", request.args, answers[-1])
                    odd = {
                        "spanning": encoding.spanning,
                        "truncated": encoding.truncated > 0,
                        "truncated_tokens": encoding.truncated,
                    }
                    counts.update(odd)
        for name, explanation in COUNTED.items():
            if counts[name]:
                print_line(f"scoremode: in {counts[name]} of {len(requests)} requests {explanation}")
        self.counts.update(counts)
        return answers

    def _encoded(self, request: Any) -> Encoded:
        """Encodes a request of the harness, and names its document in errors."""
        try:
            return self.encoder.pair(*request.args)
        except InputError as error:
            where = f"document {request.doc_id} of {request.task_name}: " if request.task_name else ""
            raise InputError(where + error.message, fix=error.fix) from None

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Returns the log-likelihood of each text, scored in windows as long as the model's context."""
        answers: list[float] = []
        with self._call(len(requests), "loglikelihood_rolling", disable_tqdm) as bar:
            texts = ((request, self.encoder.rolling(request.args[0])) for request in requests)
            for chunk in chunks(texts, lambda text: 1 + len(text[1])):
                windows = list(chain.from_iterable(text_windows for _, text_windows in chunk))
                scores = iter(self._score(windows, np.arange(len(windows))))
                for request, text_windows in chunk:
                    answers.append(math.fsum(next(scores).log_prob for _ in text_windows))
                    self.cache_hook.add_partial("loglikelihood_rolling", request.args, answers[-1])
                    bar.update(1)
        return answers

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        self.check_tasks({str(request.task_name): "generate_until" for request in requests})
        return []

    def check_tasks(self, output_types: Mapping[str, str]) -> None:
        """Refuses tasks, given by name with their output types, whose answers are generated; loads nothing."""
        if writing := [name for name, kind in output_types.items() if kind == "generate_until"]:
            raise OptionError(
                f"scoremode scores texts and generates none, which {writing[0]} needs",
                fix="run scoremode lm-eval --model hf --tasks TASK; scoremode tasks reads these logs as well",
            )

    # ── scoring ──────────────────────────────────────────────────────────────────────────────────────────────────────
    @contextmanager
    def _call(self, count: int, request_type: str, disable_tqdm: bool) -> Iterator[Any]:
        """Yields the harness's own progress bar for one call.

        A model whose weights may change between calls is closed afterwards, and the next call opens it again.
        """
        try:
            with tqdm(total=count, desc=f"Running {request_type} requests", disable=disable_tqdm or not count) as bar:
                yield bar
        finally:
            if self.held.plugin.opens_for_each_question:
                self.held.close()

    def _score(self, continuations: list[Continuation], groups: Ints, bar: Any = None) -> list[Likelihood]:
        """Returns likelihoods in the given order. With a bar, each is one request and must know if it is greedy."""
        if not continuations:
            return []
        longest, scores = max(continuation.fed for continuation in continuations), dict[int, Likelihood]()
        engine = self.held.opened(Work(longest, shares_prompts=True))
        for index, likelihood in likelihoods(engine, continuations, groups):
            scores[index] = likelihood
            if bar is not None:
                self._greedy(likelihood)  # an unknown rank is refused at the first answer, not at the last
                bar.update(1)
        self._facts = engine.facts  # an engine may report more of them after its first question
        return [scores[index] for index in range(len(continuations))]

    def _greedy(self, likelihood: Likelihood) -> bool:
        greedy = likelihood.is_greedy
        if greedy is None and self.settings.greedy == "measured":
            raise EngineError(
                f"the {self.held.engine_name} engine does not measure ranks, so greedy or not cannot be said",
                fix="give greedy=unknown-is-false if no metric of the task needs it, or use another engine",
            )
        return bool(greedy)

    # ── facts for the harness ────────────────────────────────────────────────────────────────────────────────────────
    def identity(self) -> Mapping[str, object]:
        """Returns the facts that stored answers must share with this model; known before anything is loaded."""
        names = ("add_bos_token", "prefix_token_id", "greedy")
        ours = {"max_length": self.max_length, **{name: getattr(self.settings, name) for name in names}}
        return identify(self.subject, self.held.engine_name, self.held.settings(), harness=ours)

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Takes the harness's cache (``--use_cache``); refuses a cache whose answers are not this model's.

        Its keys are the texts of a request, without the model: one file used for two models would give the first
        model's answers for both. So the identity of the model is kept in it, too.
        """
        cache = getattr(cache_hook, "dbdict", None)
        if cache is not None:
            identity = self.identity()
            if differing := differing_fields(cache.get(OWNER, {}) if len(cache) else identity, identity):
                message = f"{cache.filename} holds answers of another model or other settings"
                raise RunError(f"{message} (it differs in: {differing})", fix="give another --use_cache")
            cache[OWNER] = identity
        super().set_cache_hook(cache_hook)

    def get_model_info(self) -> dict[str, Any]:
        """Returns the facts for the harness's results: model, engine, settings, and counts of requests."""
        facts, subject = self._facts, self.subject
        info = {
            **describe_model(subject),
            **self.identity(),
            "prefix_token_id": self.encoder.known_prefix,
            "requests": {n: self.counts[n] for n in ("loglikelihood", "spanning", "truncated", "truncated_tokens")},
        }
        if facts is not None:
            info |= {**describe_engine(facts), "notes": [*facts.notes, *subject.notes]}
        return {"model_dtype": info.get("dtype"), "model_revision": subject.revision, "scoremode": info}

    @property
    def tokenizer_name(self) -> str:
        return self.subject.name.replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template that is used, for the harness's results; '' if only the tokenizer knows it."""
        return "" if self.tokenizer is None else self.tokenizer.chat_template

    def apply_chat_template(self, chat_history: list[Message], add_generation_prompt: bool = True) -> str:
        """Renders a conversation up to the start of the answer, or, without that, inside of the last message."""
        more = dict(self.settings.chat_template_args or {})
        if self.settings.enable_thinking is not None:
            more["enable_thinking"] = self.settings.enable_thinking
        if self.tokenizer is None:
            if more or not add_generation_prompt:
                argument = next(iter(more), "a prefix of answers")
                raise OptionError(f"{argument}: this tokenizer's chat template takes no arguments", fix="leave it out")
            return self.subject.tokenizer.render_chat(chat_history, open_turn=True)
        if not self.tokenizer.chat_template:
            raise ModelError("this model has no chat template", fix="leave --apply_chat_template out")
        more |= {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
        try:
            return str(self.tokenizer.apply_chat_template(chat_history, tokenize=False, **more))
        except Exception as error:  # templates raise their own errors and Python's errors
            fix = "leave --system_instruction and --apply_chat_template out, or correct its roles"
            raise ModelError(f"the chat template refused a conversation ({error})", fix=fix) from None

    def close(self) -> None:
        """Stops the engine. The next request opens it again."""
        self.held.close()


def chunks(parts: Iterable[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """Yields parts together until their sizes reach CHUNK. None is split: the choices of a document share a context."""
    chunk, total = list[T](), 0
    for part in parts:
        chunk.append(part)
        total += size(part)
        if total >= CHUNK:
            yield chunk
            chunk, total = [], 0
    if chunk:
        yield chunk


def _document(request: Any) -> tuple[Any, ...]:
    if request.doc_id is None:
        return (None, request.args[0])  # a request that no task made: its context stands for the document
    return (request.task_name, request.doc_id)


def _groups(requests: Sequence[Any], encoded: Sequence[Encoded]) -> Ints:
    """Returns a group number per request, equal for requests of one document that begin with the same tokens.

    Requests without context, or with another number of tokens cut from their left, begin with different tokens.
    """
    each = zip(requests, encoded, strict=True)
    keys = [(*_document(request), request.args[0] == "", encoding.truncated) for request, encoding in each]
    numbers = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    return np.array([numbers[key] for key in keys], dtype=np.int64)


def _usual_device() -> Any:
    """Returns the device that the harness passes by default, which is ignored: engines choose better themselves."""
    from lm_eval.config.evaluate_config import EvaluatorConfig

    return next((field.default for field in fields(EvaluatorConfig) if field.name == "device"), None)


# ── the arguments of the model ───────────────────────────────────────────────────────────────────────────────────────
def read_arguments(arguments: Mapping[str, object]) -> tuple[LazyModel, AdapterSettings]:
    """Reads the model and the settings. Refuses everything that can be refused before the model is loaded."""
    present = {name: value for name, value in arguments.items() if value is not None}
    params = {OTHER_NAMES.get(name, name): _read_back(OTHER_NAMES.get(name, name), present[name]) for name in present}
    if len(params) < len(present):
        raise OptionError("the model is given twice", fix="give model or pretrained, not both")
    known = [*all_options(), *AdapterSettings.__struct_fields__, *TEXTS]
    if unknown := [name for name in params if name not in (*known, "token")]:
        raise UnknownArgumentError(f"there is no argument {unknown[0]}", fix=did_you_mean(unknown[0], known))
    if "token" in params:
        raise OptionError(TOKEN, fix="set HF_TOKEN instead")
    if "model" not in params:
        raise OptionError("no model was given", fix="give --model_args model=NAME")
    model, tokenizer = params.pop("model"), params.pop("tokenizer", None)
    engine = checked("engine", params.pop("engine", None), str | Engine | None)
    try:
        ours = {name: params.pop(name) for name in AdapterSettings.__struct_fields__ if name in params}
        settings = msgspec.convert(ours, AdapterSettings)
    except msgspec.ValidationError as error:
        raise OptionError(f"model_args: {error}", fix="see docs/tasks.md") from None
    if settings.enable_thinking:
        raise OptionError("enable_thinking is not for log-likelihoods", fix="leave enable_thinking out")
    held = LazyModel.named(model, engine, params, tokenizer, many_questions=True)
    require_read(held.chosen.options, PREFILL, has_flag=False)
    held.settings()  # refuses options that cannot work
    return held, settings


def _read_back(name: str, value: Any) -> Any:
    """A value as it was typed: the harness makes numbers of digits, as of a revision or a folder with such a name."""
    is_text = name in TEXTS or (name in (options := all_options()) and options[name][1].kind == "str")
    return str(value) if is_text and isinstance(value, int) and not isinstance(value, bool) else value
