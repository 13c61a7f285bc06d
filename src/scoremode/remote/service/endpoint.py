"""The routes under /v1/scoremode. vLLM finds them by an endpoint plugin from version 0.26 on, by a middleware before.

This file is loaded only inside vLLM's front end.
"""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from scoremode.core.scores.messages import CONTENT_TYPE, VERSION, Asked, TooLargeError, answer_message
from scoremode.engines.vllm import support
from scoremode.errors import EngineError, InputError, ScoremodeError, one_line
from scoremode.remote.service.requests import (
    MOST_BYTES,
    MOST_WINDOWS,
    answers_in_json,
    asked_in_json,
    body_of,
    read_form,
)
from scoremode.remote.service.scorer import PROB_EXAMPLE, ProbForm, ProbScorer, Scorer
from scoremode.remote.service.starting import READY
from scoremode.version import __version__

ROOT = "/v1/scoremode"
INSTANCE = "SCOREMODE_SERVICE_INSTANCE"  # the same for all front ends of one server
STATUSES: dict[type[BaseException], int] = {TooLargeError: 413, EngineError: 500}
logger = logging.getLogger("vllm.scoremode")

Handler = Callable[[Request], Awaitable[Response]]


class ScoreEndpoint:
    """The service behind the routes. vLLM makes it for the entry point ``vllm.endpoint_plugins``."""

    name = "scoremode"
    required_tasks = ("token_classify",)
    scorer: Scorer
    prober: ProbScorer

    def __init__(self) -> None:
        self.instance = os.environ.setdefault(INSTANCE, uuid.uuid4().hex)

    def attach_router(self, app: Any) -> None:
        app.add_route(ROOT, self._answering(self.about), methods=["GET"])
        app.add_route(f"{ROOT}/score", self._answering(self.score), methods=["POST"])
        app.add_route(f"{ROOT}/tokens", self._answering(self.tokens), methods=["GET"])
        app.add_route(f"{ROOT}/prob", self._answering(self.prob), methods=["POST"])

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Makes the service ready to answer. vLLM calls this before it listens, and ends if the self-test fails."""
        self.scorer = Scorer(engine_client)
        try:
            await self.scorer.start()
        except EngineError as error:  # the error advises another engine, and a server has only this one
            raise EngineError(
                error.message, fix="try --head as-served, and please report the model and the version"
            ) from None
        names = getattr(args, "served_model_name", None) or [args.model]
        self.prober = ProbScorer(self.scorer, names[0])
        os.write(2, f"{READY}; ready at {ROOT}\n".encode())  # not logged: a level of vLLM's logs would hide it

    def _answering(self, route: Handler) -> Handler:
        """Wraps a route so that its errors become answers of one line, with a status that says whose fault it is."""

        async def handler(request: Request) -> Response:
            try:
                return await route(request)
            except Exception as raised:
                error: BaseException = raised
                while isinstance(error, BaseExceptionGroup):
                    error = error.exceptions[0]
                if isinstance(error, ScoremodeError):
                    return _refusal(STATUSES.get(type(error), 400), error)
                logger.error("scoremode: a request failed", exc_info=error)
                message = f"the server failed ({type(error).__name__}: {one_line(str(error))[:200]})"
                return _refusal(500, EngineError(message))

        return handler

    # ── routes ───────────────────────────────────────────────────────────────────────────────────────────────────────
    async def about(self, request: Request) -> Response:
        """Answers with the facts that a client must know before it requests scores."""
        scorer = self.scorer
        facts, config = scorer.facts, scorer.client.vllm_config
        settings = {**facts.settings, **support.kernel_switches()}
        settings["data_parallel_size"] = int(config.parallel_config.data_parallel_size)
        return JSONResponse(
            {
                "scoremode": __version__,
                "messages": VERSION,
                "instance": self.instance,
                "dtype": facts.dtype,
                "device": facts.device,
                "head": facts.head,
                "vocabulary": facts.vocabulary,
                "max_model_len": facts.context_length,
                "batch_tokens": scorer.batch_tokens,
                "versions": facts.versions,
                "settings": settings,
                "notes": list(facts.notes),
                "probe": scorer.probe,
                "limits": {"body_bytes": MOST_BYTES, "windows": MOST_WINDOWS},
            }
        )

    async def score(self, request: Request) -> Response:
        scorer, kind = self.scorer, _content_type(request)
        if kind not in (CONTENT_TYPE, "application/json"):
            return _refusal(415, InputError(f"this is not {CONTENT_TYPE} or JSON", fix="set Content-Type"))
        body, in_json = await body_of(request, MOST_BYTES), kind == "application/json"
        score_request = asked_in_json(body) if in_json else Asked.from_bytes(body)
        answers = await scorer.score(score_request)
        if in_json:
            return Response(answers_in_json(answers), media_type="application/json")
        data = answer_message(self.instance, answers)
        return Response(data, media_type=CONTENT_TYPE)

    async def prob(self, request: Request) -> Response:
        if _content_type(request) != "application/json":
            return _refusal(415, InputError("this is not JSON", fix="set Content-Type to application/json"))
        body = await body_of(request, MOST_BYTES)
        return JSONResponse(await self.prober.answer(read_form(body, ProbForm, PROB_EXAMPLE)))

    async def tokens(self, request: Request) -> Response:
        """Answers with the text of every token, for clients that have no tokenizer."""
        return JSONResponse({"texts": await asyncio.to_thread(lambda: self.prober.token_texts)})


class ScoreMiddleware:
    """The same routes for versions of vLLM without endpoint plugins, named with vLLM's flag ``--middleware``.

    A middleware is called when the application starts, and the application holds the engine. The routes are added to
    the application itself, so the key is checked before them, as for every other route.
    """

    def __init__(self, app: Any) -> None:
        self.app, self.service = app, ScoreEndpoint()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            application = scope["app"]
            self.service.attach_router(application)
            try:
                state = application.state
                await self.service.init_state(state.engine_client, state, state.args)
            except Exception as error:
                logger.error("scoremode: %s", error)
                await receive()
                why = str(error) if isinstance(error, ScoremodeError) else f"{type(error).__name__}: {error}"
                await send({"type": "lifespan.startup.failed", "message": why})
                return
        await self.app(scope, receive, send)


# ── answers ───────────────────────────────────────────────────────────────────────────────────────────────
def _refusal(status: int, error: ScoremodeError) -> Response:
    body = {"error": {"message": str(error), "type": type(error).__name__.removesuffix("Error"), "code": status}}
    return JSONResponse(body, status_code=status)


def _content_type(request: Request) -> str:
    return str(request.headers.get("content-type", "")).split(";")[0].strip().lower()
