//! GrammarCompiler of requests: compiled before a request is queued.
//!
//! One thread compiles, with a stack for the most nested grammar that is taken. A grammar that panics, or takes too long,
//! costs that thread ([`crew`](crate::worker_pool)), also if the call that brought it has gone away meanwhile. Its refusal is none
//! that passes, so no other worker tries it, and this one does not try it again soon. Whoever only waited too long behind
//! others is told that this passes. What a compiled grammar allows is [`masks`](crate::grammar_constraint)' to compute.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use engine::Constraint;
use grammar::{CompileError, CompiledGrammar, GrammarSource, GrammarVocabulary, MatchError};
use text::Tokenizer;
use tokio::sync::oneshot;

use crate::engine_loop::EngineWaker;
use crate::grammar_constraint::{MASK_SECONDS_MAX, MaskComputer};
use crate::worker_pool::{JobFailure, JobHandler, LostThreads, PoolConfig, WorkerPool};

/// For recursion over grammars as nested as `grammar` takes them; touched as far as it is used.
const STACK_BYTES: usize = 64 << 20;
/// GrammarCompiler that wait to be compiled; more requests are refused as an overload.
const COMPILE_QUEUE_MAX: usize = 64;
/// Compiling takes some tens of milliseconds: all that may wait are compiled within this time, on a machine that is busy.
const QUEUE_TIMEOUT: Duration = Duration::from_secs(10);
/// What takes this long on a machine that is busy may as well take for ever.
const COMPILE_SECONDS_MAX: u32 = 20;
/// A grammar that has cost a thread costs no other one for this long. Not for ever: it may have been the machine's fault.
const DENIED_FOR: Duration = Duration::from_secs(600);
/// CompileResult grammars that are cache: the choices of a request have the same one, and clients repeat theirs.
const CACHED_GRAMMARS_MAX: usize = 16;
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
    TimedOut,
    #[error("its turn to be compiled did not come within {} s", QUEUE_TIMEOUT.as_secs())]
    QueueTimeout,
    #[error("{COMPILE_QUEUE_MAX} grammars wait to be compiled already")]
    QueueFull,
    #[error("the model's vocabulary cannot be used for grammars: {detail}")]
    Vocabulary { detail: String },
    #[error("cannot start a thread for grammars")]
    Thread(#[from] io::Error),
    #[error("compiling or following it failed, which is a mistake of this program and not of the grammar")]
    Panicked,
    #[error("the worker is stopping")]
    Stopped,
}

impl From<JobFailure> for GrammarError {
    fn from(lost: JobFailure) -> Self {
        match lost {
            JobFailure::Panicked => GrammarError::Panicked,
            JobFailure::Overdue => GrammarError::TimedOut,
        }
    }
}

/// GrammarCompiler that have cost a thread: nobody is asked to try them again soon. No more than there are threads to lose.
#[derive(Clone, Default)]
pub(crate) struct GrammarDenylist(Arc<Mutex<Vec<DeniedGrammar>>>);

struct DeniedGrammar {
    source: Arc<GrammarSource>,
    lost: JobFailure,
    at: Instant,
}

impl GrammarDenylist {
    pub(crate) fn add(&self, source: Arc<GrammarSource>, lost: JobFailure) {
        self.lock().push(DeniedGrammar { source, lost, at: Instant::now() });
    }

    /// What became of it lately.
    pub(crate) fn find(&self, source: &GrammarSource, now: Instant) -> Option<JobFailure> {
        let denylist = self.lock();
        let is_lately = |known: &&DeniedGrammar| now.saturating_duration_since(known.at) < DENIED_FOR;
        denylist.iter().filter(is_lately).find(|known| *known.source == *source).map(|known| known.lost)
    }

    fn lock(&self) -> MutexGuard<'_, Vec<DeniedGrammar>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

type CompileResult = Result<Box<dyn Constraint>, GrammarError>;

struct CompileJob {
    source: Arc<GrammarSource>,
    prior_output: Vec<u32>,
}

type CompilePool = Arc<WorkerPool<CompileJob, CompileResult>>;

/// The async side. Its threads are started for the first grammar: most workers never see one.
pub(crate) struct GrammarCompiler {
    gguf: Bytes,
    mask_threads: usize,
    waker: EngineWaker,
    denylist: GrammarDenylist,
    pool: Mutex<Option<CompilePool>>,
}

impl GrammarCompiler {
    /// `gguf` is the model's metadata section. `threads`: how many may compute masks. `waker`: of the engine that draws
    /// under them.
    pub(crate) fn new(gguf: Bytes, threads: usize, waker: EngineWaker) -> Self {
        let mask_threads = threads.clamp(1, MASK_THREADS_MAX);
        Self { gguf, mask_threads, waker, denylist: GrammarDenylist::default(), pool: Mutex::new(None) }
    }

