// SPDX-License-Identifier: Apache-2.0

//! Tests of the engine loop with a model that computes nothing.

use std::sync::atomic::AtomicUsize;

use engine::{Constraint, ConstraintError, EngineConfig, KvBudget, Request, TokenMask};
use models::{Model, OutputKind, TakeOutputs};
use ops::{KvLayer, KvType, KvTypes, OpError, Reference, Step};
use tokio::sync::mpsc;

use super::*;
use crate::backend::BackendUsage;
use crate::call_trace::CallTrace;

const VOCAB_SIZE: usize = 8;
/// Long enough for a loaded machine; the awaited events take milliseconds.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Gives every token the same logit. After `full_after` steps, its device is out of memory.
struct UniformModel {
    full_after: usize,
}

impl Model<Reference> for UniformModel {
    fn vocab_size(&self) -> usize {
        VOCAB_SIZE
    }

    fn context_length(&self) -> usize {
        1000
    }

    fn kv_layers(&self, types: &KvTypes) -> Vec<KvLayer> {
        types.layers(1, 1, 4)
    }

    fn copy_blocks(
        &mut self,
        _: &mut Reference,
        _: &mut <Reference as Backend>::Kv,
        _: &[(u32, u32)],
    ) -> Result<(), OpError> {
        Ok(())
    }

    fn output_width(&self, _: OutputKind) -> usize {
        VOCAB_SIZE
    }

    fn forward(
        &mut self,
        backend: &mut Reference,
        _: &mut <Reference as Backend>::Kv,
        step: &Step<'_>,
        _: &[OutputKind],
        take: &mut TakeOutputs<'_, Reference>,
    ) -> Result<(), OpError> {
        let Some(left) = self.full_after.checked_sub(1) else {
            return Err(OpError::Memory { op: "kv", what: "keys and values", bytes: 700, free: Some(300) });
        };
        self.full_after = left;
        let rows = step.outputs.len();
        let mut logits = backend.tensor(rows.max(1), VOCAB_SIZE)?;
        backend.write(&mut logits, rows, &vec![0.0; rows * VOCAB_SIZE])?;
        take(backend, 0..rows, &logits)
    }
}

pub(crate) fn idle_engine_loop() -> (EngineHandle, EngineLoop<Reference>) {
    over(UniformModel { full_after: usize::MAX }, |_| BackendUsage::default())
}

fn over(model: UniformModel, measure: MeasureBackend<Reference>) -> (EngineHandle, EngineLoop<Reference>) {
    let config = EngineConfig { kv_types: KvType::F32.into(), ..EngineConfig::new(KvBudget::Tokens(1024)) };
    let engine = Engine::new(Box::new(model), Reference::new(), &config).unwrap();
    engine_loop(engine, 1, measure, StartupTimeline::start())
}

fn unrecorded() -> CallTrace {
    CallTrace::begin(&traces::Tracer::default(), "generate", "r", &tonic::metadata::MetadataMap::new())
}

/// Takes the next command. Returns whether it is a `Wake`.
pub(crate) fn take_wake(engine_loop: &EngineLoop<Reference>) -> bool {
    matches!(engine_loop.commands.try_recv(), Ok(EngineCommand::Wake))
}

/// Has no mask until it is open, and then allows every token.
struct GatedConstraint {
    open: Arc<AtomicBool>,
    asked: Arc<AtomicUsize>,
}

impl Constraint for GatedConstraint {
    fn token_mask(&mut self) -> Result<TokenMask<'_>, ConstraintError> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        if self.open.load(Ordering::SeqCst) {
            Ok(TokenMask::Allowed(&[(1 << VOCAB_SIZE) - 1]))
        } else {
            Ok(TokenMask::Pending)
        }
    }

    fn accept(&mut self, _: u32) {}
}

fn request(handle: &EngineHandle, max_tokens: u32) -> Request {
    Request::new(handle.next_id(), vec![1, 2, 3], max_tokens)
}

async fn tokens(outputs: &mut mpsc::Receiver<StreamItem>) -> usize {
    let mut tokens = 0;
    loop {
        let output = tokio::time::timeout(TIMEOUT, outputs.recv()).await.expect("outputs in time");
        match output.expect("an end").expect("no cut") {
            EngineOutput::Token(_) => tokens += 1,
            EngineOutput::Finished { reason, .. } => {
                assert_eq!(reason, FinishReason::Length);
                return tokens;
            }
            _ => {}
        }
    }
}

