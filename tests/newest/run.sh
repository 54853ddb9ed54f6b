#!/usr/bin/env bash
# plait on a bare Debian of another release, in a system of its own (a chroot); needs root and debootstrap.
#   run.sh train RELEASE           `make train` as root and as an ordinary user, in a folder with a space, no terminal
#   run.sh suite RELEASE [...]     the test suite with that release's Python; the arguments go to pytest
# The systems and pip's caches are kept in $PLAIT_DEBIANS; remove that folder to start afresh.
set -euo pipefail

kind="${1:-}" release="${2:-stable}"
here="$(cd "$(dirname "$0")/../.." && pwd)"
root="${PLAIT_DEBIANS:-$HOME/.cache/plait-debians}/$release-$kind"
mirror="${DEBIAN_MIRROR:-http://deb.debian.org/debian}"
user=learner

main() {
    case "$kind" in train | suite) ;; *) fail "run.sh train RELEASE, or run.sh suite RELEASE" ;; esac
    [ "$(id -u)" = 0 ] || fail "a chroot needs root: sudo make test-newest"
    command -v debootstrap >/dev/null || fail "debootstrap is missing: apt-get install debootstrap"
    trap release_mounts EXIT
    "$kind" "${@:3}"
}

fail() { echo "test-newest: $1" >&2; exit 2; }

train() {
    [ -e "$root/.made" ] || make_system python3,make,ca-certificates
    mount_system
    inside root "id -u $user >/dev/null 2>&1 || useradd --create-home $user"
    first_minutes "$user" "/home/$user"
    first_minutes root /root
}

# Output goes through a pipe, input is empty and there is no controlling terminal: as in a job or a cron line.
first_minutes() {
    local as="$1" folder="$2/mein Ordner ü/plait"
    rm -rf "$root$folder"
    copy_sources "$folder" "$as"
    if ! inside root 'python3 -c "import ensurepip"' 2>/dev/null; then
        said="$(inside "$as" "cd '$folder' && make train" 2>&1 || true)"
        [[ "$said" == *"apt install python3."*"-venv"* ]] || fail "no sentence about python3-venv: $said"
        inside root 'apt-get update -qq && apt-get install -qq --no-install-recommends python3-venv >/dev/null'
    fi
    echo "== make train as $as on $release =="
    inside "$as" "cd '$folder' && time make train SETTINGS='${SETTINGS:-}'" 2>&1 | tee "$root/said"
    grep -q '^KING HENRY\.' "$root/said" || fail "no sample was written"
    echo "== the same command again =="
    inside "$as" "cd '$folder' && time make train SETTINGS='${SETTINGS:-}'" 2>&1 | cat
}

suite() {
    local packages=python3,python3-venv,python3-dev,gcc,g++,make,git,iproute2,ca-certificates,procps,libnuma1
    [ -e "$root/.made" ] || make_system "$packages"
    mount_system
    copy_sources /plait root
    if [ "$#" -eq 0 ]; then inside root 'cd /plait && make --no-print-directory test'; return; fi
    inside root "cd /plait && make --no-print-directory env-dev && .venv/bin/python -m pytest $*"
}

make_system() {
    mkdir -p "$root"
    debootstrap --variant=minbase --include="$1" "$release" "$root" "$mirror"
    touch "$root/.made"
}

mount_system() {
    for part in proc sys dev; do
        mountpoint -q "$root/$part" || mount --rbind --make-rslave "/$part" "$root/$part"
    done
    cp /etc/resolv.conf /etc/hosts "$root/etc/"
    bind_package_indexes
}

# pip of this machine may have indexes and certificates of its own: the same ones serve inside.
bind_package_indexes() {
    local place
    for place in /etc/ssl/certs /etc/pip.conf $(pip_folders); do
        [ -e "$place" ] || continue
        if [ -d "$place" ]; then mkdir -p "$root$place"; else touch "$root$place"; fi
        mountpoint -q "$root$place" || mount --bind "$place" "$root$place"
    done
}

pip_folders() {
    { python3 -m pip config list 2>/dev/null || true; } | tr "' " '\n\n' | sed -n 's#^file://##p; /^\//p' |
        sed -E 's#^(/[^/]+/[^/]+).*#\1#' | sort -u | while read -r folder; do [ -d "$folder" ] && echo "$folder"; done
}

release_mounts() {
    local place
    # The last one first: one may lie above another.
    for place in $(tac /proc/mounts | awk '{print $2}' | grep "^$root/"); do umount -l "$place" 2>/dev/null || true; done
}

# An environment that an earlier run made in the folder stays, runs do not.
copy_sources() {
    find "$root$1" -mindepth 1 -maxdepth 1 ! -name .venv -exec rm -rf {} + 2>/dev/null || true
    mkdir -p "$root$1"
    (cd "$here" && git ls-files -z --cached --others --exclude-standard | tar --null --files-from=- --create) |
        tar --extract --directory "$root$1"
    inside root "chown -R $2: '$1'"
}

inside() {
    local home=/root
    [ "$1" = root ] || home="/home/$1"
    setsid --wait env -i HOME="$home" PATH=/usr/sbin:/usr/bin:/sbin:/bin TMPDIR=/tmp LANG=C.UTF-8 \
        ${PIP_CERT:+PIP_CERT="$PIP_CERT"} ${PIP_FIND_LINKS:+PIP_FIND_LINKS="$PIP_FIND_LINKS"} \
        chroot --userspec="$1:$1" "$root" /bin/bash -euc "$2" </dev/null
}

main "$@"
