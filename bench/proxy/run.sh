#!/usr/bin/env bash
# Run the proxy scenarios over contestants and print one table per scenario.
#
#   ./run.sh CONTESTANT...      (default: all of them)
#
# ROUNDS=2      rounds over everything; the table keeps each cell's cheapest (CPU) round
# SCENARIOS=... names from the list below (default: all)
# SECS=4        length of the timed scenarios
# PEERS=DIR     where peers.sh put the venvs (default out/peers)
#
# All contestants are up for the whole run and each scenario goes round them in turn, so the
# machine's noise falls on all alike and ratios within one table hold.
set -euo pipefail
cd "$(dirname "$0")"
OUT=$PWD/out; mkdir -p "$OUT"
PEERS=${PEERS:-$OUT/peers}
BIN=${CARGO_TARGET_DIR:-$PWD/target}/release
# fak is of another workspace than the bench, with a target folder of its own.
FAK=${FAK:-${CARGO_TARGET_DIR:-$PWD/../../target}/release/fak}
ROUNDS=${ROUNDS:-2} SECS=${SECS:-4}
ALL="direct nginx floor-raw floor-hyper fak smg-rr smg-ca vllm-rr vllm-ca sglang-rr sglang-ca"
SCENARIOS=${SCENARIOS:-json1k-c1 json1k-c16 json1k-c64 json1k-rate json64k-c16 sse-c16 sse-c256 sse-10ms hold2000 hold2000-slow}
BACKENDS="127.0.0.1:9201 127.0.0.1:9202"
URLS=$(printf 'http://%s ' $BACKENDS)
ulimit -n "$(ulimit -Hn)"

# One stanza per contestant: exec a server on 127.0.0.1:$PORT in front of $BACKENDS ($URLS).
launch() {
  local dir=$OUT/$1; mkdir -p "$dir"
  local policy=round_robin; [[ $1 == *-ca ]] && policy=cache_aware
  case $1 in
    nginx)
      sed -e "s#@DIR@#$dir#; s#@PORT@#$PORT#; s#@SERVERS@#$(printf 'server %s; ' $BACKENDS)#" nginx.conf.in > "$dir/nginx.conf"
      exec nginx -c "$dir/nginx.conf" ;;
    fak) exec "$FAK" serve --listen 127.0.0.1:$PORT --db sqlite::memory: \
      $(n=0; for url in $URLS; do echo --worker w$((n++))="$url"; done) ;;
    floor-*) exec "$BIN/floor" --mode "${1#floor-}" --port "$PORT" --workers "${BACKENDS/ /,}" ;;
    smg-*) exec "${SMG:-$PEERS/smg/bin/smg}" launch --host 127.0.0.1 --port "$PORT" --worker-urls $URLS --policy $policy \
      --log-level warn --prometheus-port $((PORT + 100)) --disable-tokenizer-autoload --worker-startup-check-interval 1 ;;
    vllm-*) exec "${VLLM_ROUTER:-$PEERS/vllm-router/bin/vllm-router}" --host 127.0.0.1 --port "$PORT" --worker-urls $URLS --policy $policy \
      --log-level warning --prometheus-port $((PORT + 100)) --worker-startup-check-interval 1 ;;
    sglang-*) exec "${SGLANG_ROUTER:-$PEERS/sglang-router/bin/sglang-router}" launch --host 127.0.0.1 --port "$PORT" --worker-urls $URLS --policy $policy \
      --log-level warn --prometheus-port $((PORT + 100)) --worker-startup-check-interval 1 ;;
    *) echo "unknown contestant $1" >&2; exit 2 ;;
  esac
}

arguments() {
  case $1 in
    json1k-c1)   echo "--body 1024 --conns 1 --seconds $SECS" ;;
    json1k-c16)  echo "--body 1024 --conns 16 --seconds $SECS" ;;
    json1k-c64)  echo "--body 1024 --conns 64 --seconds $SECS" ;;
    json1k-rate) echo "--body 1024 --conns 64 --rate 1000 --seconds $SECS" ;;
    json64k-c16) echo "--body 65536 --conns 16 --seconds $SECS" ;;
    sse-c16)     echo "--body 1024 --stream 64 --conns 16 --seconds $SECS" ;;
    sse-c256)    echo "--body 1024 --stream 64 --conns 256 --seconds $SECS" ;;
    sse-10ms)    echo "--body 1024 --stream 64 --delay 10 --conns 64 --seconds $SECS" ;;
    hold2000)    echo "--body 1024 --stream 64 --delay 50 --conns 2000 --requests 2000 --ramp 1000 --warmup 0" ;;
    hold2000-slow) echo "--body 1024 --stream 16 --delay 200 --conns 2000 --requests 2000 --ramp 1000 --warmup 0" ;;
    *) echo "unknown scenario $1" >&2; exit 2 ;;
  esac
}

[ $# -gt 0 ] || set -- $ALL
started=()
cleanup() { for pid in "${started[@]}"; do kill "$pid" 2>/dev/null || true; done; wait 2>/dev/null || true; }
trap cleanup EXIT

"$BIN/backend" --ports "$(sed 's/127.0.0.1://g; s/ /,/g' <<<"$BACKENDS")" > "$OUT/backend.log" 2>&1 &
backend=$!; started+=("$backend")
declare -A addr pid
PORT=9210
for name in "$@"; do
  if [ "$name" = direct ]; then addr[$name]=${BACKENDS/ /,}; pid[$name]=$backend; continue; fi
  PORT=$((PORT + 1))
  ( launch "$name" ) > "$OUT/$name.log" 2>&1 &
  pid[$name]=$!; started+=("$!"); addr[$name]=127.0.0.1:$PORT
done
for name in "$@"; do
  for _ in $(seq 60); do
    "$BIN/load" --addr "${addr[$name]}" --requests 1 --warmup 0 2>/dev/null | awk '{exit $2 != 1}' && continue 2
    sleep 0.5
  done
  echo "$name did not come up; see out/$name.log" >&2; exit 1
done

rows=$OUT/rows.tsv; : > "$rows"
for round in $(seq "$ROUNDS"); do
  for scenario in $SCENARIOS; do
    for name in "$@"; do
      row=$("$BIN/load" --addr "${addr[$name]}" --pid "${pid[$name]}" --label "$name" $(arguments "$scenario") 2>> "$OUT/$name.log")
      printf '%s\t%s\t%s\n' "$scenario" "$round" "$row" | tee -a "$rows" >&2
    done
  done
done

header=$("$BIN/load" --header)
for scenario in $SCENARIOS; do
  echo; echo "## $scenario"
  { echo "$header"
    for name in "$@"; do
      awk -F'\t' -v s="$scenario" -v n="$name" '$1 == s && $3 == n && (best == "" || $16 + 0 < cost) { best = $0; cost = $16 + 0 } END { print best }' "$rows" | cut -f3-
    done
  } | column -t -s$'\t'
done
