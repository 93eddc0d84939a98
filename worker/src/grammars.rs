//! Grammars of requests: compiled before a request is queued, their masks computed beside the steps.
//!
//! One thread compiles, with a stack for the most nested grammar that is taken; a few compute masks. A request has at most
//! one mask under way: the matcher goes to a thread when a token was drawn and is back, with the mask of the next, when
//! the step that needs it comes to its draw. So the threads' queue is as long as requests are running, at most. Nobody
//! waits for one that is late but its request: the engine keeps the row, goes on, and is waked when the mask is there.
//!
//! A thread that panics is lost with what it was at, and another one takes its place ([`contained`]).

use std::cell::Cell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvError, Sender, SyncSender, TrySendError, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use std::{io, thread};

use bytes::Bytes;
use engine::{Allowed, Constraint, ConstraintError};
use grammar::{CompileError, Grammar, MatchError, Matcher, Next, Source, Vocabulary};
use text::Tokenizer;
use tokio::sync::oneshot;

use crate::contained::{contained, give_up_thread};
use crate::stepper::Waker;

/// For recursion over grammars as nested as `grammar` takes them; touched as far as it is used.
const STACK_BYTES: usize = 64 << 20;
/// Grammars that wait to be compiled; more requests are refused as an overload.
const COMPILING_MAX: usize = 64;
/// Compiling takes some tens of milliseconds. What takes this long on a machine that is busy may as well take for ever.
const COMPILE_WAIT: Duration = Duration::from_secs(20);
/// A mask is bounded work: some 20 ms, half a second for hostile grammars. A request whose mask takes longer, with those
/// that stand before it, ends.
const MASK_WAIT: Duration = Duration::from_secs(10);
/// Compiled grammars that are kept: the choices of a request have the same one, and clients repeat theirs.
const KEPT_MAX: usize = 16;
const MASK_THREADS_MAX: usize = 4;

