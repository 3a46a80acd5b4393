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
  methods="$baseline,$frozen,${layer_scale-default+set(model.layer_scale=0.1),}t_fixup,small"
  [ -z "$sincos" ] || methods+=",mimetic(position=$sincos)"
  shift 4
  compare --recipe "$recipe" --folder "$folder" --methods "$methods" --set "baseline=$baseline" --seeds 10 --tune "optimizer.lr=$rates" "$@"
}

beside() {  # folder, recipe, strong default, rates, settings: how a gain depends on something else than the task
  compare --recipe "$2" --folder "method/$1" --methods "${library-default(library=true),}default,$3,$frozen${more:-}" --set baseline=default --seeds 6 \
    --tune "optimizer.lr=$4" --tune-growth 1 "${@:5}"
}

widths() {  # at which width the gain ends: heads of 16, half the epochs of the recipe
  local width
  for width in 64 128 256; do
    beside "widths/$width" digits "tokens(embeddings=3, positions=50)" 5e-4,1.5e-3,4.5e-3 --set "model.arguments.embed_dim=$width" \
      --set "model.arguments.num_heads=$((width / 16))" --set "training.length={epochs: 8}" --set "evaluation.every={epochs: 4}" --set "checkpoint.every={epochs: 8}"
  done
}

lengths() {  # small initialisation predicts that gains shrink or turn with longer training
  local steps
  for steps in 75 300; do
    library= more=,small beside "lengths/$steps" gpt2-tinystories "tokens(embeddings=3.46, positions=1)" 3e-3,6e-3,1.2e-2 --set "training.length={steps: $steps}" \
      --set "schedule.warmup={steps: $((steps / 8))}" --set "evaluation.every={steps: $steps}" --set data.limit_evaluation=100 --set data.limit_test=300
  done
}

minimised() {  # scales that minimise the measured kappa(J) of the start (minimise.py), beside those of the method
  compare --recipe digits --folder method/minimised/digits --methods "default,calibrated,calibrated(logits=1.3, share=0.00154, positions=2.71)" --set baseline=calibrated \
    --seeds 6 --tune optimizer.lr=1e-3,3e-3,1e-2 --tune-growth 1
  compare --recipe gpt2-tinystories --folder method/minimised/gpt2-tinystories --set baseline=calibrated --seeds 6 --tune optimizer.lr=3e-3,6e-3,1.2e-2 --tune-growth 1 \
    --methods "default,calibrated,calibrated(logits=0.278, share=0.0144, positions=48.4, words=2.66)" --set "training.length={steps: 150}" \
    --set "schedule.warmup={steps: 20}" --set "evaluation.every={steps: 75}" --set data.limit_evaluation=100 --set data.limit_test=300
}

tasks=("$@")
[ ${#tasks[@]} -gt 0 ] || tasks=(vit swin xcit listops text crammed-bert gpt2-wikitext2 widths lengths minimised)
for task in "${tasks[@]}"; do
  case $task in
    widths | lengths | minimised)
      "$task"
      for folder in "method/$task"/*; do wellcond pack "$folder" -o "$here/$task/$(basename "$folder")"; done
      continue ;;
    vit) "$task" ;;
    swin | crammed-bert) positions= "$task" ;;  # no learned positions to replace
    xcit) positions= layer_scale= "$task" ;;  # and scales of its own
    *) positions=sincos1d "$task" ;;
  esac
  wellcond pack "method/$task" -o "$here/../evidence/$task"
done
