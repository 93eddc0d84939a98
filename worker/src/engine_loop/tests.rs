//! The engine's thread over a model that costs nothing.

use std::sync::atomic::AtomicUsize;

use engine::{Allowed, ConstraintError, EngineConfig, KvBudget};
use models::{Model, TakeLogits};
use ops::{KvLayer, KvType, KvTypes, OpError, Reference, Step};
use tokio::sync::mpsc;

use super::*;

const VOCAB_SIZE: usize = 8;
/// For a machine under load; what is waited for takes milliseconds.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Every token is as likely as any other; on a device that is full, from the number of steps on that is said.
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

    fn forward(
        &mut self,
        backend: &mut Reference,
        _: &mut <Reference as Backend>::Kv,
        step: &Step<'_>,
        take: &mut TakeLogits<'_, Reference>,
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

/// Whether it would not sleep now, for the reason that somebody has waked it.
pub(crate) fn take_wake(engine_loop: &EngineLoop<Reference>) -> bool {
    matches!(engine_loop.commands.try_recv(), Ok(EngineCommand::Wake))
}

/// Allows everything, once it is open.
struct GatedConstraint {
    open: Arc<AtomicBool>,
    asked: Arc<AtomicUsize>,
}

impl Constraint for GatedConstraint {
    fn allowed(&mut self) -> Result<Allowed<'_>, ConstraintError> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        if self.open.load(Ordering::SeqCst) {
            Ok(Allowed::Tokens(&[(1 << VOCAB_SIZE) - 1]))
        } else {
            Ok(Allowed::Later)
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
            Output::Token(_) => tokens += 1,
            Output::Finished { reason, .. } => {
                assert_eq!(reason, FinishReason::Length);
                return tokens;
            }
            _ => {}
        }
    }
}

#[tokio::test]
async fn a_late_constraint_holds_up_nobody_and_is_not_waited_for_by_spinning() {
    let (handle, engine_loop) = idle_engine_loop();
    let thread = std::thread::spawn(move || engine_loop.run());
    let (open, asked) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let gate = || {
        Some(Box::new(GatedConstraint { open: open.clone(), asked: asked.clone() }) as Box<dyn Constraint>)
    };
    let (_, mut late) = handle.generate(request(&handle, 3), gate()).await.unwrap();
    let (_, mut other) = handle.generate(request(&handle, 100), None).await.unwrap();
    assert_eq!(tokens(&mut other).await, 100, "while the other one is late");
    assert!(matches!(late.recv().await, Some(Ok(Output::Admitted { .. }))));
    assert!(late.try_recv().is_err(), "it has drawn nothing");

    // Now it is alone. It is asked before each step, and between two the thread sleeps.
    let since = Instant::now();
    let before = asked.load(Ordering::SeqCst);
    tokio::time::sleep(100 * PAUSED_POLL).await;
    let looks = asked.load(Ordering::SeqCst) - before;
    let most = since.elapsed().as_micros() / PAUSED_POLL.as_micros() + 2;
    assert!(looks as u128 <= most, "{looks} looks, {most} polls");

    open.store(true, Ordering::SeqCst);
    handle.waker().wake();
    assert_eq!(tokens(&mut late).await, 3);

    // Whoever leaves while it is late frees its blocks.
    open.store(false, Ordering::SeqCst);
    let (_, leaving) = handle.generate(request(&handle, 3), gate()).await.unwrap();
    let mut snapshot = handle.snapshot.clone();
    let mut until = async |is: fn(&EngineSnapshot) -> bool| {
        drop(tokio::time::timeout(TIMEOUT, snapshot.wait_for(is)).await.expect("in time").unwrap());
    };
    until(|now| now.stats.late_rows == 2 && now.stats.kv_blocks_used > 0).await;
    drop(leaving);
    until(|now| now.streams == 0 && now.stats.kv_blocks_used == 0).await;
    drop((handle, snapshot));
    tokio::task::spawn_blocking(|| thread.join().unwrap().unwrap()).await.unwrap();
}

