#!/bin/sh
# Unpacks the tools of the kernel's NFS server and client (Debian's packages) under target/tools and prints the folder.
# Nothing is installed: an installed server would be started. Tests copy the tools into the virtual machine. Where apt-get
# does not have the packages it says so and fails, and the tests that need them are skipped.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
packages="nfs-kernel-server nfs-common rpcbind libtirpc3 libtirpc-common libnfsidmap1 libwrap0 keyutils libevent-core-2.1-7"
dir="${CARGO_TARGET_DIR:-$root/target}/tools/nfs-$(echo "$packages" | cksum | cut -d' ' -f1)"
if [ ! -d "$dir" ]; then
    if ! command -v apt-get >/dev/null 2>&1; then
        echo "there is no apt-get here to download $packages" >&2
        exit 1
    fi
    mkdir -p "${dir%/*}"
    new=$(mktemp -d "$dir.XXXXXX")
    # shellcheck disable=SC2086
    if ! (cd "$new" && apt-get download -q $packages >log 2>&1); then
        echo "packages of NFS can't be downloaded: $(grep -a '^E:' "$new/log" | head -1)" >&2
        rm -rf "$new"
        exit 1
    fi
    mkdir "$new/tree"
    for package in "$new"/*.deb; do
        dpkg-deb --extract "$package" "$new/tree"
    done
    rm -rf "$new"/*.deb "$new/log" "$new/tree/usr/share/doc" "$new/tree/usr/share/man" "$new/tree/usr/share/locale"
    chmod 755 "$new"
    # Another run may have done the same meanwhile.
    mv -T "$new" "$dir" 2>/dev/null || rm -rf "$new"
fi
echo "$dir/tree"
