// SPDX-License-Identifier: Apache-2.0

//! The constraint of one request: computes the next token bitmask while the engine steps.
//!
//! ```text
//! engine loop                     mask thread
//! sample a token
//!   accept(token) --MaskJob-----> matcher.accept, matcher.compute_mask
//! next step                         |
//!   allowed() = Later               |   the row's logits are deferred, other rows go on
//!   allowed() = Tokens(mask) <------+   then the thread wakes the engine
//! ```
//!
//! 1. A request has at most one mask job. The job owns the matcher until its result is read.
//! 2. Only the request itself waits for a late mask. The engine defers that row's logits and steps
//!    on.
//! 3. A request that ends drops its job. The queue therefore holds at most one job per running
//!    request, which bounds how long a request waits.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use engine::{Constraint, ConstraintError, TokenMask};
use grammar::{GrammarSource, MatchError, Matcher, MatcherStatus};

use crate::engine_loop::EngineWaker;
use crate::grammar_denylist::GrammarDenylist;
use crate::worker_pool::{JobFailure, JobHandler, JobTicket, LostThreads, PoolConfig, WorkerPool};

/// A mask takes bounded work: about 20 ms, and half a second for hostile grammars. The limit is
/// twenty times that, for a busy machine.
pub(crate) const MASK_SECONDS_MAX: u32 = 10;
/// Rust's default for threads. A matcher does not recurse.
const STACK_BYTES: usize = 2 << 20;

/// A matcher, and the mask of its current state.
struct MatcherState {
    matcher: Matcher,
    mask: Vec<u32>,
    status: Result<MatcherStatus, MatchError>,
}

/// Advances the matcher by the sampled token, and computes the next mask.
struct MaskJob {
    state: Box<MatcherState>,
    token: u32,
}

type MaskPool = WorkerPool<MaskJob, Box<MatcherState>>;

/// Computes the masks of all requests on the threads of one pool.
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
            // Each running request has at most one job.
            queue_max: usize::MAX,
            max_watchdog_ticks: MASK_SECONDS_MAX,
            lost_threads,
        };
        Ok(Arc::new(Self { pool: WorkerPool::start(config, new_handler)?, waker, denylist }))
    }

    /// Creates the constraint of a request, with the mask of its first token.
    pub(crate) fn constraint(
        self: &Arc<Self>,
        source: Arc<GrammarSource>,
        mut matcher: Matcher,
    ) -> GrammarConstraint {
        let mut mask = Vec::new();
        let status = matcher.compute_mask(&mut mask);
        let (sender, results) = sync_channel(1);
        let current = Some(Ok(Box::new(MatcherState { matcher, mask, status })));
        GrammarConstraint { current, results, sender, ticket: None, source, masks: self.clone() }
    }
}

fn new_handler() -> JobHandler<MaskJob, Box<MatcherState>> {
    Box::new(|MaskJob { mut state, token }| {
        let MatcherState { matcher, mask, status } = &mut *state;
        *status = matcher.accept(token).and_then(|()| matcher.compute_mask(mask));
        state
    })
}

/// An error means that the job cost its thread.
type MaskResult = Result<Box<MatcherState>, ConstraintError>;

/// The grammar constraint of one request.
pub(crate) struct GrammarConstraint {
    /// `None` while the next mask is being computed.
    current: Option<MaskResult>,
    results: Receiver<MaskResult>,
    sender: SyncSender<MaskResult>,
    /// The ticket of the last job. Dropping it cancels the job.
    ticket: Option<JobTicket<MaskJob, Box<MatcherState>>>,
    source: Arc<GrammarSource>,
    masks: Arc<MaskComputer>,
}

impl Constraint for GrammarConstraint {
    fn token_mask(&mut self) -> Result<TokenMask<'_>, ConstraintError> {
        if self.current.is_none() {
            self.current = self.results.try_recv().ok();
        }
        let state = match &self.current {
            Some(Ok(state)) => state,
            Some(Err(error)) => return Err(*error),
            None => return Ok(TokenMask::Pending),
        };
        match state.status {
            Ok(MatcherStatus::Active) => Ok(TokenMask::Allowed(&state.mask)),
            Ok(MatcherStatus::Finished) => Ok(TokenMask::Complete),
            Err(MatchError::TooComplex) => Err(ConstraintError::TooComplex),
            Err(MatchError::DeadEnd | MatchError::Token { .. }) => Err(ConstraintError::DeadEnd),
        }
    }

    fn accept(&mut self, token: u32) {
        let Some(Ok(state)) = self.current.take() else { return };
        let (sender, waker) = (self.sender.clone(), self.masks.waker.clone());
        let (source, denylist) = (self.source.clone(), self.masks.denylist.clone());
        let submitted = self.masks.pool.submit(MaskJob { state, token }, move |result| {
            let result = result.map_err(|failure| {
                denylist.add(source, failure);
                ConstraintError::from(failure)
            });
            // The receiver is gone if the request has ended.
            drop(sender.send(result));
            waker.wake();
        });
        match submitted {
            Ok(ticket) => self.ticket = Some(ticket),
            Err(_) => self.current = Some(Err(ConstraintError::MaskTimeout)),
        }
    }
}

