#!/usr/bin/env bash
# All that needs a GPU, in three calls of at most 8 minutes, each useful alone.
# Uses the torch that is there and downloads nothing.
#   benchmarks/gpu.sh kernels FOLDER          tests; speed of kernels; benchmarks/probe.cu; stalls of the worst
#   benchmarks/gpu.sh communication FOLDER    small all-reduces; the host's time; separate launches and
#                                             failures; CuPy; Inductor; graphs; processes beside peers
#   benchmarks/gpu.sh tables FOLDER           the tables of docs/lab/performance.md; sanitizers
# Each builds the extension first, which takes seconds if nothing has changed, and writes summary.txt,
# clocks.csv, JSON files and a log per part into the folder. A part that fails or is stopped does not
# keep the next ones from running, and what it has written stays; the exit code says whether all have
# passed. BASELINE=CHECKOUT names one that has been built: `kernels` times it, too.
set -uo pipefail
usage="usage: benchmarks/gpu.sh kernels|communication|tables FOLDER"
[[ ${1-} =~ ^(kernels|communication|tables)$ ]] || { echo "$usage" >&2; exit 2; }
mkdir -p "${2:?$usage}"
out=$(cd "$2" && pwd)
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
rm -f "$out"/*.{log,json,csv} "$out"/{summary.txt,probe}
source benchmarks/parts.sh

export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 PYCOMM_CUDA=1

pytest=("$python" -m pytest -q -n "$(($(nproc) * 2 / 3 + 1))" --tb=short -p no:cacheprovider
  --continue-on-collection-errors -m gpu)
bench=("$python" -m pycomm.bench)

absent() { # PART REASON
  echo "$1: absent, $2" | tee -a "$out/summary.txt"
}

mode() { # NAME VARIABLE=VALUE
  part "modes-$1" 13 env "$2" "${pytest[@]}" \
    tests/gpu/test_gpu.py::test_{other_collectives,processes}
}

sanitize() { # TOOL; without torch's caching, every tensor is an allocation that it can watch
  part "sanitizer-$1" 40 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
    compute-sanitizer --tool "$1" --error-exitcode 1 "$python" -m pycomm.bench.gpu.small
}

kernels() {
  part tests 130 "${pytest[@]}" tests
  part benchmarks 70 "${bench[@]}" gpu -J "$out/gpu.json"
  if [[ -n ${BASELINE-} ]]; then # shares compare: each file has the times of a copy in its own rounds
    part baseline 60 env PYTHONPATH="$BASELINE" "${bench[@]}" gpu -J "$out/baseline.json"
  else
    absent baseline "BASELINE is not set"
  fi
  if command -v nvcc >/dev/null; then
    part probe 25 bash -c 'nvcc -std=c++20 -O3 --fmad=false --expt-relaxed-constexpr -Icsrc \
      -arch=native benchmarks/probe.cu -o "$0/probe" && "$0/probe"' "$out"
  else
    absent probe "nvcc is not on PATH"
  fi
  if command -v ncu >/dev/null; then
    part profile 45 ncu --profile-from-start off --kernel-name-base demangled \
      --kernel-name regex:pycomm --section WarpStateStats --metrics "$metrics" --page raw --csv \
      --log-file "$out/ncu.csv" "$python" -m pycomm.bench.gpu.kernels "$out/gpu.json"
  else
    absent profile "ncu is not on PATH"
  fi
}

communication() {
  part small 30 "${bench[@]}" gpu --only all_reduce_1KiB -J "$out/small.json"
  part loopback 40 "${bench[@]}" gpu --only all_reduce -J "$out/loopback.json"
  part host 30 "$python" -m benchmarks.gpu_host
  part separate 60 env CUDA_MODULE_LOADING=EAGER "${pytest[@]}" tests/gpu/test_gpu_{separate,faults}.py
  part inductor 60 "${pytest[@]}" -k compiled tests/gpu/test_gpu_ops.py
  part captured 60 "${pytest[@]}" -k captured tests/gpu/test_gpu_{examples,optim}.py
  part processes 50 "${bench[@]}" all_reduce --device cuda --ranks "${ranks:-4}" -n 15 -w 0 \
    -b 1K -e 64M -f 16 --peer nccl,symm_mem -J "$out/processes.json"
}

tables() {
  part benchmarks 75 "${bench[@]}" gpu -J "$out/gpu.json"
  part sweep 25 "$python" -m pycomm.bench.gpu.sweep --json "$out/sweep.json"
  if command -v compute-sanitizer >/dev/null; then
    for tool in memcheck synccheck initcheck racecheck; do # the last one takes what the others leave
      sanitize "$tool"
    done
  else
    absent sanitizer "compute-sanitizer is not on PATH"
  fi
  mode blocking CUDA_LAUNCH_BLOCKING=1
  mode eager CUDA_MODULE_LOADING=EAGER
  mode expandable PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
}

TORCH_CUDA_ARCH_LIST=$(timeout 20 "$python" -c \
  'import torch; print("%d.%d" % torch.cuda.get_device_capability())') || failed=1
export TORCH_CUDA_ARCH_LIST
# A process on each GPU; on a single one, four take turns.
ranks=$(timeout 20 "$python" -c \
  'import torch; gpus = torch.cuda.device_count(); print(gpus if gpus > 1 else 4)') || failed=1

metrics=gpu__time_duration.sum,dram__bytes.sum.per_second
metrics+=,dram__throughput.avg.pct_of_peak_sustained_elapsed
metrics+=,sm__warps_active.avg.pct_of_peak_sustained_active,launch__registers_per_thread
clocks=timestamp,index,clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem,power.draw,temperature.gpu
nvidia-smi --query-gpu="$clocks" --format=csv --loop-ms=500 >"$out/clocks.csv" 2>&1 &

part build 130 "$python" setup.py build_ext --inplace
"$1"

for log in tests benchmarks probe small host separate processes; do
  [[ ! -f $out/$log.log ]] || tail -n 60 "$out/$log.log"
done
cat "$out/summary.txt"
exit "$failed"
