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
  local methods=(${library-"default(library=true)"} default gaussian mimetic orthogonal conditioned
    "conditioned(value_scale=default)" balanced "identity(lam=1)" "identity(lam=10)" nanochat
    "default+set(model.qk_norm=true)" "default+set(optimizer.name=muon)")
  [ "$strong" = default ] || methods+=("$strong" "$strong+gaussian" "$strong+conditioned" ${more:+"$strong+balanced"})
  printf -v joined '%s,' "${methods[@]}"
  echo "${joined%,}"
}

strong() {  # recipe, folder, a method, and what to search: scales of the tokens that make the default as strong as they can
  compare --recipe "$1" --folder "$2-strong" --methods "$3" --set "baseline=$3" --seeds 200,201 --tune-growth 0 "${@:4}"
}

found() {  # task: the strong default that its search found; the default itself if no factor is better than 1
  python - "$1-strong/tuning.json" <<'P'
import json, sys
best = json.load(open(sys.argv[1]))["methods"][0]["best"]["values"]
factors = [f"{name.split('.')[1]}={best[name]:g}" for name in sorted(best) if name.startswith("tokens.") and best[name] != 1]
print(f"tokens({', '.join(factors)})" if factors else "default")
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
  strong gpt2-tinystories gpt2-tinystories "tokens(embeddings=3.46, positions=3.46)" --set optimizer.lr=6e-3 --tune tokens.positions=1,3.46,12 --tune tokens.embeddings=1.7,3.46,7 \
    --set "training.length={steps: 300}" --set "schedule.warmup={steps: 40}" --set "evaluation.every={steps: 50}" --set data.limit_evaluation=200 --set data.limit_test=400
  fair gpt2-tinystories gpt2-tinystories "$(found gpt2-tinystories)" 1.5e-3,3e-3,6e-3,1.2e-2
}

gpt2-wikitext2() {
  strong gpt2-wikitext2 gpt2-wikitext2 "tokens(embeddings=3.46, positions=1)" --set optimizer.lr=6e-3 --tune tokens.positions=1,3.46 --tune tokens.embeddings=1.7,3.46,7,14
  fair gpt2-wikitext2 gpt2-wikitext2 "$(found gpt2-wikitext2)" 1.5e-3,3e-3,6e-3,1.2e-2
}

vit() {
  strong vit-patch8 vit "tokens(embeddings=1, positions=3)" --set optimizer.lr=3e-3 --tune tokens.positions=1,3,10,30 --tune tokens.embeddings=1,3
  fair vit-patch8 vit "$(found vit)" 1e-3,2.2e-3,5e-3,1.1e-2
}

listops() {  # of the paper's own width: the library's start is the scale-true one
  strong lra-listops listops "tokens(embeddings=7, positions=1)" --set optimizer.lr=3e-3 --tune tokens.positions=1,7 --tune tokens.embeddings=1,7,20,50
  library= fair lra-listops listops "$(found listops)" 1e-3,2.2e-3,5e-3,1.1e-2
}

crammed-bert() {
  strong crammed-bert crammed-bert "tokens(embeddings=10, positions=10)" --set optimizer.lr=1e-2 --tune tokens.positions=1,10 --tune tokens.embeddings=1,10
  fair crammed-bert crammed-bert "$(found crammed-bert)" 2.5e-3,5e-3,1e-2,2e-2
}

xcit() {
  strong xcit xcit "tokens(embeddings=3)" --set optimizer.lr=3e-3 --tune tokens.embeddings=0.3,1,3,10
  fair xcit xcit "$(found xcit)" 1e-3,2.2e-3,5e-3,1.1e-2
}

swin() {
  strong swin swin "tokens(embeddings=3)" --set optimizer.lr=3e-3 --tune tokens.embeddings=0.3,1,3,10
  fair swin swin "$(found swin)" 1e-3,2.2e-3,5e-3,1.1e-2
}

text() {  # reviews byte by byte are learned slowly: twice the steps of the other tasks, and still little is learned
  strong lra-text text "tokens(embeddings=20, positions=1)" --set optimizer.lr=3e-3 --tune tokens.positions=1,7 --tune tokens.embeddings=1,7,50
  library= fair lra-text text "$(found text)" 1.5e-3,3e-3,6e-3 --tune-growth 1
}

