// SPDX-License-Identifier: Apache-2.0

//! Replaces the file of a model while it serves. A plain value: events in, at most one action out.
//!
//! ```text
//! Loading --Loaded--> Joining --Joined--> Moving --Moved--> Draining --WorkersGone--> Unloading
//!    |                   |     (commit)                                                   |
//!    | Failed            | Failed                                               Unloaded  v
//!    '-------> Undoing <-'                                                             finished
//!                 '--WorkersGone--> Unloading --Unloaded--> finished with the failure
//! ```
//! Invariants:
//! 1. Before the commit the old workers are untouched, and the model means the old file.
//! 2. After the commit nothing returns to the old file.
//! 3. Weights are unloaded after the last of their workers has gone.

use bytes::Bytes;

use crate::status::ModelFailure;

#[derive(Clone, Debug, PartialEq, Eq)]
enum SwapPhase {
    Loading,
    /// The new workers start, and the router does not use all of them yet.
    Joining {
        digest: Bytes,
    },
    /// New requests go to the new file, and some of the old file still run or wait.
    Moving,
    Draining,
    /// The new workers leave.
    Undoing {
        failure: ModelFailure,
    },
    Unloading {
        failure: Option<ModelFailure>,
    },
}

#[derive(Debug)]
pub(crate) enum SwapEvent {
    /// The new file is resident and verified.
    Loaded { digest: Bytes },
    /// The new file cannot be loaded, a new worker does not start, or the router does not use it.
    Failed { failure: ModelFailure },
    /// The router uses every new worker.
    Joined,
    /// No request holds the old file, or the time for this is over.
    Moved,
    /// The workers that leave have gone.
    WorkersGone,
    /// The weights that leave are unloaded.
    Unloaded,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum SwapAction {
    /// Start the new workers and wait until the router uses them.
    StartWorkers,
    /// The model means the new file from now on. Wait until no request holds the old one.
    Commit {
        digest: Bytes,
    },
    DrainOldWorkers,
    RemoveNewWorkers,
    UnloadOld,
    UnloadNew,
    Finish {
        outcome: Result<(), ModelFailure>,
    },
}

/// The state of one swap.
#[derive(Debug)]
pub(crate) struct ModelSwap {
    phase: SwapPhase,
}

impl ModelSwap {
    pub(crate) fn begin() -> Self {
        Self { phase: SwapPhase::Loading }
    }

    /// The digest of the new file while its workers start.
    pub(crate) fn joining(&self) -> Option<&Bytes> {
        match &self.phase {
            SwapPhase::Joining { digest } => Some(digest),
            _ => None,
        }
    }

    /// The old workers leave.
    pub(crate) fn is_draining(&self) -> bool {
        self.phase == SwapPhase::Draining
    }

    /// The new workers leave.
    pub(crate) fn is_undoing(&self) -> bool {
        matches!(self.phase, SwapPhase::Undoing { .. })
    }

