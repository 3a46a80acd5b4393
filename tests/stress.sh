#!/usr/bin/env bash
# tests/stress.sh [ROUNDS] [SETTING ...]: repeats the tests of kills, signals, processes, Ray and time.
# Settings: quiet, busy (beside one busy process per core), pinned (on one core); all three by default.
# SELECT="processes and not slow" leaves out the slow ones. Each round adds a line to $LOGS/stress-SETTING.log.
set -uo pipefail
cd "$(dirname "$0")/.."
rounds=${1:-20}
shift || true
settings=("$@")
[ ${#settings[@]} -gt 0 ] || settings=(quiet busy pinned)
logs=${LOGS:-${TMPDIR:-/tmp}}
mapfile -t files < <(grep -rl "mark\.processes" tests --include="test_*.py")
export PYTHONPATH="$PWD/src" OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
busy=()
end_busy() {
    [ ${#busy[@]} -eq 0 ] || kill "${busy[@]}" 2>/dev/null
    busy=()
}
trap end_busy EXIT
failed=0
for setting in "${settings[@]}"; do
    before=()
    case $setting in
        quiet) ;;
        busy) for _ in $(seq "$(nproc)"); do (while :; do :; done) & busy+=($!); done ;;
        pinned) before=(taskset -c 0) ;;
        *) echo "expected quiet, busy or pinned, found $setting" >&2; exit 2 ;;
    esac
    for round in $(seq "$rounds"); do
        if told=$("${before[@]}" "${PYTHON:-python}" -m pytest -q -p no:cacheprovider -m "${SELECT:-processes}" "${files[@]}" 2>&1); then
            result=passed
        else
            result=FAILED failed=1
            printf '%s\n' "$told" >"$logs/stress-$setting-$(date +%Y%m%dT%H%M%S).txt"
        fi
        echo "$setting $round/$rounds $result: $(tail -n 1 <<<"$told")" | tee -a "$logs/stress-$setting.log"
    done
    end_busy
done
exit $failed
