#!/usr/bin/env bash
# mypy cannot see setuptools' package-dir mapping: give it the package as a folder of links.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p .typecheck/draftheads
for folder in heads infer train recipes scripts; do
    ln -sfn "../../$folder" ".typecheck/draftheads/$folder"
done
cd .typecheck
MYPYPATH=. exec mypy --config-file ../pyproject.toml "$@" -p draftheads
