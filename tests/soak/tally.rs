// SPDX-License-Identifier: Apache-2.0

//! Counts how the responses of the soak ended, and prints the table.

use std::collections::BTreeMap;
use std::fmt::{self, Display, Formatter};
use std::time::{Duration, Instant};

use super::client::Ending;
use super::output::Output;
use super::scenario::Scenario;

/// Violations that are printed in full.
const VIOLATIONS_SHOWN: usize = 20;

/// Time around an end of the router within which connections may break or be refused.
const RESET_SLACK: Duration = Duration::from_secs(2);

/// When processes ended, in order.
#[derive(Debug, Default)]
pub(super) struct ProcessEnds {
    pub(super) router: Vec<Instant>,
    pub(super) supervisor: Vec<Instant>,
}

#[derive(Debug, Default)]
pub(super) struct Tally {
    complete: u64,
    resumed: u64,
    left: u64,
    tokens: u64,
    /// Explicit errors, by their text.
    errors: BTreeMap<String, u64>,
    refusals: Vec<BrokenConnection>,
    resets: Vec<BrokenConnection>,
    /// Responses that were cut silently, had other bytes, or hung. There may be none.
    silent: Vec<String>,
    wrong: Vec<String>,
    hung: Vec<String>,
}

/// A connection that broke or was refused.
#[derive(Debug)]
struct BrokenConnection {
    began: Instant,
    ended: Instant,
    text: String,
}

impl BrokenConnection {
    fn is_near(&self, end: Instant) -> bool {
        end + RESET_SLACK >= self.began && end <= self.ended + RESET_SLACK
    }

    /// A router that ends resets its connections.
    fn is_explained_reset(&self, ends: &ProcessEnds) -> bool {
        ends.router.iter().any(|&end| self.is_near(end))
    }

    /// The first supervisor holds the public socket, so connections wait for the next router. A
    /// successor may not hold it yet when the router ends too.
    fn is_explained_refusal(&self, ends: &ProcessEnds) -> bool {
        let has_successor = ends.supervisor.first().is_some_and(|&end| end <= self.ended + RESET_SLACK);
        has_successor && self.is_explained_reset(ends)
    }

    /// The text, and how long after the last end of the router.
    fn describe(&self, ends: &ProcessEnds) -> String {
        let last = ends.router.iter().rfind(|&&end| end <= self.ended);
        match last {
            Some(&end) => format!("{:.1?} after an end of the router: {}", self.ended - end, self.text),
            None => format!("before any end of the router: {}", self.text),
        }
    }
}

impl Tally {
    pub(super) fn record(
        &mut self,
        scenario: &Scenario,
        reference: &Output,
        found: &Output,
        ending: Ending,
        began: Instant,
    ) {
        self.tokens += found.tokens() as u64;
        let is_right = match ending {
            Ending::Complete { .. } => found == reference,
            _ => found.is_begin_of(reference),
        };
        if !is_right {
            let difference = found.difference(reference);
            self.wrong.push(format!("{}: {ending:?}: {difference}", scenario.name));
        }
        let broken = |text| BrokenConnection { began, ended: Instant::now(), text };
        match ending {
            Ending::Complete { .. } if !is_right => {}
            Ending::Complete { resumes } => {
                self.complete += 1;
                self.resumed += u64::from(resumes > 0);
            }
            Ending::Left => self.left += 1,
            Ending::Refused(text) => {
                *self.errors.entry(format!("refused: {}", without_digits(&text))).or_default() += 1
            }
            Ending::Failed(text) => {
                *self.errors.entry(format!("ended: {}", without_digits(&text))).or_default() += 1
            }
            Ending::Unreachable(text) => self.refusals.push(broken(text)),
            Ending::Reset(text) => self.resets.push(broken(text)),
            Ending::Silent => self.silent.push(scenario.name.clone()),
            Ending::Hung => self.hung.push(scenario.name.clone()),
        }
    }

    /// Everything that breaks a promise; empty if all hold.
    pub(super) fn violations(&self, ends: &ProcessEnds) -> Vec<String> {
        let all = [("cut silently", &self.silent), ("wrong bytes", &self.wrong), ("hung", &self.hung)];
        let mut violations: Vec<String> = all
            .iter()
            .flat_map(|(what, found)| found.iter().map(move |text| format!("{what}: {text}")))
            .collect();
        let resets = self.resets.iter().filter(|reset| !reset.is_explained_reset(ends));
        violations
            .extend(resets.map(|it| format!("reset without an end of the router: {}", it.describe(ends))));
        let refusals = self.refusals.iter().filter(|refusal| !refusal.is_explained_refusal(ends));
        violations.extend(
            refusals
                .map(|it| format!("refused without an end of supervisor and router: {}", it.describe(ends))),
        );
        violations.truncate(VIOLATIONS_SHOWN);
        violations
    }

    pub(super) fn complete(&self) -> u64 {
        self.complete
    }
}

/// Error texts with numbers and process names in them are counted together.
fn without_digits(text: &str) -> String {
    text.chars().filter(|c| !c.is_ascii_digit()).take(160).collect()
}

impl Display for Tally {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let errors: u64 = self.errors.values().sum();
        let mut line = |what: &str, count: u64| writeln!(f, "measured: soak: {count:>7}  {what}");
        line("tokens received", self.tokens)?;
        line("streams completed, equal to their references", self.complete)?;
        line("of them resumed by another worker (gRPC says so)", self.resumed)?;
        line("left by their client, a beginning of the reference", self.left)?;
        line("ended by an explicit error", errors)?;
        line("refused with the end of supervisor and router", self.refusals.len() as u64)?;
        line("reset with the end of the router", self.resets.len() as u64)?;
        line("cut silently", self.silent.len() as u64)?;
        line("with other bytes", self.wrong.len() as u64)?;
        line("hung", self.hung.len() as u64)?;
        self.errors.iter().try_for_each(|(text, count)| writeln!(f, "soak: {count:>7}  x {text}"))
    }
}

#[test]
fn refused_connections_need_an_end_of_the_router_and_of_a_supervisor() {
    let start = Instant::now();
    let at = |seconds| start + Duration::from_secs(seconds);
    let refusal = BrokenConnection { began: at(100), ended: at(100), text: String::new() };
    let is_explained = |router: Vec<Instant>, supervisor: Vec<Instant>| {
        refusal.is_explained_refusal(&ProcessEnds { router, supervisor })
    };
    assert!(is_explained(vec![at(99)], vec![at(20)]));
    assert!(!is_explained(vec![at(99)], vec![]), "the first supervisor holds the socket");
    assert!(!is_explained(vec![at(99)], vec![at(110)]), "a later end explains nothing");
    assert!(!is_explained(vec![at(50)], vec![at(20)]), "the router has listened since");
    assert!(refusal.is_explained_reset(&ProcessEnds { router: vec![at(99)], supervisor: vec![] }));
}
