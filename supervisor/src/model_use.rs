// SPDX-License-Identifier: Apache-2.0

//! [`ModelUse`]: when requests last used a model. A plain value; time is an argument.

use std::time::{Duration, Instant};

use service::supervision::USE_REPORT_PERIOD;

/// A model with a request is reported at least this often, if one report is late.
const IN_USE: Duration = USE_REPORT_PERIOD.saturating_mul(2);

/// After this time, a model whose workers do not begin to serve may leave like any other.
const START_MAX: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ModelUse {
    /// The idle clock counts from here. `None` before the weights are there for the first time.
    unused_since: Option<Instant>,
    /// A worker has begun to serve.
    is_served: bool,
    /// `None` if no request is known to have used the model.
    last_request: Option<Instant>,
}

impl ModelUse {
    /// The weights are there.
    pub(crate) fn loaded(&mut self, now: Instant) {
        if self.unused_since.is_none() {
            self.restart(now);
        }
    }

    /// A worker begins to serve.
    pub(crate) fn served(&mut self, now: Instant) {
        if !std::mem::replace(&mut self.is_served, true) {
            self.restart(now);
        }
    }

    /// Requests that have waited come now.
    fn restart(&mut self, now: Instant) {
        self.unused_since = Some(now);
        self.last_request = self.last_request.map(|_| now);
    }

    /// A request uses the model, or waits for it.
    pub(crate) fn requested(&mut self, now: Instant) {
        self.last_request = Some(now);
        self.unused_since = self.unused_since.map(|_| now);
    }

    /// Whether the idle clock has passed `limit`. It starts again then, so that an unload which
    /// fails is not repeated at once.
    pub(crate) fn is_over(&mut self, limit: Duration, now: Instant) -> bool {
        let limit = if self.is_served { limit } else { limit.max(START_MAX) };
        let is_over = self.unused_since.is_some_and(|since| now.saturating_duration_since(since) >= limit);
        if is_over {
            self.unused_since = Some(now);
        }
        is_over
    }

    /// Whether a request uses the model now, as far as reports tell.
    pub(crate) fn is_in_use(&self, now: Instant) -> bool {
        let limit = if self.is_served { IN_USE } else { START_MAX };
        self.last_request.is_some_and(|last| now.saturating_duration_since(last) < limit)
    }
}

/// The order in which models leave if others need their memory: those that no request has used,
/// then by their last request, the oldest first. Models in use stay, unless `with_used`.
pub(crate) fn in_leaving_order<'a>(
    models: impl Iterator<Item = (&'a str, ModelUse)>,
    with_used: bool,
    now: Instant,
) -> Vec<String> {
    let may_leave = models.filter(|(_, model_use)| with_used || !model_use.is_in_use(now));
    let mut ordered: Vec<(Option<Instant>, &str)> =
        may_leave.map(|(name, model_use)| (model_use.last_request, name)).collect();
    ordered.sort_unstable();
    ordered.into_iter().map(|(_, name)| name.to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);

    #[test]
    fn the_idle_clock_starts_with_the_weights_and_again_with_each_request() {
        let start = Instant::now();
        let mut model_use = ModelUse::default();
        model_use.requested(start);
        assert!(!model_use.is_over(LIMIT, start + 10 * LIMIT), "a model that loads is not unused");
        let loaded = start + 10 * LIMIT;
        model_use.loaded(loaded - LIMIT / 2);
        model_use.served(loaded);
        model_use.loaded(loaded + LIMIT / 2);
        model_use.served(loaded + LIMIT / 2);
        assert!(!model_use.is_over(LIMIT, loaded + LIMIT * 99 / 100));
        model_use.requested(loaded + LIMIT * 99 / 100);
        assert!(!model_use.is_over(LIMIT, loaded + LIMIT));
        assert!(model_use.is_over(LIMIT, loaded + 2 * LIMIT));
        assert!(!model_use.is_over(LIMIT, loaded + 2 * LIMIT), "an unload is not repeated at once");
        assert!(model_use.is_over(LIMIT, loaded + 3 * LIMIT));
    }

    #[test]
    fn the_model_whose_last_request_is_oldest_leaves_first_and_none_in_use() {
        let start = Instant::now();
        let now = start + 100 * IN_USE;
        let mut models = [("old", 5), ("older", 4), ("busy", 99), ("fresh", 100), ("never", 0)].map(
            |(name, requested)| {
                let mut model_use = ModelUse::default();
                model_use.served(start);
                if requested > 0 {
                    model_use.requested(start + requested * IN_USE);
                }
                (name, model_use)
            },
        );
        models[2].1.requested(now - IN_USE / 2);
        models[3].1.requested(now);
        let order = |with_used| in_leaving_order(models.into_iter(), with_used, now);
        assert_eq!(order(false), ["never", "older", "old"]);
        assert_eq!(order(true), ["never", "older", "old", "busy", "fresh"]);
    }

    #[test]
    fn requests_that_waited_use_the_model_until_its_first_worker_has_served_them() {
        let start = Instant::now();
        let (mut waited, mut initial) = (ModelUse::default(), ModelUse::default());
        waited.requested(start);
        let loaded = start + 10 * IN_USE;
        waited.loaded(loaded);
        initial.loaded(loaded);
        assert!(waited.is_in_use(loaded) && !initial.is_in_use(loaded));
        // Its workers take their time, and perhaps never come.
        let limit = IN_USE;
        assert!(waited.is_in_use(loaded + 3 * IN_USE) && !waited.is_over(limit, loaded + 3 * IN_USE));
        assert!(!waited.is_in_use(loaded + START_MAX) && waited.is_over(limit, loaded + START_MAX));
        let served = loaded + START_MAX + IN_USE;
        waited.served(served);
        assert!(waited.is_in_use(served) && !waited.is_in_use(served + IN_USE));
        assert!(waited.is_over(limit, served + limit));
    }
}
