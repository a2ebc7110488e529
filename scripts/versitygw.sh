#!/bin/sh
# Builds versitygw, an S3 server written by others, for tests that want an independent one, and prints its path.
# Cached under target/tools; needs Go. Without Go it says so and fails, and the tests that need it skip.
set -eu
version=v1.8.0
root=$(cd "$(dirname "$0")/.." && pwd)
dir="${CARGO_TARGET_DIR:-$root/target}/tools/versitygw-$version"
bin="$dir/versitygw"
if [ ! -x "$bin" ]; then
    if ! command -v go >/dev/null 2>&1; then
        echo "versitygw is not built: there is no Go here (install golang, or leave these tests out)" >&2
        exit 1
    fi
    mkdir -p "$dir"
    echo "building versitygw $version into $dir (once, a few minutes)" >&2
    # One build at a time; the name appears only when it is whole.
    exec 9>"$dir/lock"
    flock 9
    if [ ! -x "$bin" ]; then
        GOBIN="$dir/new" GOFLAGS=-trimpath go install "github.com/versity/versitygw/cmd/versitygw@$version" >&2
        mv "$dir/new/versitygw" "$bin"
    fi
fi
echo "$bin"
