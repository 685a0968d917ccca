#!/usr/bin/env bash
# What a wheel is built with, into the Python that is there: torch, and CUDA's compiler from packages alone, so that any
# image with a C++ compiler will do. /usr/local/cuda, where setup.py looks last, becomes a link to it.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
cuda=${CUDA_LINK:-/usr/local/cuda}

torch=$(sed -n 's/^TORCH_cuda = \(torch==[^ ]*\).*/\1/p' Makefile)
"$python" -m pip install -q -c constraints.txt "$torch" ninja setuptools wheel numpy safetensors
# The compiler's release is that of torch's CUDA, its parts are of one release. No dependencies: torch has the runtime.
release=$("$python" -c 'import torch; print(torch.version.cuda)')
"$python" -m pip install -q --no-deps "nvidia-cuda-nvcc==$release.*" "nvidia-nvvm==$release.*" "nvidia-cuda-crt==$release.*" \
  "nvidia-cuda-cccl==$release.*"
toolkit=$("$python" -c 'import nvidia, torch; print(f"{nvidia.__path__[0]}/cu{torch.version.cuda.split(chr(46))[0]}")')
mkdir -p "$(dirname "$cuda")"
ln -sfn "$toolkit" "$cuda"
"$cuda/bin/nvcc" --version | tail -n 1
