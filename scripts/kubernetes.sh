#!/bin/sh
# Builds kube-apiserver and kubectl in the version of tests/kubelet/go.mod, and helm in that of tests/helm/go.mod, and
# prints their directory. Cached under target/tools by the versions; needs Go. Without Go it says so and fails, and the
# tests that need it skip.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
key=$(cat "$root"/tests/kubelet/go.mod "$root"/tests/helm/go.mod | cksum | cut -d' ' -f1)
dir="${CARGO_TARGET_DIR:-$root/target}/tools/kubernetes-$key"
if [ ! -e "$dir/whole" ]; then
    if ! command -v go >/dev/null 2>&1; then
        echo "kube-apiserver, kubectl and helm are not built: there is no Go here (install golang 1.21 or later)" >&2
        exit 1
    fi
    mkdir -p "$dir"
    echo "building kube-apiserver, kubectl and helm into $dir (once, about six minutes of one processor)" >&2
    # One build at a time. Other work of the machine goes first.
    exec 9>"$dir/lock"
    flock 9
    build() {
        [ -x "$dir/${2##*/}" ] && return
        (cd "$root/tests/$1" && nice -n 10 go build -trimpath -ldflags="-s -w" -o "$dir/new" "$2") >&2
        mv "$dir/new" "$dir/${2##*/}"
    }
    if [ ! -e "$dir/whole" ]; then
        build kubelet k8s.io/kubernetes/cmd/kube-apiserver
        build kubelet k8s.io/kubernetes/cmd/kubectl
        build helm helm.sh/helm/v3/cmd/helm
        touch "$dir/whole"
    fi
fi
echo "$dir"
