// SPDX-License-Identifier: Apache-2.0

//! When a model without a worker gets one, as far as the router can know. A plain value, which
//! [`crate::registry`] owns.
//!
//! 1. The supervisor says when the next worker of each model starts. What it said before the last
//!    worker was lost does not count.
//! 2. Without a supervisor that answers, a worker is expected for a bounded time after the last one
//!    was lost.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;

/// When the next worker of a model starts, as the supervisor says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NextWorker {
    /// A process of a worker is running, starting or stopping, or starts then.
    At(Instant),
    /// The model is idle, or becomes idle: it is loaded for the next request.
    OnDemand,
    /// The model is being unloaded, or all its workers are stopped.
    Never,
}

impl NextWorker {
    /// The earlier one.
    pub(crate) fn or(self, other: Self) -> Self {
        match (self, other) {
            (NextWorker::At(a), NextWorker::At(b)) => NextWorker::At(a.min(b)),
            (NextWorker::Never, next) | (next, NextWorker::Never) => next,
            (NextWorker::OnDemand, next) | (next, NextWorker::OnDemand) => next,
        }
    }
}

/// The time in which a worker is expected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ExpectedWorker {
    pub(crate) not_before: Instant,
    /// Afterwards no worker is expected any more.
    pub(crate) until: Option<Instant>,
}

/// What a client is told of the workers of a model of which none is ready.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WorkerForecast {
    #[error("its workers were lost, drain, or do not answer")]
    NoneAnswered,
    #[error("a worker is starting")]
    Starting,
    /// The supervisor pauses after each crash.
    #[error("the next worker starts in {} s", .0.as_secs().max(1))]
    StartsIn(Duration),
    #[error("none is going to start; `ballast ps` says why")]
    NoneExpected,
    /// With the reason of the supervisor.
    #[error("it cannot be loaded: {0}")]
    CannotLoad(String),
}

impl WorkerForecast {
    pub(crate) fn of(expected: Option<ExpectedWorker>, now: Instant) -> Self {
        match expected.map(|expected| expected.not_before.saturating_duration_since(now)) {
            None => WorkerForecast::NoneExpected,
            Some(Duration::ZERO) => WorkerForecast::Starting,
            Some(time) => WorkerForecast::StartsIn(time),
        }
    }
}

/// An answer of the supervisor about the models of the fleet, by name.
#[derive(Clone, Debug)]
pub(crate) struct FleetAnswer {
    /// When the supervisor was asked.
    pub(crate) asked: Instant,
    pub(crate) models: HashMap<String, NextWorker>,
    /// Why a model cannot be loaded, by name.
    pub(crate) failures: HashMap<String, String>,
    /// The name of the model by alias.
    pub(crate) aliases: HashMap<String, String>,
}

/// What came of a question to the supervisor.
#[derive(Clone, Debug, Default)]
pub(crate) enum SupervisorReply {
    Answer(FleetAnswer),
    /// It did not answer in time, is just being replaced, or was not asked yet.
    #[default]
    Silence,
    NoSupervisor,
}

/// What is known about workers that are not ready.
#[derive(Debug, Default)]
pub(crate) struct WorkerOutlook {
    reply: SupervisorReply,
}

impl WorkerOutlook {
    pub(crate) fn set_reply(&mut self, reply: SupervisorReply) {
        self.reply = reply;
    }

    fn answer(&self) -> Option<&FleetAnswer> {
        match &self.reply {
            SupervisorReply::Answer(answer) => Some(answer),
            SupervisorReply::Silence | SupervisorReply::NoSupervisor => None,
        }
    }

    /// Whether the supervisor may answer a question that is put after `time`, and has not yet.
    pub(crate) fn may_answer_after(&self, time: Instant) -> bool {
        match &self.reply {
            SupervisorReply::Answer(answer) => answer.asked <= time,
            SupervisorReply::Silence => true,
            SupervisorReply::NoSupervisor => false,
        }
    }

    /// The models that the supervisor lists and that may get workers.
    pub(crate) fn listed(&self) -> impl Iterator<Item = &str> {
        let models = self.answer().into_iter().flat_map(|answer| &answer.models);
        models.filter(|(_, next)| **next != NextWorker::Never).map(|(name, _)| name.as_str())
    }

    /// The idle models with their aliases, by name. Those that cannot be woken now are among them.
    pub(crate) fn idle(&self) -> Vec<(&str, Vec<&str>)> {
        let Some(answer) = self.answer() else { return Vec::new() };
        let is_idle = |name: &str| {
            answer.models.get(name) == Some(&NextWorker::OnDemand) || answer.failures.contains_key(name)
        };
        let mut idle: Vec<(&str, Vec<&str>)> = answer
            .models
            .keys()
            .filter(|name| is_idle(name))
            .map(|name| {
                let mut aliases: Vec<&str> = answer
                    .aliases
                    .iter()
                    .filter(|(_, of)| *of == name)
                    .map(|(alias, _)| alias.as_str())
                    .collect();
                aliases.sort_unstable();
                (name.as_str(), aliases)
            })
            .collect();
        idle.sort_unstable();
        idle
    }