    fn pool(&self) -> io::Result<CompilePool> {
        let mut pool = self.pool.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pool) = &*pool {
            return Ok(pool.clone());
        }
        let lost_threads = Arc::new(LostThreads::default());
        let masks = MaskComputer::start(
            self.mask_threads,
            lost_threads.clone(),
            self.waker.clone(),
            self.denylist.clone(),
        )?;
        let config = PoolConfig {
            thread_name: "grammars",
            stack_bytes: STACK_BYTES,
            threads: 1,
            queue_max: COMPILE_QUEUE_MAX,
            max_watchdog_ticks: COMPILE_SECONDS_MAX,
            lost_threads,
        };
        let gguf = self.gguf.clone();
        let started = WorkerPool::start(config, move || compile_handler(gguf.clone(), masks.clone()))?;
        Ok(pool.insert(started).clone())
    }

    /// The constraint of a request whose prior output it has accepted.
    pub(crate) async fn compile(&self, source: GrammarSource, prior_output: Vec<u32>) -> CompileResult {
        self.compile_within(source, prior_output, tokio::time::sleep(QUEUE_TIMEOUT)).await
    }

    /// Its turn comes before `patience` ends, or not at all.
    async fn compile_within(
        &self,
        source: GrammarSource,
        prior_output: Vec<u32>,
        patience: impl Future<Output = ()>,
    ) -> CompileResult {
        if let Some(lost) = self.denylist.find(&source, Instant::now()) {
            return Err(lost.into());
        }
        let (answer, mut answered) = oneshot::channel();
        let (source, denylist) = (Arc::new(source), self.denylist.clone());
        let job = CompileJob { source: source.clone(), prior_output };
        let asked = self.pool()?.submit(job, move |done| {
            let compiled = done.unwrap_or_else(|lost| {
                denylist.add(source, lost);
                Err(lost.into())
            });
            // Fails when nobody waits any more.
            drop(answer.send(compiled));
        });
        let ticket = asked.map_err(|_| GrammarError::QueueFull)?;
        let in_time = tokio::select! {
            compiled = &mut answered => Some(compiled),
            () = patience => None,
        };
        let compiled = match in_time {
            Some(compiled) => compiled,
            None if ticket.cancel() => return Err(GrammarError::QueueTimeout),
            // It has begun: the crew ends it in time.
            None => answered.await,
        };
        compiled.unwrap_or(Err(GrammarError::Stopped))
    }
}

/// What a thread that compiles works with.
fn compile_handler(gguf: Bytes, masks: Arc<MaskComputer>) -> JobHandler<CompileJob, CompileResult> {
    let mut compiler = CompilerThread { gguf, vocabulary: None, cache: VecDeque::new(), masks };
    Box::new(move |job| compiler.constraint(job))
}

struct CompilerThread {
    gguf: Bytes,
    /// Made for the first grammar.
    vocabulary: Option<Result<GrammarVocabulary, String>>,
    /// The last used one first.
    cache: VecDeque<(Arc<GrammarSource>, CompiledGrammar)>,
    masks: Arc<MaskComputer>,
}

impl CompilerThread {
    fn constraint(&mut self, CompileJob { source, prior_output }: CompileJob) -> CompileResult {
        let mut matcher = self.grammar(&source)?.matcher();
        for token in prior_output {
            matcher.accept(token).map_err(GrammarError::PriorOutput)?;
        }
        Ok(Box::new(self.masks.constraint(source, matcher)))
    }

    fn grammar(&mut self, source: &Arc<GrammarSource>) -> Result<&CompiledGrammar, GrammarError> {
        if let Some(at) = self.cache.iter().position(|(cache, _)| *cache == *source) {
            if let Some(used) = self.cache.remove(at) {
                self.cache.push_front(used);
            }
        } else {
            let gguf = &self.gguf;
            let vocabulary = self.vocabulary.get_or_insert_with(|| vocabulary(gguf));
            let vocabulary =
                vocabulary.as_ref().map_err(|detail| GrammarError::Vocabulary { detail: detail.clone() })?;
            let grammar = CompiledGrammar::compile(source, vocabulary)?;
            self.cache.truncate(CACHED_GRAMMARS_MAX - 1);
            self.cache.push_front((source.clone(), grammar));
        }
        Ok(&self.cache[0].1)
    }
}

fn vocabulary(gguf: &Bytes) -> Result<GrammarVocabulary, String> {
    let metadata = gguf::Metadata::parse(gguf.clone()).map_err(|error| service::exit::one_line(&error))?;
    let tokenizer = Tokenizer::from_metadata(&metadata).map_err(|error| service::exit::one_line(&error))?;
    GrammarVocabulary::new(&tokenizer).map_err(|error| service::exit::one_line(&error))
}

#[cfg(test)]
pub(crate) mod tests {
    use std::future::{pending, ready};
    use std::pin::Pin;
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::task::{self, Context, Poll};

    use engine::{Allowed, ConstraintError};

    use super::*;
    use crate::engine_loop::tests::idle_engine_loop;
    use crate::worker_pool::tests::{TIMEOUT, pool_without_watchdog, queued_jobs, tick_until_overdue};

