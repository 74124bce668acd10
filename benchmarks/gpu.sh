#!/usr/bin/env bash
# All that needs a GPU, in at most 8 minutes: build, tests, benchmarks, compute-sanitizer. Uses the
# torch that is there and downloads nothing.
#   benchmarks/gpu.sh FOLDER    writes summary.txt, gpu.json and what the parts print into the folder
# A part that fails or is stopped does not keep the next ones from running; the exit code says
# whether all have passed. Time that a part leaves over goes to the next one.
set -uo pipefail
mkdir -p "${1:?usage: benchmarks/gpu.sh FOLDER}"
out=$(cd "$1" && pwd)
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
rm -f "$out"/{build,tests,benchmarks,sanitizer}.log "$out"/{summary.txt,gpu.json}

export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 PYCOMM_CUDA=1
failed=0 spare=0

part() { # NAME SECONDS COMMAND...; what follows a hyphen of the name is not part of the log's
  local name=$1 limit=$(($2 + spare)) began=$SECONDS code=0 how
  printf '== %s\n' "$name" >>"$out/${name%%-*}.log"
  timeout -s INT -k 5 "$limit" "${@:3}" >>"$out/${name%%-*}.log" 2>&1 || code=$?
  spare=$((limit - (SECONDS - began)))
  case $code in
    0) how=passed ;;
    124 | 137) how="stopped after $limit s" failed=1 ;;
    *) how="failed ($code)" failed=1 ;;
  esac
  echo "$name: $how, $((SECONDS - began)) s" | tee -a "$out/summary.txt"
}

sanitize() { # TOOL; without torch's caching, every tensor is an allocation that it can watch
  part "sanitizer-$1" 20 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
    compute-sanitizer --tool "$1" --error-exitcode 1 "$python" -m pycomm.bench.gpu.small
}

TORCH_CUDA_ARCH_LIST=$("$python" -c \
  'import torch; print("%d.%d" % torch.cuda.get_device_capability())') || failed=1
export TORCH_CUDA_ARCH_LIST

part build 150 "$python" setup.py build_ext --inplace
part tests 150 "$python" -m pytest -q -n 4 --tb=short -p no:cacheprovider \
  --continue-on-collection-errors -m gpu tests
part benchmarks 90 "$python" -m pycomm.bench.gpu --json "$out/gpu.json"
for tool in memcheck racecheck synccheck initcheck; do
  sanitize "$tool"
done

tail -n 5 "$out/tests.log"
cat "$out/benchmarks.log"
cat "$out/summary.txt"
exit "$failed"
