"""The pages: `/`, a chat, and `/fleet`, how the fleet does. Plain files, without a build."""

import os
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import FileResponse
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

router = APIRouter(include_in_schema=False)

STATIC = Path(__file__).parent.parent / "static"
# W3C Content Security Policy 3. Scripts and styles are files of ours; nothing inline runs, and what
# a model writes can neither load a picture nor send a form.
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cache-Control": "no-cache",
}


@router.head("/")
@router.get("/", response_class=FileResponse)
async def chat_page() -> FileResponse:
    """The chat."""
    return FileResponse(STATIC / "chat" / "chat.html", headers=_PAGE_HEADERS)


@router.head("/fleet")
@router.get("/fleet", response_class=FileResponse)
async def fleet_page() -> FileResponse:
    """The dashboard."""
    return FileResponse(STATIC / "fleet" / "fleet.html", headers=_PAGE_HEADERS)


class _Revalidated(StaticFiles):
    """Files a browser asks for again each time, by ETag: pages and scripts stay of one version."""

    def file_response(
        self,
        full_path: str | os.PathLike[str],
        stat_result: os.stat_result,
        scope: Scope,
        status_code: int = 200,
    ) -> Response:
        response = super().file_response(full_path, stat_result, scope, status_code)
        response.headers["Cache-Control"] = "no-cache"
        return response


def static_files() -> StaticFiles:
    """Scripts and styles of the pages."""
    return _Revalidated(directory=STATIC)
