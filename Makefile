# The two commands a fresh machine needs are `make demo` and `make test`. The work is done in scripts/.
SHELL := /bin/bash

.PHONY: help demo test build bench fmt lint deps install clean

help:
	@echo "make demo     the main job on this machine, with no set-up: node, mount, cold and hot pass"
	@echo "make test     formatting, lints, house rules, all tests"
	@echo "make build    the optimised programs: target/release/spurline and spurline-bench"
	@echo "make bench    throughput, operations and latency beside their ceilings (BENCHMARKS.md);"
	@echo "              make bench BENCH=--quick takes minutes, BENCH='--only remote' one section"
	@echo "make fmt      format; make lint: clippy with warnings denied"
	@echo "make deps     install what is missing: system packages and the pinned Rust toolchain"
	@echo "make install  the binary, man pages and completions below PREFIX (/usr/local), and /sbin/mount.spurline for fstab"

demo:
	@scripts/setup demo
	@. scripts/env && cargo build --release --locked -p spurline
	@target/release/spurline demo

test:
	@scripts/setup test
	@scripts/test

build:
	@scripts/setup build
	@. scripts/env && cargo build --release --locked -p spurline -p spurline-bench

bench:
	@scripts/setup bench
	@. scripts/env && cargo build --release --locked -p spurline -p spurline-bench -p spurline-testkit
	@target/release/spurline bench suite --json target/bench/report.json --html target/bench/report.html $(BENCH)

fmt:
	@. scripts/env && cargo fmt --all

lint:
	@. scripts/env && cargo clippy --workspace --all-targets --locked -- -D warnings

deps:
	@scripts/setup bench

PREFIX ?= /usr/local
install: build
	install -D -m 755 target/release/spurline $(DESTDIR)$(PREFIX)/bin/spurline
	install -D -m 755 target/release/spurline-bench $(DESTDIR)$(PREFIX)/bin/spurline-bench
	install -d $(DESTDIR)/sbin && ln -sf $(PREFIX)/bin/spurline $(DESTDIR)/sbin/mount.spurline
	install -d $(DESTDIR)$(PREFIX)/share/man/man1 $(DESTDIR)$(PREFIX)/share/bash-completion/completions
	target/release/spurline man $(DESTDIR)$(PREFIX)/share/man/man1
	target/release/spurline-bench man $(DESTDIR)$(PREFIX)/share/man/man1
	target/release/spurline completions bash > $(DESTDIR)$(PREFIX)/share/bash-completion/completions/spurline

clean:
	@. scripts/env && cargo clean
