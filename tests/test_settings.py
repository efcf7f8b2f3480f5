"""Settings: loaded once, rejected with one sentence, documented by their descriptions."""

from pathlib import Path

import pytest
from tarn.errors import StartRefused
from tarn.settings import PREFIX, RENAMED, Settings, deprecation_warnings, load_settings, settings_table


def test_defaults_run_on_one_machine_without_configuration():
    settings = load_settings()

    assert (settings.lake_uri, settings.database_url, settings.port) == ("data/lake", "sqlite:///data/tarn.db", 8000)
    assert (settings.commit_backoff_base, settings.commit_backoff_cap) == (0.01, 2.0)


def test_settings_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TARN_PORT", "9000")
    monkeypatch.setenv("TARN_CORS_ORIGINS", "https://a.example, https://b.example")
    monkeypatch.setenv("TARN_STORAGE_OPTIONS", '{"aws_endpoint": "http://127.0.0.1:7070"}')
    monkeypatch.setenv("TARN_DATABASE_URL", "postgresql://tarn:secret@db/tarn")

    settings = load_settings()

    assert settings.port == 9000
    assert settings.cors_origins == ("https://a.example", "https://b.example")
    assert settings.storage_options["aws_endpoint"].get_secret_value() == "http://127.0.0.1:7070"
    assert settings.database_url == "postgresql+psycopg://tarn:secret@db/tarn"


@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [
        ("TARN_PORT", "many", "TARN_PORT: .*integer"),
        ("TARN_PORT", "70000", "TARN_PORT: .*65535"),
        ("TARN_LAKE_URI", "ftp://host/lake", "TARN_LAKE_URI: must be a local path or start with s3://"),
        ("TARN_DATABASE_URL", "mysql://host/db", "TARN_DATABASE_URL: must look like sqlite:///path"),
        ("TARN_DATABASE_URL", "nonsense", "TARN_DATABASE_URL: must look like sqlite:///path"),
        ("TARN_DATABASE_URL", "sqlite://", "TARN_DATABASE_URL: must look like sqlite:///path"),
        ("TARN_DATABASE_URL", "sqlite://host/x.db", "TARN_DATABASE_URL: must look like sqlite:///path"),
        ("TARN_DATABASE_URL", "sqlite:///x.db?foo=bar", "TARN_DATABASE_URL: .*SQLite takes no options"),
        ("TARN_DATABASE_URL", "postgresql://db/tarn?foo=bar", 'TARN_DATABASE_URL: invalid connection option "foo"'),
        ("TARN_DATABASE_URL", "postgresql://db:x/tarn", "TARN_DATABASE_URL: must look like sqlite:///path"),
        ("TARN_STORAGE_OPTIONS", "{bad", "TARN_STORAGE_OPTIONS: must be a JSON object"),
        ("TARN_STORAGE_OPTIONS", "[]", "TARN_STORAGE_OPTIONS: .*dictionary"),
        ("TARN_ADMIN_KEY", "short", "TARN_ADMIN_KEY: .*16"),
        ("TARN_ADMIN_KEY", "fifteen-letters\n", "TARN_ADMIN_KEY: .*16"),
        ("TARN_ADMIN_KEY", "a key with spaces in it", "TARN_ADMIN_KEY: .*ASCII without spaces"),
        ("TARN_ADMIN_KEY", "a-key\nof-two-lines-or-so", "TARN_ADMIN_KEY: .*ASCII without spaces"),
        ("TARN_ADMIN_KEY", "schlüssel-des-verwalters", "TARN_ADMIN_KEY: .*ASCII without spaces"),
        ("TARN_ADMIN_KEY", "tarn_something_of_my_own", "TARN_ADMIN_KEY: .*tarn_"),
        ("TARN_ADMIN_KEY", "one-part.and-another.and-a-third", "TARN_ADMIN_KEY: .*two dots"),
        ("TARN_RATE_LIMIT", "1e-310", "TARN_RATE_LIMIT: must be 0 or at least 0.001"),
        ("TARN_RATE_LIMIT", "inf", "TARN_RATE_LIMIT: .*finite"),
        ("TARN_LAKE_URL", "data", "TARN_LAKE_URL is not a setting of Tarn; did you mean TARN_LAKE_URI"),
        ("TARN_OIDC_ISSUER", "https://id.example", "needs TARN_OIDC_AUDIENCE"),
        ("TARN_SPARK_MASTER", "spark://host:7077", "SQLite, a file that executors on other machines cannot read"),
        ("TARN_SPARK_MEMORY", "lots", "TARN_SPARK_MEMORY"),
        ("TARN_LOG_LEVEL", "loud", "TARN_LOG_LEVEL"),
        ("TARN_UMASK", "", "TARN_UMASK: must be three octal digits, such as 077 or 027"),
        ("TARN_UMASK", "7", "TARN_UMASK: must be three octal digits"),
        ("TARN_UMASK", "0o77", "TARN_UMASK: must be three octal digits"),
        ("TARN_UMASK", "089", "TARN_UMASK: must be three octal digits"),
        ("TARN_UMASK", "-77", "TARN_UMASK: must be three octal digits"),
        ("TARN_UMASK", "777", "TARN_UMASK: must leave the owner every permission"),
        ("TARN_UMASK", "0277", "TARN_UMASK: must leave the owner every permission"),
        ("TARN_FETCH_ROOTS", "/srv/drop,drop", "TARN_FETCH_ROOTS: each folder must be an absolute path"),
        ("TARN_FETCH_ROOTS", "/srv/../etc", "TARN_FETCH_ROOTS: each folder must be an absolute path"),
        ("TARN_FETCH_STORES", "s3://drop", "TARN_FETCH_STORES: must be a JSON object"),
        ("TARN_FETCH_STORES", '{"http://drop": {}}', "TARN_FETCH_STORES: each store must look like s3://bucket"),
        ("TARN_FETCH_TIMEOUT", "0", "TARN_FETCH_TIMEOUT"),
        ("TARN_FETCH_PATIENCE", "0", "TARN_FETCH_PATIENCE: .*greater than 0"),
        (
            "TARN_STREAM_TIMEOUTS",
            "5",
            "TARN_STREAM_TIMEOUTS is not a setting of Tarn; did you mean TARN_STREAM_TIMEOUT",
        ),
        ("TARN_STREAM_PATIENC", "5", "TARN_STREAM_PATIENC is not a setting of Tarn"),
    ],
)
def test_invalid_setting_is_rejected_in_one_sentence_with_its_name(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, sentence: str
):
    monkeypatch.setenv(variable, value)

    with pytest.raises(StartRefused, match=sentence) as refused:
        load_settings()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("former", "name"), RENAMED.items())
