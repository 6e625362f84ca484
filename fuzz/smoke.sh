#!/bin/sh
# Runs every fuzz target for SECONDS from the recordings; fails on the first crash, hang or use of
# more than 1 GiB, whose input is left in fuzz/artifacts. Usage: fuzz/smoke.sh SECONDS
set -eu
seconds=${1:?usage: fuzz/smoke.sh SECONDS}
cd "$(dirname "$0")"
cargo fuzz --version > /dev/null 2>&1 || cargo install cargo-fuzz --locked --debug
./seed.sh
cargo fuzz build --sanitizer none
# As many at once as there are cores; xargs fails if any of them does.
cargo fuzz list | xargs -n 1 -P "$(nproc)" sh -c '
    log=$(mktemp)
    cargo fuzz run "$2" --sanitizer none -- \
        -max_total_time="$1" -timeout=10 -rss_limit_mb=1024 -max_len=65536 \
        -print_final_stats=1 -verbosity=0 > "$log" 2>&1 && status=0 || status=$?
    echo "== $2" >&2
    if [ "$status" -eq 0 ]; then tail -n 5 "$log" >&2; else tail -n 60 "$log" >&2; fi
    exit "$status"
' sh "$seconds"
