// SPDX-License-Identifier: Apache-2.0

//! Compiles the grammars of requests before the requests are queued.
//!
//! 1. One thread compiles, with a stack for the deepest grammar that `grammar` accepts.
//! 2. A grammar that panics or exceeds its time costs that thread
//!    ([`worker_pool`](crate::worker_pool)), even if the call that sent it is gone. Its refusal is
//!    permanent, so the router tries no other worker. The [`GrammarDenylist`] keeps this worker
//!    from trying it again soon.
//! 3. A request that waited too long behind other grammars gets a refusal that says when to retry.
//!
//! [`grammar_constraint`](crate::grammar_constraint) then computes what a compiled grammar allows.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use engine::Constraint;
use grammar::{CompileError, CompiledGrammar, GrammarSource, GrammarVocabulary, MatchError};
use text::{LoadTokenizerError, Tokenizer};
use tokio::sync::oneshot;

use crate::engine_loop::EngineWaker;
use crate::grammar_constraint::{MASK_SECONDS_MAX, MaskComputer};
use crate::grammar_denylist::GrammarDenylist;
use crate::worker_pool::{JobFailure, JobHandler, LostThreads, PoolConfig, WorkerPool};

/// For recursion over grammars of the deepest nesting that `grammar` accepts. The kernel maps only
/// the pages in use.
const STACK_BYTES: usize = 64 << 20;
/// Grammars that may wait to be compiled. Further requests are refused as an overload.
const COMPILE_QUEUE_MAX: usize = 64;
/// Compiling takes some tens of milliseconds. A busy machine compiles a full queue within this
/// time.
const QUEUE_TIMEOUT: Duration = Duration::from_secs(10);
/// A grammar that compiles for this long on a busy machine is taken for one that never ends.
const COMPILE_SECONDS_MAX: u32 = 20;
/// Compiled grammars in the cache: the choices of a request share one, and clients repeat theirs.
const CACHED_GRAMMARS_MAX: usize = 16;
const MASK_THREADS_MAX: usize = 4;

/// Why a grammar was refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum GrammarError {
    #[error(transparent)]
    Refused(#[from] CompileError),
    #[error("the output so far does not match the grammar")]
    PriorOutput(#[source] MatchError),
    #[error(
        "compiling the grammar took more than {COMPILE_SECONDS_MAX} s, or computing its next mask more than \
         {MASK_SECONDS_MAX} s"
    )]
    TimedOut,
    #[error("the grammar waited more than {} s to be compiled", QUEUE_TIMEOUT.as_secs())]
    QueueTimeout,
    #[error("{COMPILE_QUEUE_MAX} grammars wait to be compiled, which is the limit")]
    QueueFull,
    #[error("the model's vocabulary cannot be used for grammars: {detail}")]
    Vocabulary { detail: String },
    #[error("cannot start a thread for grammars")]
    Thread(#[from] io::Error),
    #[error(
        "compiling or following the grammar failed, which is a bug of this program and not of the grammar"
    )]
    Panicked,
    #[error("the worker is stopping")]
    Stopped,
}

impl From<JobFailure> for GrammarError {
    fn from(failure: JobFailure) -> Self {
        match failure {
            JobFailure::Panicked => GrammarError::Panicked,
            JobFailure::Overdue => GrammarError::TimedOut,
        }
    }
}

type CompileResult = Result<Box<dyn Constraint>, GrammarError>;

struct CompileJob {
    source: Arc<GrammarSource>,
    prior_output: Vec<u32>,
}

type CompilePool = Arc<WorkerPool<CompileJob, CompileResult>>;

/// The model whose tokens grammars are about.
#[derive(Clone, Debug, Default)]
pub(crate) struct GrammarModel {
    /// The file's metadata section.
    pub(crate) gguf: Bytes,
    pub(crate) vocab_size: u32,
}

/// The async side of the compiler. Threads start with the first grammar, because most workers never
/// receive one.
pub(crate) struct GrammarCompiler {
    model: GrammarModel,
    mask_threads: usize,
    waker: EngineWaker,
    denylist: GrammarDenylist,
    pool: Mutex<Option<CompilePool>>,
}

impl GrammarCompiler {
    /// `threads` is the number of threads that may compute masks, and `waker` the waker of the
    /// engine that samples under those masks.
    pub(crate) fn new(model: GrammarModel, threads: usize, waker: EngineWaker) -> Self {
        let mask_threads = threads.clamp(1, MASK_THREADS_MAX);
        Self { model, mask_threads, waker, denylist: GrammarDenylist::default(), pool: Mutex::new(None) }
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
        let model = self.model.clone();
        let started = WorkerPool::start(config, move || compile_handler(model.clone(), masks.clone()))?;
        Ok(pool.insert(started).clone())
    }

