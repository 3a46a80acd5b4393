#!/usr/bin/env bash
# Every run of results/vision: a good hour on two cores, each ablation with one seed (SEEDS=3 for more). WELLCOND_DATA names a mirror of the Hugging Face hub
# with uoft-cs/cifar10 in it, or the hub is used. What is complete is not repeated.
set -euo pipefail
results="$(cd "$(dirname "$0")" && pwd)"
runs="${RUNS:-$results/../../runs/vision}"  # full runs, which resume; what is packed from them is beside this script
mkdir -p "$runs" && cd "$runs"
compare() { wellcond compare --scale tiny --no-report "$@"; }

for family in vit deit swin xcit davit; do
  compare --recipe "$family" --folder "$family"
done

ablate() {  # name, methods, further arguments
  compare --recipe vit-patch8 --folder "ablations/$1" --methods "$2" --seeds "${SEEDS:-1}" "${@:3}"
}
identity() { printf ',identity(lam=%s)' "$@"; }

ablate lambda "default$(identity 0 0.5 1 2 4 6 8 10 12 14 16)"
ablate partial "default,conditioned(projections=q),conditioned(projections=k),conditioned(projections=v),conditioned(projections=qk),conditioned"
ablate output "default,conditioned,conditioned(output=identity),conditioned(output=orthogonal)"
ablate value-scale "default,conditioned(value_scale=0.1),conditioned(value_scale=0.5),conditioned,conditioned(value_scale=2),conditioned(value_scale=5),conditioned(value_scale=10)"
ablate value-layout "default,conditioned,conditioned(value=joint),conditioned(value=orthogonal)"
ablate scale "default,gaussian,gaussian(value=per_head),orthogonal,conditioned(match_norm=true),conditioned"
ablate theorem "default,polar,polar(layout=joint),identity(lam=10),identity(lam=1),balanced"
ablate granularity "default,identity(lam=1),identity(lam=1, layout=per_head),balanced,balanced(layout=joint)"
ablate mimetic "default,mimetic,mimetic(transposes=released),mimetic(position=sincos2d)"
ablate without-norm "default,identity(lam=1),identity(lam=10),conditioned" --set model.norms=without_block_norms
ablate qk-norm "default,gaussian,conditioned,identity(lam=10)" --set model.arguments.qk_norm=true

# Weight selection: a teacher of twice the width for each initialisation, then the student from it.
teacher() {
  wellcond train vit-patch8 --method "$1" --folder "weight-selection/teachers/$1" \
    --set model.arguments.embed_dim=96 --set model.arguments.num_heads=6
}
for method in default mimetic conditioned; do teacher "$method"; done
compare --recipe vit-patch8 --folder weight-selection/students --seeds "${SEEDS:-1}" \
  --set model.arguments.embed_dim=48 --set model.arguments.num_heads=3 \
  --methods "$(printf 'default'; for m in default mimetic conditioned; do for l in blind heads; do \
    printf ',weight_selection(teacher=weight-selection/teachers/%s, layout=%s)' "$m" "$l"; done; done)"

for folder in vit deit swin xcit davit ablations weight-selection/teachers weight-selection/students; do
  wellcond pack "$folder" -o "$results/$folder"
done
