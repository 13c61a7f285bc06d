"""One replica: a Ray actor that opens a worker on its node, and calls its methods by name."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from scoremode import __version__
from scoremode.core.disk.manifests import without_secrets
from scoremode.core.engine.base import EngineFacts
from scoremode.core.engine.plugin import EnginePlugin, Work
from scoremode.core.engine.registry import Chosen, choose
from scoremode.core.installation import installed_versions
from scoremode.core.verbs.replicas import OTHER_FILES, OpenWorker
from scoremode.errors import EngineError, ScoremodeError

OTHER_VERSION = "install the same version everywhere"


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """What a replica opens, and what it must find on its node: a node with other files or libraries is left out."""

    model: str
    engine: str
    options: Mapping[str, Any]
    tokenizer: str | None
    work: Work
    folder: str  # where the driver runs: relative paths start there
    fingerprint: str
    tokenizer_fingerprint: str
    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    open_worker: OpenWorker

    @staticmethod
    def of(chosen: Chosen, tokenizer: str | None, work: Work, open_worker: OpenWorker) -> ReplicaSpec:
        return ReplicaSpec(
            model=chosen.subject.name,
            engine=chosen.plugin.address or chosen.plugin.name,
            options=chosen.options.given(),
            tokenizer=tokenizer,
            work=work,
            folder=os.getcwd(),
            fingerprint=chosen.subject.fingerprint,
            tokenizer_fingerprint=chosen.subject.tokenizer.facts.fingerprint,
            settings=_plain_settings(chosen),
            versions=_versions(chosen.plugin),
            open_worker=open_worker,
        )

    def require_same(self, chosen: Chosen) -> None:
        """Refuses a node that has other weights, another tokenizer, other libraries or other settings."""
        host = socket.gethostname()
        if chosen.subject.fingerprint != self.fingerprint:
            raise EngineError(f"{host} has other weights in {self.model}", fix=OTHER_FILES)
        if chosen.subject.tokenizer.facts.fingerprint != self.tokenizer_fingerprint:
            raise EngineError(f"{host} has another tokenizer for {self.model}", fix=OTHER_FILES)
        versions, settings = _versions(chosen.plugin), _plain_settings(chosen)
        for name in _differing(versions, self.versions):
            raise EngineError(
                f"{host} has {name} {versions.get(name)} and the driver {self.versions.get(name)}", fix=OTHER_VERSION
            )
        names = _differing(settings, self.settings)[:3]
        if names:
            differences = [f"{name} {settings.get(name)} instead of {self.settings.get(name)}" for name in names]
            raise EngineError(
                f"the engine on {host} would be set up in another way: {', '.join(differences)}",
                fix="give the options that both can use, as in --device cpu",
            )


def _plain_settings(chosen: Chosen) -> dict[str, Any]:
    """The settings of an engine as JSON gives them back, so that those of two machines can be compared."""
    found: dict[str, Any] = json.loads(json.dumps(without_secrets(dict(chosen.settings())), default=str))
    return found


def _versions(plugin: EnginePlugin) -> dict[str, str]:
    """Versions of scoremode and of the libraries that the engine's numbers come from."""
    return {"scoremode": __version__, **installed_versions(plugin.packages)}


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    return sorted(name for name in {*one, *other} if one.get(name) != other.get(name))


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