    /// Compiles a grammar into the constraint of a request. The constraint has accepted the
    /// request's prior output.
    pub(crate) async fn compile(&self, source: GrammarSource, prior_output: Vec<u32>) -> CompileResult {
        self.compile_within(source, prior_output, tokio::time::sleep(QUEUE_TIMEOUT)).await
    }

    /// Compiles, unless `timeout` ends before the job begins.
    async fn compile_within(
        &self,
        source: GrammarSource,
        prior_output: Vec<u32>,
        timeout: impl Future<Output = ()>,
    ) -> CompileResult {
        if let Some(failure) = self.denylist.find(&source, Instant::now()) {
            return Err(failure.into());
        }
        let (sender, mut receiver) = oneshot::channel();
        let (source, denylist) = (Arc::new(source), self.denylist.clone());
        let job = CompileJob { source: source.clone(), prior_output };
        let submitted = self.pool()?.submit(job, move |result| {
            let compiled = result.unwrap_or_else(|failure| {
                denylist.add(source, failure);
                Err(failure.into())
            });
            // The receiver is dropped if the call is gone.
            drop(sender.send(compiled));
        });
        let ticket = submitted.map_err(|_| GrammarError::QueueFull)?;
        let in_time = tokio::select! {
            compiled = &mut receiver => Some(compiled),
            () = timeout => None,
        };
        let compiled = match in_time {
            Some(compiled) => compiled,
            None if ticket.cancel() => return Err(GrammarError::QueueTimeout),
            // The job has begun, and the pool's watchdog bounds it from here on.
            None => receiver.await,
        };
        compiled.unwrap_or(Err(GrammarError::Stopped))
    }
}

/// The job handler of the thread that compiles.
fn compile_handler(model: GrammarModel, masks: Arc<MaskComputer>) -> JobHandler<CompileJob, CompileResult> {
    let mut state = CompilerState { model, vocabulary: None, cache: VecDeque::new(), masks };
    Box::new(move |job| state.compile(job))
}

struct CompilerState {
    model: GrammarModel,
    /// Built for the first grammar.
    vocabulary: Option<Result<GrammarVocabulary, String>>,
    /// The most recently used grammar is first.
    cache: VecDeque<(Arc<GrammarSource>, CompiledGrammar)>,
    masks: Arc<MaskComputer>,
}

impl CompilerState {
    fn compile(&mut self, CompileJob { source, prior_output }: CompileJob) -> CompileResult {
        let mut matcher = self.grammar(&source)?.matcher();
        for token in prior_output {
            matcher.accept(token).map_err(GrammarError::PriorOutput)?;
        }
        Ok(Box::new(self.masks.constraint(source, matcher)))
    }

    fn grammar(&mut self, source: &Arc<GrammarSource>) -> Result<&CompiledGrammar, GrammarError> {
        if let Some(at) = self.cache.iter().position(|(cached, _)| *cached == *source) {
            if let Some(used) = self.cache.remove(at) {
                self.cache.push_front(used);
            }
        } else {
            let model = &self.model;
            let vocabulary = self.vocabulary.get_or_insert_with(|| build_vocabulary(model));
            let vocabulary =
                vocabulary.as_ref().map_err(|detail| GrammarError::Vocabulary { detail: detail.clone() })?;
            let grammar = CompiledGrammar::compile(source, vocabulary)?;
            self.cache.truncate(CACHED_GRAMMARS_MAX - 1);
            self.cache.push_front((source.clone(), grammar));
        }
        Ok(&self.cache[0].1)
    }
}

fn build_vocabulary(model: &GrammarModel) -> Result<GrammarVocabulary, String> {
    let metadata =
        gguf::Metadata::parse(model.gguf.clone()).map_err(|error| service::exit::one_line(&error))?;
    let vocabulary = match Tokenizer::from_metadata(&metadata) {
        Ok(tokenizer) => GrammarVocabulary::new(&tokenizer),
        Err(LoadTokenizerError::NoTokenizer) => {
            let ends = text::end_of_generation_keys(&metadata).unwrap_or_default();
            GrammarVocabulary::without_texts(model.vocab_size, &ends)
        }
        Err(error) => return Err(service::exit::one_line(&error)),
    };
    vocabulary.map_err(|error| service::exit::one_line(&error))
}

#[cfg(test)]
pub(crate) mod tests {
    use std::future::{pending, ready};
    use std::pin::Pin;
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::task::{self, Context, Poll};

    use engine::{ConstraintError, TokenMask};

