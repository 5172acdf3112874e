#!/usr/bin/env bash
# Runs the GPU kit on a machine without a network and without SGLang, from a pack of pack.sh:
#
#     OUT=results gpu-pack/bare.sh
#
# The machine needs x86-64, Python 3.12, torch 2.11 for CUDA 13, Triton 3.6, numpy, scipy, pillow
# and torchvision. All else is in the pack. Nothing is installed: the pack is unpacked into a
# folder of its own, which goes when the run ends.
#
#   PACK     the pack; by default the folder of this file
#   OUT      the folder of the results, ./out by default; each is there as soon as it is known
#   PYTHON   the Python that has torch; python3 by default
#   LIMIT    the most seconds that everything takes; 600 by default
#   TMPDIR   where to unpack, to write models and to compile: 8 GB; /tmp by default
#   GPU_KIT_FLAGS  flags that the steps give to each server they start. A server without SGLang's
#            compiled kernels needs those that are chosen below. A given value replaces them.
#
# Arguments go to the runner: `bare.sh --only bandwidth torn` runs these two steps. The exit status
# is the runner's, or 1 where the pack does not fit the machine.
set -uo pipefail
pack=$(cd "${PACK:-$(dirname "$0")}" && pwd) || exit 1
python=${PYTHON:-python3}
limit=${LIMIT:-600}
out=${OUT:-out}
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 1
site=$(mktemp -d) || exit 1
trap 'rm -rf "$site"' EXIT

timeout 120 "$python" "$pack/unpack.py" "$pack" "$site" || exit 1
cd "$site" || exit 1
export PYTHONPATH=$site PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
export SGLANG_CACHE_DIR=$site/.cache/sglang SGLANG_INFLIGHT_CACHE=$site/.cache/models
GPU_KIT_COMMIT=$(cat "$pack/commit") && export GPU_KIT_COMMIT

# the memory saver is loaded before torch, and finds torch's CUDA runtime only here
runtime=$("$python" - <<'END'
import importlib.util, pathlib
spec = importlib.util.find_spec("torch")
site = pathlib.Path(spec.origin).parents[1] if spec else pathlib.Path("/nonexistent")
print(next((file.parent for file in site.glob("nvidia/*/lib/libcudart.so.1[0-9]")), ""))
END
)
[ -z "$runtime" ] || export LD_LIBRARY_PATH=$runtime${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}

if "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    # other choices call kernels that are not in the pack
    export SGLANG_FORCE_FUSED_OP_BACKEND=${SGLANG_FORCE_FUSED_OP_BACKEND-torch}
    flags="--attention-backend triton --sampling-backend pytorch --grammar-backend none"
    flags+=" --moe-runner-backend triton --disable-custom-all-reduce"
else
    # the reference platform has no compiled kernels to miss
    flags=
fi
export GPU_KIT_FLAGS=${GPU_KIT_FLAGS-$flags}

# steps without a server run even where this fails
timeout 120 "$python" -m benchmarks.gpu.bare.check_imports --out "$out/imports.json"
case $? in
    0) ;;
    124) echo "The check of the imports took more than two minutes; imports.json has a part of it." ;;
    *) echo "A server cannot be imported here; imports.json names what is missing." ;;
esac

# the runner counts from the end of its own start, and takes a moment to end a step
left=$((limit - SECONDS))
timeout --kill-after 10 "$left" \
    "$python" -m benchmarks.gpu.run --out "$out" --limit $((left > 40 ? left - 30 : 10)) "$@"