#[tokio::test]
async fn a_stream_that_a_full_device_ends_says_what_was_wanted_free_and_missing() {
    let (handle, engine_loop) = over(UniformModel { full_after: 2 }, |_| BackendUsage::default());
    let thread = std::thread::spawn(move || engine_loop.run());
    let (_, mut outputs) = handle.generate(request(&handle, 100), None).await.unwrap();
    let cut = loop {
        let output = tokio::time::timeout(TIMEOUT, outputs.recv()).await.expect("outputs in time");
        match output.expect("an end") {
            Ok(Output::Finished { reason, .. }) => panic!("it ended as if nothing were: {reason:?}"),
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
    // It was this step's failure, not the engine's.
    tokio::task::spawn_blocking(|| thread.join().unwrap().unwrap()).await.unwrap();
}

#[test]
fn what_is_done_when_first_needed_is_not_counted_as_the_first_step() {
    const MODULES: Duration = Duration::from_millis(20);
    let lazy = LazyInit { modules: MODULES, graphs: Duration::ZERO };
    let measure = |_: &Reference| BackendUsage {
        lazy: LazyInit { modules: MODULES, graphs: Duration::ZERO },
        ..BackendUsage::default()
    };
    let (_, mut engine_loop) = over(UniformModel { full_after: 0 }, measure);
    std::thread::sleep(2 * MODULES);
    engine_loop.record_first_step(LazyInit::default(), Duration::ZERO);
    let (first, most) = (engine_loop.first_step, engine_loop.epoch.elapsed() - MODULES);
    assert!((MODULES..=most).contains(&first), "{first:?} of {most:?}");
    engine_loop.record_first_step(lazy, Duration::ZERO);
    assert_eq!(engine_loop.first_step, first, "there is one first step");
}

#[test]
fn a_waker_takes_one_place_and_keeps_nobody_alive() {
    let (handle, mut engine_loop) = idle_engine_loop();
    let waker = handle.waker();
    (0..3).for_each(|_| waker.wake());
    assert!(take_wake(&engine_loop) && !take_wake(&engine_loop));
    waker.wake();
    assert!(!take_wake(&engine_loop), "nobody has handled the first one yet");
    engine_loop.handle(EngineCommand::Wake);
    waker.wake();
    assert!(take_wake(&engine_loop));
    engine_loop.handle(EngineCommand::Wake);
    // Commands that are there wake as well, and the next one finds room again.
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

/// Two full blocks and a part of one.
fn long_prompt(text: u32) -> Vec<u32> {
    (0..40).map(|place| place / text % VOCAB_SIZE as u32).collect()
}

/// Tokens of the prompt that were found.
fn found(engine_loop: &mut EngineLoop<Reference>, prompt: Vec<u32>) -> u64 {
    let before = engine_loop.engine.stats().prompt_tokens_cached;
    engine_loop.engine.submit(Request::new(RequestId(before), prompt, 1)).unwrap();
    while engine_loop.engine.has_work() {
        engine_loop.step().unwrap();
    }
    engine_loop.engine.stats().prompt_tokens_cached - before
}

#[test]
fn what_nobody_asks_for_again_is_forgotten_after_one_period_to_two() {
    let (_handle, mut engine_loop) = idle_engine_loop();
    let just_before = |at: Duration| at - Duration::from_nanos(1);
    let cached_at = |engine_loop: &mut EngineLoop<Reference>, now| {
        engine_loop.expire_prefixes(now);
        engine_loop.engine.stats().kv_blocks_cached
    };
    assert_eq!((found(&mut engine_loop, long_prompt(1)), found(&mut engine_loop, long_prompt(2))), (0, 0));
    assert_eq!(cached_at(&mut engine_loop, PREFIX_RETENTION), 4, "both were there for less than a period");
    assert_eq!(found(&mut engine_loop, long_prompt(1)), 32);
    assert_eq!(cached_at(&mut engine_loop, just_before(2 * PREFIX_RETENTION)), 4);
    assert_eq!(cached_at(&mut engine_loop, 2 * PREFIX_RETENTION), 2, "one of them was asked for again");
    assert_eq!(found(&mut engine_loop, long_prompt(2)), 0);
    assert_eq!(cached_at(&mut engine_loop, just_before(3 * PREFIX_RETENTION)), 4);
    assert_eq!(cached_at(&mut engine_loop, 3 * PREFIX_RETENTION), 2);
    assert_eq!(cached_at(&mut engine_loop, 4 * PREFIX_RETENTION), 0);
}

#[tokio::test]
async fn prompts_are_forgotten_while_it_is_idle_and_while_it_is_not() {
    for is_idle in [true, false] {
        let (handle, mut engine_loop) = idle_engine_loop();
        engine_loop.prefix_retention = Duration::from_millis(1);
        let thread = std::thread::spawn(move || engine_loop.run());
        let (open, asked) = (Arc::new(AtomicBool::new(is_idle)), Arc::new(AtomicUsize::new(0)));
        let gate = Box::new(GatedConstraint { open, asked });
        let (_, mut other) = handle.generate(request(&handle, 3), Some(gate)).await.unwrap();
        if is_idle {
            assert_eq!(tokens(&mut other).await, 3);
        }
        let long = Request { prompt: long_prompt(1), ..request(&handle, 1) };
        let (_, mut outputs) = handle.generate(long, None).await.unwrap();
        assert_eq!(tokens(&mut outputs).await, 1);
        // Two blocks began to be found, and ceased to be.
        let mut snapshot = handle.snapshot.clone();
        let is_forgotten = |now: &EngineSnapshot| now.stats.kv_events == 5;
        let forgotten = tokio::time::timeout(TIMEOUT, snapshot.wait_for(is_forgotten)).await;
        assert_eq!(forgotten.expect("in time").unwrap().streams, usize::from(!is_idle));
        drop((handle, snapshot, other));
        tokio::task::spawn_blocking(|| thread.join().unwrap().unwrap()).await.unwrap();
    }
}
