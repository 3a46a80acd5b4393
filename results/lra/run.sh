#!/usr/bin/env bash
# Every run of results/lra: about an hour on two quiet cores. WELLCOND_DATA names a mirror of the Hugging Face hub with
# stanfordnlp/imdb and uoft-cs/cifar10 in it, or the hub is used. What is complete is not repeated.
set -euo pipefail
cd "$(dirname "$0")"
compare() {  # recipe, folder, further arguments
  wellcond compare --recipe "lra-$1" --scale tiny --no-report --folder "$2" "${@:3}"
}

compare listops listops
compare text text
for task in image pathfinder; do compare "$task" "$task" --seeds 1; done

# The Jacobian of the first head of each layer: the runs of seed 0 again, measured.
compare listops analysis/listops --seeds 1 --set tracking.jacobian_points=4 --set "tracking.heads=[0]"
compare text analysis/text --seeds 1 --set tracking.jacobian_points=2 --set "tracking.heads=[0]" \
  --methods "default,conditioned"

# The strength of the fixed correction (S-T11), and attention without layer norms (S-T12), at 300 steps.
compare text analysis/lambda --seeds 1 --set training.length.steps=300 \
  --methods "default$(printf ',identity(lam=%s)' 1 2 4 8 16)"
compare text analysis/without-norm --seeds 1 --set training.length.steps=300 \
  --set model.norms=without_block_norms --methods "default,conditioned,balanced,identity(lam=10)"

for folder in listops text image pathfinder; do wellcond report "$folder"; done
for folder in analysis/*; do wellcond report "$folder" --no-pictures; done
