"""API documentation routes: the OpenAPI document and an HTML page.

The page is self-contained: it loads no script, no font and nothing from a content delivery network.
"""

from collections import defaultdict
from html import escape
from typing import Any

from fastapi import Request
from fastapi.responses import HTMLResponse, JSONResponse

from tarn.api.http.routing import router

routes = router("", "docs")

POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"

STYLE = """
body { font: 16px/1.5 sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
summary { cursor: pointer } code { font-size: 0.95em } td { padding-right: 1rem; vertical-align: top }
details { border-bottom: 1px solid #ccc; padding: 0.3rem 0 } b { display: inline-block; min-width: 4.5rem }
"""


@routes.get("/openapi.json", include_in_schema=False)
def openapi(request: Request) -> JSONResponse:
    """Get the OpenAPI document."""
    return JSONResponse(request.app.openapi())


@routes.get("/docs", include_in_schema=False, response_class=HTMLResponse)
def docs(request: Request) -> HTMLResponse:
    """Show every operation on one HTML page."""
    return HTMLResponse(_page(request.app.openapi()), headers={"Content-Security-Policy": POLICY})


def _page(document: dict[str, Any]) -> str:
    sections: dict[str, list[str]] = defaultdict(list)
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            sections[operation["tags"][0]].append(_operation(method.upper(), path, operation))
    title, about = escape(document["info"]["title"]), escape(document["info"]["description"])
    head = f'<meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
    intro = f'<h1>{title}</h1><p>{about} For programs: <a href="/openapi.json">openapi.json</a>.</p>'
    body = "".join(f"<h2>{escape(tag)}</h2>{''.join(operations)}" for tag, operations in sections.items())
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{intro}{body}</body></html>'


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    parameters = [
        (f"{parameter['name']} ({parameter['in']})", parameter.get("description", ""))
        for parameter in operation.get("parameters", ())
    ]
    bodies = [("body", kind) for kind in operation.get("requestBody", {}).get("content", ())]
    responses = [(status, response["description"]) for status, response in operation["responses"].items()]
    return (
        f"<details><summary><b>{method}</b> <code>{escape(path)}</code></summary>"
        f"<p>{escape(operation.get('description', ''))}</p>{_table(parameters + bodies)}{_table(responses)}</details>"
    )


def _table(rows: list[tuple[str, str]]) -> str:
    cells = (f"<tr><td><code>{escape(name)}</code></td><td>{escape(text)}</td></tr>" for name, text in rows)
    return f"<table>{''.join(cells)}</table>"
