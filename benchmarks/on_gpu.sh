#!/usr/bin/env bash
# Everything that only a GPU can show, in order of value, in pieces of twelve minutes on a borrowed one.
# docs/measurements/benchmarks.md explains it.
#
#   benchmarks/on_gpu.sh                                     # again after an interruption: finished steps are not repeated
#   DEVICE=cpu ROUNDS=3 PAIRS=1 LOCKSTEP=1 MINUTES=5 benchmarks/on_gpu.sh   # the script itself, on a machine without a GPU
#   BEFORE=results.tar.gz DATA_PARTS="cifar.part-0 cifar.part-1" benchmarks/on_gpu.sh   # the next piece, on another machine
#
# Nothing comes from the network. It needs torch with CUDA, the packages of pyproject.toml, and CIFAR-10 in IMPETUS_DATA.
#   PYTHON        python3      the interpreter
#   WHEELS        (none)       a folder of wheels for packages that are missing; they go into $RESULTS/venv, above the packages of PYTHON
#   IMPETUS_DATA  ../shared/data  a torchvision folder. "random": noise for the benchmark of simulations, and no tables
#   DATA_PARTS    (none)       pieces of one tar archive of that folder, in order, where a machine takes only small files
#   DEVICE        cuda         MINUTES  12, for all steps together
#   RESULTS       build/on_gpu   STEP.log, STEP.done (seconds) or STEP.failed (exit code), and papers/
#   ARCHIVE       (none)       RESULTS as one file, written again after each step: a machine may give back few files
#   BEFORE        (none)       the ARCHIVE of the piece before, from which this one goes on
#   ROUNDS        1500         of the simulation in lockstep; others run 20 at most
#   PAIRS         15           of epochs of the local step
#   LOCKSTEP      5            measurements of each strategy of the engine batched
#   STEPS         (all)        names of the steps to make, for example "tests simulation-batched"
set -uo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3} DEVICE=${DEVICE:-cuda} MINUTES=${MINUTES:-12} RESULTS=${RESULTS:-build/on_gpu}
ROUNDS=${ROUNDS:-1500} PAIRS=${PAIRS:-15} LOCKSTEP=${LOCKSTEP:-5} STEPS=${STEPS:-}
export IMPETUS_DATA=${IMPETUS_DATA:-$PWD/../shared/data}
END=$(($(date +%s) + MINUTES * 60))
LEAST_S=20 # a step is not begun with less time left
UNFINISHED=8 # exit code of `fl compare --minutes` when runs are left
FAILED=0
mkdir -p "$RESULTS"
RESULTS=$(realpath "$RESULTS")
[ -z "${BEFORE:-}" ] || tar -xzf "$BEFORE" -C "$RESULTS" || exit
if [ -n "${DATA_PARTS:-}" ]; then
    IMPETUS_DATA=$(mktemp -d)
    trap 'rm -rf "$IMPETUS_DATA"' EXIT
    # shellcheck disable=SC2086 - a list of files
    cat $DATA_PARTS | tar -x -C "$IMPETUS_DATA" || exit
fi

# The results so far as one file, whole at any time.
keep() {
    [ -n "${ARCHIVE:-}" ] || return 0
    tar -czf "$ARCHIVE.part" -C "$RESULTS" --exclude=./venv . && mv "$ARCHIVE.part" "$ARCHIVE"
}

left() { echo $((END - $(date +%s))); }

wanted() { [ -z "$STEPS" ] || [[ " $STEPS " == *" $1 "* ]]; }

# step NAME LIMIT_S COMMAND...: runs the command if it is wanted, not done, and there is time.
step() {
    local name=$1 limit=$2 began code time
    shift 2
    wanted "$name" || return 0
    [ -e "$RESULTS/$name.done" ] && echo "$name: done before" && return 0
    time=$(left)
    [ "$time" -ge "$LEAST_S" ] || { echo "$name: no time left"; return 0; }
    [ "$time" -ge "$limit" ] || limit=$time
    echo "$name: at most $limit s"
    rm -f "$RESULTS/$name.failed"
    began=$(date +%s)
    # SIGINT first: the commands then write what they have.
    timeout --signal=INT --kill-after=15 "$limit" "$@" >"$RESULTS/$name.log" 2>&1
    code=$?
    if [ "$code" -eq 0 ]; then
        echo $(($(date +%s) - began)) >"$RESULTS/$name.done"
    elif [ "$code" -eq "$UNFINISHED" ]; then
        echo "$name: goes on the next time"
    else
        echo "$code" >"$RESULTS/$name.failed"
        FAILED=1
    fi
    tail -n 4 "$RESULTS/$name.log"
    keep
}

