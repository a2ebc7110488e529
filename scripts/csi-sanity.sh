#!/bin/sh
# Builds csi-sanity, the conformance test of Kubernetes for CSI drivers, and prints its path. Its version is that of
# tests/csi/go.mod. Cached under target/tools; needs Go. Without Go it says so and fails, and the test that needs it skips.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
version=$(awk '$1 ~ /csi-test\/v5$/ { print $2; exit }' "$root/tests/csi/go.mod")
dir="${CARGO_TARGET_DIR:-$root/target}/tools/csi-sanity-$version"
bin="$dir/csi-sanity"
if [ ! -x "$bin" ]; then
    if ! command -v go >/dev/null 2>&1; then
        echo "csi-sanity is not built: there is no Go here (install Go 1.25 or later, or leave this test out)" >&2
        exit 1
    fi
    mkdir -p "$dir"
    echo "building csi-sanity $version into $dir (once, a minute)" >&2
    # One build at a time; the name appears only when it is whole.
    exec 9>"$dir/lock"
    flock 9
    if [ ! -x "$bin" ]; then
        (cd "$root/tests/csi" && go build -trimpath -o "$bin.new" github.com/kubernetes-csi/csi-test/v5/cmd/csi-sanity) >&2
        mv "$bin.new" "$bin"
    fi
fi
echo "$bin"
