//! A request's grammar as the engine sees it: the mask of the next token is computed beside the steps.
//!
//! A request has at most one mask under way: the matcher goes to a thread when a token was drawn and is back, with the mask
//! of the next, when the step that needs it comes to its draw. Nobody waits for one that is late but its request: the
//! engine keeps the row, goes on, and is waked when the mask is there. A request that ends takes its job along, so what
//! waits is one job of each that runs, at most, and a request's wait is bounded by that and by what one mask may take.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use engine::{Allowed, Constraint, ConstraintError};
use grammar::{MatchError, Matcher, Next, Source};

use crate::crew::{Crew, Losses, Lost, Terms, Ticket, Tool};
use crate::grammars::Costly;
use crate::stepper::Waker;

/// Bounded work: some 20 ms, half a second for hostile grammars. Twenty times that, for a machine that is busy.
pub(crate) const MASK_SECONDS_MAX: u32 = 10;
/// What Rust gives a thread: a matcher does not recurse.
const STACK_BYTES: usize = 2 << 20;

/// A matcher with the mask at its state.
struct Work {
    matcher: Matcher,
    mask: Vec<u32>,
    next: Result<Next, MatchError>,
}

/// The token was drawn.
struct Job {
    work: Box<Work>,
    token: u32,
}

type MaskCrew = Crew<Job, Box<Work>>;

/// What computes masks, and whom it wakes and tells.
pub(crate) struct Masks {
    crew: Arc<MaskCrew>,
    waker: Waker,
    costly: Costly,
}

impl Masks {
    pub(crate) fn start(
        threads: usize,
        losses: Arc<Losses>,
        waker: Waker,
        costly: Costly,
    ) -> io::Result<Arc<Self>> {
        let terms = Terms {
            name: "masks",
            stack_bytes: STACK_BYTES,
            threads,
            // A request that runs has one at most.
            waiting_max: usize::MAX,
            looks_max: MASK_SECONDS_MAX,
            losses,
        };
        Ok(Arc::new(Self { crew: Crew::start(terms, tool)?, waker, costly }))
    }

    /// For a request of the grammar `source`, with the mask of its first token.
    pub(crate) fn constraint(self: &Arc<Self>, source: Arc<Source>, mut matcher: Matcher) -> Masked {
        let mut mask = Vec::new();
        let next = matcher.allowed(&mut mask);
        let (sender, back) = sync_channel(1);
        let here = Some(Ok(Box::new(Work { matcher, mask, next })));
        Masked { here, back, sender, ticket: None, source, masks: self.clone() }
    }
}

/// What a thread of the crew does.
fn tool() -> Tool<Job, Box<Work>> {
    Box::new(|Job { mut work, token }| {
        let Work { matcher, mask, next } = &mut *work;
        *next = matcher.accept(token).and_then(|()| matcher.allowed(mask));
        work
    })
}

/// `Err`: it was lost.
type Back = Result<Box<Work>, ConstraintError>;

/// One request's grammar.
pub(crate) struct Masked {
    /// `None` while the next mask is being computed.
    here: Option<Back>,
    back: Receiver<Back>,
    sender: SyncSender<Back>,
    /// Of the last mask that was asked for.
    ticket: Option<Ticket<Job, Box<Work>>>,
    source: Arc<Source>,
    masks: Arc<Masks>,
}

impl Constraint for Masked {
    fn allowed(&mut self) -> Result<Allowed<'_>, ConstraintError> {
        if self.here.is_none() {
            self.here = self.back.try_recv().ok();
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
        let Some(Ok(work)) = self.here.take() else { return };
        let (back, waker) = (self.sender.clone(), self.masks.waker.clone());
        let (source, costly) = (self.source.clone(), self.masks.costly.clone());
        let asked = self.masks.crew.ask(Job { work, token }, move |done| {
            let done = done.map_err(|lost| {
                costly.add(source, lost);
                ConstraintError::from(lost)
            });
            // A request that has ended meanwhile takes nothing back.
            drop(back.send(done));
            waker.wake();
        });
        match asked {
            Ok(ticket) => self.ticket = Some(ticket),
            Err(_) => self.here = Some(Err(ConstraintError::Late)),
        }
    }
}

