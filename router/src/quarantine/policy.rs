// SPDX-License-Identifier: Apache-2.0

//! The state of the quarantine.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::num::NonZeroU32;
use std::ops::Bound;
use std::time::Duration;

use super::content::ContentKey;
use super::worker_trials::{ContentStanding, TrialLoss, WorkerTrials};
use crate::admission::Uptime;
use crate::routing::WorkerId;

/// Losses after which a content is quarantined, if it was the only candidate the last time. One
/// loss happens to any request whose worker is killed, or whose workers are killed together.
const LOSSES_MAX: u32 = 2;
/// Workers that one cause kills, like a device that fails or memory that runs out, die within this
/// time of each other. So two losses of a content within it count as one.
pub const KILLED_TOGETHER: Duration = Duration::from_secs(1);
/// Workers that died with a content after which it is quarantined although its output grew from
/// one to the next, if no other content on the last of them was on as many. Fewer may be kills from
/// outside.
const DEATHS_MAX: u32 = 8;
/// Workers that died with a content after which its streams are spread, so that they tell the cause
/// from its neighbours.
const SPREAD_DEATHS: u32 = 3;
/// How long a trial keeps others away. A prefill of a few thousand tokens takes less.
pub(super) const TRIAL_MAX: Duration = Duration::from_secs(5);
/// Contents with losses. A worker that dies adds as many as it has streams.
pub(super) const RECORDS_MAX: usize = 4096;

/// One stay of a stream on a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct StreamId(u64);

/// The content may not enter the worker now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blocked;

/// A content in quarantine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuarantineEntry {
    pub losses: u32,
    pub remaining: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LossVerdict {
    Resume,
    /// `is_new`: this loss put the content there.
    Quarantine {
        entry: QuarantineEntry,
        is_new: bool,
    },
}

/// What is known of a content that was on a worker which died.
#[derive(Clone, Copy, Debug)]
struct LossRecord {
    /// Zero if other contents were the candidates.
    losses: u32,
    /// Workers that died with the content, since a stream of it ended as it should.
    deaths: u32,
    /// The last stream that entered a worker before the last of them.
    last_death: StreamId,
    /// The most output tokens at a loss. With more, the content is cleared.
    output_tokens: usize,
    /// Nothing but `deaths` is remembered.
    is_cleared: bool,
    /// The next trial is alone.
    is_suspect: bool,
    /// The last stream that entered a worker before the last loss, counted or not.
    last_stream: StreamId,
    /// When the last loss was counted.
    last_loss: Option<Uptime>,
    /// Until then, streams of the content enter no worker.
    waits_until: Option<Uptime>,
    expires: Uptime,
    is_quarantined: bool,
}

impl LossRecord {
    fn counts(&self, now: Uptime) -> bool {
        self.expires > now && !self.is_cleared
    }

    /// The content is a candidate for the death of a worker that a stream of it entered after the
    /// last loss.
    fn add_loss(&mut self, loss: &TrialLoss, now: Uptime, expires: Uptime) {
        let together_until = self.last_loss.map(|at| at + KILLED_TOGETHER);
        match together_until.filter(|&until| now < until) {
            // One cause may have killed both workers. If the content did, it would take further
            // workers within this time, so it waits.
            Some(until) => self.waits_until = Some(until),
            None => {
                self.losses += 1;
                self.last_loss = Some(now);
                self.waits_until = None;
                self.expires = expires;
                // A content without a trial of its own may be blamed for what a neighbour did.
                self.is_quarantined |= self.is_suspect && loss.is_only && self.losses >= LOSSES_MAX;
            }
        }
        self.is_suspect = loss.was_on_trial || loss.is_only || self.losses >= LOSSES_MAX;
    }
}

#[derive(Debug)]
pub struct QuarantinePolicy {
    quarantine_for: Duration,
    records: HashMap<ContentKey, LossRecord>,
    workers: BTreeMap<WorkerId, WorkerTrials>,
    /// When contents may enter workers again ([`LossRecord::waits_until`]).
    wait_ends: BTreeSet<Uptime>,
    last_id: u64,
}

