#!/usr/bin/env bash
# Makes a folder that a bare machine with a card needs, on a machine with a network:
#
#     benchmarks/gpu/pack.sh [--lean] [FOLDER]
#
# FOLDER is gpu-pack by default. It has at most 64 MiB. PYTHON is the project's environment's
# Python, by default the one of .venv. A --lean pack has no packages that an image with torch
# mostly has, such as transformers.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
exec "$python" -m benchmarks.gpu.bare.pack "$@"
