#!/usr/bin/env bash
# The test suite on the newest Debian and its Python, in a bare system of its own (a chroot); needs root.
# The system and the packages are fetched once and kept in $PLAIT_NEWEST; remove that folder to start afresh.
# Other arguments than none go to pytest in place of the whole suite.
set -euo pipefail

here="$(cd "$(dirname "$0")/../.." && pwd)"
root="${PLAIT_NEWEST:-$HOME/.cache/plait-newest-debian}"
release="${DEBIAN_RELEASE:-stable}"
mirror="${DEBIAN_MIRROR:-http://deb.debian.org/debian}"

main() {
    [ "$(id -u)" = 0 ] || fail "a chroot needs root: sudo make test-newest"
    command -v debootstrap >/dev/null || fail "debootstrap is missing: apt-get install debootstrap"
    [ -e "$root/.made" ] || make_system
    trap release_mounts EXIT
    mount_system
    copy_sources
    install_packages
    run_tests "$@"
}

fail() { echo "test-newest: $1" >&2; exit 2; }

make_system() {
    mkdir -p "$root"
    debootstrap --variant=minbase \
        --include=python3,python3-venv,python3-dev,gcc,g++,make,git,iproute2,ca-certificates,procps,libnuma1 \
        "$release" "$root" "$mirror"
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
    for place in $(awk '{print $2}' /proc/mounts | grep "^$root/" | sort -r); do umount -l "$place" 2>/dev/null || true; done
}

copy_sources() {
    rm -rf "$root/plait"
    mkdir -p "$root/plait"
    (cd "$here" && git ls-files -z --cached --others --exclude-standard | tar --null --files-from=- --create) |
        tar --extract --directory "$root/plait"
}

# The environment lies beside the sources, so that it outlives them.
install_packages() {
    inside 'python3 -m venv /venv-plait && ln -sfn /venv-plait /plait/.venv'
    inside 'cd /plait && python3 --version && .venv/bin/python -m pip install --quiet --cache-dir /pip-cache --editable ".[dev]"'
}

run_tests() {
    if [ "$#" -gt 0 ]; then inside "cd /plait && .venv/bin/python -m pytest $*"; return; fi
    inside 'cd /plait && touch .venv/.python .venv/.plait .venv/.dev && make --no-print-directory test'
}

inside() { env -i HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin TMPDIR=/tmp LANG=C.UTF-8 \
    ${PIP_CERT:+PIP_CERT="$PIP_CERT"} ${PIP_FIND_LINKS:+PIP_FIND_LINKS="$PIP_FIND_LINKS"} \
    chroot "$root" /bin/bash -euc "$1"; }

main "$@"
