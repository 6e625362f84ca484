//! Behaviour of the core: eviction order, duplicate copies, hits, salts, resets, pauses, tiers.

use super::control::{PauseAsk, PauseMode};
use super::events::{Event, Medium, Stored};
use super::request::{Ask, Finish, Output};
use super::*;

const BLOCK: usize = 4;

fn config(connector: Connector) -> Config {
    Config {
        block_size: BLOCK,
        gpu_blocks: 33,
        cpu_blocks: 64,
        blocks_per_chunk: 1,
        self_describing: false,
        drops_last_hit: false,
        connector,
        max_model_len: 256,
        max_running: 8,
        max_step_tokens: 256,
        sliding_window: None,
        pause_reaches_connector: true,
        partial_wake_keeps_paused: true,
        paused_counts_as_sleeping: true,
        cpu_event_block_size: 0,
    }
}

fn engine(connector: Connector) -> Engine {
    Engine::new(config(connector), 1, None)
}

fn tokens(first: u32, count: u32) -> Vec<u32> {
    (first..first + count).collect()
}

fn ask(id: u64, prompt: Vec<u32>, max_tokens: usize) -> Ask {
    let external_id = format!("r{id}");
    Ask { id, external_id, prompt, max_tokens, ..Ask::default() }
}

/// Steps until nothing is left to do; one event list a batch, empty ones left out.
fn drain(engine: &mut Engine) -> (Vec<Output>, Vec<Vec<Event>>) {
    let (mut outputs, mut batches) = (Vec::new(), Vec::new());
    for _ in 0..1000 {
        if !engine.has_work() {
            return (outputs, batches);
        }
        let step = engine.step();
        outputs.extend(step.outputs);
        batches.extend((!step.events.is_empty()).then_some(step.events));
    }
    panic!("the engine does not come to rest");
}

fn run(engine: &mut Engine, ask: Ask) -> (Vec<Output>, Vec<Vec<Event>>) {
    engine.add(ask);
    drain(engine)
}

fn stored(event: &Event) -> &Stored {
    match event {
        Event::Stored(stored) => stored,
        other => panic!("not a store: {other:?}"),
    }
}

/// One letter an event: S and s for device and host stores, R and r for removals, C for a clear.
fn shape(batches: &[Vec<Event>]) -> Vec<String> {
    let letter = |event: &Event| match event {
        Event::Stored(s) if s.medium == Medium::Gpu => 'S',
        Event::Stored(_) => 's',
        Event::Removed { medium: Medium::Gpu, .. } => 'R',
        Event::Removed { .. } => 'r',
        Event::Cleared => 'C',
    };
    batches.iter().map(|batch| batch.iter().map(letter).collect()).collect()
}

fn sleep(level: u8, mode: PauseMode) -> PauseAsk {
    PauseAsk { mode, clear_cache: true, keep_connector: false, sleep_level: Some(level) }
}

fn pause(mode: PauseMode, clear_cache: bool) -> PauseAsk {
    PauseAsk { mode, clear_cache, keep_connector: false, sleep_level: None }
}

#[test]
fn the_block_with_the_last_token_is_never_a_device_hit() {
    let mut engine = engine(Connector::None);
    let prompt = tokens(10, 12);
    run(&mut engine, ask(1, prompt.clone(), 1));
    assert_eq!(engine.holds(&prompt, &Identity::default()).gpu, 2);
    let (outputs, _) = run(&mut engine, ask(2, prompt.clone(), 1));
    assert_eq!(outputs[0].cached.map(|c| c.local), Some(8));
    let longer = tokens(10, 13);
    assert_eq!(engine.holds(&longer, &Identity::default()).hit_tokens, 12);
}

