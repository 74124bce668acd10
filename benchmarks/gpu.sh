#!/usr/bin/env bash
# All that needs a GPU, in at most 10 minutes: build, tests, benchmarks, profiles, compute-sanitizer.
# Uses the torch that is there and downloads nothing.
#   benchmarks/gpu.sh FOLDER    writes summary.txt, JSON files, clocks.csv and a log per part into it
# A part that fails or is stopped does not keep the next ones from running; the exit code says
# whether all have passed.
set -uo pipefail
mkdir -p "${1:?usage: benchmarks/gpu.sh FOLDER}"
out=$(cd "$1" && pwd)
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
rm -f "$out"/*.log "$out"/{summary.txt,clocks.csv} "$out"/{gpu,processes,sweep}.json "$out/ncu.csv"
source benchmarks/parts.sh

export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 PYCOMM_CUDA=1

pytest=("$python" -m pytest -q -n "$(($(nproc) * 2 / 3 + 1))" --tb=short -p no:cacheprovider
  --continue-on-collection-errors -m gpu)

mode() { # NAME VARIABLE=VALUE
  part "modes-$1" 13 env "$2" "${pytest[@]}" \
    tests/gpu/test_gpu.py::test_{other_collectives,processes}
}

sanitize() { # TOOL; without torch's caching, every tensor is an allocation that it can watch
  part "sanitizer-$1" 25 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
    compute-sanitizer --tool "$1" --error-exitcode 1 "$python" -m pycomm.bench.gpu.small
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
part tests 130 "${pytest[@]}" tests
part benchmarks 75 "$python" -m pycomm.bench gpu -J "$out/gpu.json"
part processes 40 "$python" -m pycomm.bench all_reduce --device cuda --ranks "$ranks" -n 15 -w 0 \
  -b 1K -e 64M -f 16 --peer nccl,symm_mem -J "$out/processes.json"
part sweep 25 "$python" -m pycomm.bench.gpu.sweep --json "$out/sweep.json"
if command -v ncu >/dev/null; then
  part profile 20 ncu --profile-from-start off --kernel-name-base demangled \
    --kernel-name regex:pycomm --metrics "$metrics" --page raw --csv --log-file "$out/ncu.csv" \
    "$python" -m pycomm.bench.gpu.kernels
fi
for tool in memcheck synccheck initcheck racecheck; do # the last one takes what the others leave
  sanitize "$tool"
done
mode blocking CUDA_LAUNCH_BLOCKING=1
mode eager CUDA_MODULE_LOADING=EAGER
mode expandable PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True

tail -n 5 "$out/tests.log"
cat "$out/benchmarks.log" "$out/processes.log"
cat "$out/summary.txt"
exit "$failed"
