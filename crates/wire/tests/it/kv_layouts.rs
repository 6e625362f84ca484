//! Layouts that no single recording shows: forms mixed in one batch, short and long positional
//! forms, extra and missing names, unknown types, and every form of a hash.

use fak_wire::kv::{
    Batch, BlockHash, DecodeError, Event, ExtraKey, ExtraKeys, Limits, Removed, Shape, Stored,
    decode,
};
use rmp::encode::{
    write_array_len, write_bin, write_f64, write_map_len, write_nil, write_sint, write_str,
    write_uint,
};

/// Builds msgpack by hand: the encoder under test's decoder must not be its own.
#[derive(Default, Clone)]
struct Pack(Vec<u8>);

impl Pack {
    fn array(mut self, len: u32) -> Self {
        write_array_len(&mut self.0, len).unwrap();
        self
    }
    fn map(mut self, len: u32) -> Self {
        write_map_len(&mut self.0, len).unwrap();
        self
    }
    fn str(mut self, text: &str) -> Self {
        write_str(&mut self.0, text).unwrap();
        self
    }
    fn bin(mut self, bytes: &[u8]) -> Self {
        write_bin(&mut self.0, bytes).unwrap();
        self
    }
    fn uint(mut self, value: u64) -> Self {
        write_uint(&mut self.0, value).unwrap();
        self
    }
    fn sint(mut self, value: i64) -> Self {
        write_sint(&mut self.0, value).unwrap();
        self
    }
    fn nil(mut self) -> Self {
        write_nil(&mut self.0).unwrap();
        self
    }
    fn float(mut self, value: f64) -> Self {
        write_f64(&mut self.0, value).unwrap();
        self
    }
    fn uints(self, values: impl ExactSizeIterator<Item = u64>) -> Self {
        let packed = self.array(values.len() as u32);
        values.fold(packed, Pack::uint)
    }
    fn then(mut self, other: &Pack) -> Self {
        self.0.extend_from_slice(&other.0);
        self
    }
}

fn pack() -> Pack {
    Pack::default()
}

fn batch_of(events: &[Pack]) -> Pack {
    let head = pack().array(3).float(1.5).array(events.len() as u32);
    events.iter().fold(head, |packed, event| packed.then(event)).uint(0)
}

fn read(events: &[Pack]) -> Result<Batch, DecodeError> {
    decode(&batch_of(events).0, &Limits::default())
}

/// Two blocks of two tokens: the part that all forms of a store share.
fn positional_store(fields: u32) -> Pack {
    let packed = pack().array(fields + 1).str("BlockStored").uints([7, 8].into_iter());
    packed.nil().uints([1, 2, 3, 4].into_iter()).uint(2).nil()
}

fn named_store(names: u32) -> Pack {
    let packed = pack().map(names + 5).str("type").str("BlockStored");
    let packed = packed.str("block_hashes").uints([7, 8].into_iter());
    let packed = packed.str("parent_block_hash").nil();
    packed.str("token_ids").uints([1, 2, 3, 4].into_iter()).str("block_size").uint(2)
}

fn expected_store() -> Stored {
    Stored {
        hashes: vec![BlockHash::Int(7), BlockHash::Int(8)],
        tokens: vec![1, 2, 3, 4],
        block_size: 2,
        ..Stored::default()
    }
}

#[test]
fn arrays_and_maps_mix_in_one_batch_and_unknown_types_are_counted() {
    let of_0_9 = positional_store(5);
    let of_0_22 = positional_store(10).str("GPU").nil().array(2).nil().nil().uint(0).str("mla");
    let with_more = named_store(2).str("medium").str("GPU").str("colour").array(1).str("blue");
    let short = named_store(0);
    let unknown = pack().map(2).str("type").str("BlockMoved").str("medium").uint(3);
    let unknown_array = pack().array(3).str("BlockPinned").uint(1).map(1).str("x").nil();
    let batch = read(&[of_0_9, of_0_22, with_more, short, unknown, unknown_array]).unwrap();

    let store = expected_store();
    let gpu = Some("GPU".to_owned());
    let expected = [
        store.clone(),
        Stored {
            medium: gpu.clone(),
            extra_keys: ExtraKeys::None,
            spec_kind: Some("mla".to_owned()),
            ..store.clone()
        },
        Stored { medium: gpu, ..store.clone() },
        store,
    ];
    assert_eq!(batch.events, expected.map(Event::Stored));
    assert_eq!(batch.unknown_events, 2);
    assert_eq!(batch.unknown_tags, ["BlockMoved", "BlockPinned"]);
}