if [ -n "${WHEELS:-}" ]; then
    # An environment of its own: the processes that the steps start have other Python paths, and find its packages too.
    purelib='import sysconfig; print(sysconfig.get_path("purelib"))'
    given=$("$PYTHON" -c "$purelib")
    "$PYTHON" -m venv --clear --without-pip "$RESULTS/venv" || exit
    site=$("$RESULTS/venv/bin/python" -c "$purelib")
    "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$WHEELS"/*.whl || exit
    echo "import site; site.addsitedir('$given')" >"$site/given.pth"
    PYTHON=$RESULTS/venv/bin/python
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

"$PYTHON" - "$DEVICE" >"$RESULTS/environment.txt" 2>&1 <<'CHECK' || { cat "$RESULTS/environment.txt"; exit 1; }
import importlib.util, platform, sys
NEEDED = """torch numpy safetensors grpc grpc_health grpc_reflection google google_crc32c blake3 pydantic typer rich
    structlog prometheus_client sqlalchemy alembic markupsafe cryptography jwt OpenSSL
    pytest pytest_asyncio pytest_timeout hypothesis""".split()
if missing := [name for name in NEEDED if not importlib.util.find_spec(name)]:
    sys.exit(f"missing packages, for example as wheels in WHEELS: {' '.join(missing)}")
import torch
print(platform.platform(), platform.python_version(), "torch", torch.__version__, "CUDA", torch.version.cuda)
if sys.argv[1] != "cpu":
    print(torch.cuda.get_device_name(), torch.cuda.get_device_properties(0))
import fl_ops.simulate.simulation  # what cannot be imported ends the script here, before time is used
CHECK
cat "$RESULTS/environment.txt"

FEW=$((ROUNDS < 20 ? ROUNDS : 20))
local_step() { step "local-$1-$2" "$3" "$PYTHON" -m benchmarks.local_step --device "$DEVICE" --model "$1" --precision "$2" --pairs "$PAIRS"; }

step recorded 90 "$PYTHON" -m pytest -q -m "" -k cuda tests/algorithms/batched
rounds() { step "rounds-$1" "$2" "$PYTHON" -m benchmarks.lockstep.rounds --device "$DEVICE" --rounds "$FEW" --only "${@:3}"; }
host_time() { step "host-time-$1" 60 "$PYTHON" -m benchmarks.host_time --device "$DEVICE" --repeats 2 --rounds "$((2 * FEW))" --algorithm "$1"; }
host_time fedavg
host_time scaffold
rounds small 90 "two-layer CNN" "797,962 parameters"
rounds resnet18-gn 150 ResNet-18-GN
step passes 120 "$PYTHON" -m benchmarks.lockstep.passes
step tests 90 "$PYTHON" -m pytest -q -m "" -k "cuda or gpu" tests/algorithms tests/fl_tasks tests/fl_client/gates \
    tests/fl_client/settings tests/fl_client/training tests/fl_client/monitoring tests/fl_ops/simulate tests/fl_ops/compare \
    tests/fl_server/aggregation \
    tests/integration/runs/test_cuda.py
simulation=("$PYTHON" -m benchmarks.simulation --device "$DEVICE" --repeats 1)
step simulation-batched 180 "${simulation[@]}" --only batched --rounds "$ROUNDS"
step lockstep 90 "$PYTHON" -m benchmarks.lockstep.strategies --device "$DEVICE" --rounds "$LOCKSTEP"

# paper NAME SECONDS OPTION...: a table's runs, which go on where the piece before stopped.
paper() {
    local minutes
    [ "$2" -ge "$LEAST_S" ] || return 0
    minutes=$(awk "BEGIN { print ($2 - 15) / 60 }")
    step "paper-$1" "$2" "$PYTHON" -m fl_ops compare "docs/measurements/papers/$1.toml" --minutes "$minutes" \
        --out "$RESULTS/papers/$1" --data-root "$IMPETUS_DATA" --engine batched --device "$DEVICE" "${@:3}"
}

# The time that is left goes to two methods of the first table, then to what else is measured, then to all tables.
FIRST=fedcm-cifar-10-100-clients
[ "$IMPETUS_DATA" = random ] || paper "$FIRST" $(($(left) - 10)) --only FedAvg --only FedCM
local_step small-cnn float32 60
local_step resnet18-gn float32 150
local_step resnet18-gn bfloat16 120
step simulation-workers 120 "${simulation[@]}" --only workers --rounds "$FEW" # on this machine's processors
if [ "$IMPETUS_DATA" != random ]; then
    tables=(docs/measurements/papers/*.toml)
    for index in "${!tables[@]}"; do
        name=$(basename "${tables[$index]}" .toml)
        [ "$name" = "$FIRST" ] || paper "$name" $((($(left) - 10) / (${#tables[@]} - index)))
    done
fi
exit $FAILED
