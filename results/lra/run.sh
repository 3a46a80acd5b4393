#!/usr/bin/env bash
# Every run of results/lra: about an hour on two cores. WELLCOND_DATA names a mirror of the Hugging Face hub with
# stanfordnlp/imdb, uoft-cs/cifar10 and acl-citation-pairs in it. What is complete is not repeated.
set -euo pipefail
cd "$(dirname "$0")"
compare() {  # recipe, folder, further arguments
  wellcond compare --recipe "lra-$1" --scale tiny --no-report --folder "$2" "${@:3}"
}

compare listops listops
compare text text
for task in retrieval image pathfinder; do compare "$task" "$task" --seeds 1; done

# The Jacobian of the first head of each layer over training: the runs of seed 0 again, measured.
jacobian=(--seeds 1 --set tracking.jacobian_points=4 --set "tracking.heads=[0]")
compare listops analysis/listops "${jacobian[@]}"
compare text analysis/text "${jacobian[@]}"

# The strength of the fixed correction (S-T11), and attention without layer norms (S-T12).
compare text analysis/lambda --seeds 1 \
  --methods "default$(printf ',identity(lam=%s)' 0 0.5 1 2 4 6 8 10 12 14 16)"
compare text analysis/without-norm --methods "default,conditioned,identity(lam=10)" \
  --set model.norms=without_block_norms

wellcond report .
