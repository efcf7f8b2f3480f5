"""Secrets in logs, which other people than the operator may read."""

import logging
from collections.abc import Iterator

import pytest
import structlog
from tarn import logs
from tarn.settings import Settings

from tests.in_process_api import InProcessApi


@pytest.fixture
def _restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield
    root.handlers = handlers
    root.setLevel(level)
    structlog.reset_defaults()


@pytest.mark.usefixtures("_restored")
@pytest.mark.parametrize("form", ["console", "json"])
def test_unexpected_error_is_logged_without_the_callers_key(
    api: InProcessApi,
    settings: Settings,
    form: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    def fail(*_: object) -> None:
        raise RuntimeError("something broke")

    api.dataset("donations")
    monkeypatch.setattr(api.services.store, "get", fail)
    logs.configure(settings.model_copy(update={"log_format": form}))

    status = api.admin.get("/v1/datasets/donations").status_code
    written = capsys.readouterr().err

    assert status == 500
    assert "RuntimeError" in written
    assert "something broke" in written
    assert str(api.admin.key) not in written
