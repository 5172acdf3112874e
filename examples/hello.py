"""Change a server's weights while it answers, and print each token's version.

python -m examples.hello --url http://localhost:30000 --model-path /ckpt/step-42
"""

from __future__ import annotations

import argparse
import json

import httpx

from sglang_inflight.client import Client, version_per_token

SAMPLING = {"temperature": 0, "max_new_tokens": 4000, "ignore_eos": True}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.hello")
    parser.add_argument("--url", default="http://localhost:30000", help="the server")
    parser.add_argument("--model-path", required=True, help="the new checkpoint, as it sees it")
    parser.add_argument("--weight-version", default="new", help="what to call it")
    options = parser.parse_args()

    request = {"text": "Once upon a time", "sampling_params": SAMPLING, "stream": True}
    generate = httpx.stream("POST", f"{options.url}/generate", json=request, timeout=600)
    with Client(options.url) as client, generate as stream:
        events = (line for line in stream.iter_lines() if line.startswith("data: {"))
        chunks = (json.loads(event.removeprefix("data: ")) for event in events)
        next(chunks)  # the first token is there

        receipt = client.update_from_disk(options.model_path, weight_version=options.weight_version)
        print(f"{receipt['base_version']} -> {receipt['weight_version']}")
        for chunk in chunks:
            versions = version_per_token(chunk["meta_info"])
            if versions.count(options.weight_version) >= 10:
                break
    for token, version in zip(chunk["output_ids"], versions, strict=False):
        print(f"token {token} by {version}")


if __name__ == "__main__":
    main()
