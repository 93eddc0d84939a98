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

/// Time around an end of the router within which connections may break.
const RESET_SLACK: Duration = Duration::from_secs(2);

#[derive(Debug, Default)]
pub(super) struct Tally {
    complete: u64,
    resumed: u64,
    left: u64,
    tokens: u64,
    /// Explicit errors, by their text.
    errors: BTreeMap<String, u64>,
    unreachable: u64,
    resets: Vec<Reset>,
    /// Responses that were cut silently, had other bytes, or hung. There may be none.
    silent: Vec<String>,
    wrong: Vec<String>,
    hung: Vec<String>,
}

/// A connection that broke.
#[derive(Debug)]
struct Reset {
    began: Instant,
    ended: Instant,
    text: String,
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
            Ending::Unreachable => self.unreachable += 1,
            Ending::Reset(text) => self.resets.push(Reset { began, ended: Instant::now(), text }),
            Ending::Silent => self.silent.push(scenario.name.clone()),
            Ending::Hung => self.hung.push(scenario.name.clone()),
        }
    }

    /// Resets that no end of a router explains. `router_ends` are the times of those.
    fn unexplained<'a>(&'a self, router_ends: &[Instant]) -> Vec<&'a str> {
        let is_explained = |reset: &&Reset| {
            router_ends
                .iter()
                .any(|&end| end + RESET_SLACK >= reset.began && end <= reset.ended + RESET_SLACK)
        };
        self.resets.iter().filter(|reset| !is_explained(reset)).map(|reset| reset.text.as_str()).collect()
    }

    /// Everything that breaks a promise; empty if all hold.
    pub(super) fn violations(&self, router_ends: &[Instant]) -> Vec<String> {
        let all = [("cut silently", &self.silent), ("wrong bytes", &self.wrong), ("hung", &self.hung)];
        let mut violations: Vec<String> = all
            .iter()
            .flat_map(|(what, found)| found.iter().map(move |text| format!("{what}: {text}")))
            .collect();
        violations.extend(
            self.unexplained(router_ends)
                .iter()
                .map(|text| format!("reset without an end of the router: {text}")),
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
        line("not sent: no router listened", self.unreachable)?;
        line("reset with the end of the router", self.resets.len() as u64)?;
        line("cut silently", self.silent.len() as u64)?;
        line("with other bytes", self.wrong.len() as u64)?;
        line("hung", self.hung.len() as u64)?;
        self.errors.iter().try_for_each(|(text, count)| writeln!(f, "soak: {count:>7}  x {text}"))
    }
}