#[test]
fn a_prefix_extension_names_its_parent_and_a_decode_store_follows_the_prefill() {
    let mut engine = engine(Connector::None);
    // 7 prompt tokens and 2 outputs: the second block is full when output 1 is computed.
    let (_, batches) = run(&mut engine, ask(1, tokens(10, 7), 3));
    assert_eq!(shape(&batches), ["S", "S"]);
    let (first, second) = (stored(&batches[0][0]), stored(&batches[1][0]));
    assert_eq!((first.hashes.len(), first.parent), (1, None));
    assert_eq!(second.parent, Some(first.hashes[0]));
    assert_eq!(second.tokens.len(), BLOCK);
    let (_, batches) = run(&mut engine, ask(2, tokens(10, 13), 1));
    assert_eq!(stored(&batches[0][0]).parent, Some(first.hashes[0]));
    assert_eq!(stored(&batches[0][0]).hashes.len(), 2);
}

#[test]
fn equal_prompts_prefilled_at_once_store_two_copies_and_remove_two() {
    let mut engine = engine(Connector::None);
    let prompt = tokens(10, 9);
    engine.add(ask(1, prompt.clone(), 1));
    engine.add(ask(2, prompt, 1));
    let first = engine.step();
    // The second request finds the first one's blocks, cached in the same step.
    assert_eq!(shape(&[first.events]), ["S"]);
    drain(&mut engine);

    let mut engine = Engine::new(config(Connector::None), 1, None);
    let prompt = tokens(10, 8);
    engine.add(ask(1, prompt.clone(), 1));
    engine.add(ask(2, prompt.clone(), 1));
    let (_, batches) = drain(&mut engine);
    // The last block is no hit, so the second request fills its own copy of it.
    assert_eq!(shape(&batches), ["SS"]);
    let copy = stored(&batches[0][1]);
    assert_eq!(copy.hashes, stored(&batches[0][0]).hashes[1..]);
    // Filling the pool removes both copies, one event each.
    let (_, batches) = run(&mut engine, ask(3, tokens(1000, 125), 1));
    let gone =
        |event: &&Event| matches!(event, Event::Removed { hashes, .. } if *hashes == copy.hashes);
    assert_eq!(batches[0].iter().filter(gone).count(), 2);
}

#[test]
fn tails_are_evicted_before_heads_and_old_before_young() {
    let mut engine = engine(Connector::None);
    let (_, old) = run(&mut engine, ask(1, tokens(10, 12), 1));
    let (_, young) = run(&mut engine, ask(2, tokens(100, 12), 1));
    let chain = |batches: &[Vec<Event>]| stored(&batches[0][0]).hashes.clone();
    let mut expected: Vec<_> = chain(&old).into_iter().rev().collect();
    expected.extend(chain(&young).into_iter().rev());
    // 32 usable blocks, 6 of them cached: 30 more take the uncached ones first, then 4 cached.
    let (_, batches) = run(&mut engine, ask(3, tokens(1000, 119), 1));
    let removed: Vec<BlockHash> = batches[0]
        .iter()
        .filter_map(|event| match event {
            Event::Removed { hashes, .. } => Some(hashes[0]),
            _ => None,
        })
        .collect();
    assert_eq!(removed, expected[..4]);
    assert!(matches!(batches[0].last(), Some(Event::Stored(_))), "removals come before the store");
}

#[test]
fn a_salt_is_in_the_first_blocks_extra_keys_and_separates_tenants() {
    let mut engine = engine(Connector::None);
    let salted = Identity { salt: Some("tenantA".into()), lora: None };
    let prompt = tokens(10, 9);
    let salted_ask = Ask { identity: salted.clone(), ..ask(1, prompt.clone(), 1) };
    let (_, batches) = run(&mut engine, salted_ask);
    let keys = stored(&batches[0][0]).extra_keys.clone().unwrap();
    assert_eq!(keys, [vec!["tenantA".to_owned()], vec![]]);
    assert_eq!(engine.holds(&prompt, &salted).gpu, 2);
    assert_eq!(engine.holds(&prompt, &Identity::default()).gpu, 0);
    let lora = hash::Lora { id: 1, name: "sql".into() };
    let both = Identity { lora: Some(lora), ..salted };
    assert_eq!(both.extra_keys(0), ["sql", "tenantA"]);
    assert_eq!(both.extra_keys(1), ["sql"]);
}

