"""Writes kv_events.txt: every recorded KV event file, read by an independent decoder (the Python
package msgpack), one line an event. Run from this folder: python3 kv_events.py > kv_events.txt"""

import pathlib
import struct
import sys

import msgpack

FIXTURES = pathlib.Path(__file__).resolve().parents[4] / "fixtures"
STORED = [
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
    "extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality",
    "ownership", "session_id", "lookahead_token_ids",
]
REMOVED = ["block_hashes", "medium", "group_idx", "locality", "ownership"]


def frames(data):
    at = 0
    while at < len(data):
        (size,) = struct.unpack_from(">I", data, at)
        yield data[at + 4 : at + 4 + size]
        at += 4 + size


def hash_text(value):
    if value is None:
        return "-"
    return value.hex() if isinstance(value, bytes) else str(value % 2**64)


def text(value):
    return "-" if value is None else str(value)


def keys_text(keys):
    if keys is None:
        return "unreported"
    if not any(keys):
        return "none"
    return "|".join(",".join(block or []) for block in keys)


def event_text(event):
    if isinstance(event, dict):
        tag, fields = event["type"], event
    else:
        tag = event[0]
        names = STORED if tag == "BlockStored" else REMOVED
        fields = dict(zip(names, event[1:]))
    get = fields.get
    if tag == "AllBlocksCleared":
        return "cleared"
    hashes = get("block_hashes")
    place = f"medium={text(get('medium'))} group={get('group_idx') or 0} locality={text(get('locality'))} ownership={text(get('ownership'))}"
    ends = f"n={len(hashes)} first={hash_text(hashes[0])} last={hash_text(hashes[-1])}"
    if tag == "BlockRemoved":
        return f"removed {ends} {place}"
    tokens = get("token_ids")
    return (
        f"stored {ends} parent={hash_text(get('parent_block_hash'))} tokens={len(tokens)} sum={sum(tokens)}"
        f" block={get('block_size')} lora={text(get('lora_id'))}/{text(get('lora_name'))}"
        f" keys={keys_text(get('extra_keys'))} kind={text(get('kv_cache_spec_kind'))}"
        f" window={text(get('kv_cache_spec_sliding_window'))} session={text(get('session_id'))}"
        f" lookahead={text(get('lookahead_token_ids'))} {place}"
    )


def main():
    for path in sorted(FIXTURES.glob("vllm-*/kv-events/*.bin")):
        name = f"{path.parent.parent.name}/{path.name}"
        all_frames = list(frames(path.read_bytes()))
        replay = "dealer" in path.name
        version = tuple(int(part) for part in path.parent.parent.name[5:].split("."))
        size = 4 if replay and version >= (0, 26) else 3
        for start in range(0, len(all_frames), size):
            topic, number, payload = all_frames[start : start + size][-3:]
            seq = int.from_bytes(number, "big")
            if not payload:
                print(f"{name} end")
                continue
            ts, events, rank = msgpack.unpackb(payload)
            for event in events:
                print(f"{name} seq={seq} ts={ts!r} rank={text(rank)} {event_text(event)}")


sys.exit(main())
