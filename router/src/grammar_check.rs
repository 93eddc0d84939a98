//! A grammar is compiled by a worker before its request waits anywhere: one that is none, or that nothing matches, is
//! refused at once, takes nobody's turn, and is never told to come again. Nor is one that holds up or breaks that worker's
//! compiler, and no other worker is asked about it.
//!
//! Whoever asks gets a worker's compiler for nothing here, so checks are bounded: a tenant has few under way, all together
//! less than a worker lets wait, the rest wait for those, in bounds and to their deadline. What was found is kept for a
//! while: a grammar that comes again costs no call.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use proto::worker::v1::CheckGrammarRequest;
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout_at};

use crate::admission::Tenant;
use crate::dispatch::{RETRY_AFTER, Refusal, verdict};
use crate::fleet::Fleet;
use crate::params::RequestGrammar;
use crate::placement::{Fingerprint, ModelKey};

/// Under way, of one tenant: a worker compiles one after the other, and others want theirs, too.
const TENANT_UNDER_WAY_MAX: usize = 4;
/// Of all: half of what a worker lets wait to be compiled. The other half is for requests whose turn has come.
const UNDER_WAY_MAX: usize = 32;
/// Under way or waiting for that, of one tenant and of all. Each holds a request's body.
const TENANT_MAX: u32 = 128;
const MAX: u32 = 256;
/// A worker answers within some 31 s: 10 until a grammar's turn comes, 20 to compile it, and one until that is noticed. After
/// one that does not, the next is asked.
const CHECK_WAIT: Duration = Duration::from_secs(40);
/// Grammars whose verdict is kept, of up to 257 KiB each.
const KEPT_MAX: usize = 32;

#[derive(Debug)]
pub(crate) struct GrammarChecks {
    fleet: Arc<Fleet>,
    under_way: Semaphore,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Checks that have not ended, and those of each tenant that has any.
    checks: u32,
    tenants: HashMap<Tenant, Own>,
    /// The last used one first.
    kept: VecDeque<Kept>,
}

#[derive(Debug)]
struct Own {
    checks: u32,
    under_way: Arc<Semaphore>,
}

#[derive(Debug)]
struct Kept {
    model: Fingerprint,
    source: proto::v1::Grammar,
    /// Or why it is none.
    found: Result<(), String>,
}

impl GrammarChecks {
    pub(crate) fn new(fleet: Arc<Fleet>) -> Arc<Self> {
        Arc::new(Self { fleet, under_way: Semaphore::new(UNDER_WAY_MAX), state: Mutex::default() })
    }

    /// `Ok` also if no worker is there to say: then the request waits for one, or is refused for that.
    pub(crate) async fn check(
        &self,
        model: &ModelKey,
        grammar: &RequestGrammar,
        tenant: &Tenant,
        deadline: Instant,
    ) -> Result<(), Refusal> {
        if let Some(found) = self.lock().recall(&model.fingerprint, grammar) {
            return found;
        }
        let check = self.begin(tenant)?;
        let checked = timeout_at(deadline, async {
            // Both live as long as this: they are never closed.
            let _own = check.under_way.acquire().await;
            let _place = self.under_way.acquire().await;
            // Somebody may have asked the same meanwhile.
            let found = self.lock().recall(&model.fingerprint, grammar);
            match found {
                Some(found) => found,
                None => self.ask(model, grammar).await,
            }
        });
        checked.await.unwrap_or(Err(Refusal::Deadline))
    }

    async fn ask(&self, model: &ModelKey, grammar: &RequestGrammar) -> Result<(), Refusal> {
        let request = CheckGrammarRequest {
            fingerprint: Bytes::copy_from_slice(&model.fingerprint.0),
            grammar: Some(grammar.source.clone()),
        };
        let (mut tried, mut refusal) = (Vec::new(), None);
        while let Some(mut peer) = self.fleet.least_loaded(model, &tried) {
            tried.push(peer.worker);
            let answer = tokio::time::timeout(CHECK_WAIT, peer.client.check_grammar(request.clone())).await;
            match answer {
                Ok(Ok(_)) => {
                    self.lock().keep(&model.fingerprint, grammar, Ok(()));
                    return Ok(());
                }
                Ok(Err(status)) => match verdict(&self.fleet, &peer, &status, Some(grammar)) {
                    Ok(passing) => refusal = passing.or(refusal),
                    Err(Refusal::Grammar { param, detail }) => {
                        self.lock().keep(&model.fingerprint, grammar, Err(detail.clone()));
                        return Err(Refusal::Grammar { param, detail });
                    }
                    Err(refusal) => return Err(refusal),
                },
                Err(_) => {
                    tracing::warn!(worker = %peer.worker_name, "no answer about a grammar within {CHECK_WAIT:?}");
                }
            }
        }
        refusal.map_or(Ok(()), Err)
    }

