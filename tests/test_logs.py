"""Logs, which people read over the operator's shoulder."""

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
    house: InProcessApi,
    settings: Settings,
    form: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    def explode(*_: object) -> None:
        raise RuntimeError("something broke")

    house.dataset("donations")
    monkeypatch.setattr(house.services.store, "get", explode)
    logs.configure(settings.model_copy(update={"log_format": form}))

    status = house.admin.get("/v1/datasets/donations").status_code
    written = capsys.readouterr().err

    assert status == 500
    assert "RuntimeError" in written
    assert "something broke" in written
    assert str(house.admin.key) not in written