#[test]
fn an_adapter_and_a_salt_of_one_name_share_no_block() {
    let mut engine = engine(Connector::None);
    let prompt = tokens(10, 9);
    let lora = Some(hash::Lora { id: 1, name: "sql".into() });
    let adapted = Identity { salt: None, lora };
    let salted = Identity { salt: Some("sql".into()), lora: None };
    assert_eq!(adapted.extra_keys(0), salted.extra_keys(0), "events tell them alike");
    run(&mut engine, Ask { identity: adapted.clone(), ..ask(1, prompt.clone(), 1) });
    assert_eq!(engine.holds(&prompt, &adapted).gpu, 2);
    assert_eq!(engine.holds(&prompt, &salted).gpu, 0);
}

#[test]
fn a_request_that_skips_the_caches_takes_nothing_and_stores_copies() {
    let mut engine = engine(Connector::Offloading);
    let prompt = tokens(10, 9);
    run(&mut engine, ask(1, prompt.clone(), 1));
    let skipping = Ask { skips_caches: true, ..ask(2, prompt.clone(), 1) };
    let (outputs, batches) = run(&mut engine, skipping);
    assert_eq!(outputs[0].cached.map(|c| (c.local, c.external)), Some((0, 0)));
    assert_eq!(shape(&batches), ["S"], "a second copy on the device, none in the tier");
    assert_eq!(engine.counters().prefix_queries, 9, "of the first request alone");
    assert_eq!(engine.reset_prefix_cache(false, false), Ok(true));
    let skipping = Ask { skips_caches: true, ..ask(3, prompt, 1) };
    let (outputs, _) = run(&mut engine, skipping);
    assert_eq!(outputs[0].cached.map(|c| (c.local, c.external)), Some((0, 0)), "nor of the tier");
}

#[test]
fn a_hit_that_is_reported_is_announced_from_the_start_and_removed_once() {
    let mut engine = engine(Connector::None);
    let prompt = tokens(10, 13);
    run(&mut engine, ask(1, prompt.clone(), 1));
    let session_id = Some("s".to_owned());
    let reporting = Ask { reports_hits: true, session_id, ..ask(2, prompt, 1) };
    let (_, batches) = run(&mut engine, reporting);
    assert_eq!(shape(&batches), ["S"]);
    let report = stored(&batches[0][0]).clone();
    assert_eq!((report.hashes.len(), report.parent, report.tokens.len()), (3, None, 12));
    assert_eq!(report.session_id.as_deref(), Some("s"));
    let (_, batches) = run(&mut engine, ask(3, tokens(1000, 128), 1));
    let gone = batches.iter().flatten().filter(|event| match event {
        Event::Removed { hashes, .. } => report.hashes.contains(&hashes[0]),
        _ => false,
    });
    assert_eq!(gone.count(), 3, "one copy each");
}

#[test]
fn a_speculating_engine_computes_the_last_block_of_each_hit_again() {
    let drafting = Config { drops_last_hit: true, ..config(Connector::None) };
    let mut engine = Engine::new(drafting, 1, None);
    let prompt = tokens(10, 13);
    run(&mut engine, ask(1, prompt.clone(), 1));
    assert_eq!(engine.holds(&prompt, &Identity::default()).gpu, 2);
    let (outputs, _) = run(&mut engine, ask(2, prompt, 1));
    assert_eq!(outputs[0].cached.map(|c| c.local), Some(8));
    let (outputs, _) = run(&mut engine, ask(3, tokens(10, 5), 1));
    assert_eq!(outputs[0].cached.map(|c| c.local), Some(0));
}

fn chunked(self_describing: bool) -> Engine {
    let config = Config { blocks_per_chunk: 2, self_describing, ..config(Connector::Offloading) };
    Engine::new(config, 1, None)
}

