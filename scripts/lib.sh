# Sourced by the other scripts: an environment in .venv with octavo in it, made once.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
venv="$root/.venv"

# What Python compiles is kept in the environment, for all processes that tests and benchmarks start:
# also where the surroundings forbid to keep it beside the sources.
unset PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX="$venv/bytecode"

fail() {
    echo "$(basename "$0"): $*" >&2
    exit 1
}

# The first interpreter that is new enough; $PYTHON overrides.
find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "needs Python 3.11 or later (Debian, Ubuntu: apt-get install python3 python3-venv)"
}

make_venv() {
    # A half-made environment, or one whose interpreter is gone, is made again.
    if "$venv/bin/python" -c "import pip" 2>/dev/null; then
        return
    fi
    local python
    python="$(find_python)"
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python cannot make virtual environments (Debian, Ubuntu: apt-get install python3-venv)"
    rm -rf "$venv"
    "$python" -m venv "$venv"
}

# The build of PyTorch from the registry runs on any machine, but is pinned where only the CPU is
# used, so that everybody's results there come from the same one.
torch_requirement() {
    if [[ -e /dev/nvidia0 ]] || command -v nvidia-smi >/dev/null; then
        echo "torch>=2.11"
    else
        echo "torch==2.13.0"
    fi
}

# setup [EXTRA]: octavo, editable, with the optional dependencies EXTRA, of which those for tests
# need PyTorch and the kernels of all instruction sets, and others the best kernels for this
# processor. What was installed is noted in a stamp, so that a second run installs nothing and needs
# no network.
setup() {
    local extra="${1:-}" torch="" isa=native stamp wanted
    make_venv
    if [[ "$extra" == *test* ]]; then
        isa=all
        torch="$(torch_requirement)"
    elif ! makes_kernels; then
        extra="${extra:+$extra,}torch" # without kernels, nothing else runs a model
        torch="$(torch_requirement)"
    fi
    export OCTAVO_BUILD_ISA="${OCTAVO_BUILD_ISA:-$isa}"
    stamp="$venv/octavo-installed${extra:+-$extra}"
    wanted="$("$venv/bin/python" - "$torch" <<'PYTHON'
import hashlib, pathlib, sys
what = [pathlib.Path(f).read_text() for f in ("pyproject.toml", "setup.py")]
what += [sys.version, sys.argv[1]]
print(hashlib.sha256("\0".join(what).encode()).hexdigest())
PYTHON
)"
    if [[ -f "$stamp" && "$(<"$stamp")" == "$wanted" ]]; then
        build_native
        return
    fi
    echo "installing octavo${extra:+ with [$extra]} into .venv (once)" >&2
    # Compiling begins while packages are fetched; pip's own build waits for it and finds all done.
    # Modules in Python are compiled when they are first imported, if ever.
    build_native &
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile \
        ${torch:+"$torch"} -e ".${extra:+[$extra]}" >&2
    wait $! || fail "the native kernels do not compile"
    echo "$wanted" >"$stamp"
}

# Whether the native kernels are compiled here.
makes_kernels() {
    [[ "${OCTAVO_NATIVE:-}" != 0 ]] && PYTHONPATH=csrc "$venv/bin/python" -B -c '
import sys, build
sys.exit(build.find_compiler() is None)'
}

# The native kernels, as their sources are now; what has not changed is not compiled again.
build_native() {
    "$venv/bin/python" csrc/build.py --quiet
}
