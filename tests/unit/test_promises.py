"""A promised name stays, or goes by the one way in which names go."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
from packaging.version import Version

from harness.starting import ROOT
from sglang_inflight import client
from sglang_inflight.frontend import as_sglang
from sglang_inflight.settings import PREFIX, Settings
from sglang_inflight.vocabulary import deprecations
from sglang_inflight.vocabulary.bodies import DiskBody, RollbackBody
from sglang_inflight.vocabulary.deprecations import DEPRECATED, Deprecated, Kind
from sglang_inflight.vocabulary.errors import BadSetting, Refused
from tests.support import promised

CHANGELOG = (ROOT / "CHANGELOG.md").read_text()


def test_promised_names_are_the_recorded_ones() -> None:
    now, recorded = promised.promised(), promised.recorded()
    over = promised.may_go()
    gone = [line for line in sorted(recorded - now) if not promised.has_gone(line, over)]
    assert gone == [], "these are promised: docs/promises.md says how to deprecate a name"
    assert sorted(now - recorded) == [], f"run python -m {promised.__name__} to promise these"
    assert sorted(recorded - now) == [], f"run python -m {promised.__name__} to drop these"


@pytest.mark.parametrize("each", DEPRECATED, ids=lambda each: each.name)
def test_deprecated_name_has_outlived_its_time(each: Deprecated) -> None:
    assert Version(each.since) < Version(each.removed_in)
    assert Version(each.removed_in) > promised.VERSION, f"remove {each.name}, and its entry"
    assert f"`{each.name}`" in CHANGELOG


def test_changelog_begins_with_this_version() -> None:
    heads = [line.split()[1] for line in CHANGELOG.splitlines() if line.startswith("## ")]
    assert heads[0] == f"[{promised.VERSION}]"
    assert heads == sorted(heads, reverse=True)


def entry(kind: Kind, name: str, replacement: str, monkeypatch: pytest.MonkeyPatch) -> Deprecated:
    each = Deprecated(
        kind=kind, name=name, replacement=replacement, since="0.2.0", removed_in="0.4.0"
    )
    monkeypatch.setattr(deprecations, "DEPRECATED", (each,))
    deprecations._tell_once.cache_clear()
    return each


@pytest.mark.parametrize(
    ("shape", "body", "read"),
    [
        (DiskBody, b'{"model_path": "m", "label": "v1"}', "v1"),
        (RollbackBody, b'{"label": "v1"}', "v1"),
    ],
)
def test_deprecated_field_is_taken_for_its_replacement_and_told_once(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    shape: Any,
    body: bytes,
    read: str,
) -> None:
    each = entry("field", "label", "weight_version", monkeypatch)
    with caplog.at_level(logging.WARNING):
        assert [as_sglang.decode(body, shape).weight_version for _ in range(2)] == [read] * 2
    assert [record.message for record in caplog.records] == [each.sentence]


def test_deprecated_field_beside_its_replacement_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entry("field", "label", "weight_version", monkeypatch)
    body = b'{"model_path": "m", "label": "v1", "weight_version": "v2"}'
    with pytest.raises(Refused, match="label and its replacement weight_version"):
        as_sglang.decode(body, DiskBody)


def test_deprecated_setting_is_taken_for_its_replacement(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    each = entry("setting", f"{PREFIX}KEEP", f"{PREFIX}STAGING", monkeypatch)
    with caplog.at_level(logging.WARNING):
        assert Settings.from_environment({f"{PREFIX}KEEP": "off"}).staging == "off"
    assert [record.message for record in caplog.records] == [each.sentence]
    with pytest.raises(BadSetting, match="and its replacement"):
        Settings.from_environment({f"{PREFIX}KEEP": "off", f"{PREFIX}STAGING": "off"})


def test_deprecated_name_of_the_client_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    each = entry("client", "Herd", "Fleet", monkeypatch)
    ours: Any = client
    with pytest.warns(DeprecationWarning, match=f"^{re.escape(each.sentence)}$"):
        assert ours.Herd is client.Fleet
    with pytest.raises(AttributeError, match="no attribute 'Heard'"):
        _ = ours.Heard


def test_promised_name_may_go_only_after_its_deprecation(monkeypatch: pytest.MonkeyPatch) -> None:
    each = entry("field", "label", "weight_version", monkeypatch)
    monkeypatch.setattr(promised, "DEPRECATED", (each,))
    line = "field /update_weights_from_disk label"
    for version, goes in (("0.3.9", False), ("0.4.0", True)):
        monkeypatch.setattr(promised, "VERSION", Version(version))
        assert promised.has_gone(line, promised.may_go()) is goes
        assert not promised.has_gone("field /update_weights_from_disk other", promised.may_go())
