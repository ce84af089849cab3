#!/bin/sh
# Generates protos/fl/v1/*_pb2*: `make protos`, or with a folder as argument to write them elsewhere.
# Runs from the repository root, because imports between .proto files are written from there (-I .).
set -eu
cd "$(dirname "$0")/.."
out=${1:-.}
"${PYTHON:-python3}" -m grpc_tools.protoc -I . \
    --python_out="$out" --pyi_out="$out" --grpc_python_out="$out" protos/fl/v1/*.proto