#[test]
fn a_chunk_is_named_by_its_last_block_and_loaded_whole_or_not_at_all() {
    let mut engine = chunked(false);
    let prompt = tokens(10, 21);
    let (_, batches) = run(&mut engine, ask(1, prompt.clone(), 1));
    assert_eq!(shape(&batches), ["S", "ss"], "five blocks are two chunks");
    let hashes = stored(&batches[0][0]).hashes.clone();
    let named: Vec<_> = batches[1].iter().map(|event| stored(event).hashes.clone()).collect();
    assert!(named.contains(&vec![hashes[1]]) && named.contains(&vec![hashes[3]]));
    assert_eq!(engine.reset_prefix_cache(false, false), Ok(true));
    let holds = |count: u32| engine.holds(&tokens(10, count), &Identity::default()).hit_tokens;
    assert_eq!((holds(7), holds(9), holds(21)), (0, 8, 16), "a block is no chunk");
    run(&mut engine, ask(2, tokens(10, 5), 1));
    let held = |count: u32| engine.holds(&tokens(10, count), &Identity::default());
    assert_eq!(held(9).hit_tokens, 4, "what is left of the chunk is less than one");
    assert_eq!(held(21).hit_tokens, 16, "a load may begin within a chunk");
}

#[test]
fn self_describing_events_tell_each_block_of_a_chunk() {
    let mut engine = chunked(true);
    let (_, batches) = run(&mut engine, ask(1, tokens(10, 21), 1));
    let device = stored(&batches[0][0]);
    for event in &batches[1] {
        let host = stored(event);
        assert_eq!((host.hashes.len(), host.block_size, host.tokens.len()), (2, BLOCK, 8));
        let at = device.hashes.iter().position(|hash| *hash == host.hashes[0]).unwrap();
        assert_eq!(host.hashes, device.hashes[at..at + 2]);
        assert_eq!(host.parent, at.checked_sub(1).map(|i| device.hashes[i]));
        assert_eq!(host.tokens, device.tokens[at * BLOCK..(at + 2) * BLOCK]);
        assert_eq!(host.extra_keys, None);
    }
}

#[test]
fn an_idle_reset_is_announced_with_the_next_request_only() {
    let mut engine = engine(Connector::None);
    run(&mut engine, ask(1, tokens(10, 9), 1));
    assert_eq!(engine.reset_prefix_cache(false, false), Ok(true));
    assert_eq!(engine.reset_prefix_cache(false, false), Ok(true));
    assert!(!engine.has_work());
    let (_, batches) = run(&mut engine, ask(2, tokens(10, 9), 1));
    assert_eq!(shape(&batches), ["CCS"]);
}

#[test]
fn a_busy_reset_is_refused_and_wipes_the_external_tier_all_the_same() {
    let mut engine = engine(Connector::Offloading);
    let prompt = tokens(10, 9);
    run(&mut engine, ask(1, prompt.clone(), 1));
    assert_eq!(engine.holds(&prompt, &Identity::default()).cpu, 2);
    engine.add(ask(2, tokens(100, 5), 10));
    engine.step();
    assert_eq!(engine.reset_prefix_cache(false, true), Ok(false));
    let holds = engine.holds(&prompt, &Identity::default());
    assert_eq!((holds.gpu, holds.cpu), (2, 0));
}

#[test]
fn resetting_running_requests_recomputes_them_without_changing_their_output() {
    let plain = run(&mut engine(Connector::None), ask(1, tokens(10, 9), 12)).0;
    let mut engine = engine(Connector::None);
    engine.add(ask(1, tokens(10, 9), 12));
    let mut outputs = engine.step().outputs;
    outputs.extend(engine.step().outputs);
    assert_eq!(engine.reset_prefix_cache(true, false), Ok(true));
    let (rest, batches) = drain(&mut engine);
    outputs.extend(rest);
    let text =
        |outputs: &[Output]| outputs.iter().flat_map(|o| o.tokens.clone()).collect::<Vec<_>>();
    assert_eq!(text(&outputs), text(&plain));
    assert!(shape(&batches)[0].starts_with("CS"));
    assert_eq!(engine.counters().preemptions, 1);
}

#[test]
fn a_host_store_follows_its_device_store_by_one_batch() {
    let mut engine = engine(Connector::Offloading);
    let (_, batches) = run(&mut engine, ask(1, tokens(10, 9), 1));
    assert_eq!(shape(&batches), ["S", "ss"]);
    let host = stored(&batches[1][0]);
    assert_eq!((host.block_size, host.tokens.len(), host.parent), (0, 0, None));
    assert!(host.extra_keys.is_none() && host.spec.is_none());
}

