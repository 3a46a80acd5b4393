#!/usr/bin/env bash
# tests/oldest.sh [PYTEST ARGUMENTS]: the default tests on the oldest versions that pyproject.toml allows.
# Every lower bound of pyproject.toml is installed exactly, so that one that is too low, or that contradicts another, is
# an error; what these depend on is the newest that fits. The environment is made in $OLDEST (8 GB; .venv-oldest by
# default), anew when pyproject.toml changes.
# Without arguments everything runs but pages, documents and records, which show numbers of the newest versions.
set -euo pipefail
cd "$(dirname "$0")/.."
place=${OLDEST:-.venv-oldest}
stamp=$place/.installed-$(sha256sum pyproject.toml | cut -c1-16)
if [ ! -e "$stamp" ]; then
    rm -rf "$place"
    "${PYTHON:-python3}" -m venv "$place"
    "$place/bin/python" - >"$place/oldest.txt" <<'BOUNDS'
import re, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
required = {*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)}
for line in sorted(line for line in required if not line.startswith("wellcond[")):
    print("{}=={}".format(*re.match(r"([\w.-]+)>=([\d.]+)", line).groups()))
BOUNDS
    "$place/bin/python" -m pip install --quiet --disable-pip-version-check -c "$place/oldest.txt" --editable '.[dev]'
    touch "$stamp"
fi
if [ $# -eq 0 ]; then
    set -- -m "not slow" tests/{attention,cli,conditioning,contracts,distributed,doctor,export,init}
    set -- "$@" tests/{integrations,jacobian,lab,linalg,measurement,theory,training}
fi
export PYTHONPATH=$PWD/src OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
exec "$place/bin/python" -m pytest -q -p no:cacheprovider "$@"
