#!/usr/bin/env bash
# Makes an environment for one release of SGLang, or brings it up to date, for `make setup`.
#
# SGLANG=0.5.20 chooses the release; otherwise it is the newest supported one. That one's environment is .venv, another
# one's .venv-RELEASE. `setup_env.sh --where` says which and does nothing.
#
# - Nothing is done when its stamp matches what the environment is made from (see `fingerprint`).
# - An environment that an interrupted set-up left behind is built anew; one that was made by hand is brought up to date.
# - A directory of that name that is no virtual environment is left alone, with an error.
# - pip's output goes to setup.log in it; the end of it is shown when a step fails.
#
# PYTHON=/path/to/python chooses the interpreter (3.11 or newer).
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
newest=$(grep -v '^#' python/sglang/srt/mem_cache/hicache/releases.txt | tail -n 1)
release=${SGLANG:-$newest}
venv=.venv
if [ "$release" != "$newest" ]; then venv=.venv-$release; fi
if [ "${1:-}" = --where ]; then printf '%s\n' "$venv"; exit 0; fi
py=$venv/bin/python
stamp=$venv/.setup-stamp
in_progress=$venv/.setup-in-progress
log=$venv/setup.log
constraints=requirements/constraints.txt
of_release=requirements/constraints-$release.txt
stand_in=packaging/torchvision-stand-in
started=$SECONDS
step_pid=
first_time=

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: error: %s\n' "$*" >&2; exit 1; }

stop_step() { if [ -n "$step_pid" ]; then kill "$step_pid" 2>/dev/null || true; fi; }
trap stop_step EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

known_releases() { printf '%s\n' requirements/constraints-*.txt | sed 's/.*constraints-\(.*\)\.txt/\1/' | paste -sd' '; }
[ -f "$of_release" ] || die "SGLANG must be one of: $(known_releases), got $release (there is no $of_release)"

# Every input of the environment, its place included (an editable install and the scripts' first lines name it).
fingerprint() {
    {
        printf '%s\n' "$root"
        find pyproject.toml "$constraints" "$of_release" scripts/setup_env.sh "$stand_in" -type f \
            \( -name '*.toml' -o -name '*.txt' -o -name '*.sh' -o -name '*.py' \) -print0 |
            LC_ALL=C sort -z | xargs -0 sha256sum
    } | sha256sum | cut -d' ' -f1
}

usable_python() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3 python3.12 python3.13; do
        if usable_python "$candidate"; then printf '%s' "$candidate"; return; fi
        if [ -n "${PYTHON:-}" ]; then die "PYTHON=$PYTHON is not a Python 3.11 or newer with the venv module"; fi
    done
    die "no Python 3.11 or newer with the venv module (on Debian: apt-get install python3 python3-venv)"
}

# step "what it does" command...: runs it with its output in the log, and says every 20 s where it stands.
step() {
    local title=$1 since=$SECONDS next=20
    shift
    say "$title"
    "$@" >>"$log" 2>&1 </dev/null &
    step_pid=$!
    while kill -0 "$step_pid" 2>/dev/null; do
        sleep 0.5
        if ((SECONDS - since >= next)); then
            next=$((next + 20))
            say "  $((SECONDS - since)) s: $(grep -E '^(Collecting|Downloading|Processing|Installing|Building)' "$log" | tail -n 1 | cut -c1-72)"
        fi
    done
    local pid=$step_pid status=0
    step_pid=
    wait "$pid" || status=$?
    if ((status != 0)); then
        tail -n 15 "$log" >&2
        # pip's own refusal (status 1) leaves the environment whole, so the next call goes on from here; after a kill
        # it may be anything, and is built anew.
        if ((status == 1)); then rm -f "$in_progress"; fi
        die "failed: $title (all of it in $log)"
    fi
}

pip_install() {
    "$py" -m pip install --no-input --disable-pip-version-check --progress-bar off --constraint "$constraints" \
        --constraint "$of_release" "$@"
}

make_venv() { # make_venv PYTHON -m venv ...
    "$@" >/dev/null || die "could not make a virtual environment in $venv with $1"
}

prepare_venv() {
    if [ ! -e "$venv" ] && [ ! -L "$venv" ]; then
        local python
        python=$(find_python)
        say "new virtual environment in $venv ($("$python" --version))"
        first_time=" (about 3 GB, some minutes)"
        make_venv "$python" -m venv "$venv"
        return
    fi
    [ -d "$venv" ] || die "$venv exists and is not a directory; move it away"
    # `venv` makes these directories before it writes pyvenv.cfg: only they may stand without it.
    if [ ! -f "$venv/pyvenv.cfg" ] && [ -n "$(ls -A "$venv" | grep -vxE 'bin|include|lib|lib64' || true)" ]; then
        die "$venv is not a virtual environment; move it away"
    fi
    local why=
    if [ -e "$in_progress" ]; then
        why="an earlier set-up was interrupted"
    elif ! usable_python "$py"; then
        why="its Python does not run or is older than 3.11"
    elif ! "$py" -m pip --version >/dev/null 2>&1; then
        why="it has no working pip"
    elif ! made_here; then
        why="it was made in another place, which its commands still name"
    elif ! python_as_asked; then
        why="PYTHON asks for another version"
    fi
    if [ -n "$why" ]; then
        local python
        python=$(find_python)
        say "rebuilding $venv: $why ($("$python" --version))"
        first_time=" (about 3 GB, some minutes)"
        make_venv "$python" -m venv --clear "$venv"
    fi
}

install_torchvision_stand_in() {
    local copy
    copy=$(mktemp -d)
    cp -R "$stand_in/." "$copy"
    local status=0
    pip_install --no-deps --no-build-isolation --force-reinstall "$copy" || status=$?
    rm -rf "$copy"
    return "$status"
}

# The first lines of its commands name this very place (or the one that a link leads to).
made_here() {
    head -n 2 "$venv/bin/pip" 2>/dev/null | grep -qF -e "$root/$venv/bin/" -e "$(cd "$venv" && pwd -P)/bin/"
}

# PYTHON is unset, or the environment has the version that it asks for.
python_as_asked() { [ -z "${PYTHON:-}" ] || [ "$("$py" -V 2>&1)" = "$("$PYTHON" -V 2>&1)" ]; }

# The real one: importable, and no stand-in.
real_torchvision() {
    "$py" -c 'import sys, torchvision; sys.exit(torchvision.__version__.endswith("+standin"))' >/dev/null 2>&1
}

# One set-up at a time, where the machine can say so.
if command -v flock >/dev/null 2>&1; then
    exec 9<"$root"
    flock -n 9 || { say "waiting for another set-up of this tree"; flock 9; }
fi

wanted=$(fingerprint)
if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && [ ! -e "$in_progress" ] &&
    usable_python "$py" && python_as_asked; then
    say "$venv is up to date"
    exit 0
fi

prepare_venv
rm -f "$stamp"
touch "$in_progress"
: >"$log"
step "[1/4] pip and setuptools" pip_install pip setuptools
step "[2/4] this distribution and its pinned dependencies$first_time" \
    pip_install --no-build-isolation --editable '.[cli,cpu,dev,docs]'
step "[3/4] SGLang $release, without the dependencies that need CUDA" pip_install --no-deps sglang
if real_torchvision; then
    say "[4/4] torchvision is here and imports"
else
    step "[4/4] stand-in for torchvision, which cannot be imported here ($stand_in/README.md)" \
        install_torchvision_stand_in
fi
printf '%s\n' "$wanted" >"$stamp"
rm -f "$in_progress"
say "$venv is ready after $((SECONDS - started)) s"
