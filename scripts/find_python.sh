#!/bin/sh
# Prints the command of a Python that can run ShiftJAX (3.12 or newer, with venv). Looks at $PYTHON,
# then at the PATH, then at pyenv and uv. 3.12 and 3.13 come first: JAX has wheels for them.
set -u

works() {
    "$1" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 12))' 2>/dev/null
}

if [ -n "${PYTHON:-}" ]; then
    works "$PYTHON" && echo "$PYTHON" && exit 0
    echo "PYTHON=$PYTHON is not a Python 3.12 or newer with the venv module; unset it or choose another." >&2
    exit 1
fi

for version in 3.12 3.13 3.14; do
    for python in "python$version" \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$version"*/bin/python3 \
        "$HOME"/.local/share/uv/python/cpython-"$version"*/bin/python3 \
        "/opt/homebrew/bin/python$version" "/usr/local/bin/python$version"; do
        works "$python" && echo "$python" && exit 0
    done
done
works python3 && echo python3 && exit 0

echo "No Python 3.12 or newer (with the venv module) was found. Install one, for example with" >&2
echo "'apt install python3.12-venv', 'pyenv install 3.12' or 'uv python install 3.12', or name" >&2
echo "one: make PYTHON=/path/to/python3.12" >&2
exit 1