causal() {  # which of Q, K and V it is that hurts a causal model
  local tied="conditioned(keys=tied),conditioned(keys=tied, value_scale=default)"
  compare --recipe gpt2-tinystories --folder causal --set optimizer.lr=3e-3 --set "evaluation.every={steps: 150}" --seeds 5 \
    --set "training.length={steps: 300}" --set "schedule.warmup={steps: 40}" --set data.limit_evaluation=200 --set data.limit_test=400 \
    --methods "default,conditioned,conditioned(projections=qk),conditioned(projections=v),conditioned(value_scale=default),$tied"
}

decide() {  # recipe, rates, settings: what the papers claim, on the further models and tasks of their tables
  compare --recipe "$1" --folder "$1" --methods "default,${gaussian-gaussian,}mimetic,conditioned,identity(lam=10)" --set baseline=default --seeds 10 \
    --tune "optimizer.lr=$2" "${@:3}"
}

deit() { decide deit 1e-3,2.2e-3,5e-3,1.1e-2; }
davit() { decide davit 1e-3,2.2e-3,5e-3,1.1e-2; }
lra-retrieval() { gaussian= decide lra-retrieval 1e-3,3e-3 --tune-growth 1; }
lra-image() { gaussian= decide lra-image 1e-3,3e-3 --tune-growth 1; }
lra-pathfinder() { gaussian= decide lra-pathfinder 1e-3,3e-3 --tune-growth 1; }

again() {  # recipe, methods, seeds, settings: what ten seeds left open, once more, at the rates that were found, on fresh seeds; larger test splits
  # where most of the noise is that of the split
  compare --recipe "$1" --folder "again/${name:-$1}" --methods "$2" --set "baseline=${2%%,*}" --seeds "$(seq -s, 100 $((99 + $3)))" "${@:4}"
}
again-digits() { again digits default,conditioned 30; }
again-gpt2-tinystories() {
  again gpt2-tinystories default,conditioned 32
}
again-listops() {
  again lra-listops "default,mimetic,conditioned,identity(lam=10)" 14 --set data.num_test=10000
}
again-text() {
  again lra-text "default,mimetic,conditioned,identity(lam=10)" 12 --set data.limit_test=10000
}
again-epochs() {  # as `measured-vision`, without the Jacobian
  local family
  for family in deit xcit vit-patch8 davit; do
    name="epochs-$family" again "$family" default,conditioned 24 --set optimizer.lr=1e-3 --set "training.length={epochs: 3}" --set "evaluation.every={epochs: 0.25}" \
      --set data.limit_train=3000 --set evaluation.test=null --set training.batch_size=128 --set "schedule.warmup={epochs: 0.5}" --set data.limit_test=2000
  done
}
again-output() { name=output again vit-patch8 "conditioned,conditioned(output=orthogonal)" 16 --set optimizer.lr=2.2e-3 --set "evaluation.every={epochs: 4}"; }

measured() {  # recipe, rate, settings: the condition number of the Jacobian at both ends, and how many epochs are saved
  wellcond compare --scale tiny --no-report --recipe "$1" --folder "measured/$1" --methods "default,conditioned,identity(lam=10)" --seeds 8 \
    --set "optimizer.lr=$2" --set tracking.weights_every=null --set tracking.jacobian_points=2 --set "tracking.heads=[0]" "${@:3}"
}

measured-vision() {
  local family short=(--set "training.length={epochs: 3}" --set "evaluation.every={epochs: 0.25}" --set data.limit_train=3000 --set evaluation.test=null
    --set training.batch_size=128 --set "schedule.warmup={epochs: 0.5}" --set data.limit_test=2000)
  for family in vit-patch8 xcit; do measured "$family" 1e-3 "${short[@]}"; done
  for family in deit swin davit; do measured "$family" 1e-3 "${short[@]}" --set tracking.jacobian_points=0; done
}

measured-lra() {
  local short=(--set task.length=64 --set "training.length={steps: 200}" --set "evaluation.every={steps: 20}" --set evaluation.test=null)
  measured lra-listops 2e-3 "${short[@]}" --set "data.options={min_length: 5, max_length: 64, max_depth: 4, max_args: 5}"
  measured lra-text 2e-3 "${short[@]}" --set data.limit_evaluation=1000 --set data.limit_test=2000
}

measured-causal() {
  measured gpt2-tinystories 3e-3 --set "training.length={steps: 50}" --set "evaluation.every={steps: 50}" --set evaluation.test=null --set task.context=32 \
    --set "schedule.warmup={steps: 40}" --set data.limit_evaluation=200 --set data.limit_test=400
}

