"""The built-in page to try the models, a single HTML file without external resources."""

from pathlib import Path

from starlette.responses import Response

from .app import Endpoint, Service

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""The page can connect only to its own server, and no other page can embed it in a frame."""


async def show_page(service: Service, fields: None) -> Response:
    """Answers `/`."""
    del service, fields
    html = Path(__file__).with_name("page.html").read_bytes()
    return Response(html, media_type="text/html; charset=utf-8", headers=HEADERS)


PAGE = (Endpoint("GET", "/", show_page, "A page to try the models", is_open=True),)
"""The endpoint of this file."""
