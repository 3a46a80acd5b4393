#!/usr/bin/env bash
# The test of PREREGISTRATION.md: `calibrated` and four more baselines on the held-out tasks, each at its own best rate, on the settings,
# tuning seeds and ten fresh seeds of results/evidence, whose runs are used again. `run.sh swin listops` runs these tasks alone.
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$here/../evidence/run.sh"
mkdir -p method

frozen="calibrated(positions=0.5)"
strong() { :; }  # was searched for the evidence
fair() {  # recipe, folder, strong default, rates, settings
  local recipe=$1 folder="method/$2" baseline rates=$4 sincos=${positions-sincos2d} methods
  baseline=$(python -c 'import json, sys; print(json.load(open(sys.argv[1]))["baseline"])' "$2/comparison.json")
  [ -d "$folder" ] || cp -rl "$2" "$folder"
  methods="$baseline,$frozen,default+set(model.layer_scale=0.1),t_fixup,small"
  [ -z "$sincos" ] || methods+=",mimetic(position=$sincos)"
  shift 4
  compare --recipe "$recipe" --folder "$folder" --methods "${only:-$methods}" --set "baseline=$baseline" --seeds 10 --tune "optimizer.lr=$rates" "$@"
}

tasks=("$@")
[ ${#tasks[@]} -gt 0 ] || tasks=(vit swin xcit listops text crammed-bert gpt2-wikitext2)
for task in "${tasks[@]}"; do
  case $task in
    vit) "$task" ;;
    swin | xcit) positions= "$task" ;;  # no learned positions to replace
    *) positions=sincos1d "$task" ;;
  esac
  wellcond pack "method/$task" -o "$here/../evidence/$task"
done