ablate() {  # recipe, folder, methods, settings: five seeds, one rate for all
  compare --recipe "$1" --folder "ablations/$2" --methods "$3" --seeds 5 "${@:4}"
}
identity() { printf ',identity(lam=%s)' "$@"; }
projections() { printf ',conditioned(projections=%s)' "$@"; }
value_scales() { printf ',conditioned(value_scale=%s)' "$@"; }

ablations() {  # recipe, name, settings: strength, projections, scale of V, W_O, the form of the correction, norms
  ablate "$1" "$2" "default,conditioned$(identity 1 2 4 6 8 10 12 14 16)$(projections q k v qk)$(value_scales 0.1 0.5 2 5 10),conditioned(output=orthogonal),polar,balanced" "${@:3}"
  ablate "$1" "$2-without-norm" "default,conditioned,identity(lam=1),identity(lam=10)" --set model.norms=without_block_norms "${@:3}"
}

ablations-vision() {  # and controls of our own
  local short=(--set optimizer.lr=2.2e-3 --set "evaluation.every={epochs: 4}")
  ablations vit-patch8 vision "${short[@]}"
  ablate vit-patch8 vision "default,conditioned,identity(lam=0.5),identity(lam=10, layout=per_head),polar(layout=joint),gaussian,gaussian(value=per_head),orthogonal,conditioned(match_norm=true)$(
    ),conditioned(value=joint),conditioned(value=orthogonal)$(printf ',conditioned(projections=v, output=%s)' identity orthogonal)$(
    ),mimetic,mimetic(transposes=released),mimetic(position=sincos2d)" "${short[@]}"
  ablate vit-patch8 vision-qk-norm default,conditioned --set model.arguments.qk_norm=true "${short[@]}"
}
ablations-language() {
  ablations gpt2-wikitext2 language --set optimizer.lr=3e-3 --set "training.length={steps: 150}" --set "schedule.warmup={steps: 15}" --set "evaluation.every={steps: 75}" \
    --set data.limit_test=400 --set model.arguments.resid_pdrop=0 --set model.arguments.embd_pdrop=0 --set model.arguments.attn_pdrop=0
}
ablations-lra() {
  local short=(--set "data.options={min_length: 5, max_length: 64, max_depth: 4, max_args: 5}" --set task.length=64 --set "training.length={steps: 200}"
    --set "evaluation.every={steps: 100}" --set optimizer.lr=2.2e-3)
  ablate lra-listops lra "default,conditioned,balanced$(identity 1 2 4 10)" "${short[@]}"
  ablate lra-listops lra-without-norm "default,conditioned,identity(lam=1),identity(lam=10)" --set model.norms=without_block_norms "${short[@]}"
}

weight-selection() {  # a teacher of twice the width for each start, then the student from it
  local method layout students=default
  for method in default mimetic conditioned; do
    wellcond train vit-patch8 --method "$method" --set optimizer.lr=2.2e-3 --folder "weight-selection/teachers/$method" --set model.arguments.embed_dim=96 --set model.arguments.num_heads=6
    for layout in blind heads; do students+=",weight_selection(teacher=weight-selection/teachers/$method, layout=$layout)"; done
  done
  compare --recipe vit-patch8 --folder weight-selection/students --seeds 8 --methods "$students" --set optimizer.lr=2.2e-3 \
    --set model.arguments.embed_dim=48 --set model.arguments.num_heads=3 --set "evaluation.every={epochs: 4}"
}

[ "${BASH_SOURCE[0]}" = "$0" ] || return 0  # results/method/run.sh uses these functions

tasks=("$@")
[ ${#tasks[@]} -gt 0 ] || tasks=(digits gpt2-tinystories causal gpt2-wikitext2 vit listops crammed-bert xcit swin text
  again-digits again-gpt2-tinystories again-listops again-text again-epochs again-output deit davit lra-retrieval lra-image lra-pathfinder measured-vision measured-lra measured-causal
  ablations-vision ablations-language ablations-lra weight-selection)
for task in "${tasks[@]}"; do
  "$task"
  for folder in "$task" "$task-strong"; do [ ! -d "$folder" ] || pack "$folder"; done
done
for folder in again/* measured/* ablations/* weight-selection/students; do [ ! -d "$folder" ] || pack "$folder"; done
