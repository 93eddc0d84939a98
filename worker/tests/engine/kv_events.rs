// SPDX-License-Identifier: Apache-2.0

//! KV cache events: several subscribers, subscribers that reconnect, and subscribers that do not
//! read.

use std::collections::HashSet;
use std::time::Duration;

use bytes::Bytes;
use prefix::{Scope, block_hashes};
use proto::worker::v1::worker_client::WorkerClient;
use proto::worker::v1::{self as wire, kv_event};
use tonic::transport::Channel;
use tonic::{Code, Status, Streaming};

use crate::harness::{TIMEOUT, WorkerFixture, fleet, fleet_with};

/// The cached blocks as a router would track them from events.
struct KvCacheReplica {
    frames: Streaming<wire::KvEventsFrame>,
    log: u64,
    next: u64,
    known: HashSet<Bytes>,
    /// How often an event has cleared `known`.
    cleared: usize,
}

async fn subscribe(
    client: &mut WorkerClient<Channel>,
    fingerprint: &Bytes,
    (log, from): (u64, u64),
) -> Result<Streaming<wire::KvEventsFrame>, Status> {
    let request =
        wire::SubscribeKvEventsRequest { fingerprint: fingerprint.clone(), log_id: log, from_event: from };
    Ok(client.subscribe_kv_events(request).await?.into_inner())
}

impl KvCacheReplica {
    async fn new(worker: &mut WorkerFixture) -> Self {
        let frames = subscribe(&mut worker.client, &worker.fingerprint, (0, 0)).await.unwrap();
        Self { frames, log: 0, next: 0, known: HashSet::new(), cleared: 0 }
    }

    /// Reconnects and continues from its last event.
    async fn again(&mut self, worker: &mut WorkerFixture) {
        let from = (self.log, self.next);
        self.frames = subscribe(&mut worker.client, &worker.fingerprint, from).await.unwrap();
    }

    async fn read(&mut self) -> Result<(), Status> {
        let frame = tokio::time::timeout(TIMEOUT, self.frames.message()).await.expect("a frame in time")?;
        let frame = frame.expect("the stream ends only with a status");
        for event in frame.events {
            match event.event.unwrap() {
                kv_event::Event::Stored(block) => {
                    assert_eq!(block.group, 0, "this model has one KV cache group");
                    assert!(self.known.insert(block.hash), "the block was stored twice");
                }
                kv_event::Event::Removed(block) => {
                    assert!(self.known.remove(&block.hash), "the removed block was never stored");
                }
                kv_event::Event::Cleared(wire::AllBlocksCleared {}) => {
                    self.known.clear();
                    self.cleared += 1;
                }
            }
        }
        (self.log, self.next) = (frame.log_id, frame.next_event);
        Ok(())
    }

    /// Reads up to the current state of the cache. Call while no request runs.
    async fn catch_up(&mut self, worker: &mut WorkerFixture) {
        let next = worker.stats().await.next_kv_event;
        while self.next != next {
            self.read().await.unwrap();
        }
    }
}

async fn block_tokens(worker: &mut WorkerFixture) -> usize {
    worker.metadata().await.unwrap().0.kv_block_tokens as usize
}

/// Runs a request. Returns the keys of its full blocks: all tokens of prompt and output are
/// computed except the last.
async fn run(worker: &mut WorkerFixture, prompt: &[u32], salt: &str) -> HashSet<Bytes> {
    let block_tokens = block_tokens(worker).await;
    let request = wire::GenerateRequest { cache_salt: salt.into(), ..worker.greedy(prompt, 40) };
    let generated = worker.generate(request).await.unwrap();
    assert_eq!(generated.tokens.len(), 40);
    let computed = [prompt, &generated.tokens[..39]].concat();
    let scope = Scope { salt: salt.into(), extra: Vec::new() };
    block_hashes(&scope, &computed, block_tokens)
        .map(|hash| Bytes::copy_from_slice(hash.as_bytes()))
        .collect()
}

