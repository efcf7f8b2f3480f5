"""Tests of the compose file that need no container engine: its structure, settings and commands."""

import os
import re
import subprocess
import sys
import tomllib

import jsonschema
import pytest
from tarn.settings import PREFIX, Settings, load_settings

from tests.s3 import ACCESS_KEY, SECRET_KEY, S3Server
from tests.ship.compose import SCHEMA, VARIABLE, compose
from tests.ship.dockerfile import ROOT, final_stage

TARN_SERVICES = ("migrate", "api", "worker")
FILLED = {"PASSWORD": "a-password-of-a-laptop", "ADMIN_KEY": "0123456789abcdef"}
SECRET_NAME = re.compile("PASSWORD|SECRET|KEY|DATABASE_URL|STORAGE_OPTIONS")


def test_compose_file_matches_the_schema():
    jsonschema.validate(compose(), SCHEMA)


@pytest.mark.parametrize(
    "wrong", [{"comand": ["api"]}, {"healthcheck": {}}, {"ports": ["8000:8000"]}, {"depends_on": ["postgres"]}]
)
def test_service_with_an_invalid_key_or_value_fails_the_schema(wrong):
    document = compose()
    document["services"]["api"] |= wrong
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, SCHEMA)


def test_every_image_has_a_version_and_tarns_is_that_of_the_package():
    images = {name: service["image"] for name, service in compose()["services"].items()}
    assert [
        image for image in images.values() if not re.fullmatch(r"[a-z/]+:v?[0-9]+(\.[0-9]+)+(-[a-z]+)?", image)
    ] == []
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert {images[name] for name in (*TARN_SERVICES, "bucket")} == {f"tarn:{version}"}


@pytest.mark.parametrize("name", TARN_SERVICES)
def test_tarn_accepts_the_settings_of_every_service(name, monkeypatch):
    given = compose(**FILLED)["services"][name]["environment"]
    assert set(given) <= {PREFIX + field.upper() for field in Settings.model_fields}
    for variable, value in given.items():
        monkeypatch.setenv(variable, value)
    settings = load_settings()
    assert settings.storage_options["aws_secret_access_key"].get_secret_value() == FILLED["PASSWORD"]
    assert FILLED["PASSWORD"] in settings.database_url


def test_secrets_are_required_variables_and_not_in_the_file():
    for service in compose()["services"].values():
        for name, value in service.get("environment", {}).items():
            # An access key's id is a name, and the root user of this S3 server has to have one.
            if SECRET_NAME.search(name) and not name.endswith(("ACCESS_KEY_ID", "ROOT_ACCESS_KEY")):
                assert VARIABLE.search(value), f"{name} has no variable in it"
    assert ".env" in (ROOT / ".gitignore").read_text().splitlines()


def test_containers_of_tarn_write_only_to_volumes_and_have_no_privileges():
    for name in (*TARN_SERVICES, "bucket"):
        service = compose()["services"][name]
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert {*service["volumes"], *service["tmpfs"]} == set(final_stage("VOLUME")[0].parts)


def test_only_the_api_is_reachable_and_only_from_this_machine():
    ports = {name: service["ports"] for name, service in compose()["services"].items() if "ports" in service}
    assert ports == {"api": ["127.0.0.1:8000:8000"]}


def test_each_service_runs_its_command_after_its_dependencies():
    services = compose()["services"]
    assert [services[name]["command"] for name in TARN_SERVICES] == [[name] for name in TARN_SERVICES]
    needs = {"migrate": "service_completed_successfully", "bucket": "service_completed_successfully"}
    for name in ("api", "worker"):
        assert {each: how["condition"] for each, how in services[name]["depends_on"].items()} == needs
    assert services["migrate"]["depends_on"]["postgres"]["condition"] == "service_healthy"
    assert "test" in services["postgres"]["healthcheck"]


def test_only_the_api_uses_the_health_check_of_the_image():
    without = [name for name in TARN_SERVICES if compose()["services"][name].get("healthcheck") == {"disable": True}]
    assert without == ["migrate", "worker"]


def test_stop_grace_period_is_longer_than_that_of_tarn():
    for name in ("api", "worker"):
        assert int(compose()["services"][name]["stop_grace_period"].removesuffix("s")) > load_settings().shutdown_grace


def test_bucket_script_creates_the_bucket_and_succeeds_if_it_exists(s3: S3Server):
    bucket = compose(**FILLED)["services"]["bucket"]
    assert bucket["entrypoint"] == ["python", "-c"]
    keys = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
    assert set(bucket["environment"]) == {"ENDPOINT", *keys}
    (script,) = bucket["command"]
    for _ in range(2):
        subprocess.run(
            [sys.executable, "-c", script.replace('"lake"', '"laptop"')],
            env=os.environ | keys | {"ENDPOINT": s3.endpoint},
            check=True,
            timeout=60,
        )
    assert "laptop" in [each["Name"] for each in s3.client().list_buckets()["Buckets"]]
