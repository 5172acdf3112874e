"""Which versions of a client and a server belong together."""

from __future__ import annotations

import pytest

from sglang_inflight.vocabulary.version import why_not_together


@pytest.mark.parametrize("server", ["0.2.0", "0.2.7", "0.2.1rc1"])
def test_versions_of_one_minor_belong_together(server: str) -> None:
    assert why_not_together("0.2.0", server) is None


@pytest.mark.parametrize("server", ["0.1.0", "0.3.0", "1.2.0", "0.20.0"])
def test_other_versions_name_the_client_to_install(server: str) -> None:
    why = why_not_together("0.2.0", server)
    minor = ".".join(server.split(".")[:2])
    assert why is not None
    assert f"and the server is sglang-inflight {server}" in why
    assert why.endswith(f"install sglang-inflight-client=={minor}.*")
