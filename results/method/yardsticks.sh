#!/usr/bin/env bash
# The runs of PREREGISTRATION-2.md on the two yardsticks. `yardsticks.sh shakespeare 1` runs the first tier of methods on
# nanoGPT's shakespeare-char; a higher tier takes the lower ones along. Every method searches its rate on two tuning
# seeds and is tested on fresh ones; what is complete is not repeated, and what is packed beside this script counts as
# complete where the runs themselves are gone. JOBS says how many runs at once.
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$here/../evidence/run.sh"
mkdir -p yardsticks

muon="+set(optimizer.name=muon)"
tiers=("default,calibrated,default$muon,calibrated$muon")

shakespeare() {
  local tier methods joined
  for ((tier = 0; tier < $1; tier++)); do methods+=("${tiers[tier]}"); done
  printf -v joined '%s,' "${methods[@]}"
  wellcond compare --recipe gpt2-shakespeare --folder yardsticks/shakespeare --methods "${joined%,}" --set baseline=default --seeds 8 --jobs "${JOBS:-auto}" \
    --tune optimizer.lr=5e-4,1e-3,2e-3,4e-3,1e-2,3e-2 --set "evaluation.every={steps: 2000}" --set "checkpoint.every={steps: 2000}" --no-report
}

name=$1
if [ ! -d "yardsticks/$name" ] && [ -f "$here/yardsticks/$name.jsonl" ]; then
  wellcond unpack "$here/yardsticks/$name.jsonl" --folder "yardsticks/$name"
fi
trap 'wellcond pack "yardsticks/$name" -o "$here/yardsticks/$name"' EXIT  # also of what is complete when it is stopped
"$name" "${2:-1}"
