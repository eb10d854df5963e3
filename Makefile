# SPDX-License-Identifier: Apache-2.0
# The front door. `make demo` shows the library at work, `make check` proves it; CMake does the rest.
BUILD ?= build
JOBS  ?= $(shell nproc)

# What a build, the tests and the demo need, as Debian packages.
PACKAGES = gcc g++ cmake pkg-config libopenblas-openmp-dev libjansson-dev libcmocka-dev \
           python3 python3-numpy gzip xz-utils binutils

DEMO_SECONDS ?= 60
DEMO_DATA    ?= /usr/include
# Ranks that share every batch, threads of one process.
DEMO_RANKS   ?= 2

.PHONY: all build demo check bench install deps clean

all: build

# Installs what is missing as root; otherwise prints the one line to run.
deps:
	@missing=; for p in $(PACKAGES); do \
	    dpkg-query -W -f='$${Status}' $$p 2>/dev/null | grep -q 'ok installed' || missing="$$missing $$p"; \
	done; \
	[ -z "$$missing" ] && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "installing:$$missing"; \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $$missing >/dev/null; \
	else \
	    echo "These packages are missing; run this and try again:"; \
	    echo "    sudo apt-get install$$missing"; exit 1; \
	fi

build: deps
	@cmake -S . -B $(BUILD) -DCMAKE_BUILD_TYPE=Release >$(BUILD).log 2>&1 || { cat $(BUILD).log; exit 1; }
	@cmake --build $(BUILD) -j $(JOBS) >>$(BUILD).log 2>&1 || { cat $(BUILD).log; exit 1; }

demo: build
	$(BUILD)/deltarule info
	$(BUILD)/deltarule train --data $(DEMO_DATA) --glob '*.h' --seconds $(DEMO_SECONDS) --out $(BUILD)/demo \
	    --ranks $(DEMO_RANKS) --cp relay --threads $$((($(JOBS) + $(DEMO_RANKS) - 1) / $(DEMO_RANKS)))
	$(BUILD)/deltarule generate --model $(BUILD)/demo --prompt '#ifndef _' --tokens 300

check: build
	ctest --test-dir $(BUILD) --output-on-failure

bench: build
	$(BUILD)/deltarule bench

install: build
	cmake --install $(BUILD) $(if $(PREFIX),--prefix $(PREFIX))

clean:
	rm -rf $(BUILD) $(BUILD).log
