"""``GET /ssd/status``: one JSON object that says what speculation does. ``GET /ssd``: a page that draws it, live."""

from __future__ import annotations

from importlib.metadata import version
from importlib.resources import files
from typing import Any

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

router = APIRouter()


@router.get("/ssd/status")
async def status() -> dict[str, Any]:
    """The scheduler's figures (SGLang's ``get_internal_state``) under our names."""
    from sglang.srt.entrypoints.http_server import get_global_state

    states = await get_global_state().tokenizer_manager.get_internal_state()
    figures: dict[str, Any] = states[0].get("ssd") or {"mode": "off", "draft_state": "none"}
    return {"version": version("sglang-ssd"), "sglang": version("sglang"), **figures}


@router.get("/ssd", response_class=HTMLResponse, include_in_schema=False)
async def page() -> str:
    """Asks for the status every second; it needs nothing from elsewhere."""
    return files("sglang_ssd.api").joinpath("page.html").read_text(encoding="utf-8")


def install_routes() -> None:
    """Add our routes to SGLang's application; call it once, before the server starts."""
    from sglang.srt.entrypoints.http_server import app

    app.include_router(router)