#[test]
fn a_truncated_batch_is_an_error_at_every_length() {
    let whole = batch_of(&[positional_store(5), named_store(0)]).0;
    assert!(decode(&whole, &Limits::default()).is_ok());
    for len in 0..whole.len() {
        assert!(decode(&whole[..len], &Limits::default()).is_err(), "{len} bytes");
    }
}

#[test]
fn a_longer_positional_form_of_a_later_version_still_reads() {
    let longer = positional_store(17).str("GPU").nil().nil();
    let longer = (0..9).fold(longer, |packed, _| packed.nil());
    let batch = read(&[longer]).unwrap();
    let medium = Some("GPU".to_owned());
    assert_eq!(batch.events, [Event::Stored(Stored { medium, ..expected_store() })]);
}

#[test]
fn the_type_may_stand_anywhere_in_the_map() {
    let last = pack().map(3).str("block_hashes").uints([9].into_iter()).str("medium").str("CPU");
    let batch = read(&[last.str("type").str("BlockRemoved")]).unwrap();
    let hashes = vec![BlockHash::Int(9)];
    let removed = Removed { hashes, medium: Some("CPU".to_owned()), ..Removed::default() };
    assert_eq!(batch.events, [Event::Removed(removed)]);
}

#[test]
fn signed_and_unsigned_hashes_of_one_bit_pattern_are_one_block() {
    let store = pack().array(6).str("BlockStored").array(1).sint(-1).sint(i64::MIN);
    let store = store.uints([1, 2].into_iter()).uint(2).nil();
    let removed = pack().array(2).str("BlockRemoved").array(2).uint(u64::MAX).uint(1 << 63);
    let batch = read(&[store, removed]).unwrap();
    let [Event::Stored(store), Event::Removed(removed)] = batch.events.as_slice() else {
        panic!("{batch:?}")
    };
    assert_eq!(store.hashes[0], removed.hashes[0]);
    assert_eq!(store.parent.as_ref(), Some(&removed.hashes[1]));
}

#[test]
fn byte_hashes_of_any_width_are_kept_and_differ_from_integers() {
    let digest = [7u8; 32];
    let removed = pack().array(2).str("BlockRemoved").array(4);
    let removed = removed.bin(&digest).bin(b"5").uint(5).bin(&[0, 0, 0, 0, 0, 0, 0, 5]);
    let batch = read(&[removed]).unwrap();
    let [Event::Removed(removed)] = batch.events.as_slice() else { panic!("{batch:?}") };
    let bytes = |bytes: &[u8]| BlockHash::Bytes(bytes.into());
    let expected =
        [bytes(&digest), bytes(b"5"), BlockHash::Int(5), bytes(&[0, 0, 0, 0, 0, 0, 0, 5])];
    assert_eq!(removed.hashes, expected);
}

#[test]
fn every_kind_of_extra_key_is_kept_apart() {
    let keys = pack().array(2).nil().array(6).str("tenantA").bin(&[1, 2]).sint(-3);
    let keys = keys.array(2).str("image-1").sint(-4).float(0.5).array(2).str("x").nil();
    let store = named_store(1).str("extra_keys").then(&keys);
    let batch = read(&[store]).unwrap();
    let [Event::Stored(store)] = batch.events.as_slice() else { panic!("{batch:?}") };
    let opaque = |packed: Pack| ExtraKey::Opaque(packed.0.into());
    let expected = vec![
        ExtraKey::Text("tenantA".to_owned()),
        ExtraKey::Bytes([1, 2].into()),
        ExtraKey::Int(-3),
        ExtraKey::Pair("image-1".to_owned(), -4),
        opaque(pack().float(0.5)),
        opaque(pack().array(2).str("x").nil()),
    ];
    assert_eq!(store.extra_keys, ExtraKeys::PerBlock(vec![vec![], expected]));
}

#[test]
fn extra_keys_for_another_number_of_blocks_are_refused() {
    let store = named_store(1).str("extra_keys").array(3).nil().nil().nil();
    let error = read(&[store]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "event 0, field extra_keys: found 3 entries, expected 2, one for each of block_hashes"
    );
}

/// A store of `hashes` hashes and `tokens` tokens in blocks of two.
fn store_of(hashes: u64, tokens: u64, block_size: u64, kind: Option<&str>) -> Pack {
    let packed = pack().map(6).str("type").str("BlockStored");
    let packed = packed.str("block_hashes").uints((0..hashes as u32).map(u64::from));
    let packed = packed.str("parent_block_hash").nil();
    let packed = packed.str("token_ids").uints((0..tokens as u32).map(u64::from));
    let packed = packed.str("block_size").uint(block_size).str("kv_cache_spec_kind");
    match kind {
        Some(kind) => packed.str(kind),
        None => packed.nil(),
    }
}