impl QuarantinePolicy {
    /// `quarantine_for` is also the time for which losses are remembered.
    pub fn new(quarantine_for: Duration) -> Self {
        Self {
            quarantine_for,
            records: HashMap::new(),
            workers: BTreeMap::new(),
            wait_ends: BTreeSet::new(),
            last_id: 0,
        }
    }

    /// `Some` if the content is in quarantine.
    pub fn find(&self, content: ContentKey, now: Uptime) -> Option<QuarantineEntry> {
        let record = self.record(content, now).filter(|record| record.is_quarantined)?;
        Some(QuarantineEntry { losses: record.losses, remaining: record.expires - now })
    }

    /// Puts a stream of the content on trial at a worker. `force` ignores other trials and the wait
    /// of the content.
    pub fn enter(
        &mut self,
        worker: WorkerId,
        content: ContentKey,
        now: Uptime,
        force: bool,
    ) -> Result<StreamId, Blocked> {
        let record = self.record(content, now);
        let waits_until = record.and_then(|record| record.waits_until);
        if waits_until.is_some_and(|until| now < until) && !force {
            return Err(Blocked);
        }
        let standing = record.map_or(ContentStanding::Clean, |record| match record.is_suspect {
            true => ContentStanding::Suspect,
            false => ContentStanding::Recorded,
        });
        let is_suspect = standing == ContentStanding::Suspect;
        let mut others = self.workers.iter().filter(|(id, _)| **id != worker);
        let is_elsewhere = is_suspect && others.any(|(_, trials)| trials.has_trial(content, now));
        if is_elsewhere && !force {
            return Err(Blocked);
        }
        let deaths_of = |content| find_deaths(&self.records, content, now);
        let trials = self.workers.entry(worker).or_default();
        if !trials.may_enter(content, standing, deaths_of, now) && !force {
            return Err(Blocked);
        }
        self.last_id += 1;
        let id = StreamId(self.last_id);
        trials.enter(id, content, standing, now);
        self.drop_claims(content);
        Ok(id)
    }

    /// The suspect no longer waits for any worker.
    pub fn drop_claims(&mut self, content: ContentKey) {
        self.workers.values_mut().for_each(|trials| trials.drop_claim(content));
        self.workers.retain(|_, trials| !trials.is_empty());
    }

    /// The stream has `output_tokens` tokens, of all its workers together. Its trial ends if that
    /// is beyond the point of every loss of the content. Returns true if others may enter the
    /// worker now.
    pub fn record_output(
        &mut self,
        worker: WorkerId,
        id: StreamId,
        content: ContentKey,
        output_tokens: usize,
        now: Uptime,
    ) -> bool {
        if let Some(record) = self.records.get_mut(&content).filter(|record| record.counts(now)) {
            if record.is_quarantined || output_tokens <= record.output_tokens {
                return false;
            }
            record.is_cleared = true;
        }
        self.workers.get_mut(&worker).is_some_and(|trials| trials.set_output(id))
    }

    /// A stream of the content ended as it should, which clears the content.
    pub fn record_completion(&mut self, content: ContentKey) {
        if self.records.get(&content).is_some_and(|record| !record.is_quarantined) {
            self.records.remove(&content);
        }
    }

