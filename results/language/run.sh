#!/usr/bin/env bash
# Every run of results/language: about an hour on two quiet cores (an estimate). WELLCOND_DATA names a mirror of the Hugging Face hub with
# roneneldan/TinyStories, Salesforce/wikitext and nyu-mll/glue in it, or the hub is used. What is complete is not repeated.
set -euo pipefail
cd "$(dirname "$0")"
runs="${RUNS:-../../runs/language}"  # full runs, which resume; what is packed from them is beside this script
compare() {  # recipe, folder, further arguments
  wellcond compare --recipe "$1" --scale tiny --no-report --folder "$runs/$2" "${@:3}"
}

plain="default,gaussian,mimetic,conditioned,balanced,identity(lam=1),identity(lam=10)"
causal="conditioned(keys=tied),conditioned(keys=tied,own_token=0.1),gaussian(keys=tied)"
for task in gpt2-tinystories gpt2-wikitext2; do compare "$task" "$task" --methods "$plain,$causal"; done

compare crammed-bert crammed-bert
wellcond glue "$runs/crammed-bert" --tasks cola,sst2,rte,mrpc

# Two further methods of the library, with a baseline of their own.
for task in gpt2-tinystories gpt2-wikitext2 crammed-bert; do
  compare "$task" "further/$task" --methods default,orthogonal,polar
done
wellcond glue "$runs/further/crammed-bert" --tasks cola,sst2,rte,mrpc

# The Jacobian of the first head of each layer under the causal mask: the runs of seed 0 again, measured.
compare gpt2-tinystories causal-jacobian --seeds 1 --set tracking.jacobian_points=3 --set "tracking.heads=[0]" \
  --methods "default,gaussian,mimetic,conditioned,balanced,$causal,identity(lam=10)"

wellcond pack "$runs" -o .
