//! What the engine notes about its requests, compared with what the scheduler has of them.

use crate::request::input::RequestId;
use crate::request::state::Task;
use crate::schedule::admission::Admission;
use crate::schedule::integrity::IntegrityError;
use crate::schedule::scheduler::Scheduler;
use crate::schedule::sequence_id::Slot;
use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

pub(crate) struct Books<'a> {
    pub(crate) tasks: &'a [Option<Task>],
    pub(crate) slots: &'a HashMap<RequestId, Slot>,
    pub(crate) deadlines: &'a BTreeSet<(Duration, Slot)>,
    pub(crate) admission: &'a Admission,
    pub(crate) scheduler: &'a Scheduler,
}

impl Books<'_> {
    /// Every request has its sequence, its name, its deadline and, until it is admitted, its place in the queue; there are
    /// no others.
    pub(crate) fn check(&self) -> Result<(), IntegrityError> {
        let (mut live, mut with_deadline) = (0, 0);
        let mut queued: HashMap<u64, usize> = HashMap::new();
        for (index, task) in self.tasks.iter().enumerate() {
            let slot = Slot(index as u32);
            let sequence = self.scheduler.sequence(slot);
            let Some(task) = task else {
                sequence.map_or(Ok(()), |_| Err(IntegrityError::Task(slot)))?;
                continue;
            };
            let is_named = self.slots.get(&task.id) == Some(&slot);
            if !is_named || sequence.is_none_or(|sequence| sequence.admitted == task.queued_for.is_some()) {
                return Err(IntegrityError::Task(slot));
            }
            live += 1;
            with_deadline +=
                usize::from(task.deadline.is_some_and(|at| self.deadlines.contains(&(at, slot))));
            if let Some(tenant) = task.queued_for {
                *queued.entry(tenant).or_default() += 1;
            }
        }
        if self.slots.len() != live {
            return Err(IntegrityError::Named { named: self.slots.len(), live });
        }
        let expected = self.tasks.iter().flatten().filter(|task| task.deadline.is_some()).count();
        if self.deadlines.len() != expected || with_deadline != expected {
            return Err(IntegrityError::Deadlines { listed: self.deadlines.len(), live: expected });
        }
        for (&tenant, &found) in &queued {
            let counted = self.admission.waiting_of(tenant);
            if counted != found {
                return Err(IntegrityError::Admission { tenant, counted, found });
            }
        }
        let found = queued.values().sum();
        match self.admission.waiting() {
            counted if counted == found => Ok(()),
            counted => Err(IntegrityError::Queue { counted, found }),
        }
    }
}