    /// The stream's worker is dead.
    pub fn record_loss(
        &mut self,
        worker: WorkerId,
        id: StreamId,
        content: ContentKey,
        output_tokens: usize,
        now: Uptime,
    ) -> LossVerdict {
        let earlier = self.record(content, now).copied();
        let deaths_of = |content| find_deaths(&self.records, content, now);
        let deaths_before = deaths_of(content);
        let last_death = self.records.get(&content).map_or(StreamId(0), |record| record.last_death);
        let loss = self.workers.get_mut(&worker).and_then(|trials| trials.lose(id, deaths_of));
        self.make_room(now);
        // Workers that are killed together say no more about a content than one of them.
        let is_new_death = loss.is_some() && id > last_death;
        let is_new_trial = earlier.is_none_or(|record| id > record.last_stream);
        let deaths = deaths_before + u32::from(is_new_death);
        let has_most_deaths = loss.as_ref().is_some_and(|loss| loss.has_most_deaths);
        let is_repeated = is_new_death && deaths >= DEATHS_MAX && has_most_deaths;
        let mut record = earlier.unwrap_or(LossRecord {
            losses: 0,
            deaths,
            last_death,
            output_tokens,
            is_cleared: false,
            is_suspect: false,
            last_stream: StreamId(0),
            last_loss: None,
            waits_until: None,
            expires: now + self.quarantine_for,
            is_quarantined: false,
        });
        let was_quarantined = record.is_quarantined;
        record.deaths = deaths;
        if is_new_death {
            record.last_death = StreamId(self.last_id);
        }
        // The content is on trial again until it is past this point.
        record.output_tokens = record.output_tokens.max(output_tokens);
        // Otherwise others are blamed, or another stream of the content was counted.
        if let Some(loss) = loss.filter(|loss| loss.is_candidate && is_new_trial) {
            record.add_loss(&loss, now, now + self.quarantine_for);
            record.last_stream = StreamId(self.last_id);
            // Those that are over are removed.
            self.wait_ends = self.wait_ends.split_off(&now);
            self.wait_ends.extend(record.waits_until);
        }
        if is_repeated {
            record.losses = record.losses.max(deaths);
            record.expires = now + self.quarantine_for;
            record.is_quarantined = true;
        }
        self.records.insert(content, record);
        match record.is_quarantined {
            true => {
                let entry = QuarantineEntry { losses: record.losses, remaining: record.expires - now };
                LossVerdict::Quarantine { entry, is_new: !was_quarantined }
            }
            false => LossVerdict::Resume,
        }
    }

    /// Number of workers that died with the content, if there are so many that its streams are to
    /// be spread.
    pub fn deaths_to_spread(&self, content: ContentKey, now: Uptime) -> Option<NonZeroU32> {
        let deaths = find_deaths(&self.records, content, now);
        NonZeroU32::new(deaths).filter(|deaths| deaths.get() >= SPREAD_DEATHS)
    }

    /// The stream left the worker: it ended, or its loss is recorded.
    pub fn leave(&mut self, worker: WorkerId, id: StreamId) {
        if let Some(trials) = self.workers.get_mut(&worker) {
            trials.remove(id);
            if trials.is_empty() {
                self.workers.remove(&worker);
            }
        }
    }

    /// Time after which a blocked content should try again even if nothing else happens.
    pub fn next_change(&self, now: Uptime) -> Duration {
        let changes = self.workers.values().filter_map(|trials| trials.next_change(now));
        let wait_ends = self.wait_ends.range((Bound::Excluded(now), Bound::Unbounded));
        let changes = changes.chain(wait_ends.map(|&end| end - now).next());
        changes.min().unwrap_or(TRIAL_MAX)
    }

    /// Number of contents in quarantine.
    pub fn quarantined(&self, now: Uptime) -> usize {
        self.records.values().filter(|record| record.is_quarantined && record.expires > now).count()
    }

    fn record(&self, content: ContentKey, now: Uptime) -> Option<&LossRecord> {
        self.records.get(&content).filter(|record| record.counts(now))
    }

    /// Keeps less than [`RECORDS_MAX`] records. Contents in quarantine are removed last.
    fn make_room(&mut self, now: Uptime) {
        if self.records.len() < RECORDS_MAX {
            return;
        }
        self.records.retain(|_, record| record.expires > now);
        while self.records.len() >= RECORDS_MAX {
            let oldest =
                self.records.iter().min_by_key(|(_, record)| (record.is_quarantined, record.expires));
            let oldest = oldest.map(|(&content, _)| content);
            self.records.remove(&oldest.expect("RECORDS_MAX is above 0"));
        }
    }
}

/// Number of workers that died with the content.
fn find_deaths(records: &HashMap<ContentKey, LossRecord>, content: ContentKey, now: Uptime) -> u32 {
    records.get(&content).filter(|record| record.expires > now).map_or(0, |record| record.deaths)
}
