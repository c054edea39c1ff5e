#!/usr/bin/env bash
# Builds wheel and sdist in dist/, for `make dist`, and tries the wheel beside every supported release of SGLang.
#
# Each try has a fresh environment: SGLang from the index and the wheel are installed there without dependencies, which
# it reads from the environment that `make setup` made for that release. RELEASES="0.5.23" tries those only.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
releases=${RELEASES:-$(grep -v '^#' python/sglang/srt/mem_cache/hicache/releases.txt)}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

say() { printf 'dist: %s\n' "$*"; }
quiet() { "$@" >"$work/log" 2>&1 </dev/null || { tail -n 15 "$work/log" >&2; echo "dist: error: failed: $*" >&2; exit 1; }; }

# From the files that git knows, so that nothing stray is packed.
build() {
    local py
    py=$PWD/$(SGLANG='' bash scripts/setup_env.sh --where)/bin/python
    SGLANG='' bash scripts/setup_env.sh
    mkdir "$work/source"
    git ls-files -z | xargs -0 cp --parents -t "$work/source"
    rm -rf dist
    mkdir dist
    (cd "$work/source" && quiet "$py" -c "import sys, setuptools.build_meta as build; build.build_sdist(sys.argv[1])" "$work")
    # The wheel is made from the sdist, as an index would have it.
    quiet "$py" -m pip wheel --no-deps --no-build-isolation --no-index -w dist "$work"/*.tar.gz
    mv "$work"/*.tar.gz dist/
    say "$(cd dist && ls | paste -sd' ')"
}

try() { # try RELEASE
    local release=$1 fresh=$work/$1 py
    say "SGLang $release: a fresh environment with the wheel"
    SGLANG=$release bash scripts/setup_env.sh
    py=$PWD/$(SGLANG=$release bash scripts/setup_env.sh --where)/bin/python
    quiet "$py" -m venv "$fresh"
    quiet "$fresh/bin/python" -m pip install --no-deps --disable-pip-version-check "sglang==$release" dist/*.whl
    # A folder that a .pth file names has its own .pth files ignored: the editable install there is not seen.
    "$py" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$("$fresh/bin/python" -c \
        'import sysconfig; print(sysconfig.get_path("purelib"))')/dependencies.pth"
    (
        cd "$work"
        place=$("$fresh/bin/python" -c 'import sglang.srt.mem_cache.hicache as found; print(found.__path__[0])')
        [[ $place == "$fresh"/* ]] || { echo "dist: error: $place was loaded instead of the wheel" >&2; exit 1; }
        "$fresh/bin/kvlayouts" check 2>"$work/log" || { tail -n 15 "$work/log" >&2; exit 1; }
    )
}

since=$SECONDS
build
for release in $releases; do try "$release"; done
say "the wheel fits $(echo $releases) after $((SECONDS - since)) s"
