//! Grammars of requests: compiled before a request is queued, their masks computed beside the steps.
//!
//! One thread compiles, with a stack for the most nested grammar that is taken; a few compute masks. A request has at most
//! one mask under way: the matcher goes to a thread when a token was drawn and is back, with the mask of the next, when
//! the step that needs it comes to its draw. So the threads' queue is as long as requests are running, at most.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, Sender, SyncSender, TrySendError, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use std::{io, thread};

use bytes::Bytes;
use engine::{Allowed, Constraint, ConstraintError};
use grammar::{CompileError, Grammar, MatchError, Matcher, Next, Source, Vocabulary};
use text::Tokenizer;
use tokio::sync::oneshot;

/// For recursion over grammars as nested as `grammar` takes them; touched as far as it is used.
const STACK_BYTES: usize = 64 << 20;
/// Grammars that wait to be compiled; more requests are refused as an overload.
const COMPILING_MAX: usize = 64;
/// Compiling is bounded work, some tens of milliseconds; this is for a machine that is busy.
const COMPILE_WAIT: Duration = Duration::from_secs(20);
/// A mask is bounded work of about 20 ms.
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
    #[error("the worker is stopping")]
    Stopped,
}

/// The async side. Its threads are started for the first grammar: most workers never see one.
pub(crate) struct Grammars {
    gguf: Bytes,
    mask_threads: usize,
    jobs: Mutex<Option<SyncSender<Compile>>>,
}

type Compiled = Result<Box<dyn Constraint>, GrammarError>;

struct Compile {
    source: Source,
    prior_output: Vec<u32>,
    answer: oneshot::Sender<Compiled>,
}

impl Grammars {
    /// `gguf` is the model's metadata section. `threads`: how many may compute masks.
    pub(crate) fn new(gguf: Bytes, threads: usize) -> Self {
        Self { gguf, mask_threads: threads.clamp(1, MASK_THREADS_MAX), jobs: Mutex::new(None) }
    }

    fn jobs(&self) -> io::Result<SyncSender<Compile>> {
        let mut running = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(jobs) = &*running {
            return Ok(jobs.clone());
        }
        let (masks, jobs) = channel::<MaskJob>();
        let jobs = Arc::new(Mutex::new(jobs));
        for _ in 0..self.mask_threads {
            let jobs = jobs.clone();
            thread::Builder::new().name("masks".to_owned()).spawn(move || compute_masks(&jobs))?;
        }
        let (sender, waiting) = sync_channel(COMPILING_MAX);
        let compiler = Compiler { gguf: self.gguf.clone(), vocabulary: None, kept: VecDeque::new(), masks };
        thread::Builder::new()
            .name("grammars".to_owned())
            .stack_size(STACK_BYTES)
            .spawn(move || compiler.run(&waiting))?;
        Ok(running.insert(sender).clone())
    }

    /// The constraint of a request whose prior output it has accepted.
    pub(crate) async fn compile(&self, source: Source, prior_output: Vec<u32>) -> Compiled {
        let (answer, answered) = oneshot::channel();
        self.jobs()?.try_send(Compile { source, prior_output, answer }).map_err(|error| match error {
            TrySendError::Full(_) => GrammarError::Crowded,
            TrySendError::Disconnected(_) => GrammarError::Stopped,
        })?;
        match tokio::time::timeout(COMPILE_WAIT, answered).await {
            Ok(Ok(compiled)) => compiled,
            Ok(Err(_)) => Err(GrammarError::Stopped),
            Err(_) => Err(GrammarError::Late),
        }
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
    /// Until every handle is gone.
    fn run(mut self, jobs: &Receiver<Compile>) {
        while let Ok(Compile { source, prior_output, answer }) = jobs.recv() {
            if answer.is_closed() {
                continue;
            }
            let compiled = self.constraint(source, &prior_output);
            drop(answer.send(compiled));
        }
    }

    fn constraint(&mut self, source: Source, prior_output: &[u32]) -> Compiled {
        let mut matcher = self.grammar(source)?.matcher();
        for &token in prior_output {
            matcher.accept(token).map_err(GrammarError::PriorOutput)?;
        }
        let mut mask = Vec::new();
        let next = matcher.allowed(&mut mask);
        let work = MaskWork { matcher, mask, next };
        let (sender, back) = sync_channel(1);
        Ok(Box::new(Masked { here: Some(Box::new(work)), back, sender, masks: self.masks.clone() }))
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

struct MaskJob {
    work: Box<MaskWork>,
    token: u32,
    back: SyncSender<Box<MaskWork>>,
}

fn compute_masks(jobs: &Mutex<Receiver<MaskJob>>) {
    loop {
        // Held while waiting: the others wait for the lock in its place.
        let job = jobs.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(MaskJob { mut work, token, back }) = job else { return };
        let MaskWork { matcher, mask, next } = &mut *work;
        *next = matcher.accept(token).and_then(|()| matcher.allowed(mask));
        // A request that has ended meanwhile takes nothing back.
        drop(back.send(work));
    }
}

/// One request's grammar.
struct Masked {
    /// `None` while the next mask is being computed.
    here: Option<Box<MaskWork>>,
    back: Receiver<Box<MaskWork>>,
    sender: SyncSender<Box<MaskWork>>,
    masks: Sender<MaskJob>,
}

impl Constraint for Masked {
    fn allowed(&mut self) -> Result<Allowed<'_>, ConstraintError> {
        if self.here.is_none() {
            self.here = self.back.recv_timeout(MASK_WAIT).ok();
        }
        let Some(work) = &self.here else { return Err(ConstraintError::Late) };
        match work.next {
            Ok(Next::Tokens) => Ok(Allowed::Tokens(&work.mask)),
            Ok(Next::End) => Ok(Allowed::Nothing),
            Err(MatchError::TooComplex) => Err(ConstraintError::TooComplex),
            Err(MatchError::DeadEnd | MatchError::Token { .. }) => Err(ConstraintError::DeadEnd),
        }
    }

    fn accept(&mut self, token: u32) {
        if let Some(work) = self.here.take() {
            // Fails when the worker is stopping; the next mask is then late.
            drop(self.masks.send(MaskJob { work, token, back: self.sender.clone() }));
        }
    }
}
