#!/usr/bin/env bash
# Every run of results/evidence: each method searches its learning rate on two tuning seeds, then is tested on ten fresh
# ones. Half an hour to an hour on two cores for each task; what is complete is not repeated. WELLCOND_DATA names a
# mirror of the Hugging Face hub, or the hub is used. `run.sh gpt2-wikitext2 vit` runs these tasks alone.
set -euo pipefail
results="$(cd "$(dirname "$0")" && pwd)"
runs="${RUNS:-$results/../../runs/evidence}"  # full runs, which resume; what is packed from them is beside this script
mkdir -p "$runs" && cd "$runs"
quick=(--scale tiny --set tracking.jacobian_points=0 --set tracking.weights_every=null --no-report)
compare() { wellcond compare "${quick[@]}" "$@"; }
pack() { for name in "$@"; do wellcond pack "$name" -o "$results/$name"; done; }

everything() {  # the strong default
  local strong=$1 joined
  local methods=(${library-"default(library=true)"} default "$strong" gaussian mimetic orthogonal conditioned
    "conditioned(value_scale=default)" balanced "identity(lam=1)" "identity(lam=10)" nanochat
    "default+set(model.qk_norm=true)" "default+set(optimizer.name=muon)"
    "$strong+gaussian" "$strong+conditioned" ${more:+"$strong+balanced"})
  printf -v joined '%s,' "${methods[@]}"
  echo "${joined%,}"
}

strong() {  # recipe, folder, a method, and what to search: scales of the tokens that make the default as strong as they can
  compare --recipe "$1" --folder "$2-strong" --methods "$3" --set "baseline=$3" --seeds 200,201 --tune-growth 0 "${@:4}"
}

found() {  # task: the strong default that its search found
  python - "$1-strong/tuning.json" <<'P'
import json, sys
best = json.load(open(sys.argv[1]))["methods"][0]["best"]["values"]
print("tokens(" + ", ".join(f"{name.split('.')[1]}={best[name]:g}" for name in sorted(best) if name.startswith("tokens.")) + ")")
P
}

fair() {  # recipe, folder, strong default, rates, settings
  compare --recipe "$1" --folder "$2" --methods "$(everything "$3")" --set "baseline=$3" --seeds 10 --tune "optimizer.lr=$4" "${@:5}"
}

digits() {
  strong digits digits "tokens(positions=25, embeddings=1)" --tune optimizer.lr=1e-3,3e-3,1e-2 --tune tokens.positions=6,12,25,50,101 --tune tokens.embeddings=1,3
  more=1 fair digits digits "$(found digits)" 1e-3,3e-3,5.5e-3,1e-2
}

gpt2-tinystories() {
  strong gpt2-tinystories gpt2-tinystories "tokens(embeddings=3.46, positions=3.46)" --set optimizer.lr=6e-3 --tune tokens.positions=1,3.46,12 --tune tokens.embeddings=1.7,3.46,7
  fair gpt2-tinystories gpt2-tinystories "$(found gpt2-tinystories)" 1.5e-3,3e-3,6e-3,1.2e-2 --set "training.length={steps: 150}" \
    --set "schedule.warmup={steps: 20}" --set "evaluation.every={steps: 75}" --set data.limit_evaluation=100 --set data.limit_test=300
}

gpt2-wikitext2() {  # less than an epoch: without dropout, which triples the time of a step
  local short=(--set "training.length={steps: 150}" --set "schedule.warmup={steps: 15}" --set "evaluation.every={steps: 75}" --set data.limit_test=400
    --set model.arguments.resid_pdrop=0 --set model.arguments.embd_pdrop=0 --set model.arguments.attn_pdrop=0)
  strong gpt2-wikitext2 gpt2-wikitext2 "tokens(embeddings=3.46, positions=1)" --set optimizer.lr=6e-3 --tune tokens.positions=1,3.46 --tune tokens.embeddings=1.7,3.46,7,14 "${short[@]}"
  fair gpt2-wikitext2 gpt2-wikitext2 "$(found gpt2-wikitext2)" 1.5e-3,3e-3,6e-3,1.2e-2 "${short[@]}"
}

