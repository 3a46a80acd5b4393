#!/usr/bin/env bash
# Every run of results/lra: about an hour on two quiet cores (an estimate). WELLCOND_DATA names a mirror of the Hugging Face
# hub with stanfordnlp/imdb in it, or the hub is used. What is complete is not repeated.
set -euo pipefail
cd "$(dirname "$0")"
runs="${RUNS:-../../runs/lra}"  # full runs, which resume; what is packed from them is beside this script
compare() {  # recipe, folder, further arguments
  wellcond compare --recipe "lra-$1" --scale tiny --no-report --folder "$runs/$2" "${@:3}"
}

compare listops listops
compare text text
compare pathfinder pathfinder --seeds 1

# The Jacobian of the first head of each layer: the runs of seed 0 again, measured.
compare listops analysis/listops --seeds 1 --set tracking.jacobian_points=4 --set "tracking.heads=[0]"
short=(--set task.length=128 --set model.arguments.landmarks=16)  # more is beyond double precision
compare text analysis/text --seeds 1 "${short[@]}" --set tracking.jacobian_points=3 --set "tracking.heads=[0]"

# The strength of the fixed correction (S-T11), and attention without layer norms (S-T12), whose inputs must then be larger.
short+=(--set model.arguments.word_deviation=1.0)
compare text analysis/lambda "${short[@]}" --methods "default,conditioned,balanced$(printf ',identity(lam=%s)' 1 2 4 10)"
compare text analysis/without-norm "${short[@]}" --set model.norms=without_block_norms \
  --methods "default,conditioned,balanced,identity(lam=1),identity(lam=10)"

wellcond pack "$runs" -o .
