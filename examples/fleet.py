"""Change the weights of many servers, of all or of none, and roll back.

python -m examples.fleet --url http://one:30000 --url http://two:30000 --model-path /ckpt/step-42
"""

from __future__ import annotations

import argparse
from typing import Any

from sglang_inflight.client import Fleet, FleetRefused, FleetSplit, Report


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.fleet")
    parser.add_argument("--url", action="append", required=True, help="a server; give many")
    parser.add_argument("--model-path", required=True, help="the new checkpoint, as each sees it")
    parser.add_argument("--weight-version", default="new", help="what to call it")
    parser.add_argument("--roll-back", action="store_true", help="and return to what was")
    options = parser.parse_args()

    with Fleet(options.url) as fleet:
        try:
            show(fleet.update_from_disk(options.model_path, weight_version=options.weight_version))
            if options.roll_back:
                show(fleet.roll_back(expected_version=options.weight_version))
        except FleetRefused as refused:
            # no server has changed: correct the named fault, and call again
            print(refused)
            return 1
        except FleetSplit as split:
            # the servers in ``answers`` have changed, and the others have not: roll the former back
            print(split)
            show(fleet.roll_back(only=split.report.answers))
            return 1
    return 0


def show(report: Report[Any]) -> None:
    for url, receipt in report.answers.items():
        print(f"{url}: {receipt['base_version']} -> {receipt['weight_version']}")


if __name__ == "__main__":
    raise SystemExit(main())
