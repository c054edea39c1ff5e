#!/usr/bin/env bash
# Writes the versions of an environment to requirements/constraints.txt, for `make freeze`. SGLANG chooses it as in
# setup_env.sh. What stands in constraints-RELEASE.txt is written there instead.
#
# Kept as they stand: the lines of torch's CUDA build, which a CPU machine does not have. Left out: this distribution,
# and torchvision, which is not taken from an index. A local version label (2.13.0+cpu) is dropped, so that another
# build of the same release satisfies the pin too.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=$(bash scripts/setup_env.sh --where)
file=requirements/constraints.txt
all=$(mktemp)
new=$(mktemp)
trap 'rm -f "$all" "$new"' EXIT
grep -E '^(#|cuda-|nvidia-)' "$file" >"$new"
"$venv/bin/python" -m pip freeze --all --exclude-editable --exclude torchvision 2>/dev/null |
    grep -vE '^(cuda-|nvidia-)' |
    sed 's/^\([^ ]*==[^+ ]*\)+.*/\1/' | LC_ALL=C sort -f >"$all"
of_release=requirements/constraints-$(sed -n 's/^sglang==//p' "$all").txt
there="^($(sed -n 's/==.*//p' "$of_release" | paste -sd'|'))=="
grep -vE "$there" "$all" >>"$new"
if grep -vE '^[A-Za-z0-9._-]+==[^ ]+$' "$all" >&2; then
    echo "freeze: error: these packages of $venv have no version that can be pinned" >&2
    exit 1
fi
cat "$new" >"$file"
grep '^#' "$of_release" >"$new"
grep -E "$there" "$all" >>"$new"
cat "$new" >"$of_release"
echo "freeze: $(grep -c == "$file") versions in $file, $(grep -c == "$of_release") in $of_release"
