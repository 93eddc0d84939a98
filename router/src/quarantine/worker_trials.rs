// SPDX-License-Identifier: Apache-2.0

//! The streams on one run of a worker, and which of them are on trial.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::content::ContentKey;
use super::policy::{StreamId, TRIAL_MAX};
use crate::admission::Uptime;

/// A suspect waits for [`TRIAL_MAX`] beside a stream of a content that was on so many dead workers,
/// and on as many as the suspect: that content may crash the worker during the suspect's trial.
const BYSTANDER_DEATHS: u32 = 2;

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
    /// What was found when the first stream reported that the worker is dead.
    death: Option<WorkerDeath>,
    /// Contents of streams that have reported it.
    reported: BTreeSet<ContentKey>,
}

#[derive(Debug)]
struct WorkerDeath {
    candidates: BTreeSet<ContentKey>,
    was_on_trial: bool,
    /// Earlier deaths of workers with each content that was there.
    earlier_deaths: BTreeMap<ContentKey, u32>,
}

/// What the death of a worker means for one stream.
pub(super) struct TrialLoss {
    pub(super) is_candidate: bool,
    /// The content is the only candidate.
    pub(super) is_only: bool,
    /// No other content there was on as many dead workers before.
    pub(super) has_most_deaths: bool,
    /// Some streams were on trial.
    pub(super) was_on_trial: bool,
}

impl WorkerTrials {
    /// True if `content` may enter now. A suspect that may not gets a claim, unless it waits for
    /// trials that are longer than the claim.
    pub(super) fn may_enter(
        &mut self,
        content: ContentKey,
        standing: ContentStanding,
        deaths_of: impl Fn(ContentKey) -> u32,
        now: Uptime,
    ) -> bool {
        self.claim = self.claim.take().filter(|claim| claim.until > now);
        let claimed_by_other = self.claim.as_ref().is_some_and(|claim| claim.content != content);
        let trials = self.streams.values().filter(|stream| !stream.has_output && stream.content != content);
        let blocking = trials.filter(|other| other.blocks(standing, now));
        let youngest = blocking.map(|other| other.since).max();
        let deaths_min = deaths_of(content).max(BYSTANDER_DEATHS);
        let mut others = self.streams.values().filter(|stream| stream.content != content);
        let may_be_framed = standing == ContentStanding::Suspect
            && others.any(|other| now < other.since + TRIAL_MAX && deaths_of(other.content) >= deaths_min);
        if may_be_framed && youngest.is_none() {
            return false;
        }
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
        let is_alive = self.death.is_none();
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
        self.streams.is_empty() && (self.claim.is_none() || self.death.is_some())
    }

    /// Time until a trial or claim ends by itself.
    pub(super) fn next_change(&self, now: Uptime) -> Option<Duration> {
        let trials = self.streams.values().filter(|stream| !stream.has_output);
        let ends = trials.map(|stream| stream.since + TRIAL_MAX);
        let ends = ends.chain(self.claim.as_ref().map(|claim| claim.until));
        ends.filter(|&end| end > now).min().map(|end| end - now)
    }

    /// The worker is dead. `None` if another stream of the content has reported it. `deaths_of`:
    /// how many workers have died with a content before.
    pub(super) fn lose(&mut self, id: StreamId, deaths_of: impl Fn(ContentKey) -> u32) -> Option<TrialLoss> {
        let content = self.streams.get(&id)?.content;
        if !self.reported.insert(content) {
            return None;
        }
        let streams = &self.streams;
        let death = self.death.get_or_insert_with(|| WorkerDeath::new(streams, deaths_of));
        let WorkerDeath { candidates, was_on_trial, earlier_deaths } = death;
        let is_candidate = candidates.contains(&content);
        let own_deaths = earlier_deaths.get(&content);
        let mut others = earlier_deaths.iter().filter(|(other, _)| **other != content);
        Some(TrialLoss {
            is_candidate,
            is_only: is_candidate && candidates.len() == 1,
            has_most_deaths: others.all(|(_, deaths)| Some(deaths) < own_deaths),
            was_on_trial: *was_on_trial,
        })
    }
}

impl WorkerDeath {
    fn new(streams: &BTreeMap<StreamId, StreamTrial>, deaths_of: impl Fn(ContentKey) -> u32) -> Self {
        let on_trial: Vec<&StreamTrial> = streams.values().filter(|stream| !stream.has_output).collect();
        let was_on_trial = !on_trial.is_empty();
        let has_suspect = on_trial.iter().any(|stream| stream.is_suspect());
        let candidates = match was_on_trial {
            true => {
                let of_trial = on_trial.iter().filter(|stream| stream.is_suspect() || !has_suspect);
                of_trial.map(|stream| stream.content).collect()
            }
            false => streams.values().map(|stream| stream.content).collect(),
        };
        let contents = streams.values().map(|stream| stream.content);
        let earlier_deaths = contents.map(|content| (content, deaths_of(content))).collect();
        Self { candidates, was_on_trial, earlier_deaths }
    }
}
