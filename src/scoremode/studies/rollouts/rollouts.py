"""``scoremode rollouts``: texts that a model writes, with the log-probability of every token when it was drawn."""

from __future__ import annotations

import hashlib
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Unpack

import numpy as np

from scoremode.core.disk.uri import RemotePath, located
from scoremode.core.engine.plugin import Work
from scoremode.core.engine.registry import all_options, open_for, require
from scoremode.core.plan.path import DECODE, DecodePath, read_path
from scoremode.core.scores.answers import FAULT
from scoremode.core.verbs.arguments import ModelArguments, spelled_out
from scoremode.core.verbs.model import GivenTokenizer, LazyModel
from scoremode.core.verbs.planned import identify
from scoremode.core.verbs.progress import Progress, announce, shows_progress
from scoremode.core.verbs.replicas import spread_options
from scoremode.core.verbs.run_contents import describe_engine, describe_model
from scoremode.errors import EngineError, OptionError, UnknownArgumentError, did_you_mean
from scoremode.studies.rollouts.prompts import GivenPrompts, Prompts, encoded, read_prompts
from scoremode.studies.rollouts.texts import (
    FINISHES,
    Rollouts,
    RolloutsFolder,
    WrittenTokens,
    pack,
    prompts_digest,
    tokens_digest,
)
from scoremode.studies.rollouts.writing import DrawingRules, ReplicatedWriter, Writer, WritingRequest
from scoremode.values import Ids
from scoremode.version import __version__

MOST_TEXTS = 1_000_000  # the requests for all of them are held in memory
MAX_TOKENS = 256  # of a text, if the user gives no number


@spelled_out(ModelArguments)
@shows_progress
def rollouts(
    model: str,
    prompts: GivenPrompts,
    *,
    samples: int = 1,
    temperature: float = 0.0,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    max_tokens: int | None = None,
    seed: int = 0,
    sequences: int | None = None,
    engine: str | None = None,
    tokenizer: GivenTokenizer | None = None,
    out: str | Path | None = None,
    fresh: bool = False,
    progress: Progress | None = None,
    **arguments: Unpack[ModelArguments],
) -> Rollouts:
    """Let a model write texts after prompts, and keep the log-probability of every token when it was drawn.

    ``prompts`` is the name of a file (.jsonl or .txt), or a list of texts and of rows like those of a file. Each prompt
    gets ``samples`` texts of at most ``max_tokens`` tokens (default: 256). ``temperature`` 0 takes the model's first
    choice; else tokens are drawn, after the filters ``min_p``, ``top_k`` and ``top_p``. The draws of a text follow from
    ``seed``, its prompt's number and its own. ``sequences`` texts are written side by side. With ``out``, finished
    texts are kept there at once, and the same call resumes. ``arguments`` are options of the engine (dtype, device, …).

    >>> import scoremode as sm
    >>> written = sm.rollouts("org/model", ["Once upon a time"], temperature=1, samples=4)         # doctest: +SKIP
    >>> written.text[0], written.raw_logprob[0].sum()                                              # doctest: +SKIP
    >>> sm.compare("org/model", "org/model-W4A16", corpus=written).kl                              # doctest: +SKIP
    """
    rules = read_rules(temperature, top_p, top_k, min_p)
    most = MAX_TOKENS if max_tokens is None else max_tokens
    for flag, count in (("--samples", samples), ("--max-tokens", most)):
        if count < 1:
            raise OptionError(f"{flag} {count} writes nothing", fix="give 1 or more")
    path = read_path(DECODE, sequences=sequences) if sequences is not None else None
    for name in arguments:
        if name not in (*all_options(), *spread_options()):
            raise UnknownArgumentError(f"there is no argument {name}", fix=did_you_mean(name, list(all_options())))
    place = None if out is None else located(out)
    if isinstance(place, RemotePath):
        raise OptionError(f"{place}: rollouts are written to folders of this machine", fix="give a folder to --out")
    rows = read_prompts(prompts)
    if (texts := len(rows.rows) * samples) > MOST_TEXTS:
        message = f"{texts:,} texts are too many for one folder (at most {MOST_TEXTS:,})"
        raise OptionError(message, fix="give fewer --samples, or write several folders with another --seed each")
    with closing(LazyModel.named(model, engine, arguments, tokenizer)) as lazy:
        require(lazy.plugin, "writes", "write texts with their log-probabilities")
        encodings = encoded(rows, lazy.subject.tokenizer)
        _require_known([ids for _, ids in encodings], lazy.subject.vocabulary)
        task = WritingTask(rows, encodings, rules, lazy.longest_window, path, samples, most, seed)
        return _written(lazy, task, place, fresh=fresh, progress=progress)


