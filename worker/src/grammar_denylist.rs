// SPDX-License-Identifier: Apache-2.0

//! Remembers grammars that have cost a thread, so that no thread compiles them again soon.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use grammar::GrammarSource;

use crate::worker_pool::JobFailure;

/// How long a grammar stays on the list. It expires because the machine, not the grammar, may have
/// been at fault.
pub(crate) const DENIED_FOR: Duration = Duration::from_secs(600);

/// Holds at most as many grammars as a process may lose threads.
#[derive(Clone, Default)]
pub(crate) struct GrammarDenylist(Arc<Mutex<Vec<DeniedGrammar>>>);

struct DeniedGrammar {
    source: Arc<GrammarSource>,
    failure: JobFailure,
    denied_at: Instant,
}

impl GrammarDenylist {
    pub(crate) fn add(&self, source: Arc<GrammarSource>, failure: JobFailure) {
        self.lock().push(DeniedGrammar { source, failure, denied_at: Instant::now() });
    }

    /// The failure of this grammar, if it failed less than [`DENIED_FOR`] ago.
    pub(crate) fn find(&self, source: &GrammarSource, now: Instant) -> Option<JobFailure> {
        let denied = self.lock();
        let is_current =
            |denied: &&DeniedGrammar| now.saturating_duration_since(denied.denied_at) < DENIED_FOR;
        denied.iter().filter(is_current).find(|denied| *denied.source == *source).map(|denied| denied.failure)
    }

    fn lock(&self) -> MutexGuard<'_, Vec<DeniedGrammar>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
