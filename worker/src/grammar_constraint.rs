//! A request's grammar as the engine sees it: the mask of the next token is computed beside the steps.
//!
//! A request has at most one mask under way: the matcher goes to a thread when a token was drawn and is results, with the mask
//! of the next, when the step that needs it comes to its draw. Nobody waits for one that is late but its request: the
//! engine keeps the row, goes on, and is waked when the mask is there. A request that ends takes its job along, so what
//! waits is one job of each that runs, at most, and a request's wait is bounded by that and by what one mask may take.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use engine::{Allowed, Constraint, ConstraintError};
use grammar::{GrammarSource, MatchError, Matcher, MatcherStatus};

use crate::engine_loop::EngineWaker;
use crate::grammar_compiler::GrammarDenylist;
use crate::worker_pool::{JobFailure, JobHandler, JobTicket, LostThreads, PoolConfig, WorkerPool};

/// Bounded work: some 20 ms, half a second for hostile grammars. Twenty times that, for a machine that is busy.
pub(crate) const MASK_SECONDS_MAX: u32 = 10;
/// What Rust gives a thread: a matcher does not recurse.
const STACK_BYTES: usize = 2 << 20;

/// A matcher with the mask at its state.
struct MatcherState {
    matcher: Matcher,
    mask: Vec<u32>,
    next: Result<MatcherStatus, MatchError>,
}

/// The token was drawn.
struct MaskJob {
    work: Box<MatcherState>,
    token: u32,
}

type MaskPool = WorkerPool<MaskJob, Box<MatcherState>>;

/// What computes masks, and whom it wakes and tells.
pub(crate) struct MaskComputer {
    pool: Arc<MaskPool>,
    waker: EngineWaker,
    denylist: GrammarDenylist,
}

impl MaskComputer {
    pub(crate) fn start(
        threads: usize,
        lost_threads: Arc<LostThreads>,
        waker: EngineWaker,
        denylist: GrammarDenylist,
    ) -> io::Result<Arc<Self>> {
        let config = PoolConfig {
            thread_name: "masks",
            stack_bytes: STACK_BYTES,
            threads,
            // A request that runs has one at most.
            queue_max: usize::MAX,
            max_watchdog_ticks: MASK_SECONDS_MAX,
            lost_threads,
        };
        Ok(Arc::new(Self { pool: WorkerPool::start(config, mask_handler)?, waker, denylist }))
    }

    /// For a request of the grammar `source`, with the mask of its first token.
    pub(crate) fn constraint(
        self: &Arc<Self>,
        source: Arc<GrammarSource>,
        mut matcher: Matcher,
    ) -> GrammarConstraint {
        let mut mask = Vec::new();
        let next = matcher.compute_mask(&mut mask);
        let (sender, results) = sync_channel(1);
        let current = Some(Ok(Box::new(MatcherState { matcher, mask, next })));
        GrammarConstraint { current, results, sender, ticket: None, source, masks: self.clone() }
    }
}

/// What a thread of the pool does.
fn mask_handler() -> JobHandler<MaskJob, Box<MatcherState>> {
    Box::new(|MaskJob { mut work, token }| {
        let MatcherState { matcher, mask, next } = &mut *work;
        *next = matcher.accept(token).and_then(|()| matcher.compute_mask(mask));
        work
    })
}

/// `Err`: it was lost.
type MaskResult = Result<Box<MatcherState>, ConstraintError>;

/// One request's grammar.
pub(crate) struct GrammarConstraint {
    /// `None` while the next mask is being computed.
    current: Option<MaskResult>,
    results: Receiver<MaskResult>,
    sender: SyncSender<MaskResult>,
    /// Of the last mask that was asked for.
    ticket: Option<JobTicket<MaskJob, Box<MatcherState>>>,
    source: Arc<GrammarSource>,
    masks: Arc<MaskComputer>,
}

impl Constraint for GrammarConstraint {
    fn allowed(&mut self) -> Result<Allowed<'_>, ConstraintError> {
        if self.current.is_none() {
            self.current = self.results.try_recv().ok();
        }
        let work = match &self.current {
            Some(Ok(work)) => work,
            Some(Err(error)) => return Err(*error),
            None => return Ok(Allowed::Later),
        };
        match work.next {
            Ok(MatcherStatus::Active) => Ok(Allowed::Tokens(&work.mask)),
            Ok(MatcherStatus::Finished) => Ok(Allowed::Nothing),
            Err(MatchError::TooComplex) => Err(ConstraintError::TooComplex),
            Err(MatchError::DeadEnd | MatchError::Token { .. }) => Err(ConstraintError::DeadEnd),
        }
    }

    fn accept(&mut self, token: u32) {
        let Some(Ok(work)) = self.current.take() else { return };
        let (results, waker) = (self.sender.clone(), self.masks.waker.clone());
        let (source, denylist) = (self.source.clone(), self.masks.denylist.clone());
        let asked = self.masks.pool.submit(MaskJob { work, token }, move |done| {
            let done = done.map_err(|lost| {
                denylist.add(source, lost);
                ConstraintError::from(lost)
            });
            // A request that has ended meanwhile takes nothing results.
            drop(results.send(done));
            waker.wake();
        });
        match asked {
            Ok(ticket) => self.ticket = Some(ticket),
            Err(_) => self.current = Some(Err(ConstraintError::Late)),
        }
    }
}