#[test]
fn tokens_must_fit_the_hashes_and_the_block_size() {
    let shape = |hashes, tokens, block_size, kind| {
        let batch = read(&[store_of(hashes, tokens, block_size, kind)])?;
        let [Event::Stored(store)] = batch.events.as_slice() else { panic!("{batch:?}") };
        Ok::<Shape, DecodeError>(store.shape())
    };
    let full = Some("full_attention");
    assert_eq!(shape(2, 4, 2, full), Ok(Shape::Blocks));
    // Up to 0.19.1 the offload tier gave its block size without tokens, since 0.20.2 it gives 0.
    assert_eq!(shape(1, 0, 48, None), Ok(Shape::LocationOnly));
    assert_eq!(shape(1, 0, 0, None), Ok(Shape::LocationOnly));
    // Sliding-window and state-space groups leave blocks out, and old layouts do not name them.
    assert_eq!(shape(1, 6, 2, Some("sliding_window")), Ok(Shape::Sparse));
    assert_eq!(shape(0, 4, 2, Some("mamba")), Ok(Shape::Sparse));
    assert_eq!(shape(1, 6, 2, None), Ok(Shape::Sparse));

    let text = |result: Result<Shape, DecodeError>| result.unwrap_err().to_string();
    assert_eq!(
        text(shape(2, 5, 2, full)),
        "event 0, field token_ids: found 5 tokens, expected 4: 2 block_hashes of block_size 2"
    );
    assert_eq!(
        text(shape(1, 4, 2, full)),
        "event 0, field token_ids: found 4 tokens, expected 2: 1 block_hashes of block_size 2"
    );
    assert!(shape(3, 4, 2, None).is_err(), "more hashes than tokens for them");
    assert!(shape(1, 5, 2, None).is_err(), "a part of a block");
    assert_eq!(
        text(shape(2, 4, 0, None)),
        "event 0, field block_size: found 0, expected more than 0 where token_ids are given"
    );
}

#[test]
fn a_store_without_a_parent_field_is_not_taken_for_a_prompts_start() {
    let store = pack().map(4).str("type").str("BlockStored").str("block_hashes").array(0);
    let store = store.str("token_ids").array(0).str("block_size").uint(0);
    let error = read(&[pack().array(1).str("AllBlocksCleared"), store]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "event 1, field parent_block_hash: found nothing, expected it in every store"
    );
    assert_eq!(error.place().event, Some(1));
}

#[test]
fn a_wrong_type_is_named_with_its_event_and_field() {
    let removed = pack().array(3).str("BlockRemoved").array(1).str("abc").nil();
    let error = read(&[removed]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "event 0, field block_hashes: found a string, expected a 64-bit integer or bytes"
    );
    let store = named_store(1).str("group_idx").sint(-1);
    assert_eq!(
        read(&[store]).unwrap_err().to_string(),
        "event 0, field group_idx: found -1, expected a group of 0 or more, or nil"
    );
}

#[test]
fn nil_fields_mean_what_absent_ones_do() {
    let nils = named_store(4).str("medium").nil().str("group_idx").nil();
    let nils = nils.str("extra_keys").nil().str("session_id").nil();
    assert_eq!(read(&[nils]).unwrap().events, read(&[named_store(0)]).unwrap().events);
}

#[test]
fn lookahead_tokens_are_kept_one_list_a_block() {
    let store = named_store(1).str("lookahead_token_ids").array(2).uints([5].into_iter()).nil();
    let batch = read(&[store]).unwrap();
    let [Event::Stored(store)] = batch.events.as_slice() else { panic!("{batch:?}") };
    assert_eq!(store.lookahead, Some(vec![vec![5], vec![]]));
}

#[test]
fn a_batch_may_lack_its_rank_and_carry_more_elements() {
    let without = pack().array(2).float(1.5).array(0);
    assert_eq!(decode(&without.0, &Limits::default()).unwrap().rank, None);
    let more = pack().array(4).float(1.5).array(0).uint(3).str("later");
    assert_eq!(decode(&more.0, &Limits::default()).unwrap().rank, Some(3));
    let trailing = pack().array(2).float(1.5).array(0).nil();
    assert_eq!(
        decode(&trailing.0, &Limits::default()).unwrap_err().to_string(),
        "batch, field payload: found 1 bytes after the batch, expected its end"
    );
}