#[test]
fn a_kept_tier_restores_in_the_batch_after_the_clear_and_is_not_announced_again() {
    let mut engine = engine(Connector::Offloading);
    let prompt = tokens(10, 13);
    run(&mut engine, ask(1, prompt.clone(), 1));
    assert_eq!(engine.reset_prefix_cache(false, false), Ok(true));
    let (outputs, batches) = run(&mut engine, ask(2, prompt, 1));
    assert_eq!(shape(&batches), ["C", "S"]);
    assert_eq!(stored(&batches[1][0]).hashes.len(), 3);
    let cached = outputs[0].cached.unwrap();
    assert_eq!((cached.local, cached.external), (0, 12));
    assert_eq!(engine.tiers().transfers().loads, 1);
}

#[test]
fn a_connector_hit_may_cover_the_last_token() {
    let mut engine = engine(Connector::Offloading);
    let prompt = tokens(10, 8);
    run(&mut engine, ask(1, prompt.clone(), 1));
    assert_eq!(engine.reset_prefix_cache(false, false), Ok(true));
    assert_eq!(engine.holds(&prompt, &Identity::default()).hit_tokens, 8);
    let (outputs, _) = run(&mut engine, ask(2, prompt, 1));
    assert_eq!(outputs[0].cached.unwrap().external, 8);
}

#[test]
fn a_wiped_tier_is_stored_and_announced_again_without_removals() {
    for ask_external in [true, false] {
        let mut engine = engine(Connector::Offloading);
        run(&mut engine, ask(1, tokens(10, 9), 1));
        if ask_external {
            assert_eq!(engine.reset_prefix_cache(false, true), Ok(true));
        } else {
            let (_, done) = engine.pause(sleep(1, PauseMode::Abort), 0);
            assert_eq!(done, Some(Ok(())));
            assert!(engine.wake(None));
        }
        let (_, batches) = run(&mut engine, ask(2, tokens(10, 9), 1));
        assert_eq!(shape(&batches), ["CS", "ss"]);
    }
}

#[test]
fn host_eviction_is_one_event_with_many_hashes() {
    let mut engine =
        Engine::new(Config { cpu_blocks: 4, ..config(Connector::Offloading) }, 1, None);
    run(&mut engine, ask(1, tokens(10, 17), 1));
    let (_, batches) = run(&mut engine, ask(2, tokens(100, 13), 1));
    let removed = batches.iter().flatten().find_map(|event| match event {
        Event::Removed { hashes, medium: Medium::Cpu, .. } => Some(hashes.len()),
        _ => None,
    });
    assert_eq!(removed, Some(3));
}

#[test]
fn pending_host_events_survive_a_reset_and_follow_the_clear() {
    let mut engine = engine(Connector::Offloading);
    engine.hold_connector_events(true);
    run(&mut engine, ask(1, tokens(10, 9), 1));
    assert_eq!(engine.reset_prefix_cache(false, true), Ok(true));
    engine.hold_connector_events(false);
    let (_, batches) = run(&mut engine, ask(2, tokens(10, 5), 1));
    assert_eq!(shape(&batches)[0], "CSss", "stale stores after the clear, in one batch");
}

#[test]
fn pause_modes_end_run_on_or_stall_what_is_in_flight() {
    for mode in [PauseMode::Abort, PauseMode::Wait, PauseMode::Keep] {
        let mut engine = engine(Connector::None);
        engine.add(ask(1, tokens(10, 5), 6));
        engine.step();
        let (aborted, done) = engine.pause(pause(mode, false), 7);
        assert!(engine.is_paused(), "{mode:?}: true as soon as the pause starts");
        engine.add(ask(2, tokens(50, 5), 1));
        let (outputs, _) = drain(&mut engine);
        let finish = |list: &[Output]| list.last().and_then(|o| o.finish.clone());
        match mode {
            PauseMode::Abort => assert_eq!(finish(&aborted), Some(Finish::Abort)),
            PauseMode::Wait => assert_eq!(finish(&outputs), Some(Finish::Length)),
            PauseMode::Keep => assert!(outputs.is_empty() && aborted.is_empty()),
        }
        let settled = engine.settle_idle();
        match done {
            Some(done) => assert_eq!(done, Ok(())),
            None => assert_eq!(settled, [(7, Ok(()))]),
        }
        engine.resume();
        let (outputs, _) = drain(&mut engine);
        let kept = usize::from(mode == PauseMode::Keep);
        let ended = outputs.iter().filter(|o| o.finish == Some(Finish::Length)).count();
        assert_eq!(ended, 1 + kept, "{mode:?}: the queued one, and the kept one");
    }
}