vit() {
  local short=(--set "evaluation.every={epochs: 2}")
  strong vit-patch8 vit "tokens(embeddings=1, positions=3)" --set optimizer.lr=3e-3 --tune tokens.positions=1,3,10,30 --tune tokens.embeddings=1,3 "${short[@]}"
  fair vit-patch8 vit "$(found vit)" 1e-3,2.2e-3,5e-3,1.1e-2 "${short[@]}"
}

listops() {  # of the paper's own width: the library's start is the scale-true one
  local short=(--set "data.options={min_length: 5, max_length: 64, max_depth: 4, max_args: 5}" --set task.length=64 --set "training.length={steps: 200}" --set "evaluation.every={steps: 100}")
  strong lra-listops listops "tokens(embeddings=7, positions=1)" --set optimizer.lr=3e-3 --tune tokens.positions=1,7 --tune tokens.embeddings=1,7,20,50 "${short[@]}"
  library= fair lra-listops listops "$(found listops)" 1e-3,2.2e-3,5e-3,1.1e-2 "${short[@]}"
}

crammed-bert() {
  local short=(--set "training.length={steps: 200}" --set training.batch_size=32 --set "evaluation.every={steps: 100}" --set data.limit_test=400)
  strong crammed-bert crammed-bert "tokens(embeddings=1, positions=1)" --set optimizer.lr=1e-2 --tune tokens.positions=1,10 --tune tokens.embeddings=1,10 "${short[@]}"
  fair crammed-bert crammed-bert "$(found crammed-bert)" 2.5e-3,5e-3,1e-2,2e-2 "${short[@]}"
}

xcit() {
  local short=(--set "training.length={epochs: 3}" --set data.limit_train=3000 --set training.batch_size=64 --set "evaluation.every={epochs: 3}")
  strong xcit xcit "tokens(embeddings=1)" --set optimizer.lr=3e-3 --tune tokens.embeddings=0.3,1,3,10 "${short[@]}"
  fair xcit xcit "$(found xcit)" 1e-3,2.2e-3,5e-3,1.1e-2 "${short[@]}"
}

swin() {
  local short=(--set "training.length={epochs: 2}" --set "schedule.warmup={epochs: 0.2}" --set training.batch_size=64 --set data.limit_train=4000 --set "evaluation.every={epochs: 2}")
  strong swin swin "tokens(embeddings=1)" --set optimizer.lr=3e-3 --tune tokens.embeddings=0.3,1,3,10 "${short[@]}"
  fair swin swin "$(found swin)" 1e-3,2.2e-3,5e-3,1.1e-2 "${short[@]}"
}

text() {
  local short=(--set task.length=256 --set training.batch_size=16 --set "training.length={steps: 200}" --set "evaluation.every={steps: 100}" --set data.limit_test=1000)
  strong lra-text text "tokens(embeddings=20, positions=1)" --set optimizer.lr=3e-3 --tune tokens.positions=1,7 --tune tokens.embeddings=1,7,50 "${short[@]}"
  library= fair lra-text text "$(found text)" 1e-3,2.2e-3,5e-3,1.1e-2 "${short[@]}"
}

causal() {  # which of Q, K and V it is that hurts a causal model
  local tied="conditioned(keys=tied),conditioned(keys=tied, value_scale=default)"
  compare --recipe gpt2-tinystories --folder causal --set "evaluation.every={steps: 150}" --seeds 5 \
    --methods "default,conditioned,conditioned(projections=qk),conditioned(projections=v),conditioned(value_scale=default),$tied"
}

tasks=("$@")
[ ${#tasks[@]} -gt 0 ] || tasks=(digits gpt2-tinystories causal gpt2-wikitext2 vit listops crammed-bert xcit swin text)
for task in "${tasks[@]}"; do
  "$task"
  for folder in "$task" "$task-strong"; do [ ! -d "$folder" ] || pack "$folder"; done
done
