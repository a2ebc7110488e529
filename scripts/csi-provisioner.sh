#!/bin/sh
# Builds csi-provisioner, which makes the volumes of claims in a cluster, and prints its path. Its version is that of
# tests/provisioner/go.mod. Cached under target/tools; needs Go. Without Go it says so and fails, and the test that needs it
# skips.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
version=$(awk '$1 == "require" && $2 ~ /external-provisioner/ { print $3; exit }' "$root/tests/provisioner/go.mod")
dir="${CARGO_TARGET_DIR:-$root/target}/tools/csi-provisioner-$version"
bin="$dir/csi-provisioner"
if [ ! -x "$bin" ]; then
    if ! command -v go >/dev/null 2>&1; then
        echo "csi-provisioner is not built: there is no Go here (install golang 1.26 or later)" >&2
        exit 1
    fi
    mkdir -p "$dir"
    echo "building csi-provisioner $version into $dir (once, about five minutes of one processor)" >&2
    # One build at a time; the name appears only when it is whole. Other work of the machine goes first.
    exec 9>"$dir/lock"
    flock 9
    if [ ! -x "$bin" ]; then
        (cd "$root/tests/provisioner" && nice -n 10 go build -trimpath -ldflags="-s -w" -o "$bin.new" \
            github.com/kubernetes-csi/external-provisioner/v6/cmd/csi-provisioner) >&2
        mv "$bin.new" "$bin"
    fi
fi
echo "$bin"
