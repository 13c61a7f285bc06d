"""How vLLM finds the routes: an endpoint plugin from 0.26 on, a middleware before. Both are vLLM's own ways."""

from __future__ import annotations

import logging
from typing import Any

from scoremode.errors import ScoremodeError
from scoremode.service.routes import Service

logger = logging.getLogger("vllm.scoremode")


class ScoreEndpoint:
    """The object behind the entry point ``vllm.endpoint_plugins``."""

    name = "scoremode"
    required_tasks = ("token_classify",)

    def __init__(self) -> None:
        self.service = Service()

    def attach_router(self, app: Any) -> None:
        self.service.attach(app)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Called before the server listens: a self-test that fails ends it."""
        await self.service.start(engine_client, names_of(args))


class ScoreMiddleware:
    """The same routes for versions without endpoint plugins, named with vLLM's flag ``--middleware``.

    A middleware is called when the application starts, and the application holds the engine. The routes are added to
    the application itself, so the key is checked before them, as for every other route.
    """

    def __init__(self, app: Any) -> None:
        self.app, self.service = app, Service()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            application = scope["app"]
            self.service.attach(application)
            try:
                await self.service.start(application.state.engine_client, names_of(application.state.args))
            except Exception as error:
                logger.error("scoremode: %s", error)
                await receive()
                why = str(error) if isinstance(error, ScoremodeError) else f"{type(error).__name__}: {error}"
                await send({"type": "lifespan.startup.failed", "message": why})
                return
        await self.app(scope, receive, send)


def names_of(args: Any) -> list[str]:
    """The names that the model is served under."""
    return list(getattr(args, "served_model_name", None) or [args.model])
