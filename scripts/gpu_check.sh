#!/usr/bin/env bash
# On a machine with an NVIDIA GPU: the tests that need one, then the measurements. At most six minutes.
#   scripts/gpu_check.sh [folder for the figures, default out/]
# PYTHON=/path/to/python uses an environment that already has the project, JAX with CUDA and pytest.
if [ -n "${PYTHON:-}" ]; then
    set -euo pipefail
    cd "$(dirname "$0")/.."
    say() { printf '\033[1m==>\033[0m %s\n' "$*" >&2; }
    python="$PYTHON"
else
    source "$(dirname "$0")/environment.sh"
    python=.venv/bin/python
fi

if ! command -v nvidia-smi > /dev/null || ! nvidia-smi --list-gpus 2> /dev/null | grep -q GPU; then
    say "No NVIDIA GPU is in sight (nvidia-smi lists none), so nothing was checked."
    say "Run this where there is one, of compute capability 8.0 or more (A100, RTX 30 and newer) with its driver."
    say "Without a GPU, .venv/gpu-gate/bin/python scripts/check_gpu_program.py (made by scripts/test --all)"
    say "compiles and inspects the same programs, and scripts/test interprets the kernels."
    exit 2
fi
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader >&2
[ -n "${PYTHON:-}" ] || { make_venv; need_cuda; }

out="${1:-out}"
mkdir -p "$out"
deadline=$((SECONDS + 340))
status=0
say "Running the tests that need a GPU"
XLA_PYTHON_CLIENT_PREALLOCATE=false timeout 150 "$python" -m pytest -m gpu tests/gpu || status=$?
if [ "$status" = 2 ] || [ "$status" -ge 4 ]; then
    say "The tests could not run (status $status); see above."
fi
say "Measuring"
timeout "$((deadline - SECONDS))" "$python" scripts/bench_kernels.py --seconds "$((deadline - SECONDS - 60))" --json "$out/gpu_bench.json" || status=$?
[ "$status" = 0 ] && say "All is well; the figures are in $out/gpu_bench.json." || say "Something failed: see above."
exit "$status"
