//! Grammars of requests: compiled before a request is queued.
//!
//! One thread compiles, with a stack for the most nested grammar that is taken. A grammar that panics, or takes too long,
//! costs that thread ([`crew`](crate::crew)), also if the call that brought it has gone away meanwhile. Its refusal is none
//! that passes, so no other worker tries it, and this one does not try it again soon. Whoever only waited too long behind
//! others is told that this passes. What a compiled grammar allows is [`masks`](crate::masks)' to compute.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use engine::Constraint;
use grammar::{CompileError, Grammar, MatchError, Source, Vocabulary};
use text::Tokenizer;
use tokio::sync::oneshot;

use crate::crew::{Crew, Losses, Lost, Terms, Tool};
use crate::masks::{MASK_SECONDS_MAX, Masks};
use crate::stepper::Waker;

/// For recursion over grammars as nested as `grammar` takes them; touched as far as it is used.
const STACK_BYTES: usize = 64 << 20;
/// Grammars that wait to be compiled; more requests are refused as an overload.
const COMPILING_MAX: usize = 64;
/// Compiling takes some tens of milliseconds: all that may wait are compiled within this time, on a machine that is busy.
const TURN_WAIT: Duration = Duration::from_secs(10);
/// What takes this long on a machine that is busy may as well take for ever.
const COMPILE_SECONDS_MAX: u32 = 20;
/// A grammar that has cost a thread costs no other one for this long. Not for ever: it may have been the machine's fault.
const COSTLY_FOR: Duration = Duration::from_secs(600);
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
    #[error(
        "compiling it, or computing what it allows next, was given up after {COMPILE_SECONDS_MAX} or \
         {MASK_SECONDS_MAX} s"
    )]
    Overdue,
    #[error("its turn to be compiled did not come within {} s", TURN_WAIT.as_secs())]
    Late,
    #[error("{COMPILING_MAX} grammars wait to be compiled already")]
    Crowded,
    #[error("the model's vocabulary cannot be used for grammars: {detail}")]
    Vocabulary { detail: String },
    #[error("cannot start a thread for grammars")]
    Thread(#[from] io::Error),
    #[error("compiling or following it failed, which is a mistake of this program and not of the grammar")]
    Broken,
    #[error("the worker is stopping")]
    Stopped,
}

impl From<Lost> for GrammarError {
    fn from(lost: Lost) -> Self {
        match lost {
            Lost::Panicked => GrammarError::Broken,
            Lost::Overdue => GrammarError::Overdue,
        }
    }
}

/// Grammars that have cost a thread: nobody is asked to try them again soon. No more than there are threads to lose.
#[derive(Clone, Default)]
pub(crate) struct Costly(Arc<Mutex<Vec<Known>>>);

struct Known {
    source: Arc<Source>,
    lost: Lost,
    at: Instant,
}

impl Costly {
    pub(crate) fn add(&self, source: Arc<Source>, lost: Lost) {
        self.lock().push(Known { source, lost, at: Instant::now() });
    }

