#!/bin/sh
# Fills fuzz/corpus/TARGET with the recordings of real engines and the hand-written fuzz/seeds.
set -eu
cd "$(dirname "$0")"
fixtures=../fixtures
for target in kv_batch kv_frames sse openai_request openai_chunk metrics; do
    mkdir -p "corpus/$target"
done

# A recording's name within the corpus: its version and file in one.
name() { echo "$1" | sed 's|^\.\./fixtures/||; s|/|_|g'; }

for file in "$fixtures"/*/kv-events/*.bin; do
    cp "$file" "corpus/kv_frames/$(name "$file")"
    case "$file" in
        *dealer*) ;;
        # The payload starts after topic ("kv@tiny"), number and three lengths of 4 bytes.
        *) tail -c +28 "$file" > "corpus/kv_batch/$(name "$file")" ;;
    esac
done
for file in "$fixtures"/*/sse/*.txt; do
    # The first byte tells the target how to cut the stream.
    { printf '\007'; cat "$file"; } > "corpus/sse/$(name "$file")"
    # The first and last chunks: those between repeat.
    { grep '^data: ' "$file" || true; } | sed 's/^data: //' | sed -n '1,2p;$p' \
        > "corpus/openai_chunk/$(name "$file")"
done
for file in "$fixtures"/*/metrics/*.prom; do
    # Beginning and end, cut short for speed; together they hold every kind of line.
    head -c 6000 "$file" > "corpus/metrics/$(name "$file")-head"
    tail -c 6000 "$file" > "corpus/metrics/$(name "$file")-tail"
done
cp seeds/openai_request/* corpus/openai_request/