def read_rules(temperature: float, top_p: float | None, top_k: int | None, min_p: float | None) -> DrawingRules:
    """Checks how tokens are to be drawn.

    >>> read_rules(0.7, None, 40, None)
    DrawingRules(temperature=0.7, top_p=1.0, top_k=40, min_p=0.0)
    """
    if top_k is not None and top_k < 1:
        raise OptionError(f"--top-k {top_k} leaves no token", fix="give 1 or more, or leave --top-k out")
    shares = {"--top-p": 1.0 if top_p is None else top_p, "--min-p": 0.0 if min_p is None else min_p}
    for flag, value in {"--temperature": temperature, **shares}.items():
        if not math.isfinite(value) or value < 0 or (flag != "--temperature" and value > 1):
            fix = "give 0 or more" if flag == "--temperature" else "give a number from 0 to 1"
            raise OptionError(f"{flag} {value} cannot be", fix=fix)
    if shares["--top-p"] == 0:
        raise OptionError("--top-p 0 leaves no token", fix="give more than 0, or --temperature 0")
    rules = DrawingRules(float(temperature), float(shares["--top-p"]), top_k or 0, float(shares["--min-p"]))
    if rules.is_greedy and rules != DrawingRules():
        raise OptionError("filters do not apply to greedy choices", fix="give --temperature 1, or leave them out")
    return rules


def _require_known(prompts: Sequence[Ids], vocabulary: int | None) -> None:
    largest = max(int(ids.max()) for ids in prompts)
    if vocabulary is not None and largest >= vocabulary:
        raise OptionError(
            f"the tokenizer gives id {largest}, but the model's vocabulary ends at {vocabulary - 1}",
            fix="give the right folder with --tokenizer",
        )


