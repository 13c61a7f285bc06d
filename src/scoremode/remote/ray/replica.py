"""One replica: a Ray actor that opens a worker on its node, and calls its methods by name."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from scoremode.core.disk.manifests import without_secrets
from scoremode.core.engine.base import EngineFacts
from scoremode.core.engine.plugin import Work
from scoremode.core.engine.registry import Chosen, choose
from scoremode.core.installation import installed_versions
from scoremode.core.verbs.replicas import OTHER_FILES, OpenWorker
from scoremode.errors import EngineError, ScoremodeError
from scoremode.version import __version__


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """What a replica opens, and what it must find on its node: a node with other files or libraries is left out."""

    model: str
    engine: str
    options: Mapping[str, Any]
    tokenizer: str | None
    work: Work
    folder: str  # where the driver runs: relative paths start there
    facts: Mapping[str, str]  # of the driver, see ``facts_of``
    open_worker: OpenWorker

    def require_same(self, chosen: Chosen) -> None:
        """Refuses a node that has other weights, another tokenizer, other libraries or other settings."""
        here = facts_of(chosen)
        names = [name for name in {**self.facts, **here} if here.get(name) != self.facts.get(name)]
        if names:
            host, words = socket.gethostname(), ", ".join(names[:3])
            values = f" ({here.get(names[0])} instead of {self.facts.get(names[0])})" if len(names) == 1 else ""
            raise EngineError(f"{host} has other {words} for {self.model}{values}", fix=OTHER_FILES)


def facts_of(chosen: Chosen) -> dict[str, str]:
    """What must be the same on every node: weights, tokenizer, versions of libraries, and settings of the engine."""
    subject, settings = chosen.subject, without_secrets(dict(chosen.settings()))
    found = {"weights": subject.fingerprint, "tokenizer": subject.tokenizer.facts.fingerprint}
    versions = {"scoremode": __version__, **installed_versions(chosen.plugin.packages)}
    found |= {f"version of {name}": version for name, version in versions.items()}
    return found | {
        f"setting {name}": json.dumps(value, default=str, sort_keys=True) for name, value in settings.items()
    }


@dataclass(frozen=True, slots=True)
class Opened:
    """What a replica reports when its worker is open."""

    facts: EngineFacts
    about: Any  # of the worker
    host: str
    node: str  # its id in Ray
    pid: int
    seconds: float  # to open the worker


@dataclass(frozen=True, slots=True)
class Finished:
    """The last item that a replica sends for a piece of work."""

    seconds: float


def as_our_error(error: Exception) -> ScoremodeError:
    """Converts an error to a class in errors.py, because other classes may not exist in the driver's process."""
    if isinstance(error, ScoremodeError):
        kind = next(kind for kind in type(error).__mro__ if kind.__module__ == ScoremodeError.__module__)
        found: ScoremodeError = kind(error.message, fix=error.fix)
        return found
    words = f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
    return EngineError(f"the engine failed ({words})", fix="run the same command again to resume")


class Replica:
    """A worker that does pieces of work. Ray makes an actor of this class. Errors are returned instead of raised."""

    def __init__(self) -> None:
        self._worker: Any = None

    def where(self) -> str:
        """The name of the host. This call returns as soon as the actor has a process."""
        return socket.gethostname()

    def open(self, spec: ReplicaSpec) -> Opened | ScoremodeError:
        import ray

        began = time.perf_counter()
        if os.path.isdir(spec.folder):
            os.chdir(spec.folder)
        try:
            chosen = choose(spec.model, spec.engine, spec.options, spec.tokenizer)
            spec.require_same(chosen)
            worker = spec.open_worker(chosen, spec.work)
        except Exception as error:
            return as_our_error(error)
        self._worker = worker.methods
        seconds, node = time.perf_counter() - began, ray.get_runtime_context().get_node_id()
        return Opened(worker.facts, worker.about, socket.gethostname(), node, os.getpid(), seconds)

    def call(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self._worker, method)(*arguments)
        except Exception as error:
            return as_our_error(error)

    def stream(self, method: str, *arguments: Any, **named: Any) -> Iterator[Any]:
        """Yields what a method yields; then ``Finished`` or an error."""
        began = time.perf_counter()
        try:
            yield from getattr(self._worker, method)(*arguments, **named)
        except Exception as error:
            yield as_our_error(error)
        else:
            yield Finished(time.perf_counter() - began)

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
