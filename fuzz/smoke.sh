#!/bin/sh
# Runs every fuzz target for SECONDS from the recordings; fails on the first crash, hang or use of
# more than 1 GiB, whose input is left in fuzz/artifacts. Usage: fuzz/smoke.sh SECONDS
set -eu
seconds=${1:?usage: fuzz/smoke.sh SECONDS}
cd "$(dirname "$0")"
cargo fuzz --version > /dev/null 2>&1 || cargo install cargo-fuzz --locked
./seed.sh
for target in $(cargo fuzz list); do
    echo "== $target" >&2
    cargo fuzz run "$target" --sanitizer none -- \
        -max_total_time="$seconds" -timeout=10 -rss_limit_mb=1024 -max_len=65536 \
        -print_final_stats=1 -verbosity=0
done
