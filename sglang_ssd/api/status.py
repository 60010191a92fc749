"""``GET /ssd/status``: one JSON object that says what speculation is doing."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from fastapi import APIRouter

router = APIRouter()


@router.get("/ssd/status")
async def status() -> dict[str, Any]:
    """The scheduler's figures (SGLang's ``get_internal_state``) under our names."""
    from sglang.srt.entrypoints.http_server import get_global_state

    states = await get_global_state().tokenizer_manager.get_internal_state()
    figures: dict[str, Any] = states[0].get("ssd") or {"mode": "off", "draft_state": "none"}
    return {"version": version("sglang-ssd"), "sglang": version("sglang"), **figures}


def install_routes() -> None:
    """Add our routes to SGLang's application; call it once, before the server starts."""
    from sglang.srt.entrypoints.http_server import app

    app.include_router(router)