#[tokio::test]
async fn a_request_without_its_mask_delays_no_other_request_and_is_not_polled_in_a_busy_loop() {
    let (handle, engine_loop) = idle_engine_loop();
    let thread = std::thread::spawn(move || engine_loop.run());
    let (open, asked) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let constraint = || {
        Some(Box::new(GatedConstraint { open: open.clone(), asked: asked.clone() }) as Box<dyn Constraint>)
    };
    let (_, mut late) = handle.generate(request(&handle, 3), constraint(), unrecorded()).await.unwrap();
    let (_, mut other) = handle.generate(request(&handle, 100), None, unrecorded()).await.unwrap();
    assert_eq!(tokens(&mut other).await, 100, "this request runs while the other one has no mask");
    assert!(matches!(late.recv().await, Some(Ok(EngineOutput::Admitted { .. }))));
    assert!(late.try_recv().is_err(), "no token is sampled without a mask");

    // Now the request is alone. The engine asks for its mask before each step, and sleeps between
    // steps.
    let since = Instant::now();
    let before = asked.load(Ordering::SeqCst);
    tokio::time::sleep(100 * PAUSED_POLL).await;
    let asks = asked.load(Ordering::SeqCst) - before;
    let most = since.elapsed().as_micros() / PAUSED_POLL.as_micros() + 2;
    assert!(asks as u128 <= most, "{asks} asks, {most} polls");

    open.store(true, Ordering::SeqCst);
    handle.waker().wake();
    assert_eq!(tokens(&mut late).await, 3);

    // A call that is dropped while its mask is missing frees its blocks.
    open.store(false, Ordering::SeqCst);
    let (_, leaving) = handle.generate(request(&handle, 3), constraint(), unrecorded()).await.unwrap();
    let mut snapshot = handle.snapshot.clone();
    let mut until = async |is: fn(&EngineSnapshot) -> bool| {
        drop(tokio::time::timeout(TIMEOUT, snapshot.wait_for(is)).await.expect("in time").unwrap());
    };
    until(|now| now.stats.deferred_rows == 2 && now.stats.kv_blocks_used > 0).await;
    drop(leaving);
    until(|now| now.streams == 0 && now.stats.kv_blocks_used == 0).await;
    drop((handle, snapshot));
    tokio::task::spawn_blocking(|| thread.join().unwrap().unwrap()).await.unwrap();
}

#[tokio::test]
async fn a_stream_that_runs_out_of_device_memory_ends_with_needed_free_and_missing_bytes() {
    let (handle, engine_loop) = over(UniformModel { full_after: 2 }, |_| BackendUsage::default());
    let thread = std::thread::spawn(move || engine_loop.run());
    let (_, mut outputs) = handle.generate(request(&handle, 100), None, unrecorded()).await.unwrap();
    let cut = loop {
        let output = tokio::time::timeout(TIMEOUT, outputs.recv()).await.expect("outputs in time");
        match output.expect("an end") {
            Ok(EngineOutput::Finished { reason, .. }) => {
                panic!("the stream ended without an error: {reason:?}")
            }
            Ok(_) => {}
            Err(cut) => break tonic::Status::from(cut),
        }
    };
    assert_eq!(cut.code(), tonic::Code::Internal);
    assert!(
        cut.message().contains("700 bytes for keys and values, of which 300 are free: 400 are missing"),
        "{cut}"
    );
    drop(handle);
    // Only the step failed: the engine loop ends without an error.
    tokio::task::spawn_blocking(|| thread.join().unwrap().unwrap()).await.unwrap();
}

#[test]
fn lazy_initialization_is_not_counted_as_the_first_step() {
    const MODULES: Duration = Duration::from_millis(20);
    let lazy = LazyInit { modules: MODULES, graphs: Duration::ZERO };
    let measure = |_: &Reference| BackendUsage {
        lazy_init: LazyInit { modules: MODULES, graphs: Duration::ZERO },
        ..BackendUsage::default()
    };
    let (_, mut engine_loop) = over(UniformModel { full_after: 0 }, measure);
    std::thread::sleep(2 * MODULES);
    engine_loop.record_first_step(LazyInit::default(), Duration::ZERO);
    let (first, most) = (engine_loop.first_step, engine_loop.epoch.elapsed() - MODULES);
    assert!((MODULES..=most).contains(&first), "{first:?} of {most:?}");
    engine_loop.record_first_step(lazy, Duration::ZERO);
    assert_eq!(engine_loop.first_step, first, "the first step is recorded once");
}