    use super::*;
    use crate::engine_loop::tests::idle_engine_loop;
    use crate::grammar_denylist::DENIED_FOR;
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
        fn token_mask(&mut self) -> Result<TokenMask<'_>, ConstraintError> {
            Ok(TokenMask::Complete)
        }

        fn accept(&mut self, _: u32) {}
    }

    /// A compiler whose handler reports what it begins, and blocks on the source "blocks" until the
    /// fixture is dropped.
    struct CompilerFixture {
        compiler: GrammarCompiler,
        pool: CompilePool,
        begun: Receiver<Arc<GrammarSource>>,
        _release: Sender<()>,
    }

    type CompileCall<'a> = Pin<Box<dyn Future<Output = CompileResult> + 'a>>;

    impl CompilerFixture {
        fn new() -> Self {
            let (begun_sender, begun) = channel();
            let (release, released) = channel::<()>();
            let released = Arc::new(Mutex::new(released));
            let pool: CompilePool = pool_without_watchdog(COMPILE_QUEUE_MAX, move || {
                let (begun_sender, released) = (begun_sender.clone(), released.clone());
                Box::new(move |job: CompileJob| {
                    // The receiver is gone once the test has ended.
                    begun_sender.send(job.source.clone()).ok();
                    if *job.source == regex("blocks") {
                        released.lock().unwrap_or_else(PoisonError::into_inner).recv().ok();
                    }
                    Ok(Box::new(FinishedConstraint) as Box<dyn Constraint>)
                })
            });
            let compiler = GrammarCompiler::new(GrammarModel::default(), 1, idle_engine_loop().0.waker());
            *compiler.pool.lock().unwrap() = Some(pool.clone());
            Self { compiler, pool, begun, _release: release }
        }

        /// Starts a call, so that its job is queued if there is room.
        fn call(&self, text: &str, timeout: impl Future<Output = ()> + 'static) -> CompileCall<'_> {
            let mut call: CompileCall<'_> =
                Box::pin(self.compiler.compile_within(regex(text), Vec::new(), timeout));
            if let Poll::Ready(compiled) = poll(&mut call) {
                return Box::pin(ready(compiled));
            }
            call
        }

        fn expect_begun(&self, text: &str) {
            assert_eq!(*self.begun.recv_timeout(TIMEOUT).expect("a job begins in time"), regex(text));
        }
    }

    fn poll(call: &mut CompileCall<'_>) -> Poll<CompileResult> {
        call.as_mut().poll(&mut Context::from_waker(task::Waker::noop()))
    }

    #[tokio::test]
    async fn a_grammar_that_blocks_the_compiler_costs_a_thread_even_if_its_call_is_gone() {
        let fixture = CompilerFixture::new();
        let gone = fixture.call("blocks", pending());
        fixture.expect_begun("blocks");
        drop(gone);
        let next = fixture.call("next", pending());
        assert_eq!(queued_jobs(&fixture.pool), 1);
        assert!(tick_until_overdue(&fixture.pool));
        fixture.expect_begun("next");
        assert!(next.await.is_ok());
        assert!(matches!(fixture.call("blocks", pending()).await, Err(GrammarError::TimedOut)));
        assert!(fixture.call("other", pending()).await.is_ok());
        fixture.expect_begun("other");
        let denied = |after| fixture.compiler.denylist.find(&regex("blocks"), Instant::now() + after);
        assert_eq!((denied(Duration::ZERO), denied(DENIED_FOR)), (Some(JobFailure::Overdue), None));
    }

    #[tokio::test]
    async fn waiting_too_long_and_compiling_too_long_are_different_errors() {
        let fixture = CompilerFixture::new();
        let (end_timeout, timeout) = oneshot::channel::<()>();
        let mut blocks = fixture.call("blocks", async { drop(timeout.await) });
        fixture.expect_begun("blocks");
        end_timeout.send(()).unwrap();
        assert!(poll(&mut blocks).is_pending(), "the queue timeout does not apply to a job that has begun");
        assert!(matches!(fixture.call("waits", ready(())).await, Err(GrammarError::QueueTimeout)));
        assert_eq!(queued_jobs(&fixture.pool), 0, "a job that timed out leaves the queue");
        assert!(tick_until_overdue(&fixture.pool));
        assert!(matches!(blocks.await, Err(GrammarError::TimedOut)));
        assert!(fixture.call("waits", pending()).await.is_ok(), "the denylist does not hold this grammar");
    }

    #[tokio::test]
    async fn dropped_calls_leave_the_queue() {
        let fixture = CompilerFixture::new();
        let _blocks = fixture.call("blocks", pending());
        fixture.expect_begun("blocks");
        let full: Vec<_> = (0..COMPILE_QUEUE_MAX).map(|n| fixture.call(&n.to_string(), pending())).collect();
        assert!(matches!(fixture.call("more", pending()).await, Err(GrammarError::QueueFull)));
        drop(full);
        assert!(poll(&mut fixture.call("more", pending())).is_pending());
    }
}