# ── what is asked ────────────────────────────────────────────────────────────────────────────────────────────────────
@dataclass(frozen=True, slots=True, eq=False)
class WritingTask:
    """All texts that are to be written: text i belongs to prompt i // samples."""

    prompts: Prompts
    encoded: list[tuple[str, Ids]]  # of each prompt
    rules: DrawingRules
    context: int | None  # tokens that fit into the model
    path: DecodePath | None  # how many texts side by side; None: the engine's own choice
    samples: int
    max_tokens: int
    seed: int

    @property
    def rooms(self) -> list[int]:
        """How many tokens each text may have; 0 where the prompt fills the model's context."""
        most = self.max_tokens
        each = [most if self.context is None else min(most, self.context - len(ids)) for _, ids in self.encoded]
        return [max(0, room) for room in each for _ in range(self.samples)]

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its text."""
        each = zip(self.encoded, self.rooms[:: self.samples], strict=True)
        return max(len(ids) + room for (_, ids), room in each)

    def requests(self, which: Sequence[int]) -> list[WritingRequest]:
        rooms, requests = self.rooms, []
        for number in which:
            prompt, sample = divmod(number, self.samples)
            digest = hashlib.sha256(f"{self.seed} {prompt} {sample}".encode()).digest()
            seed = int.from_bytes(digest[:8], "little") >> 2
            requests.append(WritingRequest(self.encoded[prompt][1], seed, rooms[number]))
        return requests

    def identity(self, lazy: LazyModel) -> Mapping[str, object]:
        """The facts that must be equal for stored texts to be these."""
        answers = [row.answer for row in self.prompts.rows]
        return identify(
            lazy.subject,
            lazy.engine_name,
            lazy.settings(),
            prompts=prompts_digest((ids for _, ids in self.encoded), answers),
            sampling=asdict(self.rules),
            samples=self.samples,
            max_tokens=self.max_tokens,
            seed=self.seed,
            sequences=None if self.path is None else self.path.sequences,
        )


# ── the loop ─────────────────────────────────────────────────────────────────────────────────────────────────────────
def _written(
    lazy: LazyModel, task: WritingTask, out: Path | None, *, fresh: bool, progress: Progress | None
) -> Rollouts:
    with ExitStack() as stack:
        folder = out or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="scoremode-"))) / "rollouts"
        claim = stack.enter_context(RolloutsFolder(folder, task.identity(lazy), fresh=fresh))
        texts = claim.finished
        if texts is None:
            announce(progress, f"loading {lazy.subject.name} with {lazy.engine_name}")
            work = Work(task.longest, shares_prompts=task.samples > 1, path=task.path)
            writer: Writer
            if lazy.replicas is None:
                writer = open_for(lazy.chosen, "writes", work, task.rules)
            else:
                writer = ReplicatedWriter(lazy.replicas, work, task.rules, progress)
            with closing(writer):
                texts = _write(writer, lazy, task, claim, progress)
        return texts if out is not None else replace(texts, path=None)


def _write(
    writer: Writer, lazy: LazyModel, task: WritingTask, claim: RolloutsFolder, progress: Progress | None
) -> Rollouts:
    """Writes every text that the folder lacks, then its files."""
    rooms, texts = np.array(task.rooms), claim.begin_texts()

    def keep(number: int, text: WrittenTokens) -> None:
        texts[number] = text
        claim.records.append(number, pack(text))

    for number in np.flatnonzero(rooms == 0).tolist():
        if number not in texts:
            keep(number, WrittenTokens(np.zeros(0, np.int32), np.zeros(0), np.zeros(0), "context"))
    which = np.flatnonzero(rooms)
    done = np.array([number in texts for number in which.tolist()], np.bool_)
    told, total = 0, int(rooms[which[~done]].sum())

    def tell(tokens: int) -> None:
        nonlocal told
        told += tokens
        if progress:
            progress(told, total)

    tell(0)
    requests = task.requests(which.tolist())
    for at, written in writer.write(requests, done, tell):
        _check(written, requests[at], writer, writer.facts.vocabulary)
        keep(int(which[at]), replace(written, finish=_finish(written, task, writer.ends)))
    if len(texts) < len(rooms):
        raise EngineError(f"the engine wrote {len(texts)} of {len(rooms)} texts", fix="run it again")
    announce(progress, "saving")
    every = [texts[number] for number in range(len(rooms))]
    rows = [_row(task, lazy, number, text) for number, text in enumerate(every)]
    return claim.save(rows, _manifest(writer, lazy, task, every, claim.identity))


def _finish(written: WrittenTokens, task: WritingTask, ends: frozenset[int]) -> str:
    if written.finish == "stop" or int(written.ids[-1]) in ends:
        return "stop"
    return "length" if len(written.ids) == task.max_tokens else "context"


def _check(written: WrittenTokens, request: WritingRequest, writer: Writer, vocabulary: int | None) -> None:
    """Stops if an engine gave a text that cannot be, instead of keeping it."""
    ids = written.ids
    columns = [getattr(written, name) for name in ("logprob", "raw_logprob") if name not in writer.missing]
    is_end = np.isin(ids, list(writer.ends))
    possible = (
        0 < len(ids) <= request.room
        and all(len(column) == len(ids) and bool((np.isfinite(column) & (column <= 0)).all()) for column in columns)
        and int(ids.min()) >= 0
        and (vocabulary is None or int(ids.max()) < vocabulary)
        and not is_end[:-1].any()
        and (bool(is_end[-1]) or written.finish == "stop" or len(ids) == request.room)
    )
    if not possible:
        raise EngineError("the engine gave a text that cannot be", fix=FAULT)


# ── what is kept ─────────────────────────────────────────────────────────────────────────────────────────────────────
def _row(task: WritingTask, lazy: LazyModel, number: int, text: WrittenTokens) -> dict[str, object]:
    """A text as a row of texts.parquet."""
    prompt, sample = divmod(number, task.samples)
    prompt_text, prompt_ids = task.encoded[prompt]
    return {
        **{"prompt": prompt, "sample": sample, "prompt_text": prompt_text, "prompt_ids": prompt_ids},
        **{name: getattr(text, name) for name in ("ids", "logprob", "raw_logprob", "finish")},
        "text": lazy.subject.tokenizer.decode(text.ids.tolist()),
        "answer": task.prompts.rows[prompt].answer,
    }


def _manifest(
    writer: Writer, lazy: LazyModel, task: WritingTask, texts: Sequence[WrittenTokens], identity: Mapping[str, object]
) -> dict[str, object]:
    """Everything that another person needs to get the texts again."""
    finishes = {name: sum(text.finish == name for text in texts) for name in FINISHES}
    used = [text.ids for text in texts] + [ids for _, ids in task.encoded]
    return {
        **describe_model(lazy.subject),
        **describe_engine(writer.facts),
        "tokenizer": lazy.subject.tokenizer.facts.fingerprint,
        "tokens_sha256": tokens_digest(lazy.subject.tokenizer.pieces(), used),
        "prompts_file": task.prompts.name,
        "prompts_sha256": task.prompts.sha256,
        "prompts": len(task.encoded),
        "samples": task.samples,
        "texts": len(texts),
        "written_tokens": sum(len(text.ids) for text in texts),
        "finish": finishes,
        "sampling": {**asdict(task.rules), "max_tokens": task.max_tokens, "ends": sorted(writer.ends)},
        "missing": list(writer.missing),
        "seed": task.seed,
        "notes": [*task.prompts.notes, *writer.facts.notes, *writer.account(), *_notes(task, finishes, writer.ends)],
        "scoremode": __version__,
        "identity": identity,
    }


def _notes(task: WritingTask, finishes: dict[str, int], ends: frozenset[int]) -> Iterator[str]:
    total = len(task.rooms)
    if finishes["length"]:
        most = task.max_tokens
        yield f"{finishes['length']:,} of {total:,} texts were cut at --max-tokens {most:,}"
    if finishes["context"]:
        yield f"{finishes['context']:,} of {total:,} texts were cut where the model's context of {task.context} is full"
    empty = task.rooms.count(0)
    if empty:
        yield f"{empty:,} of them have no token, because their prompt fills the context"
    if not ends and not finishes["stop"]:
        yield "the model has no end token, so no text ends by itself"
