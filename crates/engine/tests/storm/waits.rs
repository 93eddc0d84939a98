//! What the queue promises to those who wait, as its head states it.

use super::{Live, Storm};
use crate::schedule::sequence::{Kind, State};
use crate::schedule::sequence_id::Slot;
use crate::schedule::waiting_queue::{AGED_EVERY, Rank};
use std::collections::BTreeMap;
use std::time::Duration;

/// Of one that waits.
#[derive(Clone, Debug)]
pub(super) struct Wait {
    /// Its place in the line.
    rank: Rank,
    admissions: u32,
    /// Each lasts `AGED_EVERY` admissions.
    turns: u32,
    /// Somebody behind it was admitted before it.
    passed: bool,
    /// Set for the first request of a tenant in its class: by whom it was passed, and how often.
    passed_by: Option<BTreeMap<u64, u32>>,
}

impl Storm {
    fn state(&self, slot: Slot) -> State {
        self.scheduler.sequence(slot).unwrap().state
    }

    /// Those who have entered the queue: each older one that lives may be served before, once for each time it enters.
    pub(super) fn notice_waits(&mut self) {
        let enters =
            |(slot, live): &(&Slot, &Live)| live.wait.is_none() && self.state(**slot) == State::Waiting;
        let entered: Vec<(Slot, u64)> =
            self.live.iter().filter(enters).map(|(&slot, live)| (slot, live.age)).collect();
        for &(_, age) in &entered {
            let younger = self.live.values_mut().filter(|live| live.age > age);
            younger.filter_map(|live| live.wait.as_mut()).for_each(|wait| wait.turns += 1);
        }
        for (slot, age) in entered {
            let older = self.live.values().filter(|live| live.age < age).count() as u32;
            let rank = self.scheduler.sequence(slot).unwrap().rank;
            let live = self.live.get_mut(&slot).unwrap();
            let passed_by = (live.queued && live.first).then(BTreeMap::new);
            live.wait = Some(Wait { rank, admissions: 0, turns: older + 1, passed: false, passed_by });
        }
    }

    /// Of the step that was just planned.
    pub(super) fn note_admissions(&mut self, step: usize) {
        let first = self.scheduler.plan().admitted.clone();
        for &(slot, _) in &first {
            self.pass_others(slot);
            assert!(self.live[&slot].queued, "reported once, when first admitted");
        }
        let waited = self.live.iter().filter(|(_, live)| live.wait.is_some()).map(|(&slot, _)| slot);
        let admitted: Vec<Slot> = waited.filter(|&slot| self.state(slot) != State::Waiting).collect();
        self.check_order(&admitted);
        let count = admitted.len() as u32;
        for wait in self.live.values_mut().filter_map(|live| live.wait.as_mut()) {
            wait.admissions += count;
            // Of those admitted in one step, some came after it.
            let bound = AGED_EVERY * wait.turns + count;
            let admissions = wait.admissions;
            assert!(
                admissions <= bound,
                "a request starves: {admissions} admissions, at most {bound} are promised"
            );
        }
        for slot in admitted {
            let live = self.live.get_mut(&slot).unwrap();
            live.wait = None;
            live.admitted = true;
            let is_first = first.iter().any(|&(other, _)| other == slot);
            assert_eq!(is_first, live.queued, "whoever is first admitted is reported");
            if std::mem::replace(&mut live.queued, false) {
                self.admission.admitted(live.tenant, Duration::from_millis(step as u64));
            }
        }
        self.notice_waits();
    }

    /// `slot` is the next of the plan's admissions.
    fn pass_others(&mut self, slot: Slot) {
        let by_age = self.scheduler.sequence(slot).unwrap().rank.is_aged();
        let Live { tenant, priority, ref mut wait, .. } = *self.live.get_mut(&slot).unwrap();
        let wait = wait.as_mut().unwrap();
        // Its own place in the line is behind it.
        wait.passed_by = None;
        let (rank, is_owed) = (wait.rank, wait.passed);
        if by_age || is_owed {
            return;
        }
        for live in self.live.values_mut().filter(|live| live.priority == priority && live.tenant != tenant) {
            let Some(wait) = live.wait.as_mut().filter(|wait| wait.rank > rank) else { continue };
            let Some(passed_by) = &mut wait.passed_by else { continue };
            let times = passed_by.entry(tenant).or_default();
            *times += 1;
            assert!(*times <= 1, "a tenant's first request is passed by another of tenant {tenant}");
        }
    }

    /// Nobody is passed by rank whom the step could have used.
    fn check_order(&mut self, admitted: &[Slot]) {
        let by_age = |slot: Slot| self.scheduler.sequence(slot).unwrap().rank.is_aged();
        let by_rank = admitted.iter().filter(|&&slot| !by_age(slot));
        let rank = |slot: &Slot| self.live[slot].wait.as_ref().map(|wait| wait.rank);
        let Some(last) = by_rank.filter_map(rank).max() else { return };
        let is_passed = |slot: &Slot| rank(slot) < Some(last) && self.state(*slot) == State::Waiting;
        let passed: Vec<Slot> = self.live.keys().copied().filter(is_passed).collect();
        for slot in passed {
            let is_scored = self.live[&slot].kind == Kind::Score;
            let has_reason = if is_scored { self.score_rows_are_used() } else { self.follows(slot) };
            assert!(has_reason, "a request is passed for nothing");
            self.summary.passed += usize::from(!is_scored);
            self.live.get_mut(&slot).unwrap().wait.as_mut().unwrap().passed = true;
        }
    }

    fn score_rows_are_used(&self) -> bool {
        let chunks = self.scheduler.plan().chunks.iter();
        let scored = chunks.filter(|chunk| self.live[&chunk.slot].kind == Kind::Score);
        scored.map(|chunk| chunk.rows).sum::<usize>() == self.limits.score_rows_max
    }
}
