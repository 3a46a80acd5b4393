#!/usr/bin/env bash
# The held-out tasks of PREREGISTRATION-2.md: `calibrated`, the strong default and gaussian with Muon, and Muon by head, added to the
# records of results/evidence, whose settings, rates, tuning seeds, fresh seeds and runs they share. `together.sh swin listops` runs these alone.
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$here/../evidence/run.sh"
mkdir -p method

frozen="calibrated(positions=0.5)"
muon="+set(optimizer.name=muon)"  # matrices of the blocks by Muon, the rest by AdamW

strong() { :; }  # was searched for the evidence
fair() {  # recipe, folder, strong default, rates, settings
  local recipe=$1 folder="method/$2" rates=$4 baseline methods
  [ -d "$folder" ] || wellcond unpack "$here/../evidence/$2.jsonl" --folder "$folder"
  baseline=$(python -c 'import json, sys; print(json.load(open(sys.argv[1]))["baseline"])' "$folder/comparison.json")
  methods="$baseline,$frozen,default$muon,$frozen$muon,gaussian$muon"
  [ "$baseline" = default ] || methods+=",default,$baseline$muon"
  shift 4
  compare --recipe "$recipe" --folder "$folder" --methods "$methods" --set "baseline=$baseline" --seeds 10 --tune "optimizer.lr=$rates" --jobs "${JOBS:-auto}" "$@"
}
found() { echo; }

why() {  # task, recipe, rate, settings: what of calibrated it is that adds to Muon
  local without="" part
  for part in logits share words positions; do without+=",calibrated(${part}=null)$muon"; done
  [ -d "method/why/$1" ] || [ ! -f "$here/why/$1.jsonl" ] || wellcond unpack "$here/why/$1.jsonl" --folder "method/why/$1"
  wellcond compare --scale tiny --recipe "$2" --folder "method/why/$1" --methods "calibrated$muon$without,default$muon" --set "baseline=calibrated$muon" --seeds 10 \
    --set "optimizer.lr=$3" --set tracking.jacobian_points=0 --set tracking.weights_every=null --no-report --jobs "${JOBS:-auto}" "${@:4}"
  wellcond pack "method/why/$1" -o "$here/why/$1"
}
why-vit() { why vit vit-patch8 2.2e-3; }
why-gpt2-wikitext2() { why gpt2-wikitext2 gpt2-wikitext2 2.4e-2; }

tasks=("$@")
[ ${#tasks[@]} -gt 0 ] || tasks=(vit crammed-bert xcit swin listops gpt2-wikitext2 text why-vit why-gpt2-wikitext2)
for task in "${tasks[@]}"; do
  "$task"
  case $task in why-*) continue ;; esac
  wellcond pack "method/$task" -o "$here/../evidence/$task"
done