    /// What became of it lately.
    pub(crate) fn find(&self, source: &Source, now: Instant) -> Option<Lost> {
        let costly = self.lock();
        let is_lately = |known: &&Known| now.saturating_duration_since(known.at) < COSTLY_FOR;
        costly.iter().filter(is_lately).find(|known| *known.source == *source).map(|known| known.lost)
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Known>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

type Compiled = Result<Box<dyn Constraint>, GrammarError>;

struct Job {
    source: Arc<Source>,
    prior_output: Vec<u32>,
}

type Compilers = Arc<Crew<Job, Compiled>>;

/// The async side. Its threads are started for the first grammar: most workers never see one.
pub(crate) struct Grammars {
    gguf: Bytes,
    mask_threads: usize,
    waker: Waker,
    costly: Costly,
    compilers: Mutex<Option<Compilers>>,
}

impl Grammars {
    /// `gguf` is the model's metadata section. `threads`: how many may compute masks. `waker`: of the engine that draws
    /// under them.
    pub(crate) fn new(gguf: Bytes, threads: usize, waker: Waker) -> Self {
        let mask_threads = threads.clamp(1, MASK_THREADS_MAX);
        Self { gguf, mask_threads, waker, costly: Costly::default(), compilers: Mutex::new(None) }
    }

    fn compilers(&self) -> io::Result<Compilers> {
        let mut compilers = self.compilers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(compilers) = &*compilers {
            return Ok(compilers.clone());
        }
        let losses = Arc::new(Losses::default());
        let masks = Masks::start(self.mask_threads, losses.clone(), self.waker.clone(), self.costly.clone())?;
        let terms = Terms {
            name: "grammars",
            stack_bytes: STACK_BYTES,
            threads: 1,
            waiting_max: COMPILING_MAX,
            looks_max: COMPILE_SECONDS_MAX,
            losses,
        };
        let gguf = self.gguf.clone();
        let started = Crew::start(terms, move || tool(gguf.clone(), masks.clone()))?;
        Ok(compilers.insert(started).clone())
    }

    /// The constraint of a request whose prior output it has accepted.
    pub(crate) async fn compile(&self, source: Source, prior_output: Vec<u32>) -> Compiled {
        self.compile_in_turn(source, prior_output, tokio::time::sleep(TURN_WAIT)).await
    }

    /// Its turn comes before `patience` ends, or not at all.
    async fn compile_in_turn(
        &self,
        source: Source,
        prior_output: Vec<u32>,
        patience: impl Future<Output = ()>,
    ) -> Compiled {
        if let Some(lost) = self.costly.find(&source, Instant::now()) {
            return Err(lost.into());
        }
        let (answer, mut answered) = oneshot::channel();
        let (source, costly) = (Arc::new(source), self.costly.clone());
        let job = Job { source: source.clone(), prior_output };
        let asked = self.compilers()?.ask(job, move |done| {
            let compiled = done.unwrap_or_else(|lost| {
                costly.add(source, lost);
                Err(lost.into())
            });
            // Fails when nobody waits any more.
            drop(answer.send(compiled));
        });
        let ticket = asked.map_err(|_| GrammarError::Crowded)?;
        let in_time = tokio::select! {
            compiled = &mut answered => Some(compiled),
            () = patience => None,
        };
        let compiled = match in_time {
            Some(compiled) => compiled,
            None if ticket.withdraw() => return Err(GrammarError::Late),
            // It has begun: the crew ends it in time.
            None => answered.await,
        };
        compiled.unwrap_or(Err(GrammarError::Stopped))
    }
}

/// What a thread that compiles works with.
fn tool(gguf: Bytes, masks: Arc<Masks>) -> Tool<Job, Compiled> {
    let mut compiler = Compiler { gguf, vocabulary: None, kept: VecDeque::new(), masks };
    Box::new(move |job| compiler.constraint(job))
}

struct Compiler {
    gguf: Bytes,
    /// Made for the first grammar.
    vocabulary: Option<Result<Vocabulary, String>>,
    /// The last used one first.
    kept: VecDeque<(Arc<Source>, Grammar)>,
    masks: Arc<Masks>,
}

impl Compiler {
    fn constraint(&mut self, Job { source, prior_output }: Job) -> Compiled {
        let mut matcher = self.grammar(&source)?.matcher();
        for token in prior_output {
            matcher.accept(token).map_err(GrammarError::PriorOutput)?;
        }
        Ok(Box::new(self.masks.constraint(source, matcher)))
    }

    fn grammar(&mut self, source: &Arc<Source>) -> Result<&Grammar, GrammarError> {
        if let Some(at) = self.kept.iter().position(|(kept, _)| *kept == *source) {
            if let Some(used) = self.kept.remove(at) {
                self.kept.push_front(used);
            }
        } else {
            let gguf = &self.gguf;
            let vocabulary = self.vocabulary.get_or_insert_with(|| vocabulary(gguf));
            let vocabulary =
                vocabulary.as_ref().map_err(|detail| GrammarError::Vocabulary { detail: detail.clone() })?;
            let grammar = Grammar::compile(source, vocabulary)?;
            self.kept.truncate(KEPT_MAX - 1);
            self.kept.push_front((source.clone(), grammar));
        }
        Ok(&self.kept[0].1)
    }
}

fn vocabulary(gguf: &Bytes) -> Result<Vocabulary, String> {
    let metadata = gguf::Metadata::parse(gguf.clone()).map_err(|error| service::exit::one_line(&error))?;
    let tokenizer = Tokenizer::from_metadata(&metadata).map_err(|error| service::exit::one_line(&error))?;
    Vocabulary::new(&tokenizer).map_err(|error| service::exit::one_line(&error))
}

#[cfg(test)]
pub(crate) mod tests {
    use std::future::{pending, ready};
    use std::pin::Pin;
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::task::{self, Context, Poll};

    use engine::{Allowed, ConstraintError};

    use super::*;
    use crate::crew::tests::{PATIENCE, by_hand, look_until_overdue, waiting};
    use crate::stepper::tests::over_nothing;

    pub(crate) fn vocabulary() -> (Tokenizer, Vocabulary) {
        let demo = concat!(env!("CARGO_MANIFEST_DIR"), "/../demo/pycoder-7m-q8_0.gguf");
        let file = std::fs::File::open(demo).unwrap();
        let length = file.metadata().unwrap().len();
        let header = gguf::Header::read(std::io::BufReader::new(file), length).unwrap();
        let tokenizer = Tokenizer::from_metadata(header.metadata()).unwrap();
        let vocabulary = Vocabulary::new(&tokenizer).unwrap();
        (tokenizer, vocabulary)
    }

    fn regex(text: &str) -> Source {
        Source::Regex(text.to_owned())
    }

    struct Whole;

    impl Constraint for Whole {
        fn allowed(&mut self) -> Result<Allowed<'_>, ConstraintError> {
            Ok(Allowed::Nothing)
        }

        fn accept(&mut self, _: u32) {}
    }

    /// Over a compiler that says what it begins, and does not return from "blocks" before this is gone.
    struct Bench {
        grammars: Grammars,
        compilers: Compilers,
        begun: Receiver<Arc<Source>>,
        _release: Sender<()>,
    }

    type Call<'a> = Pin<Box<dyn Future<Output = Compiled> + 'a>>;

    impl Bench {
        fn new() -> Self {
            let (begins, begun) = channel();
            let (release, released) = channel::<()>();
            let released = Arc::new(Mutex::new(released));
            let compilers: Compilers = by_hand(COMPILING_MAX, move || {
                let (begins, released) = (begins.clone(), released.clone());
                Box::new(move |job: Job| {
                    // Nobody listens when the test is over.
                    begins.send(job.source.clone()).ok();
                    if *job.source == regex("blocks") {
                        released.lock().unwrap_or_else(PoisonError::into_inner).recv().ok();
                    }
                    Ok(Box::new(Whole) as Box<dyn Constraint>)
                })
            });
            let grammars = Grammars::new(Bytes::new(), 1, over_nothing().0.waker());
            *grammars.compilers.lock().unwrap() = Some(compilers.clone());
            Self { grammars, compilers, begun, _release: release }
        }

        /// In the queue, if there is room.
        fn call(&self, text: &str, patience: impl Future<Output = ()> + 'static) -> Call<'_> {
            let mut call: Call<'_> =
                Box::pin(self.grammars.compile_in_turn(regex(text), Vec::new(), patience));
            if let Poll::Ready(compiled) = poll(&mut call) {
                return Box::pin(ready(compiled));
            }
            call
        }

        fn begins(&self, text: &str) {
            assert_eq!(*self.begun.recv_timeout(PATIENCE).expect("somebody compiles"), regex(text));
        }
    }

    fn poll(call: &mut Call<'_>) -> Poll<Compiled> {
        call.as_mut().poll(&mut Context::from_waker(task::Waker::noop()))
    }

    #[tokio::test]
    async fn a_grammar_that_holds_up_the_compiler_costs_a_thread_although_its_call_is_gone() {
        let bench = Bench::new();
        let gone = bench.call("blocks", pending());
        bench.begins("blocks");
        drop(gone);
        let next = bench.call("next", pending());
        assert_eq!(waiting(&bench.compilers), 1);
        assert!(look_until_overdue(&bench.compilers));
        bench.begins("next");
        assert!(next.await.is_ok());
        assert!(matches!(bench.call("blocks", pending()).await, Err(GrammarError::Overdue)));
        assert!(bench.call("other", pending()).await.is_ok());
        bench.begins("other");
        let costly = |after| bench.grammars.costly.find(&regex("blocks"), Instant::now() + after);
        assert_eq!((costly(Duration::ZERO), costly(COSTLY_FOR)), (Some(Lost::Overdue), None));
    }

    #[tokio::test]
    async fn who_waited_in_vain_is_told_another_thing_than_who_takes_too_long() {
        let bench = Bench::new();
        let (impatient, patience) = oneshot::channel::<()>();
        let mut blocks = bench.call("blocks", async { drop(patience.await) });
        bench.begins("blocks");
        impatient.send(()).unwrap();
        assert!(poll(&mut blocks).is_pending(), "its turn has come: how long it waited matters no more");
        assert!(matches!(bench.call("waits", ready(())).await, Err(GrammarError::Late)));
        assert_eq!(waiting(&bench.compilers), 0, "nobody will compile it");
        assert!(look_until_overdue(&bench.compilers));
        assert!(matches!(blocks.await, Err(GrammarError::Overdue)));
        assert!(bench.call("waits", pending()).await.is_ok(), "it was not at fault");
    }

    #[tokio::test]
    async fn calls_that_went_away_take_no_places() {
        let bench = Bench::new();
        let _blocks = bench.call("blocks", pending());
        bench.begins("blocks");
        let full: Vec<_> = (0..COMPILING_MAX).map(|n| bench.call(&n.to_string(), pending())).collect();
        assert!(matches!(bench.call("more", pending()).await, Err(GrammarError::Crowded)));
        drop(full);
        assert!(poll(&mut bench.call("more", pending())).is_pending());
    }
}