impl From<JobFailure> for ConstraintError {
    fn from(lost: JobFailure) -> Self {
        match lost {
            JobFailure::Panicked => ConstraintError::Broken,
            JobFailure::Overdue => ConstraintError::Late,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use grammar::CompiledGrammar;

    use super::*;
    use crate::engine_loop::EngineHandle;
    use crate::engine_loop::tests::{idle_engine_loop, take_wake};
    use crate::grammar_compiler::tests::vocabulary;
    use crate::worker_pool::tests::{fail_next_job, pool_without_threads, queued_jobs, run_next_job};

    /// Of the one choice "yes".
    struct YesGrammar {
        source: Arc<GrammarSource>,
        grammar: CompiledGrammar,
        tokens: Vec<u32>,
    }

    impl YesGrammar {
        fn new() -> Self {
            let (tokenizer, vocabulary) = vocabulary();
            let source = Arc::new(GrammarSource::Choice(vec!["yes".to_owned()]));
            let grammar = CompiledGrammar::compile(&source, &vocabulary).unwrap();
            let tokens = tokenizer.encode("yes", text::EncodeOptions::default()).unwrap();
            Self { source, grammar, tokens }
        }

        fn constraint(&self, masks: &Arc<MaskComputer>) -> GrammarConstraint {
            masks.constraint(self.source.clone(), self.grammar.matcher())
        }
    }

    /// Nobody computes masks here but the test: what returns did not wait for one.
    fn masks(handle: &EngineHandle) -> Arc<MaskComputer> {
        Arc::new(MaskComputer {
            pool: pool_without_threads(mask_handler),
            waker: handle.waker(),
            denylist: GrammarDenylist::default(),
        })
    }

    #[test]
    fn a_mask_is_computed_between_a_draw_and_the_next_and_by_others() {
        let (handle, _engine_loop) = idle_engine_loop();
        let (masks, yes) = (masks(&handle), YesGrammar::new());
        let mut constraint = yes.constraint(&masks);
        for &token in &yes.tokens {
            let Ok(Allowed::Tokens(mask)) = constraint.allowed() else { panic!("it is not whole") };
            assert_ne!(mask[token as usize / 32] & 1 << (token % 32), 0);
            constraint.accept(token);
            assert!(constraint.current.is_none(), "the matcher is with the job");
            assert_eq!(constraint.allowed(), Ok(Allowed::Later));
            run_next_job(&masks.pool);
        }
        assert_eq!(constraint.allowed(), Ok(Allowed::Nothing));
    }

    #[test]
    fn the_engine_is_waked_when_a_mask_is_there() {
        let (handle, engine_loop) = idle_engine_loop();
        let (masks, yes) = (masks(&handle), YesGrammar::new());
        let mut constraint = yes.constraint(&masks);
        constraint.accept(yes.tokens[0]);
        assert!(!take_wake(&engine_loop));
        run_next_job(&masks.pool);
        assert!(take_wake(&engine_loop));
        assert!(matches!(constraint.allowed(), Ok(Allowed::Tokens(_) | Allowed::Nothing)));
    }

    #[test]
    fn a_request_that_ends_takes_its_job_and_its_matcher_along() {
        let (handle, _engine_loop) = idle_engine_loop();
        let (masks, yes) = (masks(&handle), YesGrammar::new());
        let mut left: Vec<_> = (0..20).map(|_| yes.constraint(&masks)).collect();
        left.iter_mut().for_each(|constraint| constraint.accept(yes.tokens[0]));
        let mut stays = yes.constraint(&masks);
        stays.accept(yes.tokens[0]);
        assert_eq!(queued_jobs(&masks.pool), 21);
        drop(left);
        assert_eq!(queued_jobs(&masks.pool), 1, "nobody computes what nobody waits for");
        assert_eq!(
            Arc::strong_count(&yes.source),
            1 + 2,
            "nor holds it: the test, one request and its job do"
        );
        run_next_job(&masks.pool);
        assert!(matches!(stays.allowed(), Ok(Allowed::Tokens(_) | Allowed::Nothing)));
    }

    #[test]
    fn a_mask_that_costs_its_thread_ends_its_request_and_its_grammar_is_known_for_it() {
        let yes = YesGrammar::new();
        for (lost, said) in
            [(JobFailure::Panicked, ConstraintError::Broken), (JobFailure::Overdue, ConstraintError::Late)]
        {
            let (handle, engine_loop) = idle_engine_loop();
            let masks = masks(&handle);
            let mut constraint = yes.constraint(&masks);
            constraint.accept(yes.tokens[0]);
            fail_next_job(&masks.pool, lost);
            assert!(take_wake(&engine_loop));
            assert_eq!(constraint.allowed(), Err(said));
            assert_eq!(constraint.allowed(), Err(said), "and so it stays");
            assert_eq!(masks.denylist.find(&yes.source, Instant::now()), Some(lost));
        }
    }
}
