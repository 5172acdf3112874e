"""Run the tests marked ``guards_fix`` on SGLang without our plugin: each should fail there.

``python -m tests.support.upstream``. A passing test guards nothing, and makes the exit status 1.
"""

from __future__ import annotations

import os
import sys

import pytest


class _Outcomes:
    def __init__(self) -> None:
        self.passed: list[str] = []
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or (report.when == "setup" and report.failed):
            (self.passed if report.passed else self.failed).append(report.nodeid)


def main() -> int:
    os.environ["INFLIGHT_TEST_UPSTREAM"] = "1"
    outcomes = _Outcomes()
    pytest.main(["-m", "guards_fix", "--timeout", "120", "--tb=no", "-q"], plugins=[outcomes])
    print(f"\n{len(outcomes.failed)} tests fail on SGLang as it is released:")
    print("\n".join(f"  {name}" for name in outcomes.failed))
    if outcomes.passed:
        print(f"{len(outcomes.passed)} pass there, and guard nothing:")
        print("\n".join(f"  {name}" for name in outcomes.passed))
    return 1 if outcomes.passed or not outcomes.failed else 0


if __name__ == "__main__":
    sys.exit(main())
