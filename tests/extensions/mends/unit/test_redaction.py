"""Keys and passwords in a server's arguments are redacted."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.server_args import ServerArgs, prepare_server_args

from sglang_inflight.extensions.mends.redaction import (
    REDACTED,
    redact_arguments,
    redact_command,
    redact_engine_info,
    redact_server_info,
)

STORAGE = '{"bucket": "kv", "s3": {"access_key": "AKIA1234", "secretKey": "s3cret\\\\n"}}'
FLAGS = (
    *("--api-key", "user key's", "--admin-api-key=user key's own"),
    *("--ssl-certfile", "cert", "--ssl-keyfile", "file", "--ssl-keyfile-password", "pass\\word"),
    *("--hicache-storage-backend-extra-config", STORAGE),
)
# SGLang composes the parameters at run time
ARGUMENTS: Any = ServerArgs
SECRETS = ("user key", "pass\\word", "AKIA1234", "s3cret")


@pytest.fixture
def server_args() -> Any:
    return prepare_server_args(["--model-path", "dummy", *FLAGS])


def test_secret_arguments_are_redacted(server_args: Any) -> None:
    redacted = redact_arguments(server_args.resolved_dict(), server_args)
    for name in ("api_key", "admin_api_key", "ssl_keyfile_password"):
        assert redacted[name] == REDACTED
    assert json.loads(redacted["hicache_storage_backend_extra_config"]) == {
        "bucket": "kv",
        "s3": {"access_key": REDACTED, "secretKey": REDACTED},
    }
    assert redacted["ssl_keyfile"] == "file"
    assert redacted["model_path"] == "dummy"


def test_arguments_without_secrets_are_unchanged() -> None:
    server_args = ARGUMENTS(model_path="dummy")
    resolved = server_args.resolved_dict()
    assert redact_arguments(resolved, server_args) == resolved


def test_secrets_in_launch_command_are_redacted(server_args: Any) -> None:
    info = {"launch_command": server_args.launch_command, "model_path": "dummy"}
    redacted = redact_server_info(info, server_args, {})
    assert redacted["model_path"] == "dummy"
    for secret in SECRETS:
        assert secret in info["launch_command"]
        assert secret not in redacted["launch_command"]
    assert f"--api-key {REDACTED} --admin-api-key={REDACTED} " in redacted["launch_command"]


def test_secrets_in_engine_call_are_redacted() -> None:
    key = 'it\'s "quoted"'
    server_args = ARGUMENTS(model_path="dummy", admin_api_key=key)
    info = {"launch_command": f"Engine(model_path='dummy', admin_api_key={key!r})"}
    engine: Any = SimpleNamespace(server_args=server_args)
    redacted = redact_engine_info(info, engine)["launch_command"]
    assert "quoted" not in redacted
    assert REDACTED in redacted


def test_command_with_a_short_secret_is_redacted_whole() -> None:
    server_args = ARGUMENTS(model_path="dummy", api_key="1")
    assert redact_command("serve --tp-size 1 --api-key 1", server_args) == REDACTED


def test_missing_command_stays_none() -> None:
    server_args = ARGUMENTS(model_path="dummy", api_key="user-key")
    assert redact_command(None, server_args) is None
