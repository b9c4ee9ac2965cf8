# Sourced by the other scripts: an environment in .venv with octavo in it, made once.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
venv="$root/.venv"
constraints=scripts/constraints.txt # by scripts/lock; relative, since pip splits lists of files at blanks

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

# setup [EXTRA]: octavo, editable, with the optional dependencies EXTRA, of which those for tests
# need the kernels of all instruction sets, and others the best kernels for this processor. All
# packages have the versions of the constraints, so that what worked yesterday works today. What was
# installed is noted in a stamp, so that a second run installs nothing and needs no network; other
# constraints install anew.
setup() {
    local extra="${1:-}" isa=native stamp wanted
    make_venv
    if [[ "$extra" == *test* ]]; then
        isa=all
    elif ! makes_kernels; then
        extra="${extra:+$extra,}torch" # without kernels, nothing else runs a model
    fi
    export OCTAVO_BUILD_ISA="${OCTAVO_BUILD_ISA:-$isa}"
    stamp="$venv/octavo-installed${extra:+-$extra}"
    wanted="$("$venv/bin/python" - "$constraints" <<'PYTHON'
import hashlib, pathlib, sys
what = [pathlib.Path(f).read_text() for f in ("pyproject.toml", "setup.py", sys.argv[1])]
what += [sys.version]
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
    install_pinned -e ".${extra:+[$extra]}" >&2
    wait $! || fail "the native kernels do not compile"
    echo "$wanted" >"$stamp"
}

# install_pinned ARGS: pip install, all packages as the constraints have them: also those that build
# octavo, of which older versions of pip are told by the environment alone, newer ones by another
# variable. Whoever has set constraints has them too.
install_pinned() {
    PIP_CONSTRAINT="${PIP_CONSTRAINT:+$PIP_CONSTRAINT }$constraints" \
        PIP_BUILD_CONSTRAINT="${PIP_BUILD_CONSTRAINT:+$PIP_BUILD_CONSTRAINT }$constraints" \
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile "$@"
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