    /// Whether a request has to ask for the model.
    pub(crate) fn is_on_demand(&self, name: &str) -> bool {
        let next = self.answer().and_then(|answer| answer.models.get(self.full_name(name)));
        next == Some(&NextWorker::OnDemand)
    }

    /// The name of the model that may be called by an alias.
    pub(crate) fn full_name<'a>(&'a self, name: &'a str) -> &'a str {
        let answer = self.answer().filter(|answer| !answer.models.contains_key(name));
        answer.and_then(|answer| answer.aliases.get(name)).map_or(name, String::as_str)
    }

    /// Why the model of this name cannot be loaded.
    pub(crate) fn failure(&self, name: &str) -> Option<&str> {
        let failures = self.answer().map(|answer| &answer.failures);
        failures.and_then(|failures| failures.get(self.full_name(name))).map(String::as_str)
    }

    pub(crate) fn lists(&self, name: &str) -> bool {
        let name = self.full_name(name);
        self.listed().any(|listed| listed == name)
    }

    /// When a worker of the model is expected, which lost its last one at `lost`. Without a
    /// supervisor, or without a name that one knows, it is expected for `wait`.
    pub(crate) fn next_worker(
        &self,
        name: Option<&str>,
        lost: Instant,
        wait: Duration,
        now: Instant,
    ) -> Option<ExpectedWorker> {
        let answer = self.answer().filter(|answer| answer.asked > lost);
        match answer.zip(name) {
            Some((answer, name)) => match answer.models.get(self.full_name(name))? {
                NextWorker::At(start) => Some(ExpectedWorker { not_before: *start, until: None }),
                NextWorker::OnDemand => Some(ExpectedWorker { not_before: answer.asked, until: None }),
                NextWorker::Never => None,
            },
            None => {
                let until = lost + wait;
                (until > now).then_some(ExpectedWorker { not_before: lost, until: Some(until) })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WAIT: Duration = Duration::from_secs(30);

    fn answered(asked: Instant, next: NextWorker) -> WorkerOutlook {
        let models = HashMap::from([("m".to_owned(), next)]);
        WorkerOutlook {
            reply: SupervisorReply::Answer(FleetAnswer {
                asked,
                models,
                failures: HashMap::new(),
                aliases: HashMap::new(),
            }),
        }
    }

    #[test]
    fn without_a_supervisor_a_worker_is_expected_for_a_bounded_time_after_the_loss() {
        let lost = Instant::now();
        let outlook = WorkerOutlook::default();
        let next = |now| outlook.next_worker(Some("m"), lost, WAIT, now);
        let expected = ExpectedWorker { not_before: lost, until: Some(lost + WAIT) };
        assert_eq!(next(lost), Some(expected));
        assert_eq!(next(lost + WAIT - Duration::from_millis(1)), Some(expected));
        assert_eq!(next(lost + WAIT), None);
        assert!(!outlook.lists("m"));
    }

    #[test]
    fn the_supervisor_s_answer_counts_if_it_is_younger_than_the_loss() {
        let lost = Instant::now();
        let later = lost + Duration::from_millis(1);
        let start = lost + Duration::from_secs(40);
        let outlook = answered(later, NextWorker::At(start));
        let next = |outlook: &WorkerOutlook, name, lost| outlook.next_worker(Some(name), lost, WAIT, later);
        assert_eq!(next(&outlook, "m", lost), Some(ExpectedWorker { not_before: start, until: None }));
        assert_eq!(next(&outlook, "unloaded", lost), None);
        assert!(outlook.lists("m") && !outlook.lists("unloaded"));
        let until = Some(lost + WAIT);
        let of_any = outlook.next_worker(None, lost, WAIT, later);
        assert_eq!(of_any, Some(ExpectedWorker { not_before: lost, until }));

        let stopped = answered(later, NextWorker::Never);
        assert_eq!(next(&stopped, "m", lost), None);
        assert!(!stopped.lists("m"));
        // The worker was started again and lost since then.
        let until = Some(later + WAIT);
        assert_eq!(next(&stopped, "m", later), Some(ExpectedWorker { not_before: later, until }));
    }

    #[test]
    fn a_client_is_told_when_the_next_worker_starts() {
        let now = Instant::now();
        let forecast = |not_before| {
            let expected = ExpectedWorker { not_before, until: None };
            WorkerForecast::of(Some(expected), now).to_string()
        };
        assert_eq!(forecast(now), "a worker is starting");
        assert_eq!(forecast(now + 2 * WAIT), "the next worker starts in 60 s");
        assert_eq!(forecast(now + WAIT / 60), "the next worker starts in 1 s");
        let none = WorkerForecast::of(None, now).to_string();
        assert_eq!(none, "none is going to start; `ballast ps` says why");
    }

    #[test]
    fn the_earliest_start_of_several_workers_counts() {
        let now = Instant::now();
        let (soon, late) = (NextWorker::At(now), NextWorker::At(now + WAIT));
        assert_eq!([late.or(soon), soon.or(late), NextWorker::Never.or(soon)], [soon; 3]);
        assert_eq!(late.or(NextWorker::Never), late);
        assert_eq!(NextWorker::Never.or(NextWorker::Never), NextWorker::Never);
    }
}
