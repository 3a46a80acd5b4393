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

tasks=("$@")
[ ${#tasks[@]} -gt 0 ] || tasks=(vit crammed-bert xcit swin listops gpt2-wikitext2 text)
for task in "${tasks[@]}"; do
  "$task"
  wellcond pack "method/$task" -o "$here/../evidence/$task"
done