#[test]
fn a_waker_queues_one_command_and_does_not_keep_the_loop_running() {
    let (handle, mut engine_loop) = idle_engine_loop();
    let waker = handle.waker();
    (0..3).for_each(|_| waker.wake());
    assert!(take_wake(&engine_loop) && !take_wake(&engine_loop));
    waker.wake();
    assert!(!take_wake(&engine_loop), "the first wake-up is not handled yet");
    engine_loop.handle(EngineCommand::Wake);
    waker.wake();
    assert!(take_wake(&engine_loop));
    engine_loop.handle(EngineCommand::Wake);
    // A full queue wakes the loop too. The next wake-up finds room again.
    while handle.commands.try_send(EngineCommand::Drain).is_ok() {}
    waker.wake();
    while let Ok(command) = engine_loop.commands.try_recv() {
        assert!(matches!(command, EngineCommand::Drain));
    }
    waker.wake();
    assert!(take_wake(&engine_loop));
    drop(handle);
    waker.wake();
    assert_eq!(engine_loop.commands.recv_timeout(TIMEOUT).err(), Some(RecvTimeoutError::Disconnected));
}

/// A prompt of two full blocks and a part of a third.
fn long_prompt(text: u32) -> Vec<u32> {
    (0..40).map(|place| place / text % VOCAB_SIZE as u32).collect()
}

/// Runs a request. Returns how many tokens of its prompt were prefix cache hits.
fn cached_tokens(engine_loop: &mut EngineLoop<Reference>, prompt: Vec<u32>) -> u64 {
    let before = engine_loop.engine.stats().prompt_tokens_cached;
    engine_loop.engine.submit(Request::new(RequestId(before), prompt, 1)).unwrap();
    while engine_loop.engine.has_work() {
        engine_loop.step().unwrap();
    }
    engine_loop.engine.stats().prompt_tokens_cached - before
}

#[test]
fn an_unused_prefix_expires_after_one_to_two_periods() {
    let (_handle, mut engine_loop) = idle_engine_loop();
    let just_before = |at: Duration| at - Duration::from_nanos(1);
    let cached_at = |engine_loop: &mut EngineLoop<Reference>, now| {
        engine_loop.expire_prefixes(now);
        engine_loop.engine.stats().kv_blocks_cached
    };
    assert_eq!(
        (cached_tokens(&mut engine_loop, long_prompt(1)), cached_tokens(&mut engine_loop, long_prompt(2))),
        (0, 0)
    );
    assert_eq!(cached_at(&mut engine_loop, PREFIX_RETENTION), 4, "both prefixes are younger than a period");
    assert_eq!(cached_tokens(&mut engine_loop, long_prompt(1)), 32);
    assert_eq!(cached_at(&mut engine_loop, just_before(2 * PREFIX_RETENTION)), 4);
    assert_eq!(cached_at(&mut engine_loop, 2 * PREFIX_RETENTION), 2, "one of the prefixes had a hit");
    assert_eq!(cached_tokens(&mut engine_loop, long_prompt(2)), 0);
    assert_eq!(cached_at(&mut engine_loop, just_before(3 * PREFIX_RETENTION)), 4);
    assert_eq!(cached_at(&mut engine_loop, 3 * PREFIX_RETENTION), 2);
    assert_eq!(cached_at(&mut engine_loop, 4 * PREFIX_RETENTION), 0);
}

#[tokio::test]
async fn prefixes_expire_while_the_engine_is_idle_and_while_it_is_busy() {
    for is_idle in [true, false] {
        let (handle, mut engine_loop) = idle_engine_loop();
        engine_loop.prefix_retention = Duration::from_millis(1);
        let thread = std::thread::spawn(move || engine_loop.run());
        let (open, asked) = (Arc::new(AtomicBool::new(is_idle)), Arc::new(AtomicUsize::new(0)));
        let constraint = Box::new(GatedConstraint { open, asked });
        let (_, mut other) =
            handle.generate(request(&handle, 3), Some(constraint), unrecorded()).await.unwrap();
        if is_idle {
            assert_eq!(tokens(&mut other).await, 3);
        }
        let long = Request { prompt: long_prompt(1), ..request(&handle, 1) };
        let (_, mut outputs) = handle.generate(long, None, unrecorded()).await.unwrap();
        assert_eq!(tokens(&mut outputs).await, 1);
        // Two blocks were stored in the prefix cache, then removed from it.
        let mut snapshot = handle.snapshot.clone();
        let has_expired = |now: &EngineSnapshot| now.stats.kv_events == 5;
        let expired = tokio::time::timeout(TIMEOUT, snapshot.wait_for(has_expired)).await;
        assert_eq!(expired.expect("in time").unwrap().streams, usize::from(!is_idle));
        drop((handle, snapshot, other));
        tokio::task::spawn_blocking(|| thread.join().unwrap().unwrap()).await.unwrap();
    }
}