#[test]
fn keep_with_a_cleared_cache_recomputes_the_kept_request() {
    let mut engine = engine(Connector::None);
    engine.add(ask(1, tokens(10, 9), 8));
    engine.step();
    engine.step();
    let (_, done) = engine.pause(pause(PauseMode::Keep, true), 0);
    assert_eq!(done, Some(Ok(())));
    assert!(!engine.has_work());
    engine.resume();
    let step = engine.step();
    assert_eq!(shape(&[step.events]), ["CS"]);
    assert_eq!(step.computed_tokens, 11, "prompt and two output tokens");
}

#[test]
fn only_pauses_that_clear_announce_a_clear() {
    for (ask_pause, clears) in [
        (pause(PauseMode::Abort, true), true),
        (pause(PauseMode::Abort, false), false),
        (sleep(1, PauseMode::Wait), true),
        (sleep(2, PauseMode::Keep), true),
    ] {
        let mut engine = engine(Connector::Offloading);
        run(&mut engine, ask(1, tokens(10, 9), 1));
        assert_eq!(engine.pause(ask_pause, 0).1, Some(Ok(())));
        let holds = engine.holds(&tokens(10, 9), &Identity::default());
        assert_eq!((holds.gpu == 0, holds.cpu == 0), (clears, clears));
        engine.wake(None);
        let (_, batches) = run(&mut engine, ask(2, tokens(500, 5), 1));
        assert_eq!(shape(&batches)[0].starts_with('C'), clears);
    }
}

#[test]
fn an_aborted_queue_causes_a_step_that_publishes_the_pending_clear() {
    let mut engine = engine(Connector::None);
    run(&mut engine, ask(1, tokens(10, 9), 1));
    engine.pause(pause(PauseMode::Abort, true), 0);
    engine.add(ask(2, tokens(10, 9), 1));
    assert!(!engine.has_work(), "queued, not run");
    let (aborted, done) = engine.pause(sleep(1, PauseMode::Abort), 3);
    assert_eq!(aborted[0].finish, Some(Finish::Abort));
    assert_eq!((aborted[0].cached, done), (Some(request::CachedTokens::default()), None));
    let (_, batches) = drain(&mut engine);
    assert_eq!(shape(&batches), ["C"]);
    assert_eq!(engine.settle_idle(), [(3, Ok(()))]);
    assert!(engine.is_sleeping());
}

#[test]
fn resume_on_a_sleeper_serves_with_the_memory_asleep() {
    let mut engine = engine(Connector::None);
    engine.pause(sleep(1, PauseMode::Abort), 0);
    engine.resume();
    assert_eq!((engine.is_paused(), engine.is_sleeping()), (false, true));
    run(&mut engine, ask(1, tokens(10, 5), 3));
    assert_eq!(engine.counters().tokens_while_asleep, 3);
}

#[test]
fn a_partial_wake_keeps_the_engine_off_and_a_wrong_tag_does_nothing() {
    let mut engine = engine(Connector::None);
    engine.pause(sleep(1, PauseMode::Abort), 0);
    let tags = |tags: &[&str]| Some(tags.iter().map(|t| (*t).to_owned()).collect::<Vec<_>>());
    assert!(!engine.wake(tags(&["scheduling"]).as_deref()));
    assert!(!engine.wake(tags(&["weights"]).as_deref()));
    assert!(!engine.wake(tags(&["weights", "kv_cache"]).as_deref()), "weights are awake already");
    assert!(engine.is_paused());
    assert!(engine.wake(tags(&["kv_cache"]).as_deref()));
    assert_eq!((engine.is_paused(), engine.is_sleeping()), (false, false));
}

