#!/bin/sh
# Ten minutes, fourteen with vLLM, on a machine with a GPU, from a folder of `make gpu-kit`: what has not been measured there comes first.
#
#   sh benchmarks/gpu/run.sh [RESULTS]        # a folder for results and logs, by default $OUT or ./results
#
# Each command has a limit, and its results are in the folder as soon as it prints them. docs/gpu.md says what to look at.
set -u
results=${1:-${OUT:-results}}
mkdir -p "$results"
export PYTHONUNBUFFERED=1

# run NAME SECONDS ARGUMENTS...: a module of Python, its result as JSON, and its log
run() {
  name=$1 limit=$2
  shift 2
  echo "$name: python -m $*"
  timeout "$limit" python -m "$@" >"$results/$name.json" 2>"$results/$name.log"
  status=$?
  echo "$name: exit status $status after at most $limit s"
  tail -n 20 "$results/$name.log"
}

# 1. The device's codec: encode, prove and decode, with the time of each kernel, and whether its bytes are the host's.
run gpu_codec 110 benchmarks.gpu.codec --json
# Fewer streams in a program: each turn waits for fewer misses, and more programs are resident.
run gpu_codec_8 70 benchmarks.gpu.codec --lanes 8 --json
# 2. How long a publish holds the trainer, with many tensors and with few.
run gpu_held 50 benchmarks.gpu.held --json
# 3. Detect, stage, commit and audit at 7.6 billion elements.
run gpu 130 benchmarks.gpu --parts kernels,detect,dense,mixture --no-counts --json
# 4. The kernels' property tests, as far as there is time.
run gpu_tests 60 benchmarks.gpu --parts tests --json
# 5. A real server beside a trainer: tokens a second with versions, and the longest silence of a stream.
if python -c "import vllm, transformers" 2>/dev/null; then
  run gpu_serve 180 benchmarks.gpu_serve --versions 15 --json
  # 6. Layouts of vLLM: pauses of quantized servers, which prove what they make when they start.
  for layout in fp8_per_channel mxfp8; do
    run "gpu_commit_$layout" 120 benchmarks.commit --device cuda --json -- --quantization "$layout"
  done
else
  echo "gpu_serve: left out, because vllm or transformers is missing"
fi