def test_deprecated_variable_sets_the_renamed_setting_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, former: str, name: str
):
    deprecated, current = f"{PREFIX}{former.upper()}", f"{PREFIX}{name.upper()}"
    monkeypatch.setenv(deprecated, "7")

    assert getattr(load_settings(), name) == 7
    assert deprecation_warnings() == [f"{deprecated} is deprecated: use {current}"]


def test_deprecated_variable_is_overridden_by_an_argument(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TARN_STREAM_PATIENCE", "7")

    assert load_settings(stream_timeout=8).stream_timeout == 8


def test_current_variable_sets_a_renamed_setting_without_a_warning(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TARN_STREAM_TIMEOUT", "7")

    assert load_settings().stream_timeout == 7
    assert deprecation_warnings() == []


@pytest.mark.parametrize("current", ["TARN_STREAM_TIMEOUT", "tarn_stream_timeout"])
def test_deprecated_and_current_variable_together_are_refused(monkeypatch: pytest.MonkeyPatch, current: str):
    monkeypatch.setenv("TARN_STREAM_PATIENCE", "7")
    monkeypatch.setenv(current, "7")

    with pytest.raises(StartRefused, match=r"^TARN_STREAM_PATIENCE and TARN_STREAM_TIMEOUT are both set") as refused:
        load_settings()
    assert "\n" not in str(refused.value)


def test_driver_in_the_database_url_is_replaced(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TARN_DATABASE_URL", "sqlite+foo:///a%3Fb.db")

    assert load_settings().database_url == "sqlite:///a%3Fb.db"


def test_administrator_key_may_end_with_a_newline(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TARN_ADMIN_KEY", "0123456789abcdef\n")

    key = load_settings().admin_key

    assert key is not None
    assert key.get_secret_value() == "0123456789abcdef"


def test_secrets_are_not_in_the_representation(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TARN_ADMIN_KEY", "hunter2-hunter2-hunter2")
    monkeypatch.setenv("TARN_STORAGE_OPTIONS", '{"aws_secret_access_key": "hunter2"}')
    monkeypatch.setenv("TARN_FETCH_STORES", '{"s3://drop": {"aws_secret_access_key": "hunter2"}}')

    assert "hunter2" not in repr(load_settings())


def test_invalid_secret_is_not_part_of_the_error(monkeypatch: pytest.MonkeyPatch):
    for variable, value in (
        ("TARN_ADMIN_KEY", "hunter2"),
        ("TARN_STORAGE_OPTIONS", '{"aws_secret_access_key": hunter2'),
        ("TARN_FETCH_STORES", '{"s3://drop": {"aws_secret_access_key": hunter2'),
    ):
        with monkeypatch.context() as wrong:
            wrong.setenv(variable, value)
            with pytest.raises(StartRefused) as refused:
                load_settings()
            assert "hunter2" not in str(refused.value)


def test_settings_table_has_every_setting_and_equals_the_docs():
    table = settings_table()

    assert all(f"`TARN_{name.upper()}`" in table for name in Settings.model_fields)
    assert table in (Path(__file__).parent.parent / "docs" / "settings.md").read_text(), "run `make docs`"