impl From<JobFailure> for ConstraintError {
    fn from(failure: JobFailure) -> Self {
        match failure {
            JobFailure::Panicked => ConstraintError::Internal,
            JobFailure::Overdue => ConstraintError::MaskTimeout,
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

    /// A grammar whose only output is "yes".
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

    /// A mask computer without threads: a call that returns has not waited for a mask.
    fn masks(handle: &EngineHandle) -> Arc<MaskComputer> {
        Arc::new(MaskComputer {
            pool: pool_without_threads(new_handler),
            waker: handle.waker(),
            denylist: GrammarDenylist::default(),
        })
    }

    #[test]
    fn a_mask_is_computed_by_a_job_after_each_token() {
        let (handle, _engine_loop) = idle_engine_loop();
        let (masks, yes) = (masks(&handle), YesGrammar::new());
        let mut constraint = yes.constraint(&masks);
        for &token in &yes.tokens {
            let Ok(TokenMask::Allowed(mask)) = constraint.token_mask() else {
                panic!("the grammar allows no token")
            };
            assert_ne!(mask[token as usize / 32] & 1 << (token % 32), 0);
            constraint.accept(token);
            assert!(constraint.current.is_none(), "the job owns the matcher");
            assert_eq!(constraint.token_mask(), Ok(TokenMask::Pending));
            run_next_job(&masks.pool);
        }
        assert_eq!(constraint.token_mask(), Ok(TokenMask::Complete));
    }

    #[test]
    fn a_finished_mask_wakes_the_engine() {
        let (handle, engine_loop) = idle_engine_loop();
        let (masks, yes) = (masks(&handle), YesGrammar::new());
        let mut constraint = yes.constraint(&masks);
        constraint.accept(yes.tokens[0]);
        assert!(!take_wake(&engine_loop));
        run_next_job(&masks.pool);
        assert!(take_wake(&engine_loop));
        assert!(matches!(constraint.token_mask(), Ok(TokenMask::Allowed(_) | TokenMask::Complete)));
    }

    #[test]
    fn dropping_a_constraint_drops_its_job_and_its_matcher() {
        let (handle, _engine_loop) = idle_engine_loop();
        let (masks, yes) = (masks(&handle), YesGrammar::new());
        let mut left: Vec<_> = (0..20).map(|_| yes.constraint(&masks)).collect();
        left.iter_mut().for_each(|constraint| constraint.accept(yes.tokens[0]));
        let mut stays = yes.constraint(&masks);
        stays.accept(yes.tokens[0]);
        assert_eq!(queued_jobs(&masks.pool), 21);
        drop(left);
        assert_eq!(queued_jobs(&masks.pool), 1, "dropped constraints leave the queue");
        assert_eq!(
            Arc::strong_count(&yes.source),
            1 + 2,
            "the test, one constraint and its job hold the source"
        );
        run_next_job(&masks.pool);
        assert!(matches!(stays.token_mask(), Ok(TokenMask::Allowed(_) | TokenMask::Complete)));
    }

    #[test]
    fn a_mask_job_that_fails_ends_its_request_and_puts_its_grammar_on_the_denylist() {
        let yes = YesGrammar::new();
        for (failure, error) in [
            (JobFailure::Panicked, ConstraintError::Internal),
            (JobFailure::Overdue, ConstraintError::MaskTimeout),
        ] {
            let (handle, engine_loop) = idle_engine_loop();
            let masks = masks(&handle);
            let mut constraint = yes.constraint(&masks);
            constraint.accept(yes.tokens[0]);
            fail_next_job(&masks.pool, failure);
            assert!(take_wake(&engine_loop));
            assert_eq!(constraint.token_mask(), Err(error));
            assert_eq!(constraint.token_mask(), Err(error), "the error is permanent");
            assert_eq!(masks.denylist.find(&yes.source, Instant::now()), Some(failure));
        }
    }
}
