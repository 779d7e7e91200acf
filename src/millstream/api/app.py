"""Puts the pod together: routes, error bodies, CORS, security headers."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from sse_starlette.sse import AppStatus
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from millstream import __version__
from millstream.api.auth.authenticator import Authenticator
from millstream.api.direct import Direct
from millstream.api.errors import install_error_handlers
from millstream.api.farewell import Farewell
from millstream.api.metrics import PodMetrics
from millstream.api.pod import open_pod
from millstream.api.rate_headers import RATE_HEADERS
from millstream.api.request_counts import RequestCounts
from millstream.api.routes import (
    chat,
    completions,
    fleet,
    health,
    metrics,
    models,
    pages,
    responses,
    simple,
    sockets,
    tasks,
    usage,
)
from millstream.api.routes.openapi import describe
from millstream.api.security_headers import SecurityHeaders
from millstream.api.traced import Traced
from millstream.shared.content_filter import open_filters
from millstream.shared.log import name_process
from millstream.shared.settings import Settings
from millstream.shared.tracing import open_tracing, tracing_wanted

EXPOSED_HEADERS = ["x-task-id", "retry-after", "location", *RATE_HEADERS]


def create_app(settings: Settings) -> tuple[FastAPI, ASGIApp]:
    """The application, and the same as it is to be served: with CORS and security headers.

    They lie outside everything, so that an error raised anywhere has them too.

    Raises:
        SettingsError: keys, tokens or the content filter are set up wrongly, or anyone could reach
            a fleet without keys.
    """
    authenticator = Authenticator(settings)
    filters = open_filters(settings)
    counts = RequestCounts()
    # Streams end when the pod says so (streams.py), not the moment the server is told to stop.
    AppStatus.disable_automatic_graceful_drain()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        async with (
            open_pod(settings, authenticator, filters) as pod,
            open_tracing("api", pod.id) as tracing,
        ):
            name_process(pod_id=pod.id)
            app.state.tracing = tracing
            app.state.pod = pod
            app.state.metrics = PodMetrics(pod, counts)
            yield

    app = FastAPI(
        title="Millstream",
        version=__version__,
        description="A fleet of language models whose answers are durable, numbered logs.",
        lifespan=lifespan,
        redirect_slashes=False,  # its Location would repeat whatever Host a client sends
    )
    routers = [
        module.router
        for module in (
            chat,
            completions,
            responses,
            models,
            tasks,
            simple,
            sockets,
            usage,
            health,
            metrics,
            fleet,
            pages,
        )
    ]
    install_error_handlers(app, counts, routers)
    for router in routers:
        app.include_router(router)
    app.mount("/static", pages.static_files())
    describe(app)
    allowed = authenticator.pages
    direct = Direct(app, routers)
    served = Farewell(Traced(direct, app.state) if tracing_wanted() else direct, counts)
    if not (allowed.all or allowed.private or allowed.listed):
        return app, SecurityHeaders(served)
    # Who may read an answer. Whether a page of a fleet without keys may ask is decided before.
    everyone = allowed.all or allowed.private
    cors = CORSMiddleware(
        served,
        allow_origins=["*"] if everyone else sorted(allowed.listed),
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=EXPOSED_HEADERS,
    )
    return app, SecurityHeaders(cors)
