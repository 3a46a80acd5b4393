#!/usr/bin/env bash
# The runs of PREREGISTRATION-2.md on the two yardsticks: `yardsticks.sh shakespeare 1` runs the first tier of methods on
# nanoGPT's shakespeare-char, `yardsticks.sh pets 1` that on Oxford Pets; a higher tier takes the lower ones along. Every
# method searches its rate on two tuning seeds and is tested on fresh ones; what is complete is not repeated, and what is
# packed beside this script counts as complete where the runs themselves are gone. JOBS says how many runs at once.
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$here/../evidence/run.sh"
mkdir -p yardsticks

rates=5e-4,1e-3,2e-3,4e-3,1e-2,3e-2
muon="+set(optimizer.name=muon)"  # matrices of the blocks by Muon, the rest by AdamW

unless_default() {  # the search for a strong default may find the default, which is there already
  [[ "$1" = default* ]] || echo "$1,"
}

shakespeare_tier() {  # tier, strong default
  case $1 in
    1) echo "default,calibrated,default$muon,calibrated$muon" ;;
    2) echo "$(unless_default "$2")gaussian,conditioned,mimetic_vo,mimetic,$(unless_default "$2$muon")gaussian$muon" ;;
    3) echo "default+muon(heads=each),default+muon(heads=pairs),calibrated+muon(heads=each),calibrated+muon(heads=pairs),default+qk_norm,default+qk_norm(gain=true)" ;;
    # Singular values of Q and K of at most 1.5 bound the logits of normed tokens by 1.5^2 D / sqrt(d) = 51, about tau
    4) echo "default+qk_clip(tau=50),default+spectral_cap(w_max=1.5, projections=qk),sigma_reparam,equilibrated,balanced,default+conditioned_tokens,default+grayed_tokens,default+qk_rate(0.3)" ;;
    5) echo "gaussian(projections=qk),conditioned(projections=qk)" ;;
  esac
}

pets_tier() {  # tier, strong default
  case $1 in
    1) echo "default,calibrated,mimetic,conditioned" ;;
    2) echo "$(unless_default "$2")gaussian,identity(lam=10)" ;;
    3) echo "default$muon,calibrated$muon" ;;
  esac
}

methods() {  # yardstick, last tier, strong default
  local tier joined=""
  for ((tier = 1; tier <= $2; tier++)); do joined+="${joined:+,}$("$1_tier" "$tier" "$3")"; done
  echo "$joined"
}

shakespeare() {  # last tier
  local best=default
  local settings=(--set "evaluation.every={steps: 2000}" --set "checkpoint.every={steps: 2000}" --no-report --jobs "${JOBS:-auto}")
  if (($1 >= 2)); then
    strong gpt2-shakespeare yardsticks/shakespeare "tokens(positions=3.46, embeddings=3.46)" --set optimizer.lr=4e-3 --tune tokens.positions=1,3.46,12 --tune tokens.embeddings=1.7,3.46,7 "${settings[@]}"
    best=$(found yardsticks/shakespeare)
  fi
  wellcond compare --recipe gpt2-shakespeare --folder yardsticks/shakespeare --methods "$(methods shakespeare "$1" "$best")" --set baseline=default --seeds 8 --tune "optimizer.lr=$rates" "${settings[@]}"
  if (($1 >= 5)); then  # the default at the sigma sqrt(D) of width 768, of another folder since a proxy is of the recipe
    wellcond compare --recipe gpt2-shakespeare --folder yardsticks/shakespeare-true --methods default --set "proxy={width: 768}" --seeds 8 --tune "optimizer.lr=$rates" "${settings[@]}"
  fi
}

pets() {  # last tier; 25 minutes a run: 4 to search the rate of a method, on one seed, and 3 to test it
  local best=default
  if (($1 >= 2)); then
    strong pets-vit-t yardsticks/pets "tokens(positions=25, embeddings=1)" --set optimizer.lr=1e-3 --tune tokens.positions=1,6,25,101 --jobs "${JOBS:-auto}"
    best=$(found yardsticks/pets)
  fi
  wellcond compare --recipe pets-vit-t --folder yardsticks/pets --methods "$(methods pets "$1" "$best")" --set baseline=default --seeds 3 --tune optimizer.lr=5e-4,1e-3,2e-3,4e-3 --tuning-seeds 1 --no-report --jobs "${JOBS:-auto}"
}

yardstick=$1
for name in "$yardstick" "$yardstick-strong" "$yardstick-true"; do
  if [ ! -d "yardsticks/$name" ] && [ -f "$here/yardsticks/$name.jsonl" ]; then
    wellcond unpack "$here/yardsticks/$name.jsonl" --folder "yardsticks/$name"
  fi
done
pack_all() {
  for name in "$yardstick" "$yardstick-strong" "$yardstick-true"; do
    [ ! -d "yardsticks/$name" ] || wellcond pack "yardsticks/$name" -o "$here/yardsticks/$name"
  done
}
trap pack_all EXIT  # also of what is complete when it is stopped
"$yardstick" "${2:-1}"
