#!/usr/bin/env bash
# Every run of results/evidence: each method searches its learning rate on two tuning seeds, then is tested on ten fresh
# ones. About an hour on two cores for each task; what is complete is not repeated. WELLCOND_DATA names a mirror of the
# Hugging Face hub, or the hub is used.
set -euo pipefail
results="$(cd "$(dirname "$0")" && pwd)"
runs="${RUNS:-$results/../../runs/evidence}"  # full runs, which resume; what is packed from them is beside this script
mkdir -p "$runs" && cd "$runs"
quick=(--scale tiny --set tracking.jacobian_points=0 --set tracking.weights_every=null --no-report)
compare() { wellcond compare "${quick[@]}" "$@"; }
pack() { for name in "$@"; do wellcond pack "$name" -o "$results/$name"; done; }

everything() {  # the strong default
  local strong=$1 joined
  local methods=("default(library=true)" default "$strong" gaussian mimetic orthogonal conditioned
    "conditioned(value_scale=default)" balanced "identity(lam=1)" "identity(lam=10)" nanochat
    "default+set(model.qk_norm=true)" "default+set(optimizer.name=muon)"
    "$strong+gaussian" "$strong+conditioned" "$strong+balanced")
  printf -v joined '%s,' "${methods[@]}"
  echo "${joined%,}"
}

strong() {  # recipe, a method, and what to search: scales of the tokens that make the default as strong as they can
  compare --recipe "$1" --folder "$1-strong" --methods "$2" --set "baseline=$2" --seeds 200,201 --tune-growth 0 "${@:3}"
}

fair() {  # recipe, its strong default, rates
  compare --recipe "$1" --folder "$1" --methods "$(everything "$2")" --set "baseline=$2" --seeds 10 --tune "optimizer.lr=$3"
}

strong digits "tokens(positions=25, embeddings=1)" --tune optimizer.lr=1e-3,3e-3,1e-2 --tune tokens.positions=6,12,25,50,101 --tune tokens.embeddings=1,3
fair digits "tokens(embeddings=3, positions=50)" 1e-3,3e-3,5.5e-3,1e-2

strong gpt2-tinystories "tokens(embeddings=3.46, positions=3.46)" --set optimizer.lr=6e-3 --tune tokens.positions=1,3.46,12 --tune tokens.embeddings=1.7,3.46,7
fair gpt2-tinystories "tokens(embeddings=3.46, positions=1)" 1.5e-3,3e-3,6e-3,1.2e-2

# Which of Q, K and V it is that hurts a causal model.
tied="conditioned(keys=tied),conditioned(keys=tied, value_scale=default)"
compare --recipe gpt2-tinystories --folder causal --set "evaluation.every={steps: 150}" --seeds 5 \
  --methods "default,conditioned,conditioned(projections=qk),conditioned(projections=v),conditioned(value_scale=default),$tied"

pack digits-strong digits gpt2-tinystories-strong gpt2-tinystories causal
