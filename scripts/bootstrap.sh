#!/usr/bin/env bash
# Sets up what is missing on this machine: Debian packages, an interpreter, .venv from the lock.
# Re-running does nothing when nothing is missing; a changed lock updates the venv.
set -euo pipefail
cd "$(dirname "$0")/.."

lock=requirements/dev.txt
venv=.venv
stamp=$venv/.pivot-lock
home=$venv/.pivot-home # programs of a venv name its place: a copy's would work on the clone that was copied
minor_wanted=12

say() { printf '[setup] %s\n' "$*"; }
die() { printf '[setup] %s\n' "$*" >&2; exit 1; }

find_interpreter() {
    local candidate
    # PATH first, then pyenv, whose versions are often not on PATH
    for candidate in python3.13 python3.12 python3.14 python3 \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-9]*/bin/python3; do
        candidate=$(command -v "$candidate" 2>/dev/null) || continue
        if "$candidate" -c "import ensurepip, sys, venv; sys.exit(sys.version_info < (3, $minor_wanted))" 2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    return 1
}

install_packages() {
    local missing=() name
    while read -r name; do
        [[ -z $name || $name == \#* ]] && continue
        dpkg-query -W -f '${Status}' "$name" 2>/dev/null | grep -q 'ok installed' || missing+=("$name")
    done <lab/debian-packages.txt
    [[ ${#missing[@]} -eq 0 ]] && return
    [[ $(id -u) -eq 0 ]] || die "Debian packages are missing and installing them needs root: ${missing[*]}"
    say "installing Debian packages: ${missing[*]}"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

install_venv() {
    local python wanted
    if [[ -x $venv/bin/python ]] && ! "$venv/bin/python" -c '' 2>/dev/null; then
        say "the interpreter of $venv is gone; making $venv anew"
        rm -rf "$venv"
    elif [[ -e $venv && ! ( -f $home && $(<"$home") == "$PWD" ) ]]; then
        say "$venv was made for another place, or not to its end; making it anew"
        rm -rf "$venv"
    fi
    wanted=$(cat "$lock" pyproject.toml lab/pyproject.toml scripts/bootstrap.sh | sha256sum)
    [[ -f $stamp && $(<"$stamp") == "$wanted" ]] && return
    if [[ ! -x $venv/bin/python ]]; then
        python=$(find_interpreter) ||
            die "no Python of at least 3.$minor_wanted found on PATH or in pyenv: install one (Debian 13, Ubuntu 24.04: apt-get install python3 python3-venv; else: pyenv install 3.13)"
        say "making $venv with $("$python" --version) ($python)"
        "$python" -m venv "$venv" || die "$python cannot make a venv: apt-get install python3-venv"
        printf '%s\n' "$PWD" >"$home"
    fi
    say "installing the locked Python packages of $lock into $venv"
    rm -f "$stamp"
    "$venv/bin/pip" install -q --disable-pip-version-check --no-deps --require-hashes -r "$lock" 2> >(grep -v '^WARNING: Location' >&2)
    "$venv/bin/pip" install -q --disable-pip-version-check --no-deps --no-index --no-build-isolation --editable . --editable lab
    printf '%s\n' "$wanted" >"$stamp"
}

[[ $(uname -s) == Linux && $(uname -m) == x86_64 ]] || die "the lab and the locks are for x86_64 Linux, this is $(uname -s) $(uname -m)"
[[ $PWD != *[[:space:]]* ]] || die "the path of this clone has a blank, at which ssh and others split: move it ($PWD)"
command -v dpkg-query >/dev/null || die "this machine has no dpkg: the lab needs Debian 12, Debian 13 or Ubuntu 24.04"
install_packages
install_venv
