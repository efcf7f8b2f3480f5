"""The compose file as compose reads it, with merged keys and substituted variables."""

import re
from typing import Any

import yaml

from tests.ship.dockerfile import ROOT

FILE = ROOT / "docker-compose.yml"
VARIABLE = re.compile(r"\$\{(\w+):\?[^}]+\}")


def compose(**variables: str) -> dict[str, Any]:
    """Return the document with these variables substituted, and all others unchanged."""
    text = VARIABLE.sub(lambda found: variables.get(found[1], found[0]), FILE.read_text())
    return yaml.safe_load(text)


def strings() -> dict[str, Any]:
    return {"type": "object", "additionalProperties": {"type": "string"}}


def array() -> dict[str, Any]:
    return {"type": "array", "items": {"type": "string"}, "minItems": 1}


DURATION = {"type": "string", "pattern": "^[0-9]+(s|m)$"}

HEALTH = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "disable": {"type": "boolean"},
        "test": {"type": "array", "items": {"type": "string"}, "contains": {"enum": ["CMD", "CMD-SHELL"]}},
        "interval": DURATION,
        "timeout": DURATION,
        "retries": {"type": "integer", "minimum": 1},
    },
    "oneOf": [{"required": ["disable"]}, {"required": ["test"]}],
}

SERVICE = {
    "type": "object",
    "additionalProperties": False,
    "required": ["image", "restart"],
    "properties": {
        "image": {"type": "string"},
        "build": {"type": "string"},
        "command": array(),
        "entrypoint": array(),
        "environment": strings(),
        "ports": {"type": "array", "items": {"type": "string", "pattern": r"^[0-9.]+:[0-9]+:[0-9]+$"}},
        "volumes": array(),
        "tmpfs": array(),
        "cap_drop": array(),
        "security_opt": array(),
        "read_only": {"type": "boolean"},
        "restart": {"type": "string", "pattern": "^(no|always|unless-stopped|on-failure(:[0-9]+)?)$"},
        "stop_grace_period": DURATION,
        "healthcheck": HEALTH,
        "depends_on": {
            "type": "object",
            "additionalProperties": {
                "type": "object",
                "additionalProperties": False,
                "required": ["condition"],
                "properties": {
                    "condition": {"enum": ["service_started", "service_healthy", "service_completed_successfully"]}
                },
            },
        },
    },
}

SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name", "services", "volumes"],
    "patternProperties": {"^x-": {}},
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z0-9][a-z0-9_-]*$"},
        "services": {"type": "object", "additionalProperties": SERVICE},
        "volumes": {"type": "object", "additionalProperties": {"type": "null"}},
    },
}
"""The part of the compose specification that the file uses. Every other key is a mistake."""
