# Sourced by scripts/demo, scripts/test and .ci/run: prepare_venv makes .venv where there is none, installs the project into
# it, and leaves $ROOT, $VENV and $PY for the caller. A stamp in the environment makes the next call a matter of milliseconds.
#
# NANOVLLM_VENV   another place for the environment
# PYTHON          the interpreter to make it with (default: the first of python3, python3.14 .. python3.11 that fits)
#
# Three cases:
#   1. an ambient Python whose torch sees a GPU: the environment shares its packages, nothing is pinned;
#   2. an NVIDIA GPU without such a torch: a fresh environment, nothing pinned, torch as PyPI has it;
#   3. no GPU: the tested set of constraints.txt. PyPI's torch for Linux carries several GB of CUDA libraries even so; pip takes
#      PyTorch's CPU build where PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS name a place that has one.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
VENV="${NANOVLLM_VENV:-$ROOT/.venv}"
PY="$VENV/bin/python"
export PIP_DISABLE_PIP_VERSION_CHECK=1

say() { printf '%s\n' "nanovllm: $*" >&2; }

die() {
    say "error: $*"
    exit 1
}

new_enough() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
        if command -v "$candidate" >/dev/null && new_enough "$candidate"; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    die "no Python >= 3.11 with its venv module found (looked at: ${PYTHON:-python3, python3.14 to python3.11});" \
        "install one, or name it: PYTHON=/path/to/python $0"
}

sees_gpu() { "$1" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' >/dev/null 2>&1; }

has_gpu() { sees_gpu "$PY" || { command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; }; }

site_packages() { "$PY" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

make_venv() {
    local python shared=""
    python="$(find_python)" || exit 1
    if sees_gpu "$python"; then
        shared=--system-site-packages
    fi
    say "making ${VENV/#"$PWD"\//} with $("$python" --version)"
    "$python" -m venv $shared "$VENV" || die "$python -m venv $VENV failed"
    if [[ -n "$shared" ]]; then
        # An ambient Python that is itself a virtual environment does not hand its packages down; a .pth file does.
        "$python" -c 'import site; print(*site.getsitepackages(), sep="\n")' >"$(site_packages)/ambient.pth"
    fi
}

pip_install() { "$PY" -m pip install --quiet "$@"; }

# For a machine that has every package and reaches no registry: the project by a .pth file, without a build.
link() {
    "$PY" -c 'import numpy, safetensors, torch, tqdm, transformers, xxhash' && printf '%s\n' "$ROOT" >"$(site_packages)/nanovllm.pth"
}

install() { # $1: what to install, "path[extras]"
    if has_gpu; then
        pip_install --editable "$1" && return
        link && say "pip failed; using this folder with the packages that are installed already" && return
    else
        pip_install --constraint "$ROOT/constraints.txt" --editable "$1" && return
        if [[ -z "${CI:-}" ]]; then
            say "the versions of constraints.txt do not fit this machine; trying without them"
            pip_install --editable "$1" && return
        fi
    fi
    die "pip could not install nanovllm into $VENV"
}

prepare_venv() { # $1: extras, comma-separated, may be empty
    local extras="${1:-}" stamp wanted
    [[ -e "$VENV" ]] || make_venv
    new_enough "$PY" || die "$VENV holds no working Python >= 3.11; remove that folder and run this again"
    stamp="$VENV/nanovllm-${extras:-plain}.stamp"
    wanted="$ROOT $(cat "$ROOT/pyproject.toml" "$ROOT/constraints.txt" | cksum)"
    if [[ ! -f "$stamp" || "$(<"$stamp")" != "$wanted" ]]; then
        say "installing into ${VENV/#"$PWD"\//} (the first time takes a few minutes)"
        install "$ROOT${extras:+[$extras]}"
        printf '%s\n' "$wanted" >"$stamp"
    fi
}