/// Why a grammar was not taken.
#[derive(Debug, thiserror::Error)]
pub(crate) enum GrammarError {
    #[error(transparent)]
    Refused(#[from] CompileError),
    #[error("the output so far does not match the grammar")]
    PriorOutput(#[source] MatchError),
    #[error("the model's vocabulary cannot be used for grammars: {detail}")]
    Vocabulary { detail: String },
    #[error("it was not compiled within {} s", COMPILE_WAIT.as_secs())]
    Late,
    #[error("{COMPILING_MAX} grammars wait to be compiled already")]
    Crowded,
    #[error("cannot start a thread for grammars")]
    Thread(#[from] io::Error),
    #[error("compiling it failed, which is a mistake of this program and not of the grammar")]
    Broken,
    #[error("the worker is stopping")]
    Stopped,
}

/// The async side. Its threads are started for the first grammar: most workers never see one.
pub(crate) struct Grammars {
    gguf: Bytes,
    mask_threads: usize,
    waker: Waker,
    running: Mutex<Option<(SyncSender<Compile>, Desk)>>,
}

type Compiled = Result<Box<dyn Constraint>, GrammarError>;

struct Compile {
    source: Source,
    prior_output: Vec<u32>,
    begun: Arc<AtomicBool>,
    answer: oneshot::Sender<Compiled>,
}

impl Grammars {
    /// `gguf` is the model's metadata section. `threads`: how many may compute masks. `waker`: of the engine that draws
    /// under them.
    pub(crate) fn new(gguf: Bytes, threads: usize, waker: Waker) -> Self {
        let mask_threads = threads.clamp(1, MASK_THREADS_MAX);
        Self { gguf, mask_threads, waker, running: Mutex::new(None) }
    }

    fn running(&self) -> io::Result<(SyncSender<Compile>, Desk)> {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(running) = &*running {
            return Ok(running.clone());
        }
        let (masks, jobs) = channel();
        let jobs = Arc::new(Mutex::new(jobs));
        for _ in 0..self.mask_threads {
            start_masks(jobs.clone(), self.waker.clone())?;
        }
        let (sender, waiting) = sync_channel(COMPILING_MAX);
        let jobs = Arc::new(Mutex::new(waiting));
        let desk = Desk { gguf: self.gguf.clone(), jobs, masks };
        start_compiler(desk.clone())?;
        Ok(running.insert((sender, desk)).clone())
    }

    /// The constraint of a request whose prior output it has accepted.
    pub(crate) async fn compile(&self, source: Source, prior_output: Vec<u32>) -> Compiled {
        let (answer, answered) = oneshot::channel();
        let begun = Arc::new(AtomicBool::new(false));
        let job = Compile { source, prior_output, begun: begun.clone(), answer };
        let (jobs, desk) = self.running()?;
        jobs.try_send(job).map_err(|error| match error {
            TrySendError::Full(_) => GrammarError::Crowded,
            TrySendError::Disconnected(_) => GrammarError::Stopped,
        })?;
        match tokio::time::timeout(COMPILE_WAIT, answered).await {
            Ok(Ok(compiled)) => compiled,
            Ok(Err(_)) => Err(GrammarError::Stopped),
            Err(_) => {
                // This is what keeps the thread: others need not wait for it.
                if begun.load(Ordering::Relaxed) && give_up_thread() {
                    start_compiler(desk)?;
                }
                Err(GrammarError::Late)
            }
        }
    }
}

/// What a thread that compiles begins with.
#[derive(Clone)]
struct Desk {
    gguf: Bytes,
    jobs: Arc<Mutex<Receiver<Compile>>>,
    masks: Sender<MaskJob>,
}

fn start_compiler(desk: Desk) -> io::Result<()> {
    let thread = thread::Builder::new().name("grammars".to_owned()).stack_size(STACK_BYTES);
    thread.spawn(move || compile(&desk)).map(drop)
}

/// Until every handle is gone.
fn compile(desk: &Desk) {
    let (gguf, masks) = (desk.gguf.clone(), desk.masks.clone());
    let mut compiler = Compiler { gguf, vocabulary: None, kept: VecDeque::new(), masks };
    loop {
        let Ok(Compile { source, prior_output, begun, answer }) = next(&desk.jobs) else { return };
        if answer.is_closed() {
            continue;
        }
        begun.store(true, Ordering::Relaxed);
        let answer = Rc::new(Cell::new(Some(answer)));
        let reply = |answer: &Cell<Option<oneshot::Sender<Compiled>>>, compiled| {
            // Fails when nobody waits any more.
            drop(answer.take().map(|answer| answer.send(compiled)));
        };
        let lost = {
            let (desk, answer) = (desk.clone(), answer.clone());
            move || {
                // Without a thread the next grammars are late.
                drop(start_compiler(desk));
                reply(&answer, Err(GrammarError::Broken));
            }
        };
        let compiled = contained(lost, || compiler.constraint(source, &prior_output));
        reply(&answer, compiled);
    }
}

struct Compiler {
    gguf: Bytes,
    /// Made for the first grammar.
    vocabulary: Option<Result<Vocabulary, String>>,
    /// The last used one first.
    kept: VecDeque<(Source, Grammar)>,
    masks: Sender<MaskJob>,
}

impl Compiler {
    fn constraint(&mut self, source: Source, prior_output: &[u32]) -> Compiled {
        let mut matcher = self.grammar(source)?.matcher();
        for &token in prior_output {
            matcher.accept(token).map_err(GrammarError::PriorOutput)?;
        }
        let mut mask = Vec::new();
        let next = matcher.allowed(&mut mask);
        let work = MaskWork { matcher, mask, next };
        let (sender, back) = sync_channel(1);
        let masks = self.masks.clone();
        Ok(Box::new(Masked { here: Some(Ok(Box::new(work))), begun: Instant::now(), back, sender, masks }))
    }

    fn grammar(&mut self, source: Source) -> Result<&Grammar, GrammarError> {
        if let Some(at) = self.kept.iter().position(|(kept, _)| *kept == source) {
            if let Some(used) = self.kept.remove(at) {
                self.kept.push_front(used);
            }
        } else {
            let gguf = &self.gguf;
            let vocabulary = self.vocabulary.get_or_insert_with(|| vocabulary(gguf));
            let vocabulary =
                vocabulary.as_ref().map_err(|detail| GrammarError::Vocabulary { detail: detail.clone() })?;
            let grammar = Grammar::compile(&source, vocabulary)?;
            self.kept.truncate(KEPT_MAX - 1);
            self.kept.push_front((source, grammar));
        }
        Ok(&self.kept[0].1)
    }
}

fn vocabulary(gguf: &Bytes) -> Result<Vocabulary, String> {
    let metadata = gguf::Metadata::parse(gguf.clone()).map_err(|error| service::exit::one_line(&error))?;
    let tokenizer = Tokenizer::from_metadata(&metadata).map_err(|error| service::exit::one_line(&error))?;
    Vocabulary::new(&tokenizer).map_err(|error| service::exit::one_line(&error))
}

/// A matcher with the mask at its state.
struct MaskWork {
    matcher: Matcher,
    mask: Vec<u32>,
    next: Result<Next, MatchError>,
}

/// `Err`: it was lost.
type Back = Result<Box<MaskWork>, ConstraintError>;

struct MaskJob {
    work: Box<MaskWork>,
    token: u32,
    back: SyncSender<Back>,
}

fn start_masks(jobs: Arc<Mutex<Receiver<MaskJob>>>, waker: Waker) -> io::Result<()> {
    thread::Builder::new().name("masks".to_owned()).spawn(move || compute_masks(&jobs, &waker)).map(drop)
}

fn compute_masks(jobs: &Arc<Mutex<Receiver<MaskJob>>>, waker: &Waker) {
    loop {
        let Ok(MaskJob { mut work, token, back }) = next(jobs) else { return };
        let lost = {
            let (jobs, back, waker) = (jobs.clone(), back.clone(), waker.clone());
            move || {
                // Without a thread the next masks are late.
                drop(start_masks(jobs, waker.clone()));
                drop(back.send(Err(ConstraintError::Broken)));
                waker.wake();
            }
        };
        let MaskWork { matcher, mask, next } = &mut *work;
        *next = contained(lost, || matcher.accept(token).and_then(|()| matcher.allowed(mask)));
        // A request that has ended meanwhile takes nothing back.
        drop(back.send(Ok(work)));
        waker.wake();
    }
}

/// The lock is held while waiting: other threads wait for it in place of the job.
fn next<T>(jobs: &Mutex<Receiver<T>>) -> Result<T, RecvError> {
    jobs.lock().unwrap_or_else(PoisonError::into_inner).recv()
}

/// One request's grammar.
struct Masked {
    /// `None` while the next mask is being computed.
    here: Option<Back>,
    /// When that began.
    begun: Instant,
    back: Receiver<Back>,
    sender: SyncSender<Back>,
    masks: Sender<MaskJob>,
}

impl Constraint for Masked {
    fn allowed(&mut self) -> Result<Allowed<'_>, ConstraintError> {
        if self.here.is_none() {
            self.here = match self.back.try_recv() {
                Ok(back) => Some(back),
                Err(_) if self.begun.elapsed() < MASK_WAIT => return Ok(Allowed::Later),
                Err(_) => Some(Err(ConstraintError::Late)),
            };
        }
        let work = match &self.here {
            Some(Ok(work)) => work,
            Some(Err(error)) => return Err(*error),
            None => return Ok(Allowed::Later),
        };
        match work.next {
            Ok(Next::Tokens) => Ok(Allowed::Tokens(&work.mask)),
            Ok(Next::End) => Ok(Allowed::Nothing),
            Err(MatchError::TooComplex) => Err(ConstraintError::TooComplex),
            Err(MatchError::DeadEnd | MatchError::Token { .. }) => Err(ConstraintError::DeadEnd),
        }
    }

    fn accept(&mut self, token: u32) {
        if let Some(Ok(work)) = self.here.take() {
            self.begun = Instant::now();
            // Fails when the worker is stopping; the next mask is then late.
            drop(self.masks.send(MaskJob { work, token, back: self.sender.clone() }));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stepper::tests::{is_waked, over_nothing};

    fn vocabulary() -> (Tokenizer, Vocabulary) {
        let demo = concat!(env!("CARGO_MANIFEST_DIR"), "/../demo/pycoder-7m-q8_0.gguf");
        let file = std::fs::File::open(demo).unwrap();
        let length = file.metadata().unwrap().len();
        let header = gguf::Header::read(std::io::BufReader::new(file), length).unwrap();
        let tokenizer = Tokenizer::from_metadata(header.metadata()).unwrap();
        let vocabulary = Vocabulary::new(&tokenizer).unwrap();
        (tokenizer, vocabulary)
    }

    /// Of the one choice `word`, with a mask that allows all.
    fn masked(vocabulary: &Vocabulary, word: &str) -> (Masked, Receiver<MaskJob>) {
        let grammar = Grammar::compile(&Source::Choice(vec![word.to_owned()]), vocabulary).unwrap();
        let (masks, jobs) = channel();
        let (sender, back) = sync_channel(1);
        let work = MaskWork { matcher: grammar.matcher(), mask: vec![u32::MAX], next: Ok(Next::Tokens) };
        (Masked { here: Some(Ok(Box::new(work))), begun: Instant::now(), back, sender, masks }, jobs)
    }

    /// Nobody computes masks here but the test: what returns did not wait for one.
    #[test]
    fn a_mask_is_computed_between_a_draw_and_the_next_and_by_others() {
        let (tokenizer, vocabulary) = vocabulary();
        let (mut constraint, jobs) = masked(&vocabulary, "yes");
        assert_eq!(constraint.allowed(), Ok(Allowed::Tokens(&[u32::MAX])));
        let yes = tokenizer.encode("yes", text::EncodeOptions::default()).unwrap();
        for &token in &yes {
            constraint.accept(token);
            assert!(constraint.here.is_none(), "the matcher is with the thread that has the job");
            let MaskJob { mut work, token, back } = jobs.recv().unwrap();
            assert_eq!(constraint.allowed(), Ok(Allowed::Later));
            work.matcher.accept(token).unwrap();
            work.next = work.matcher.allowed(&mut work.mask);
            back.send(Ok(work)).unwrap();
            assert!(constraint.allowed().is_ok());
        }
        assert_eq!(constraint.allowed(), Ok(Allowed::Nothing));
        constraint.accept(yes[0]);
        let MaskJob { back, .. } = jobs.recv().unwrap();
        back.send(Err(ConstraintError::Broken)).unwrap();
        assert_eq!(constraint.allowed(), Err(ConstraintError::Broken));
        assert_eq!(constraint.allowed(), Err(ConstraintError::Broken), "and so it stays");
    }

    #[test]
    fn a_mask_that_never_comes_is_an_error_after_its_time() {
        let (tokenizer, vocabulary) = vocabulary();
        let (mut constraint, _jobs) = masked(&vocabulary, "yes");
        constraint.accept(tokenizer.encode("yes", text::EncodeOptions::default()).unwrap()[0]);
        assert_eq!(constraint.allowed(), Ok(Allowed::Later));
        constraint.begun = Instant::now().checked_sub(MASK_WAIT).unwrap();
        assert_eq!(constraint.allowed(), Err(ConstraintError::Late));
    }

    #[test]
    fn the_engine_is_waked_when_a_mask_is_there() {
        let (tokenizer, vocabulary) = vocabulary();
        let (mut constraint, jobs) = masked(&vocabulary, "yes");
        let (handle, stepper) = over_nothing();
        constraint.accept(tokenizer.encode("yes", text::EncodeOptions::default()).unwrap()[0]);
        assert!(!is_waked(&stepper));
        let jobs = Arc::new(Mutex::new(jobs));
        start_masks(jobs, handle.waker()).unwrap();
        while !is_waked(&stepper) {
            thread::yield_now();
        }
        // It was there before.
        assert!(matches!(constraint.allowed(), Ok(Allowed::Tokens(_) | Allowed::Nothing)));
    }
}