impl From<Lost> for ConstraintError {
    fn from(lost: Lost) -> Self {
        match lost {
            Lost::Panicked => ConstraintError::Broken,
            Lost::Overdue => ConstraintError::Late,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use grammar::Grammar;

    use super::*;
    use crate::crew::tests::{do_next, lose_next, unmanned, waiting};
    use crate::grammars::tests::vocabulary;
    use crate::stepper::Handle;
    use crate::stepper::tests::{is_waked, over_nothing};

    /// Of the one choice "yes".
    struct Yes {
        source: Arc<Source>,
        grammar: Grammar,
        tokens: Vec<u32>,
    }

    impl Yes {
        fn new() -> Self {
            let (tokenizer, vocabulary) = vocabulary();
            let source = Arc::new(Source::Choice(vec!["yes".to_owned()]));
            let grammar = Grammar::compile(&source, &vocabulary).unwrap();
            let tokens = tokenizer.encode("yes", text::EncodeOptions::default()).unwrap();
            Self { source, grammar, tokens }
        }

        fn constraint(&self, masks: &Arc<Masks>) -> Masked {
            masks.constraint(self.source.clone(), self.grammar.matcher())
        }
    }

    /// Nobody computes masks here but the test: what returns did not wait for one.
    fn masks(handle: &Handle) -> Arc<Masks> {
        Arc::new(Masks { crew: unmanned(tool), waker: handle.waker(), costly: Costly::default() })
    }

    #[test]
    fn a_mask_is_computed_between_a_draw_and_the_next_and_by_others() {
        let (handle, _stepper) = over_nothing();
        let (masks, yes) = (masks(&handle), Yes::new());
        let mut constraint = yes.constraint(&masks);
        for &token in &yes.tokens {
            let Ok(Allowed::Tokens(mask)) = constraint.allowed() else { panic!("it is not whole") };
            assert_ne!(mask[token as usize / 32] & 1 << (token % 32), 0);
            constraint.accept(token);
            assert!(constraint.here.is_none(), "the matcher is with the job");
            assert_eq!(constraint.allowed(), Ok(Allowed::Later));
            do_next(&masks.crew);
        }
        assert_eq!(constraint.allowed(), Ok(Allowed::Nothing));
    }

    #[test]
    fn the_engine_is_waked_when_a_mask_is_there() {
        let (handle, stepper) = over_nothing();
        let (masks, yes) = (masks(&handle), Yes::new());
        let mut constraint = yes.constraint(&masks);
        constraint.accept(yes.tokens[0]);
        assert!(!is_waked(&stepper));
        do_next(&masks.crew);
        assert!(is_waked(&stepper));
        assert!(matches!(constraint.allowed(), Ok(Allowed::Tokens(_) | Allowed::Nothing)));
    }

    #[test]
    fn a_request_that_ends_takes_its_job_and_its_matcher_along() {
        let (handle, _stepper) = over_nothing();
        let (masks, yes) = (masks(&handle), Yes::new());
        let mut left: Vec<_> = (0..20).map(|_| yes.constraint(&masks)).collect();
        left.iter_mut().for_each(|constraint| constraint.accept(yes.tokens[0]));
        let mut stays = yes.constraint(&masks);
        stays.accept(yes.tokens[0]);
        assert_eq!(waiting(&masks.crew), 21);
        drop(left);
        assert_eq!(waiting(&masks.crew), 1, "nobody computes what nobody waits for");
        assert_eq!(
            Arc::strong_count(&yes.source),
            1 + 2,
            "nor holds it: the test, one request and its job do"
        );
        do_next(&masks.crew);
        assert!(matches!(stays.allowed(), Ok(Allowed::Tokens(_) | Allowed::Nothing)));
    }

    #[test]
    fn a_mask_that_costs_its_thread_ends_its_request_and_its_grammar_is_known_for_it() {
        let yes = Yes::new();
        for (lost, said) in
            [(Lost::Panicked, ConstraintError::Broken), (Lost::Overdue, ConstraintError::Late)]
        {
            let (handle, stepper) = over_nothing();
            let masks = masks(&handle);
            let mut constraint = yes.constraint(&masks);
            constraint.accept(yes.tokens[0]);
            lose_next(&masks.crew, lost);
            assert!(is_waked(&stepper));
            assert_eq!(constraint.allowed(), Err(said));
            assert_eq!(constraint.allowed(), Err(said), "and so it stays");
            assert_eq!(masks.costly.find(&yes.source, Instant::now()), Some(lost));
        }
    }
}
