"""A model for lm-evaluation-harness that runs on any engine of scoremode.

requests ─▶ chunks of whole documents ─▶ encoding.py ─▶ likelihoods ─▶ (log-likelihood, greedy?) for the harness

It scores texts and writes none: tasks with generated answers are run by the harness's own back ends.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from itertools import groupby
from pathlib import Path
from typing import Any, Literal
from weakref import WeakSet

import msgspec
import numpy as np
from lm_eval.api.model import TemplateLM
from tqdm import tqdm

from scoremode.core.disk.files import write_atomically
from scoremode.core.disk.manifests import differing_fields
from scoremode.core.engine.base import Engine
from scoremode.core.engine.plugin import Work
from scoremode.core.engine.registry import all_options, require_read
from scoremode.core.plan.path import PREFILL
from scoremode.core.strict_json import read_object
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

CHUNK = 2048  # requests that are encoded and scored at a time, extended to the end of the last document
CACHE_KIND = "scoremode answers for lm-eval"
COUNTED = {
    "spanning": "a token spans the end of the context, and the harness's rule scores other tokens than the text has",
    "truncated": "the context was cut on its left to fit the model",
}
OTHER_NAMES = {"pretrained": "model", "peft": "adapter"}  # names that the harness's own back ends use
TOKEN = "the harness writes its model arguments into its results, so an access token must not be among them"
OPEN: WeakSet[ScoremodeLM] = WeakSet()
"""All models that were created, so that a command line can close them."""


class AdapterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the adapter itself, not of an engine."""

    max_length: int | None = None  # the most tokens that are fed; None: the model's context
    add_bos_token: bool | None = None  # None: the tokenizer's own rule
    prefix_token_id: int | None = None  # the token before texts without context; None: BOS, else EOS
    greedy: Literal["measured", "unknown-is-false"] = "measured"  # unknown: the engine does not measure ranks
    enable_thinking: bool | None = None  # for chat templates that have this setting; never True for log-likelihoods
    chat_template_args: dict[str, object] | None = None


class ScoremodeLM(TemplateLM):  # type: ignore[misc]
    """Scores requests of lm-evaluation-harness with any engine. Nothing is loaded before the first request.

    >>> lm = ScoremodeLM(model="table:uniform", prefix_token_id=0)
    >>> lm._loglikelihood_tokens([("", lm.tok_encode("ab"), lm.tok_encode("cd"))], disable_tqdm=True)
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
        OPEN.add(self)

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
            for chunk in chunks_of_documents(requests):
                encoded = list(map(self._encoded, chunk))
                scores = self._score([encoding.asked for encoding in encoded], _groups(chunk, encoded), bar)
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
            for part in self._texts(requests):
                windows = [window for _, text_windows in part for window in text_windows]
                scores = iter(self._score(windows, np.arange(len(windows))))
                for request, text_windows in part:
                    answers.append(math.fsum(next(scores).log_prob for _ in text_windows))
                    self.cache_hook.add_partial("loglikelihood_rolling", request.args, answers[-1])
                    bar.update(1)
        return answers

    def _texts(self, requests: Sequence[Any]) -> Iterator[list[tuple[Any, list[Continuation]]]]:
        """Yields requests with the windows of their texts, about a chunk of windows at a time."""
        part: list[tuple[Any, list[Continuation]]] = []
        for request in requests:
            part.append((request, self.encoder.rolling(request.args[0])))
            if sum(1 + len(windows) for _, windows in part) >= CHUNK:
                yield part
                part = []
        yield part

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Answers requests that are given as ids, for code of the harness that encodes by itself."""
        continuations = [self.encoder.ids(np.array(context), np.array(target)).asked for _, context, target in requests]
        with self._call(len(requests), "loglikelihood", disable_tqdm) as bar:
            scores = self._score(continuations, np.arange(len(continuations)), bar)
            return [(likelihood.log_prob, self._greedy(likelihood)) for likelihood in scores]

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

    def engine(self, longest: int) -> Engine:
        """Returns the open engine; opens it if it is closed or was opened for shorter windows."""
        engine = self.held.opened(Work(longest, shares_prompts=True))
        self._facts = engine.facts
        return engine

    def _score(self, continuations: list[Continuation], groups: Ints, bar: Any = None) -> list[Likelihood]:
        """Returns likelihoods in the given order. With a bar, each is one request and must know if it is greedy."""
        if not continuations:
            return []
        engine, scores = self.engine(max(continuation.fed for continuation in continuations)), dict[int, Likelihood]()
        for index, likelihood in likelihoods(engine, continuations, groups):
            scores[index] = likelihood
            if bar is not None:
                self._greedy(likelihood)  # an unknown rank is refused at the first answer, not at the last
                bar.update(1)
        self._facts = engine.facts  # an engine may report more facts after its first question
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
    def identity(self) -> Mapping[str, Any]:
        """Returns the facts that stored answers must share with this model; known before anything is loaded."""
        names = ("add_bos_token", "prefix_token_id", "greedy")
        ours = {"max_length": self.max_length, **{name: getattr(self.settings, name) for name in names}}
        return identify(self.subject, self.held.engine_name, self.held.settings(), harness=ours)

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Takes the harness's cache (``--use_cache``); refuses a cache whose answers are not this model's."""
        database = getattr(cache_hook, "dbdict", None)
        if database is not None:
            claim_cache(Path(database.filename), len(database), self.identity())
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
    def prefix_token_id(self) -> int:
        return self.encoder.prefix

    @property
    def eot_token_id(self) -> int | None:
        return self.subject.tokenizer.facts.eos

    @property
    def tokenizer_name(self) -> str:
        return self.subject.name.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return [int(i) for i in self.encoder.text(string, special=add_special_tokens)]

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


def chunks_of_documents(requests: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Yields about CHUNK requests at a time and never splits a document, because its choices share their context."""
    chunk = list[Any]()
    for _, document in groupby(requests, _document):
        chunk += document
        if len(chunk) >= CHUNK:
            yield chunk
            chunk = []
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


