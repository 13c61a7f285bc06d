"""An engine that is a running server: it has loaded the model, and is asked for log-probabilities of prompts.

plan ──windows──▶ engine.py ──threads──▶ link.py ──HTTP──▶ server
                     ▲  checks.py: is it still the same?     │
                     └──────────── served.py: what it says ◀──┘

A scoring service is asked in a form of its own, with many windows per request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from scoremode.core.engine.plugin import Capabilities, EnginePlugin, Work
from scoremode.engines.server.server_options import PLAIN, SERVICE, ServerOptions

if TYPE_CHECKING:
    from scoremode.core.engine.base import Engine
    from scoremode.core.models.subject import Subject


class ServerPlugin(EnginePlugin):
    contract = 1
    name = "server"
    summary = "a running inference server, named by its address: --engine http://HOST:PORT"
    models = "a server's name (--engine http://HOST:PORT)"
    capabilities: ClassVar[Capabilities] = PLAIN
    options = ServerOptions
    addresses = ("http://", "https://")
    opens_for_each_question = True  # it may have been started again with another model
    _is_service: bool | None = None  # None: it did not say yet

    def able(self) -> Capabilities:
        """Returns the abilities of the server. A server that answers nothing without a key may be a scoring service."""
        if self.address is None:
            return self.capabilities
        from scoremode.engines.server.served import is_service

        if self._is_service is None:
            self._is_service = is_service(self.address)
        return PLAIN if self._is_service is False else SERVICE

    def claims(self, model: str) -> bool:
        return self.address is not None  # a server may call its models what it likes

    def subject(self, model: str, options: ServerOptions, tokenizer: str | None) -> Subject:
        from scoremode.engines.server.subject import find_subject

        assert self.address is not None
        subject = find_subject(self.address, model, options, tokenizer)
        self._is_service = subject.service is not None
        return subject

    def settings(self, subject: Subject, options: ServerOptions) -> dict[str, Any]:
        from scoremode.engines.server.subject import ServedSubject

        assert isinstance(subject, ServedSubject)
        settings = {**options.identity(), **subject.served.facts()}
        if subject.service is not None:
            return {**settings, "form": "service", "service": subject.service.identity()}
        assert subject.form is not None
        return {**settings, "form": subject.form.name}

    def open(self, subject: Subject, options: ServerOptions, work: Work) -> Engine:
        from scoremode.engines.server.engine import ServerEngine, ServiceEngine
        from scoremode.engines.server.subject import ServedSubject

        assert isinstance(subject, ServedSubject)
        if subject.service is not None:
            return ServiceEngine(subject, subject.service, options.concurrency)
        return ServerEngine(subject, options.concurrency)


PLUGIN = ServerPlugin
