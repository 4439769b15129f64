# shellcheck shell=bash
# Sourced by the other scripts: a virtual environment in .venv with this package, made once, renewed when
# pyproject.toml changes. Call `use_venv`, or `use_venv dev` for an extra. PYTHON chooses the interpreter.

use_venv() {
    local extra=${1:-} python=${PYTHON:-python3} stamp
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
        echo "$0: needs Python 3.10 or newer as '$python' (found: $("$python" --version 2>&1)); set PYTHON=/path/to/python" >&2
        return 1
    fi
    if [ ! -x .venv/bin/python ]; then
        echo "== making a virtual environment in .venv"
        if ! "$python" -m venv .venv; then
            rm -rf .venv
            echo "$0: '$python -m venv' failed; on Debian and Ubuntu: apt-get install python3-venv" >&2
            return 1
        fi
    fi
    stamp=.venv/installed-$extra-$(cksum <pyproject.toml | tr -d ' ')
    if [ ! -e "$stamp" ]; then
        echo "== installing the package and what it needs (a few minutes the first time: PyTorch is large)"
        if ! .venv/bin/python -m pip install --quiet --disable-pip-version-check --editable ".${extra:+[$extra]}"; then
            echo "$0: the installation failed, see above. It takes up to 7 GB with PyTorch's CUDA build; free here:" \
                "$(df -Ph . | awk 'NR == 2 { print $4 }')" >&2
            return 1
        fi
        touch "$stamp"
    fi
    # shellcheck disable=SC1091
    . .venv/bin/activate
}