def claim_cache(database: Path, answers: int, wanted: Mapping[str, Any]) -> None:
    """Claims the harness's cache for this model if it is empty; refuses one with answers of another or unknown model.

    The keys of the cache are the texts of a request, without the model: one file used for two models gives the first
    model's answers for both. So a file beside the cache names the model.
    """
    owner = database.with_name(database.name + ".scoremode.json")
    if not answers and not owner.exists():
        write_atomically(owner, json.dumps({"for": CACHE_KIND, "identity": wanted}, indent=1).encode() + b"\n")
        return
    try:
        differing = differing_fields(dict(read_object(owner)["identity"]), wanted)
    except (OSError, ValueError, KeyError, TypeError):
        differing = f"{owner.name} cannot be read"
    if differing:
        message = f"{database} holds answers of another model or other settings (it differs in: {differing})"
        raise RunError(message, fix="give another --use_cache")


# ── the arguments of the model ───────────────────────────────────────────────────────────────────────────────────────
def read_arguments(arguments: Mapping[str, Any]) -> tuple[LazyModel, AdapterSettings]:
    """Reads the model and the settings. Refuses everything that can be refused before the model is loaded."""
    params = {OTHER_NAMES.get(name, name): value for name, value in arguments.items() if value is not None}
    if len(params) < len([value for value in arguments.values() if value is not None]):
        raise OptionError("the model is given twice", fix="give model or pretrained, not both")
    if "token" in params:
        raise OptionError(TOKEN, fix="set HF_TOKEN instead")
    model = params.pop("model", None)
    if model is None:
        raise OptionError("no model was given", fix="give --model_args model=NAME")
    engine = params.pop("engine", None)
    if not isinstance(engine, Engine):  # an engine that is already open is used as it is
        engine = _text("engine", engine)
    tokenizer = _text("tokenizer", params.pop("tokenizer", None))
    try:
        ours = {name: params.pop(name) for name in AdapterSettings.__struct_fields__ if name in params}
        settings = msgspec.convert(ours, AdapterSettings)
    except msgspec.ValidationError as error:
        raise OptionError(f"model_args: {error}", fix="see docs/tasks.md") from None
    if settings.enable_thinking:
        raise OptionError("enable_thinking is not for log-likelihoods", fix="leave enable_thinking out")
    held = LazyModel.named(_text("model", model) or "", engine, _engine_options(params), tokenizer, many_questions=True)
    require_read(held.chosen.options, PREFILL, has_flag=False)
    held.settings()  # refuses options that cannot work
    return held, settings


def _engine_options(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the engine's options. The harness turns digits into numbers; this turns them back into text if needed."""
    registry = all_options()
    options = {}
    for name, value in arguments.items():
        if name not in registry:
            names = [*registry, *AdapterSettings.__struct_fields__, "model", "engine", "tokenizer"]
            raise UnknownArgumentError(f"there is no argument {name}", fix=did_you_mean(name, names))
        is_text = registry[name][1].kind == "str"
        options[name] = str(value) if is_text and isinstance(value, int) and not isinstance(value, bool) else value
    return options


def _text(name: str, value: Any) -> str | None:
    if isinstance(value, Path) or (isinstance(value, int) and not isinstance(value, bool)):
        return str(value)  # a folder may have a number as its name
    text: str | None = checked(name, value, str | None)
    return text
