// SPDX-License-Identifier: Apache-2.0

//! The streams on one run of a worker, and which of them are on trial.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::content::ContentKey;
use super::policy::{StreamId, TRIAL_MAX};
use crate::admission::Uptime;

/// What is known of a content when one of its streams enters a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ContentStanding {
    /// It has lost no worker.
    Clean,
    /// It was on a worker that died, with many others.
    Recorded,
    Suspect,
}

#[derive(Debug)]
struct StreamTrial {
    content: ContentKey,
    since: Uptime,
    standing: ContentStanding,
    /// Output beyond the point of every loss.
    has_output: bool,
}

impl StreamTrial {
    fn is_suspect(&self) -> bool {
        self.standing == ContentStanding::Suspect
    }

    /// True if a content of this standing has to wait for the end of the trial.
    fn blocks(&self, standing: ContentStanding, now: Uptime) -> bool {
        match (standing, self.standing) {
            // Either could be the cause of a death, so that it would prove nothing.
            (ContentStanding::Suspect, ContentStanding::Suspect | ContentStanding::Recorded)
            | (ContentStanding::Recorded, ContentStanding::Suspect) => true,
            // The suspect is blamed.
            (ContentStanding::Suspect, ContentStanding::Clean)
            | (ContentStanding::Clean, ContentStanding::Suspect) => now < self.since + TRIAL_MAX,
            (
                ContentStanding::Clean | ContentStanding::Recorded,
                ContentStanding::Clean | ContentStanding::Recorded,
            ) => false,
        }
    }
}

/// A suspect that waits until the other trials on this worker are over.
#[derive(Debug)]
struct TrialClaim {
    content: ContentKey,
    until: Uptime,
}

#[derive(Debug, Default)]
pub(super) struct WorkerTrials {
    streams: BTreeMap<StreamId, StreamTrial>,
    claim: Option<TrialClaim>,
    /// The candidates, once the worker is dead, and those among them whose loss is counted.
    candidates: Option<BTreeSet<ContentKey>>,
    counted: BTreeSet<ContentKey>,
}

/// What the death of a worker means for one stream.
pub(super) struct TrialLoss {
    /// The content is the only candidate.
    pub(super) is_only: bool,
    /// Some streams were on trial.
    pub(super) was_on_trial: bool,
}

impl WorkerTrials {
    /// True if `content` may enter now. A suspect that may not gets a claim, unless it waits for
    /// trials that are longer than the claim.
    pub(super) fn may_enter(&mut self, content: ContentKey, standing: ContentStanding, now: Uptime) -> bool {
        self.claim = self.claim.take().filter(|claim| claim.until > now);
        let claimed_by_other = self.claim.as_ref().is_some_and(|claim| claim.content != content);
        let trials = self.streams.values().filter(|stream| !stream.has_output && stream.content != content);
        let blocking = trials.filter(|other| other.blocks(standing, now));
        let youngest = blocking.map(|other| other.since).max();
        let is_free = !claimed_by_other && youngest.is_none();
        let ends_soon = youngest.is_none_or(|since| now < since + TRIAL_MAX);
        let is_suspect = standing == ContentStanding::Suspect;
        if !is_free && is_suspect && ends_soon && self.claim.is_none() {
            self.claim = Some(TrialClaim { content, until: now + TRIAL_MAX });
        }
        is_free
    }

    pub(super) fn enter(
        &mut self,
        id: StreamId,
        content: ContentKey,
        standing: ContentStanding,
        since: Uptime,
    ) {
        self.streams.insert(id, StreamTrial { content, since, standing, has_output: false });
    }

    /// True if the content is on trial at this worker. A dead worker tries nothing.
    pub(super) fn has_trial(&self, content: ContentKey, now: Uptime) -> bool {
        let is_trial = |stream: &&StreamTrial| !stream.has_output && now < stream.since + TRIAL_MAX;
        let is_alive = self.candidates.is_none();
        is_alive && self.streams.values().filter(is_trial).any(|stream| stream.content == content)
    }

    /// Returns true if a trial ended, which may let others enter.
    pub(super) fn set_output(&mut self, id: StreamId) -> bool {
        self.streams.get_mut(&id).is_some_and(|stream| !std::mem::replace(&mut stream.has_output, true))
    }

    pub(super) fn remove(&mut self, id: StreamId) {
        self.streams.remove(&id);
    }

    pub(super) fn drop_claim(&mut self, content: ContentKey) {
        self.claim = self.claim.take().filter(|claim| claim.content != content);
    }

    /// Nothing is left to remember. A claim on a dead worker is void.
    pub(super) fn is_empty(&self) -> bool {
        self.streams.is_empty() && (self.claim.is_none() || self.candidates.is_some())
    }

    /// Time until a trial or claim ends by itself.
    pub(super) fn next_change(&self, now: Uptime) -> Option<Duration> {
        let trials = self.streams.values().filter(|stream| !stream.has_output);
        let ends = trials.map(|stream| stream.since + TRIAL_MAX);
        let ends = ends.chain(self.claim.as_ref().map(|claim| claim.until));
        ends.filter(|&end| end > now).min().map(|end| end - now)
    }

    /// The worker is dead. `None` if the stream's content is no candidate, or if its loss is
    /// counted already.
    pub(super) fn lose(&mut self, id: StreamId) -> Option<TrialLoss> {
        let content = self.streams.get(&id)?.content;
        let on_trial: Vec<&StreamTrial> = self.streams.values().filter(|stream| !stream.has_output).collect();
        let was_on_trial = !on_trial.is_empty();
        let has_suspect = on_trial.iter().any(|stream| stream.is_suspect());
        let candidates = self.candidates.get_or_insert_with(|| match was_on_trial {
            true => {
                let of_trial = on_trial.iter().filter(|stream| stream.is_suspect() || !has_suspect);
                of_trial.map(|stream| stream.content).collect()
            }
            false => self.streams.values().map(|stream| stream.content).collect(),
        });
        let is_candidate = candidates.contains(&content) && self.counted.insert(content);
        is_candidate.then_some(TrialLoss { is_only: candidates.len() == 1, was_on_trial })
    }
}
