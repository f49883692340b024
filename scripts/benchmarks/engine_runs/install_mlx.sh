#!/usr/bin/env bash
# MLX for this CPU, or on a Mac for its GPU, with mlx-vlm's drafters (1.1 GB on Linux):
#   install_mlx.sh FOLDER; export DRAFTHEADS_MLX=FOLDER/bin/python
set -euo pipefail
folder=${1:?usage: install_mlx.sh FOLDER}
"${PYTHON:-python3.11}" -m venv "$folder"
backend=$([ "$(uname)" = Darwin ] && echo mlx || echo 'mlx[cpu]')
"$folder/bin/pip" install --quiet "$backend" 'mlx-lm==0.32.*' 'mlx-vlm==0.7.10'
"$folder/bin/pip" freeze | grep -iE '^mlx'