    /// An event that does not belong to the phase is late, and is ignored.
    pub(crate) fn handle(&mut self, event: SwapEvent) -> Option<SwapAction> {
        let (phase, action) = match (&self.phase, event) {
            (SwapPhase::Loading, SwapEvent::Loaded { digest }) => {
                (SwapPhase::Joining { digest }, SwapAction::StartWorkers)
            }
            (SwapPhase::Loading | SwapPhase::Joining { .. }, SwapEvent::Failed { failure }) => {
                (SwapPhase::Undoing { failure }, SwapAction::RemoveNewWorkers)
            }
            (SwapPhase::Joining { digest }, SwapEvent::Joined) => {
                (SwapPhase::Moving, SwapAction::Commit { digest: digest.clone() })
            }
            (SwapPhase::Moving, SwapEvent::Moved) => (SwapPhase::Draining, SwapAction::DrainOldWorkers),
            (SwapPhase::Draining, SwapEvent::WorkersGone) => {
                (SwapPhase::Unloading { failure: None }, SwapAction::UnloadOld)
            }
            (SwapPhase::Undoing { failure }, SwapEvent::WorkersGone) => {
                (SwapPhase::Unloading { failure: Some(failure.clone()) }, SwapAction::UnloadNew)
            }
            (SwapPhase::Unloading { failure }, SwapEvent::Unloaded) => {
                let outcome = failure.clone().map_or(Ok(()), Err);
                return Some(SwapAction::Finish { outcome });
            }
            _ => return None,
        };
        self.phase = phase;
        Some(action)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use service::Exit;

    use super::*;

    fn failure() -> ModelFailure {
        ModelFailure { exit: Exit::ModelRefused, text: "no tokenizer".to_owned() }
    }

    fn digest() -> Bytes {
        Bytes::from_static(b"new")
    }

    fn actions(events: Vec<SwapEvent>) -> Vec<SwapAction> {
        let mut swap = ModelSwap::begin();
        events.into_iter().filter_map(|event| swap.handle(event)).collect()
    }

    #[test]
    fn the_old_file_leaves_after_the_new_one_serves_and_no_request_holds_it() {
        let loaded = SwapEvent::Loaded { digest: digest() };
        let events = vec![
            SwapEvent::WorkersGone,
            loaded,
            SwapEvent::Moved,
            SwapEvent::Joined,
            SwapEvent::Failed { failure: failure() },
            SwapEvent::Moved,
            SwapEvent::WorkersGone,
            SwapEvent::Unloaded,
        ];
        let expected = [
            SwapAction::StartWorkers,
            SwapAction::Commit { digest: digest() },
            SwapAction::DrainOldWorkers,
            SwapAction::UnloadOld,
            SwapAction::Finish { outcome: Ok(()) },
        ];
        assert_eq!(actions(events), expected);
    }

    #[test]
    fn a_failure_before_the_commit_removes_what_is_new() {
        for loads in [false, true] {
            let mut events = vec![];
            events.extend(loads.then(|| SwapEvent::Loaded { digest: digest() }));
            events.push(SwapEvent::Failed { failure: failure() });
            events.extend([SwapEvent::Joined, SwapEvent::WorkersGone, SwapEvent::Unloaded]);
            let mut expected = vec![];
            expected.extend(loads.then_some(SwapAction::StartWorkers));
            expected.extend([SwapAction::RemoveNewWorkers, SwapAction::UnloadNew]);
            expected.push(SwapAction::Finish { outcome: Err(failure()) });
            assert_eq!(actions(events), expected);
        }
    }

    proptest! {
        /// Whatever happens in whatever order, one of the two files is never touched.
        #[test]
        fn a_swap_keeps_the_old_file_or_the_new_one(kinds in proptest::collection::vec(0..6u8, 0..40)) {
            let mut swap = ModelSwap::begin();
            let (mut committed, mut old_left, mut new_left) = (false, false, false);
            for kind in kinds {
                let event = match kind {
                    0 => SwapEvent::Loaded { digest: digest() },
                    1 => SwapEvent::Failed { failure: failure() },
                    2 => SwapEvent::Joined,
                    3 => SwapEvent::Moved,
                    4 => SwapEvent::WorkersGone,
                    _ => SwapEvent::Unloaded,
                };
                match swap.handle(event) {
                    Some(SwapAction::Commit { .. }) => committed = true,
                    Some(SwapAction::DrainOldWorkers | SwapAction::UnloadOld) => old_left = true,
                    Some(SwapAction::RemoveNewWorkers | SwapAction::UnloadNew) => new_left = true,
                    Some(SwapAction::Finish { outcome }) => {
                        prop_assert_eq!(outcome.is_ok(), committed);
                        break;
                    }
                    Some(SwapAction::StartWorkers) | None => {}
                }
                prop_assert!(!(old_left && new_left));
                prop_assert!(!old_left || committed);
                prop_assert!(!(new_left && committed));
            }
        }
    }
}
