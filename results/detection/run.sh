#!/usr/bin/env bash
# Every run of results/detection: about twenty minutes on two quiet cores (an estimate). WELLCOND_DATA names a folder with coco2017-mini in it.
# What is complete is not repeated.
set -euo pipefail
cd "$(dirname "$0")"
wellcond compare --recipe coco --scale tiny --no-report --folder coco
wellcond report coco