fn prompt(number: u32) -> Vec<u32> {
    (0..100).map(|place| (place * 7 + number * 13) % 500).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_subscriber_receives_the_blocks_of_a_request() {
    let (_directory, _weight_server, mut worker) = fleet().await;
    let mut first = KvCacheReplica::new(&mut worker).await;
    first.read().await.unwrap();
    assert_eq!((first.known.len(), first.next, first.cleared), (0, 1, 1), "the cache is empty");
    let mut second = KvCacheReplica::new(&mut worker).await;
    let plain = run(&mut worker, &prompt(0), "").await;
    let salted = run(&mut worker, &prompt(0), "secret").await;
    assert!(plain.len() > 3 && plain.is_disjoint(&salted));
    let all: HashSet<Bytes> = &plain | &salted;
    for follower in [&mut first, &mut second] {
        follower.catch_up(&mut worker).await;
        assert_eq!((&follower.known, follower.cleared), (&all, 1), "the replica has exactly these blocks");
    }
    let mut late = KvCacheReplica::new(&mut worker).await;
    late.read().await.unwrap();
    assert_eq!(
        (late.known, late.next, late.log),
        (all, first.next, first.log),
        "the first update is a snapshot"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reconnecting_subscriber_continues_or_gets_a_snapshot() {
    let (_directory, _weight_server, mut worker) =
        fleet_with(|config| config.kv_bytes = service::ByteSize::mib(4)).await;
    let blocks = worker.metadata().await.unwrap().0.kv_blocks;
    let mut follower = KvCacheReplica::new(&mut worker).await;
    let first = run(&mut worker, &prompt(0), "").await;
    follower.catch_up(&mut worker).await;
    assert_eq!(follower.known, first);
    let left_at = follower.next;
    let second = run(&mut worker, &prompt(1), "").await;
    follower.again(&mut worker).await;
    follower.catch_up(&mut worker).await;
    assert_eq!(
        (&follower.known, follower.cleared),
        (&(&first | &second), 1),
        "the earlier events still count"
    );

    // Requests evict blocks until the log no longer holds the first events.
    let mut number = 2;
    while follower.next <= left_at + blocks {
        let next = run(&mut worker, &prompt(number), "").await;
        follower.catch_up(&mut worker).await;
        assert!(follower.known.is_superset(&next));
        number += 1;
    }
    assert_eq!(follower.cleared, 1);
    assert!(worker.stats().await.evictions > 0);
    let behind = (follower.log, left_at);
    let restarted = (follower.log.wrapping_add(1), follower.next);
    let ahead = (follower.log, follower.next + 1);
    for from in [behind, restarted, ahead] {
        let frames = subscribe(&mut worker.client, &worker.fingerprint, from).await.unwrap();
        let known = HashSet::from([Bytes::from_static(b"of another time")]);
        let mut again = KvCacheReplica { frames, log: 0, next: 0, known, cleared: 0 };
        again.read().await.unwrap();
        assert_eq!((&again.known, again.next, again.cleared), (&follower.known, follower.next, 1));
    }
    let another = subscribe(&mut worker.client, &"another".into(), (0, 0)).await.unwrap_err();
    assert_eq!(another.code(), Code::FailedPrecondition);
}

#[tokio::test(flavor = "multi_thread")]
async fn subscribers_that_do_not_read_delay_nothing() {
    let (_directory, _weight_server, mut worker) =
        fleet_with(|config| config.kv_bytes = service::ByteSize::mib(4)).await;
    let mut lagging = KvCacheReplica::new(&mut worker).await;
    lagging.frames = subscribe(&mut worker.slow_client().await, &worker.fingerprint, (0, 0)).await.unwrap();
    let mut following = KvCacheReplica::new(&mut worker).await;
    for number in 0..20 {
        let next = run(&mut worker, &prompt(number), "").await;
        following.catch_up(&mut worker).await;
        assert!(following.known.is_superset(&next));
    }
    // The window is full of unread frames. Later changes arrive as events or as a snapshot.
    lagging.catch_up(&mut worker).await;
    assert_eq!((lagging.known, lagging.next), (following.known.clone(), following.next));

    let mut unread = worker.slow_client().await;
    let unread = subscribe(&mut unread, &worker.fingerprint, (0, 0)).await.unwrap();
    worker.client.drain(wire::DrainRequest { grace_ms: 60_000 }).await.unwrap();
    assert_eq!(following.read().await.unwrap_err().code(), Code::Unavailable);
    let refused = subscribe(&mut worker.client, &worker.fingerprint, (0, 0)).await;
    // A stream that ends before its first frame may report its status in the headers or after them.
    let status = match refused {
        Ok(mut frames) => frames.message().await.unwrap_err(),
        Err(status) => status,
    };
    assert_eq!(status.code(), Code::Unavailable);
    tokio::time::timeout(TIMEOUT, worker.stop())
        .await
        .expect("the worker stops without waiting for subscribers")
        .unwrap();
    drop(unread);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_number_of_subscribers_is_limited() {
    const SUBSCRIBERS_MAX: usize = 16;
    let (_directory, _weight_server, mut worker) = fleet().await;
    let mut followers = Vec::new();
    for _ in 0..SUBSCRIBERS_MAX {
        followers.push(KvCacheReplica::new(&mut worker).await);
    }
    let refused = subscribe(&mut worker.client, &worker.fingerprint, (0, 0)).await.unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");
    assert!(refused.metadata().contains_key("retry-after"));
    followers.pop();
    let has_permit = async {
        while subscribe(&mut worker.client, &worker.fingerprint, (0, 0)).await.is_err() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(TIMEOUT, has_permit).await.expect("a dropped subscription frees its permit");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reset_is_refused_while_blocks_are_in_use_and_is_one_event() {
    let (_directory, _weight_server, mut worker) = fleet().await;
    let mut follower = KvCacheReplica::new(&mut worker).await;
    let left = run(&mut worker, &prompt(0), "").await;
    follower.catch_up(&mut worker).await;
    assert_eq!((&follower.known, follower.cleared), (&left, 1));
    // The client does not read, so the request is paused and keeps its blocks.
    let mut client = worker.slow_client().await;
    let running = client.generate(worker.greedy(&prompt(1), 400)).await.unwrap();
    worker.until("a running request", |stats| stats.running == 1).await;
    let refused = worker.client.reset_prefix_cache(wire::ResetPrefixCacheRequest {}).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused}");
    assert!(worker.stats().await.kv_cached_tokens > 0);
    drop((running, client));
    worker.until("nothing held", |stats| stats.running == 0 && stats.kv_used_tokens == 0).await;
    worker.client.reset_prefix_cache(wire::ResetPrefixCacheRequest {}).await.unwrap();
    worker.until("nothing kept", |stats| stats.kv_cached_tokens == 0).await;
    follower.catch_up(&mut worker).await;
    assert_eq!((follower.known.len(), follower.cleared), (0, 2));
    let cached = worker.stats().await.prompt_tokens_cached;
    run(&mut worker, &prompt(0), "").await;
    assert_eq!(worker.stats().await.prompt_tokens_cached, cached, "the prompt was computed again");
}
