# Sourced by the set-up scripts of this folder.

fail() {
    echo "$(basename "$0"): $*" >&2
    exit 1
}

# The comment at the top of the script.
usage() {
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" >&2
    exit 2
}

default_dir() {
    echo "${XDG_CACHE_HOME:-$HOME/.cache}/octavo-peers"
}

# The first interpreter that is new enough; $PYTHON overrides.
find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import ensurepip, venv, sys; sys.exit(sys.version_info < (3, 11))' \
            2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "needs Python 3.11 or later with venv (Debian, Ubuntu: apt-get install python3 python3-venv)"
}
