"""Puts the pod together: routes, error bodies, CORS."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from sse_starlette.sse import AppStatus
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from millstream import __version__
from millstream.api.errors import install_error_handlers
from millstream.api.pod import open_pod
from millstream.api.rate_headers import RATE_HEADERS
from millstream.api.routes import (
    chat,
    fleet,
    health,
    models,
    pages,
    responses,
    simple,
    tasks,
    usage,
)
from millstream.api.routes.openapi import describe
from millstream.shared.settings import Settings

EXPOSED_HEADERS = ["x-task-id", "retry-after", "location", *RATE_HEADERS]


def create_app(settings: Settings) -> tuple[FastAPI, ASGIApp]:
    """The application, and the same with CORS around it, which is what is to be served.

    CORS lies outside everything, so that an error raised anywhere has its headers too.
    """
    # Streams end when the pod says so (streams.py), not the moment the server is told to stop.
    AppStatus.disable_automatic_graceful_drain()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        async with open_pod(settings) as pod:
            app.state.pod = pod
            yield

    app = FastAPI(
        title="Millstream",
        version=__version__,
        description="A fleet of language models whose answers are durable, numbered logs.",
        lifespan=lifespan,
        redirect_slashes=False,  # its Location would repeat whatever Host a client sends
    )
    install_error_handlers(app)
    for module in (
        chat,
        responses,
        models,
        tasks,
        simple,
        usage,
        health,
        fleet,
        pages,
    ):
        app.include_router(module.router)
    app.mount("/static", pages.static_files())
    describe(app)
    origins = [origin.strip() for origin in settings.cors_origins.split(",") if origin.strip()]
    if origins == ["none"]:
        return app, app
    return app, CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=EXPOSED_HEADERS,
    )
