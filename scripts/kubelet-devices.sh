#!/bin/sh
# Builds tests/kubelet, the device manager of the real kubelet, and prints its path. Cached under target/tools by the
# content of its sources; needs Go. Without Go it says so and fails, and the tests that need it skip.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
source=$root/tests/kubelet
if ! command -v go >/dev/null 2>&1; then
    echo "the device manager of kubelet is not built: there is no Go here (install golang 1.21 or later)" >&2
    exit 1
fi
key=$(cat "$source"/*.go "$source/go.mod" "$source/go.sum" | cksum | cut -d' ' -f1)
dir="${CARGO_TARGET_DIR:-$root/target}/tools/kubelet-devices-$key"
bin="$dir/kubelet-devices"
if [ ! -x "$bin" ]; then
    mkdir -p "$dir"
    echo "building the device manager of kubelet into $dir (once, five minutes of one processor)" >&2
    # One build at a time; the name appears only when it is whole.
    exec 9>"$dir/lock"
    flock 9
    if [ ! -x "$bin" ]; then
        # The manager's constructor is not exported; the linker accepts the reference with this flag.
        (cd "$source" && go build -trimpath -ldflags="-s -w -checklinkname=0" -o "$dir/new" .) >&2
        mv "$dir/new" "$bin"
    fi
fi
echo "$bin"
