#!/usr/bin/env bash
# Every run of results/detection: about twenty minutes on two quiet cores (an estimate). WELLCOND_DATA names a folder with coco2017-mini in it.
# What is complete is not repeated.
set -euo pipefail
cd "$(dirname "$0")"
runs="${RUNS:-../../runs/detection}"  # full runs, which resume; what is packed from them is beside this script
wellcond compare --recipe coco --scale tiny --no-report --folder "$runs/coco"
wellcond pack "$runs/coco" -o coco
