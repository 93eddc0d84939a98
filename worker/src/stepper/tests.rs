//! The engine's thread over a model that costs nothing.

use std::sync::atomic::AtomicUsize;

use engine::{Allowed, ConstraintError, EngineConfig, KvBudget};
use models::{Model, TakeLogits};
use ops::{KvLayer, KvType, KvTypes, OpError, Reference, Step};
use tokio::sync::mpsc;

use super::*;

const VOCABULARY: usize = 8;
/// For a machine under load; what is waited for takes milliseconds.
const PATIENCE: Duration = Duration::from_secs(60);

/// Every token is as likely as any other; on a device that is full, from the number of steps on that is said.
struct Even {
    full_after: usize,
}

impl Model<Reference> for Even {
    fn vocab_size(&self) -> usize {
        VOCABULARY
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
        let mut logits = backend.tensor(rows.max(1), VOCABULARY)?;
        backend.write(&mut logits, rows, &vec![0.0; rows * VOCABULARY])?;
        take(backend, 0..rows, &logits)
    }
}

pub(crate) fn over_nothing() -> (Handle, Stepper<Reference>) {
    over(Even { full_after: usize::MAX }, |_| Measured::default())
}

fn over(model: Even, measure: Measure<Reference>) -> (Handle, Stepper<Reference>) {
    let config = EngineConfig { kv_types: KvType::F32.into(), ..EngineConfig::new(KvBudget::Tokens(1024)) };
    let engine = Engine::new(Box::new(model), Reference::new(), &config).unwrap();
    stepper(engine, 1, measure, Timeline::start())
}

/// Whether it would not sleep now, for the reason that somebody has waked it.
pub(crate) fn is_waked(stepper: &Stepper<Reference>) -> bool {
    matches!(stepper.commands.try_recv(), Ok(Command::Wake))
}

/// Allows everything, once it is open.
struct Gate {
    open: Arc<AtomicBool>,
    asked: Arc<AtomicUsize>,
}

impl Constraint for Gate {
    fn allowed(&mut self) -> Result<Allowed<'_>, ConstraintError> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        if self.open.load(Ordering::SeqCst) {
            Ok(Allowed::Tokens(&[(1 << VOCABULARY) - 1]))
        } else {
            Ok(Allowed::Later)
        }
    }

    fn accept(&mut self, _: u32) {}
}

fn request(handle: &Handle, max_tokens: u32) -> Request {
    Request::new(handle.next_id(), vec![1, 2, 3], max_tokens)
}

