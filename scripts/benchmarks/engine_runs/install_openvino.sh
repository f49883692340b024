#!/usr/bin/env bash
# install_openvino.sh FOLDER: OpenVINO GenAI and its exporter in a virtual environment of their own
# (1.6 GB with a CPU build of torch, for which pip's configuration or PIP_* variables can ask).
set -euo pipefail
folder=${1:?expected the folder to make, got none}
"${PYTHON:-python3.11}" -m venv "$folder"
# Newer diffusers and huggingface-hub break the exporter's imports; torchvision, too, beside another torch.
"$folder/bin/pip" install --quiet torch==2.13.0 'openvino-genai==2026.4.*' 'optimum-intel[openvino]==2.2.*' \
  'diffusers<0.38' einops 'huggingface-hub<1.22'
"$folder/bin/pip" uninstall --quiet --yes torchvision
"$folder/bin/pip" freeze | grep -iE '^(torch|openvino.*|optimum.*|transformers|nncf)='
