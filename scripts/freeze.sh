#!/usr/bin/env bash
# Writes the versions that .venv holds to requirements/constraints.txt, for `make freeze`.
#
# Kept as they stand: the lines of torch's CUDA build, which a CPU machine does not have. Left out: this distribution,
# and torchvision, which is not taken from an index. A local version label (2.13.0+cpu) is dropped, so that another
# build of the same release satisfies the pin too.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
file=requirements/constraints.txt
new=$(mktemp)
trap 'rm -f "$new"' EXIT
grep -E '^(#|cuda-|nvidia-)' "$file" >"$new"
.venv/bin/python -m pip freeze --all --exclude-editable --exclude torchvision 2>/dev/null |
    grep -vE '^(cuda-|nvidia-)' |
    sed 's/^\([^ ]*==[^+ ]*\)+.*/\1/' | LC_ALL=C sort -f >>"$new"
if grep -v '^#' "$new" | grep -vE '^[A-Za-z0-9._-]+==[^ ]+$' >&2; then
    echo "freeze: error: these packages of .venv have no version that can be pinned" >&2
    exit 1
fi
cat "$new" >"$file"
echo "freeze: $(grep -c == "$file") versions in $file"
