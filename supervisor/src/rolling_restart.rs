// SPDX-License-Identifier: Apache-2.0

//! Restarts workers one after the other. The next one drains after the router uses the new process
//! of the one before. A plain value: events in, at most one action out.
//!
//! ```text
//! waiting: [b, c]   current: a, Draining --Running--> a, Joining --Used--> b drains
//! ```

use std::collections::VecDeque;
use std::sync::Arc;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The old process finishes its streams, or the new one starts.
    Restarting,
    /// The new process runs, and the router has not found it yet.
    Joining,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum RollingEvent<'a> {
    /// Restart these too. A worker that waits already waits once.
    Begin(Vec<Arc<str>>),
    /// A new process of the worker is ready.
    Running(&'a str),
    /// The router uses the worker.
    Joined(&'a str),
    /// The worker does not start, or the router does not use it. The others stay as they are.
    Failed(&'a str),
    /// A command stopped or removed the worker.
    Lost(&'a str),
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum RollingAction {
    /// Let the worker finish its streams and start it again.
    Restart(Arc<str>),
    /// Wait until the router uses the worker.
    AwaitRouter(Arc<str>),
    /// Leave the other workers as they are.
    GiveUp { failed: Arc<str>, left: Vec<Arc<str>> },
}

#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct RollingRestart {
    waiting: VecDeque<Arc<str>>,
    current: Option<(Arc<str>, Phase)>,
}

impl RollingRestart {
    pub(crate) fn handle(&mut self, event: RollingEvent<'_>) -> Option<RollingAction> {
        let is_current = |name: &str, phase: Option<Phase>| {
            self.current
                .as_ref()
                .is_some_and(|(current, now)| **current == *name && phase.is_none_or(|phase| phase == *now))
        };
        match event {
            RollingEvent::Begin(names) => {
                let new: Vec<_> = names.into_iter().filter(|name| !self.waiting.contains(name)).collect();
                self.waiting.extend(new);
                if self.current.is_some() {
                    return None;
                }
            }
            RollingEvent::Running(name) if is_current(name, Some(Phase::Restarting)) => {
                let (current, _) = self.current.take()?;
                self.current = Some((current.clone(), Phase::Joining));
                return Some(RollingAction::AwaitRouter(current));
            }
            RollingEvent::Joined(name) if is_current(name, Some(Phase::Joining)) => self.current = None,
            RollingEvent::Lost(name) if is_current(name, None) => self.current = None,
            RollingEvent::Failed(name) if is_current(name, None) => {
                self.current = None;
                let left = std::mem::take(&mut self.waiting);
                return Some(RollingAction::GiveUp { failed: name.into(), left: left.into() });
            }
            RollingEvent::Lost(name) => {
                self.waiting.retain(|waiting| **waiting != *name);
                return None;
            }
            RollingEvent::Running(_) | RollingEvent::Joined(_) | RollingEvent::Failed(_) => return None,
        }
        let next = self.waiting.pop_front()?;
        self.current = Some((next.clone(), Phase::Restarting));
        Some(RollingAction::Restart(next))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn names(list: &[&str]) -> Vec<Arc<str>> {
        list.iter().map(|name| (*name).into()).collect()
    }

    #[test]
    fn the_next_worker_restarts_after_the_router_uses_the_one_before() {
        let mut rolling = RollingRestart::default();
        let restart = |name: &str| Some(RollingAction::Restart(name.into()));
        let begin = RollingEvent::Begin(names(&["a", "b", "c"]));
        assert_eq!(rolling.handle(begin), restart("a"));
        assert_eq!(rolling.handle(RollingEvent::Running("b")), None);
        assert_eq!(rolling.handle(RollingEvent::Joined("a")), None);
        let joins = Some(RollingAction::AwaitRouter("a".into()));
        assert_eq!(rolling.handle(RollingEvent::Running("a")), joins);
        assert_eq!(rolling.handle(RollingEvent::Running("a")), None);
        assert_eq!(rolling.handle(RollingEvent::Lost("b")), None);
        assert_eq!(rolling.handle(RollingEvent::Joined("a")), restart("c"));
        assert_eq!(rolling.handle(RollingEvent::Begin(names(&["c", "a"]))), None);
        assert_eq!(rolling.handle(RollingEvent::Lost("c")), restart("c"));
        assert_eq!(rolling.handle(RollingEvent::Lost("c")), restart("a"));
        assert_eq!(rolling.handle(RollingEvent::Lost("a")), None);
        assert_eq!(rolling.handle(RollingEvent::Begin(names(&["b", "c"]))), restart("b"));
        assert_eq!(rolling.handle(RollingEvent::Failed("c")), None);
        let gives_up = RollingAction::GiveUp { failed: "b".into(), left: names(&["c"]) };
        assert_eq!(rolling.handle(RollingEvent::Failed("b")), Some(gives_up));
        assert_eq!(rolling, RollingRestart::default());
    }

    proptest! {
        /// Whatever happens, at most one worker is out of service. Each that was named restarts,
        /// was lost, or is reported as left.
        #[test]
        fn one_worker_at_a_time_and_none_forgotten(
            events in proptest::collection::vec((0..5u8, 0..4usize), 0..60),
        ) {
            let all = names(&["a", "b", "c", "d"]);
            let mut rolling = RollingRestart::default();
            let (mut due, mut down) = (Vec::<Arc<str>>::new(), None::<Arc<str>>);
            // In the end, whichever worker is out of service comes back.
            let finish = (0..12).flat_map(|_| (0..4).flat_map(|index| [(1, index), (2, index)]));
            for (kind, index) in events.into_iter().chain(finish) {
                let name = all[index].clone();
                let action = rolling.handle(match kind {
                    0 => {
                        if !due.contains(&name) {
                            due.push(name.clone());
                        }
                        RollingEvent::Begin(vec![name.clone()])
                    }
                    1 => RollingEvent::Running(&name),
                    2 => RollingEvent::Joined(&name),
                    3 => RollingEvent::Failed(&name),
                    _ => {
                        if down.as_ref() != Some(&name) {
                            due.retain(|due| *due != name);
                        }
                        RollingEvent::Lost(&name)
                    }
                });
                let is_free = rolling.current.is_none() || matches!(action, Some(RollingAction::Restart(_)));
                if is_free {
                    prop_assert!(kind == 0 || down.is_none() || down.as_ref() == Some(&name));
                    prop_assert!(kind != 0 || down.is_none());
                    down = None;
                }
                match action {
                    Some(RollingAction::Restart(next)) => {
                        due.retain(|due| *due != next);
                        down = Some(next);
                    }
                    Some(RollingAction::AwaitRouter(joining)) => {
                        prop_assert_eq!(Some(joining), down.clone());
                    }
                    Some(RollingAction::GiveUp { failed, left }) => {
                        prop_assert_eq!(failed, name);
                        prop_assert_eq!(std::mem::take(&mut due), left);
                    }
                    None => {}
                }
            }
            prop_assert_eq!((due, down), (Vec::<Arc<str>>::new(), None));
        }
    }
}
