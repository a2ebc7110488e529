# The two commands a fresh machine needs are `make demo` and `make test`. The work is done in scripts/.
SHELL := /bin/bash

.PHONY: help demo test test-all build bench fmt lint deps install package image wheel test-arm64 clean

help:
	@echo "make demo     the main job on this machine, with no set-up: node, mount, cold and hot pass"
	@echo "make test     formatting, lints, house rules, and the tests that a change has to pass"
	@echo "make test-all everything: public suites, virtual machines with RDMA and NFS, Kubernetes, packages, too"
	@echo "make build    the optimised programs: target/release/spurline and spurline-bench"
	@echo "make bench    throughput, operations and latency beside their ceilings (BENCHMARKS.md);"
	@echo "              make bench BENCH=--quick takes minutes, BENCH='--only remote' one section"
	@echo "make fmt      format; make lint: clippy with warnings denied"
	@echo "make deps     install what is missing: system packages and the pinned Rust toolchain"
	@echo "make install  programs, man pages, completions and systemd units below PREFIX (/usr/local), /etc/spurline,"
	@echo "              and /sbin/mount.spurline for fstab"
	@echo "make test-arm64  tests for arm64 in emulators, on amd64"
	@echo "make package  a Debian package and an archive in target/packages; ARCH=arm64 cross-builds them"
	@echo "make wheel    the Python package in target/wheels; ARCH=arm64 cross-builds it"
	@echo "make image    a container image as an OCI layout in target/packages; ARCH=arm64 cross-builds it"

demo:
	@scripts/setup demo
	@. scripts/env && cargo build --profile demo --locked -p spurline
	@target/demo/spurline demo

test:
	@scripts/setup test
	@scripts/test

test-all:
	@scripts/setup test-all
	@scripts/test --all

build:
	@scripts/setup build
	@. scripts/env && cargo build --release --locked -p spurline -p spurline-bench

bench:
	@scripts/setup bench
	@. scripts/env && cargo build --release --locked -p spurline -p spurline-bench -p spurline-testkit
	@mkdir -p target/bench
	@target/release/spurline bench suite --json target/bench/report.json --html target/bench/report.html $(BENCH)

fmt:
	@. scripts/env && cargo fmt --all

lint:
	@. scripts/env && cargo clippy --workspace --all-targets --locked -- -D warnings

deps:
	@scripts/setup bench

PREFIX ?= /usr/local
install: build
	@scripts/stage --strip strip target/release "$(DESTDIR)" "$(PREFIX)"

ARCH ?= $(if $(filter aarch64,$(shell uname -m)),arm64,amd64)
package:
	@scripts/setup package
	@scripts/package --arch $(ARCH) deb tarball

image:
	@scripts/setup package
	@scripts/package --arch $(ARCH) image

wheel:
	@scripts/setup build
	@scripts/wheel --arch $(ARCH)

test-arm64:
	@scripts/test-arm64

clean:
	@. scripts/env && cargo clean