    pub(crate) fn vocabulary() -> (Tokenizer, GrammarVocabulary) {
        let demo = concat!(env!("CARGO_MANIFEST_DIR"), "/../demo/pycoder-7m-q8_0.gguf");
        let file = std::fs::File::open(demo).unwrap();
        let length = file.metadata().unwrap().len();
        let header = gguf::Header::read(std::io::BufReader::new(file), length).unwrap();
        let tokenizer = Tokenizer::from_metadata(header.metadata()).unwrap();
        let vocabulary = GrammarVocabulary::new(&tokenizer).unwrap();
        (tokenizer, vocabulary)
    }

    fn regex(text: &str) -> GrammarSource {
        GrammarSource::Regex(text.to_owned())
    }

    struct FinishedConstraint;

    impl Constraint for FinishedConstraint {
        fn allowed(&mut self) -> Result<Allowed<'_>, ConstraintError> {
            Ok(Allowed::Nothing)
        }

        fn accept(&mut self, _: u32) {}
    }

    /// Over a compiler that says what it begins, and does not return from "blocks" before this is gone.
    struct CompilerFixture {
        grammars: GrammarCompiler,
        pool: CompilePool,
        begun: Receiver<Arc<GrammarSource>>,
        _release: Sender<()>,
    }

    type Call<'a> = Pin<Box<dyn Future<Output = CompileResult> + 'a>>;

    impl CompilerFixture {
        fn new() -> Self {
            let (begins, begun) = channel();
            let (release, released) = channel::<()>();
            let released = Arc::new(Mutex::new(released));
            let pool: CompilePool = pool_without_watchdog(COMPILE_QUEUE_MAX, move || {
                let (begins, released) = (begins.clone(), released.clone());
                Box::new(move |job: CompileJob| {
                    // Nobody listens when the test is over.
                    begins.send(job.source.clone()).ok();
                    if *job.source == regex("blocks") {
                        released.lock().unwrap_or_else(PoisonError::into_inner).recv().ok();
                    }
                    Ok(Box::new(FinishedConstraint) as Box<dyn Constraint>)
                })
            });
            let grammars = GrammarCompiler::new(Bytes::new(), 1, idle_engine_loop().0.waker());
            *grammars.pool.lock().unwrap() = Some(pool.clone());
            Self { grammars, pool, begun, _release: release }
        }

        /// In the queue, if there is room.
        fn call(&self, text: &str, patience: impl Future<Output = ()> + 'static) -> Call<'_> {
            let mut call: Call<'_> =
                Box::pin(self.grammars.compile_within(regex(text), Vec::new(), patience));
            if let Poll::Ready(compiled) = poll(&mut call) {
                return Box::pin(ready(compiled));
            }
            call
        }

        fn begins(&self, text: &str) {
            assert_eq!(*self.begun.recv_timeout(TIMEOUT).expect("somebody compiles"), regex(text));
        }
    }

    fn poll(call: &mut Call<'_>) -> Poll<CompileResult> {
        call.as_mut().poll(&mut Context::from_waker(task::Waker::noop()))
    }

    #[tokio::test]
    async fn a_grammar_that_holds_up_the_compiler_costs_a_thread_although_its_call_is_gone() {
        let bench = CompilerFixture::new();
        let gone = bench.call("blocks", pending());
        bench.begins("blocks");
        drop(gone);
        let next = bench.call("next", pending());
        assert_eq!(queued_jobs(&bench.pool), 1);
        assert!(tick_until_overdue(&bench.pool));
        bench.begins("next");
        assert!(next.await.is_ok());
        assert!(matches!(bench.call("blocks", pending()).await, Err(GrammarError::TimedOut)));
        assert!(bench.call("other", pending()).await.is_ok());
        bench.begins("other");
        let denylist = |after| bench.grammars.denylist.find(&regex("blocks"), Instant::now() + after);
        assert_eq!((denylist(Duration::ZERO), denylist(DENIED_FOR)), (Some(JobFailure::Overdue), None));
    }

    #[tokio::test]
    async fn who_waited_in_vain_is_told_another_thing_than_who_takes_too_long() {
        let bench = CompilerFixture::new();
        let (impatient, patience) = oneshot::channel::<()>();
        let mut blocks = bench.call("blocks", async { drop(patience.await) });
        bench.begins("blocks");
        impatient.send(()).unwrap();
        assert!(poll(&mut blocks).is_pending(), "its turn has come: how long it waited matters no more");
        assert!(matches!(bench.call("waits", ready(())).await, Err(GrammarError::QueueTimeout)));
        assert_eq!(queued_jobs(&bench.pool), 0, "nobody will compile it");
        assert!(tick_until_overdue(&bench.pool));
        assert!(matches!(blocks.await, Err(GrammarError::TimedOut)));
        assert!(bench.call("waits", pending()).await.is_ok(), "it was not at fault");
    }

    #[tokio::test]
    async fn calls_that_went_away_take_no_places() {
        let bench = CompilerFixture::new();
        let _blocks = bench.call("blocks", pending());
        bench.begins("blocks");
        let full: Vec<_> = (0..COMPILE_QUEUE_MAX).map(|n| bench.call(&n.to_string(), pending())).collect();
        assert!(matches!(bench.call("more", pending()).await, Err(GrammarError::QueueFull)));
        drop(full);
        assert!(poll(&mut bench.call("more", pending())).is_pending());
    }
}