async fn tokens(outputs: &mut mpsc::Receiver<Item>) -> usize {
    let mut tokens = 0;
    loop {
        let output = tokio::time::timeout(PATIENCE, outputs.recv()).await.expect("outputs in time");
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
    let (handle, stepper) = over_nothing();
    let thread = std::thread::spawn(move || stepper.run());
    let (open, asked) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let gate = || Some(Box::new(Gate { open: open.clone(), asked: asked.clone() }) as Box<dyn Constraint>);
    let (_, mut late) = handle.generate(request(&handle, 3), gate()).await.unwrap();
    let (_, mut other) = handle.generate(request(&handle, 100), None).await.unwrap();
    assert_eq!(tokens(&mut other).await, 100, "while the other one is late");
    assert!(matches!(late.recv().await, Some(Ok(Output::Admitted { .. }))));
    assert!(late.try_recv().is_err(), "it has drawn nothing");

    // Now it is alone. It is asked before each step, and between two the thread sleeps.
    let since = Instant::now();
    let before = asked.load(Ordering::SeqCst);
    tokio::time::sleep(100 * HELD_POLL).await;
    let looks = asked.load(Ordering::SeqCst) - before;
    let most = since.elapsed().as_micros() / HELD_POLL.as_micros() + 2;
    assert!(looks as u128 <= most, "{looks} looks, {most} polls");

    open.store(true, Ordering::SeqCst);
    handle.waker().wake();
    assert_eq!(tokens(&mut late).await, 3);

    // Whoever leaves while it is late frees its blocks.
    open.store(false, Ordering::SeqCst);
    let (_, leaving) = handle.generate(request(&handle, 3), gate()).await.unwrap();
    let mut snapshot = handle.snapshot.clone();
    let mut until = async |is: fn(&Snapshot) -> bool| {
        drop(tokio::time::timeout(PATIENCE, snapshot.wait_for(is)).await.expect("in time").unwrap());
    };
    until(|now| now.stats.late_rows == 2 && now.stats.kv_blocks_used > 0).await;
    drop(leaving);
    until(|now| now.streams == 0 && now.stats.kv_blocks_used == 0).await;
    drop((handle, snapshot));
    tokio::task::spawn_blocking(|| thread.join().unwrap().unwrap()).await.unwrap();
}

#[tokio::test]
async fn a_stream_that_a_full_device_ends_says_what_was_wanted_free_and_missing() {
    let (handle, stepper) = over(Even { full_after: 2 }, |_| Measured::default());
    let thread = std::thread::spawn(move || stepper.run());
    let (_, mut outputs) = handle.generate(request(&handle, 100), None).await.unwrap();
    let cut = loop {
        let output = tokio::time::timeout(PATIENCE, outputs.recv()).await.expect("outputs in time");
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
    let lazy = Lazy { modules: MODULES, graphs: Duration::ZERO };
    let measure = |_: &Reference| Measured {
        lazy: Lazy { modules: MODULES, graphs: Duration::ZERO },
        ..Measured::default()
    };
    let (_, mut stepper) = over(Even { full_after: 0 }, measure);
    std::thread::sleep(2 * MODULES);
    stepper.note_first(Lazy::default(), Duration::ZERO);
    let (first, most) = (stepper.first_step, stepper.epoch.elapsed() - MODULES);
    assert!((MODULES..=most).contains(&first), "{first:?} of {most:?}");
    stepper.note_first(lazy, Duration::ZERO);
    assert_eq!(stepper.first_step, first, "there is one first step");
}

#[test]
fn a_waker_takes_one_place_and_keeps_nobody_alive() {
    let (handle, mut stepper) = over_nothing();
    let waker = handle.waker();
    (0..3).for_each(|_| waker.wake());
    assert!(is_waked(&stepper) && !is_waked(&stepper));
    waker.wake();
    assert!(!is_waked(&stepper), "nobody has handled the first one yet");
    stepper.handle(Command::Wake);
    waker.wake();
    assert!(is_waked(&stepper));
    stepper.handle(Command::Wake);
    // Commands that are there wake as well, and the next one finds room again.
    while handle.commands.try_send(Command::Drain).is_ok() {}
    waker.wake();
    while let Ok(command) = stepper.commands.try_recv() {
        assert!(matches!(command, Command::Drain));
    }
    waker.wake();
    assert!(is_waked(&stepper));
    drop(handle);
    waker.wake();
    assert_eq!(stepper.commands.recv_timeout(PATIENCE).err(), Some(RecvTimeoutError::Disconnected));
}

/// Two full blocks and a part of one.
fn long_prompt(text: u32) -> Vec<u32> {
    (0..40).map(|place| place / text % VOCABULARY as u32).collect()
}

/// Tokens of the prompt that were found.
fn found(stepper: &mut Stepper<Reference>, prompt: Vec<u32>) -> u64 {
    let before = stepper.engine.stats().prompt_tokens_cached;
    stepper.engine.submit(Request::new(RequestId(before), prompt, 1)).unwrap();
    while stepper.engine.has_work() {
        stepper.step().unwrap();
    }
    stepper.engine.stats().prompt_tokens_cached - before
}

#[test]
fn what_nobody_asks_for_again_is_forgotten_after_one_period_to_two() {
    let (_handle, mut stepper) = over_nothing();
    let just_before = |at: Duration| at - Duration::from_nanos(1);
    let cached_at = |stepper: &mut Stepper<Reference>, now| {
        stepper.forget_prompts(now);
        stepper.engine.stats().kv_blocks_cached
    };
    assert_eq!((found(&mut stepper, long_prompt(1)), found(&mut stepper, long_prompt(2))), (0, 0));
    assert_eq!(cached_at(&mut stepper, PROMPTS_KEPT), 4, "both were there for less than a period");
    assert_eq!(found(&mut stepper, long_prompt(1)), 32);
    assert_eq!(cached_at(&mut stepper, just_before(2 * PROMPTS_KEPT)), 4);
    assert_eq!(cached_at(&mut stepper, 2 * PROMPTS_KEPT), 2, "one of them was asked for again");
    assert_eq!(found(&mut stepper, long_prompt(2)), 0);
    assert_eq!(cached_at(&mut stepper, just_before(3 * PROMPTS_KEPT)), 4);
    assert_eq!(cached_at(&mut stepper, 3 * PROMPTS_KEPT), 2);
    assert_eq!(cached_at(&mut stepper, 4 * PROMPTS_KEPT), 0);
}

#[tokio::test]
async fn prompts_are_forgotten_while_it_is_idle_and_while_it_is_not() {
    for is_idle in [true, false] {
        let (handle, mut stepper) = over_nothing();
        stepper.prompts_kept = Duration::from_millis(1);
        let thread = std::thread::spawn(move || stepper.run());
        let (open, asked) = (Arc::new(AtomicBool::new(is_idle)), Arc::new(AtomicUsize::new(0)));
        let gate = Box::new(Gate { open, asked });
        let (_, mut other) = handle.generate(request(&handle, 3), Some(gate)).await.unwrap();
        if is_idle {
            assert_eq!(tokens(&mut other).await, 3);
        }
        let long = Request { prompt: long_prompt(1), ..request(&handle, 1) };
        let (_, mut outputs) = handle.generate(long, None).await.unwrap();
        assert_eq!(tokens(&mut outputs).await, 1);
        // Two blocks began to be found, and ceased to be.
        let mut snapshot = handle.snapshot.clone();
        let is_forgotten = |now: &Snapshot| now.stats.kv_events == 5;
        let forgotten = tokio::time::timeout(PATIENCE, snapshot.wait_for(is_forgotten)).await;
        assert_eq!(forgotten.expect("in time").unwrap().streams, usize::from(!is_idle));
        drop((handle, snapshot, other));
        tokio::task::spawn_blocking(|| thread.join().unwrap().unwrap()).await.unwrap();
    }
}