#[test]
fn wake_undoes_a_pause() {
    let mut engine = engine(Connector::None);
    engine.pause(pause(PauseMode::Keep, false), 0);
    assert!(engine.wake(None));
    assert!(!engine.is_paused());
}

#[test]
fn blocks_of_old_weights_stay_hittable_and_the_oracle_says_so() {
    let mut engine = engine(Connector::Offloading);
    let prompt = tokens(10, 9);
    run(&mut engine, ask(1, prompt.clone(), 1));
    engine.set_checkpoint(2);
    engine.reload_weights();
    let holds = engine.holds(&prompt, &Identity::default());
    assert_eq!((holds.hit_tokens, holds.stale), (8, 2));
    assert_eq!(engine.reset_prefix_cache(false, false), Ok(true));
    assert_eq!(engine.holds(&prompt, &Identity::default()).stale, 2, "the tier was kept");
    let named = Ask { external_id: "two".to_owned(), ..ask(2, prompt, 1) };
    run(&mut engine, named);
    let took = request::Reused { gpu: 0, cpu: 8, remote: 0, stale: 8 };
    assert_eq!(engine.reused("two"), Some(took));
    assert_eq!(engine.reused("three"), None);
}

#[test]
fn a_small_pool_preempts_and_still_ends_every_request() {
    let small = Config { gpu_blocks: 9, ..config(Connector::None) };
    let mut engine = Engine::new(small, 1, None);
    for id in 1..=3 {
        engine.add(ask(id, tokens(100 * u32::try_from(id).unwrap(), 9), 16));
    }
    let (outputs, _) = drain(&mut engine);
    let ended = outputs.iter().filter(|o| o.finish == Some(Finish::Length)).count();
    assert_eq!((ended, outputs.len()), (3, 48));
    assert!(engine.counters().preemptions > 0);
}

#[test]
fn a_stop_string_ends_the_output_with_its_name() {
    let (outputs, _) = run(&mut engine(Connector::None), ask(1, tokens(10, 5), 20));
    let all: Vec<u32> = outputs.iter().flat_map(|o| o.tokens.clone()).collect();
    let text = crate::tokenizer::decode(&all, false);
    let stop = text[4..7].to_owned();
    let stopped = Ask { stop: vec![stop.clone()], ..ask(1, tokens(10, 5), 20) };
    let (outputs, _) = run(&mut engine(Connector::None), stopped);
    let end = text.find(&stop).unwrap() + 3;
    assert_eq!(outputs.len(), end);
    let reason = request::StopReason::Text(stop);
    assert_eq!(outputs.last().unwrap().finish, Some(Finish::Stop(Some(reason))));
}

#[test]
fn a_sliding_window_group_hits_by_its_last_window_and_repeats_hashes() {
    let hybrid = Config { sliding_window: Some(8), ..config(Connector::None) };
    let mut engine = Engine::new(hybrid, 1, None);
    let (_, batches) = run(&mut engine, ask(1, tokens(10, 17), 1));
    assert_eq!(shape(&batches), ["SS"]);
    let (full, window) = (stored(&batches[0][0]), stored(&batches[0][1]));
    assert_eq!((full.group, window.group), (0, 1));
    assert_eq!(full.hashes, window.hashes);
    let (outputs, _) = run(&mut engine, ask(2, tokens(10, 17), 1));
    assert_eq!(outputs[0].cached.unwrap().local, 16);
}

#[test]
fn a_shared_store_outlives_the_process() {
    let mut first = engine(Connector::Mooncake);
    let prompt = tokens(10, 9);
    let (_, batches) = run(&mut first, ask(1, prompt.clone(), 1));
    assert_eq!(shape(&batches), ["S"], "it announces nothing");
    let second = Engine::new(config(Connector::Mooncake), 1, first.take_remote());
    let holds = second.holds(&prompt, &Identity::default());
    assert_eq!((holds.gpu, holds.remote, holds.hit_tokens), (0, 2, 8));
}
