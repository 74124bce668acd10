# Runs parts of a script one after the other, each with a time limit. To be sourced by bash.
#   part NAME SECONDS COMMAND...    writes $out/NAME.log, without what follows a hyphen of the name,
#                                   and a line in $out/summary.txt
# A part runs in a process group of its own, which is killed when the part has ended or its time is
# up, so no process outlives its part. Time that a part leaves over goes to the next one. `failed`
# is 1 once a part has failed.
failed=0 spare=0 group=
grace=5 # seconds from SIGINT to SIGKILL
set -m  # background jobs get process groups of their own, and do not ignore SIGINT

kill_groups() { # GROUP...
  local one
  for one; do kill -KILL -- "-$one" 2>/dev/null; done
}
trap 'kill_groups $group $(jobs -p)' EXIT # a part that has just begun is a job, but not yet $group
trap 'exit 130' HUP INT TERM

part() {
  local name=$1 limit=$(($2 + spare)) began=$SECONDS code=0 how
  local log=$out/${name%%-*}.log
  printf '== %s\n' "$name" >>"$log"
  timeout -s INT -k "$grace" "$limit" "${@:3}" </dev/null >>"$log" 2>&1 &
  group=$!
  wait "$group" || code=$?
  kill_groups "$group"
  group=
  spare=$((limit - (SECONDS - began)))
  case $code in
    0) how=passed ;;
    124 | 137) how="stopped after $limit s" failed=1 ;;
    *) how="failed ($code)" failed=1 ;;
  esac
  echo "$name: $how, $((SECONDS - began)) s" | tee -a "$out/summary.txt"
}
