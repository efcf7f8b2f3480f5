"""Structured logging: one event per line, with the request it belongs to."""

import logging
import sys

import orjson
import structlog
from structlog.typing import Processor

from tarn.settings import Settings

LIBRARY_LEVEL = logging.WARNING
"""Minimum log level of libraries: below it they log URLs and headers, which can contain secrets."""

LIBRARIES_WITH_LEVEL = ("alembic", "py4j", "uvicorn")
"""Libraries that set their own log level."""


def _json(event: object, **_: object) -> str:
    return orjson.dumps(event, default=str).decode()


def configure(settings: Settings) -> None:
    """Configure logging: events of Tarn and of libraries go through one renderer to standard error."""
    console = sys.stderr.isatty() if settings.log_format == "auto" else settings.log_format == "console"
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    rendering: list[Processor] = (
        # The default formatter prints the local variables of every frame, including headers and keys.
        [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
        if console
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(serializer=_json)]
    )
    # Tarn's own events (one per request) are written directly to the stream: passing them through `logging` costs more
    # than the event itself. Libraries log through `logging`, with the same renderer.
    structlog.configure(
        processors=[*shared, *rendering],
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, settings.log_level.upper())),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(max(LIBRARY_LEVEL, logging.getLevelNamesMapping()[settings.log_level.upper()]))
    for chatty in LIBRARIES_WITH_LEVEL:
        logging.getLogger(chatty).setLevel(LIBRARY_LEVEL)