    fn begin(&self, tenant: &Tenant) -> Result<Check<'_>, Refusal> {
        let under_way = self.lock().begin(tenant)?;
        Ok(Check { checks: self, tenant: tenant.clone(), under_way })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing below panics half way: a poisoned state is a whole one.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Counted until it is dropped, also when its client goes away.
struct Check<'a> {
    checks: &'a GrammarChecks,
    tenant: Tenant,
    under_way: Arc<Semaphore>,
}

impl Drop for Check<'_> {
    fn drop(&mut self) {
        self.checks.lock().end(&self.tenant);
    }
}

impl State {
    fn begin(&mut self, tenant: &Tenant) -> Result<Arc<Semaphore>, Refusal> {
        let own = self.tenants.get(tenant).map_or(0, |own| own.checks);
        if *tenant != Tenant::Unnamed && own >= TENANT_MAX {
            let detail = format!("{own} grammars of this tenant are being checked, at most {TENANT_MAX} may");
            return Err(Refusal::TenantLimit { detail, retry_after: RETRY_AFTER });
        }
        if self.checks >= MAX {
            let detail = format!("{} grammars are being checked, at most {MAX} may", self.checks);
            return Err(Refusal::Overloaded { detail, retry_after: RETRY_AFTER });
        }
        self.checks += 1;
        let own = self
            .tenants
            .entry(tenant.clone())
            .or_insert_with(|| Own { checks: 0, under_way: Arc::new(Semaphore::new(TENANT_UNDER_WAY_MAX)) });
        own.checks += 1;
        Ok(own.under_way.clone())
    }

    fn end(&mut self, tenant: &Tenant) {
        self.checks -= 1;
        if let Some(own) = self.tenants.get_mut(tenant) {
            own.checks -= 1;
            if own.checks == 0 {
                self.tenants.remove(tenant);
            }
        }
    }

    fn recall(&mut self, model: &Fingerprint, grammar: &RequestGrammar) -> Option<Result<(), Refusal>> {
        let same = |kept: &Kept| kept.source == grammar.source && kept.model == *model;
        let at = self.kept.iter().position(same)?;
        let kept = self.kept.remove(at)?;
        let found = kept.found.clone();
        self.kept.push_front(kept);
        // Under the name that the field has this time.
        Some(found.map_err(|detail| Refusal::Grammar { param: grammar.param, detail }))
    }

    fn keep(&mut self, model: &Fingerprint, grammar: &RequestGrammar, found: Result<(), String>) {
        self.kept.truncate(KEPT_MAX - 1);
        self.kept.push_front(Kept { model: model.clone(), source: grammar.source.clone(), found });
    }
}

#[cfg(test)]
mod tests {
    use proto::v1::grammar::Kind;

    use super::*;

    fn regex(regex: &str, param: &'static str) -> RequestGrammar {
        let kind = Some(Kind::Regex(regex.to_owned()));
        RequestGrammar { param, source: proto::v1::Grammar { kind, lenient: false } }
    }

    fn named(name: &str) -> Tenant {
        Tenant::Named(name.into())
    }

    #[test]
    fn a_tenant_has_a_bound_of_its_own_and_leaves_room_to_others() {
        let mut state = State::default();
        let (flood, other) = (named("flood"), named("other"));
        (0..TENANT_MAX).for_each(|_| drop(state.begin(&flood).unwrap()));
        assert!(matches!(state.begin(&flood), Err(Refusal::TenantLimit { .. })));
        (TENANT_MAX..MAX).for_each(|_| drop(state.begin(&Tenant::Unnamed).unwrap()));
        let full = state.begin(&other).unwrap_err();
        assert!(matches!(full, Refusal::Overloaded { .. }) && full.to_string().contains("256"), "{full}");
        (0..TENANT_MAX).for_each(|_| state.end(&flood));
        drop(state.begin(&other).unwrap());
        state.end(&other);
        assert_eq!(state.tenants.keys().collect::<Vec<_>>(), [&Tenant::Unnamed], "who has none is forgotten");
    }

    #[test]
    fn what_was_found_is_kept_for_its_model_and_named_anew() {
        let mut state = State::default();
        let (model, other) = (Fingerprint(vec![1]), Fingerprint(vec![2]));
        state.keep(&model, &regex("(", "regex"), Err("it is open".to_owned()));
        let found = state.recall(&model, &regex("(", "guided_regex"));
        assert!(matches!(found, Some(Err(Refusal::Grammar { param: "guided_regex", .. }))), "{found:?}");
        assert_eq!(state.recall(&other, &regex("(", "regex")), None);
        for n in 0..KEPT_MAX - 1 {
            state.keep(&model, &regex(&n.to_string(), "regex"), Ok(()));
        }
        assert!(state.recall(&model, &regex("(", "regex")).is_some());
        state.keep(&model, &regex("a", "regex"), Ok(()));
        assert_eq!(state.recall(&model, &regex("0", "regex")), None, "the one used longest ago makes room");
        assert!(state.recall(&model, &regex("(", "regex")).is_some() && state.kept.len() == KEPT_MAX);
    }
}
