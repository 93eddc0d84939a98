// SPDX-License-Identifier: Apache-2.0

//! Has a worker compile the grammar of a request before the request waits anywhere.
//!
//! 1. A grammar that does not compile, or that matches nothing, is refused at once. The request
//!    takes no permit and gets no retry time.
//! 2. A grammar that stalls or breaks a worker's compiler is refused too, and no other worker is
//!    asked.
//! 3. Checks cost a worker time and a client nothing, so they are limited. A tenant has few checks
//!    running, and all tenants together have fewer than a worker lets wait. Other checks wait, up
//!    to a limit and their deadline.
//! 4. Results are cached for a while, so a repeated grammar costs no call.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use proto::worker::v1::CheckGrammarRequest;
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout_at};

use crate::admission::Tenant;
use crate::dispatch::{Dispatcher, call_outcome};
use crate::generate::RequestOrigin;
use crate::opening::{OpeningStep, RETRY_AFTER, RefusalCollector, RequestRefusal};
use crate::params::RequestGrammar;
use crate::quarantine::ContentKey;
use crate::request_trace::RequestTrace;
use crate::routing::{ModelKey, WorkerId};
use crate::wire::traced_call;
use crate::worker_search::WorkerSearch;

/// Running checks of one tenant. A worker compiles grammars one after the other, for all tenants.
const TENANT_RUNNING_MAX: usize = 4;
/// Running checks of all tenants: half of the compile jobs that a worker lets wait. The other half
/// is for admitted requests.
const RUNNING_MAX: usize = 32;
/// Checks that run or wait, of one tenant and of all. Each holds the body of a request.
const TENANT_CHECKS_MAX: u32 = 128;
const CHECKS_MAX: u32 = 256;
/// A worker answers within about 31 s: it waits 10 s for its turn, compiles for 20 s, and its
/// watchdog adds one. If a worker takes longer than this, the router asks the next one.
const CHECK_WAIT: Duration = Duration::from_secs(40);
/// Maximum number of cached results. Each holds at most an error text.
const CACHED_RESULTS_MAX: usize = 256;

#[derive(Debug)]
pub(crate) struct GrammarChecker {
    dispatcher: Dispatcher,
    running: Semaphore,
    state: Mutex<CheckerState>,
}

#[derive(Debug, Default)]
struct CheckerState {
    /// Checks that run or wait.
    checks: u32,
    /// Tenants with checks that run or wait.
    tenants: HashMap<Tenant, TenantChecks>,
    /// The last used result first.
    cache: VecDeque<CachedResult>,
}

#[derive(Debug)]
struct TenantChecks {
    checks: u32,
    running: Arc<Semaphore>,
}

#[derive(Debug)]
struct CachedResult {
    grammar: ContentKey,
    /// `Err` holds the compile error.
    result: Result<(), String>,
}

impl GrammarChecker {
    pub(crate) fn new(dispatcher: Dispatcher) -> Arc<Self> {
        Arc::new(Self { dispatcher, running: Semaphore::new(RUNNING_MAX), state: Mutex::default() })
    }

    /// Checks a grammar. Returns `Ok` also if the model has no worker: admission control then
    /// decides.
    pub(crate) async fn check(
        &self,
        model: &ModelKey,
        grammar: &RequestGrammar,
        origin: &RequestOrigin,
        deadline: Instant,
    ) -> Result<(), RequestRefusal> {
        let key = self.dispatcher.quarantine.hasher.key_of_grammar(model, &grammar.source);
        if let Some(result) = self.lock().cached_result(key, grammar.param) {
            return result;
        }
        let check = self.begin_check(&origin.tenant)?;
        let checked = timeout_at(deadline, async {
            // Neither semaphore is ever closed.
            let _tenant_permit = check.tenant_running.acquire().await;
            let _permit = self.running.acquire().await;
            // Another request may have checked the same grammar meanwhile.
            let cached = self.lock().cached_result(key, grammar.param);
            match cached {
                Some(result) => result,
                None => self.ask_workers(model, grammar, key, &origin.trace, deadline).await,
            }
        });
        checked.await.unwrap_or(Err(RequestRefusal::DeadlineExceeded))
    }

    async fn ask_workers(
        &self,
        model: &ModelKey,
        grammar: &RequestGrammar,
        key: ContentKey,
        trace: &RequestTrace,
        deadline: Instant,
    ) -> Result<(), RequestRefusal> {
        let registry = &self.dispatcher.registry;
        let call = CheckGrammarRequest {
            fingerprint: Bytes::copy_from_slice(&model.fingerprint.0),
            grammar: Some(grammar.source.clone()),
            request_id: trace.id().to_string(),
        };
        let (span, request) = (trace.grammar_check(), trace.logged(&model.name));
        let mut workers = WorkerSearch::new(&self.dispatcher.quarantine, key, Some(deadline), None);
        let mut refusals = RefusalCollector::default();
        let place = |tried: &[WorkerId]| registry.choose_worker(model, tried);
        while let Some((mut worker, stay)) = workers.next(place, |worker| worker.id).await? {
            let call = traced_call(call.clone(), &span);
            let answer = service::patience::timeout(CHECK_WAIT, worker.client.check_grammar(call)).await;
            match answer {
                Ok(Ok(_)) => {
                    stay.record_output(1);
                    self.lock().cache_result(key, Ok(()));
                    return Ok(());
                }
                Ok(Err(status)) => {
                    let outcome = call_outcome(&worker, &status, Some(grammar), request);
                    let verdict = self.dispatcher.record_loss(&outcome, worker.id, &stay, 0, request);
                    if let OpeningStep::Refuse(refusal) = refusals.handle(outcome, verdict) {
                        if let RequestRefusal::Grammar { detail, .. } = &refusal {
                            self.lock().cache_result(key, Err(detail.clone()));
                        }
                        return Err(refusal);
                    }
                }
                Err(_) => {
                    let (request_id, trace_id) = (request.request_id, request.trace_id());
                    tracing::warn!(%request_id, trace_id, worker = %worker.name, "no answer to a grammar check within {CHECK_WAIT:?}");
                }
            }
        }
        refusals.into_refusal().map_or(Ok(()), Err)
    }

    fn begin_check(&self, tenant: &Tenant) -> Result<PendingCheck<'_>, RequestRefusal> {
        let tenant_running = self.lock().begin_check(tenant)?;
        Ok(PendingCheck { checker: self, tenant: tenant.clone(), tenant_running })
    }

    fn lock(&self) -> MutexGuard<'_, CheckerState> {
        // A panic under this lock is a bug that ends the process in release builds (panic = abort).
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A check that runs or waits. It counts until it is dropped, also if its client disconnects.
struct PendingCheck<'a> {
    checker: &'a GrammarChecker,
    tenant: Tenant,
    tenant_running: Arc<Semaphore>,
}

impl Drop for PendingCheck<'_> {
    fn drop(&mut self) {
        self.checker.lock().end_check(&self.tenant);
    }
}

impl CheckerState {
    fn begin_check(&mut self, tenant: &Tenant) -> Result<Arc<Semaphore>, RequestRefusal> {
        let of_tenant = self.tenants.get(tenant).map_or(0, |tenant| tenant.checks);
        if *tenant != Tenant::Unnamed && of_tenant >= TENANT_CHECKS_MAX {
            let detail = format!(
                "{of_tenant} grammars of this tenant are being checked, the limit is {TENANT_CHECKS_MAX}"
            );
            return Err(RequestRefusal::TenantLimit { detail, retry_after: RETRY_AFTER });
        }
        if self.checks >= CHECKS_MAX {
            let detail = format!("{} grammars are being checked, the limit is {CHECKS_MAX}", self.checks);
            return Err(RequestRefusal::Overloaded { detail, retry_after: RETRY_AFTER });
        }
        self.checks += 1;
        let tenant_checks = self.tenants.entry(tenant.clone()).or_insert_with(|| TenantChecks {
            checks: 0,
            running: Arc::new(Semaphore::new(TENANT_RUNNING_MAX)),
        });
        tenant_checks.checks += 1;
        Ok(tenant_checks.running.clone())
    }

    fn end_check(&mut self, tenant: &Tenant) {
        self.checks -= 1;
        let tenant_checks =
            self.tenants.get_mut(tenant).expect("a check counts for its tenant until it ends");
        tenant_checks.checks -= 1;
        if tenant_checks.checks == 0 {
            self.tenants.remove(tenant);
        }
    }

    fn cached_result(
        &mut self,
        grammar: ContentKey,
        param: &'static str,
    ) -> Option<Result<(), RequestRefusal>> {
        let at = self.cache.iter().position(|cached| cached.grammar == grammar)?;
        let cached = self.cache.remove(at)?;
        let result = cached.result.clone();
        self.cache.push_front(cached);
        // The error names the field that this request used.
        Some(result.map_err(|detail| RequestRefusal::Grammar { param, detail }))
    }

    fn cache_result(&mut self, grammar: ContentKey, result: Result<(), String>) {
        self.cache.truncate(CACHED_RESULTS_MAX - 1);
        self.cache.push_front(CachedResult { grammar, result });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(name: &str) -> Tenant {
        Tenant::Named(name.into())
    }

    #[test]
    fn a_tenant_reaches_its_own_limit_before_other_tenants_are_refused() {
        let mut state = CheckerState::default();
        let (flood, other) = (named("flood"), named("other"));
        (0..TENANT_CHECKS_MAX).for_each(|_| drop(state.begin_check(&flood).unwrap()));
        assert!(matches!(state.begin_check(&flood), Err(RequestRefusal::TenantLimit { .. })));
        (TENANT_CHECKS_MAX..CHECKS_MAX).for_each(|_| drop(state.begin_check(&Tenant::Unnamed).unwrap()));
        let full = state.begin_check(&other).unwrap_err();
        assert!(
            matches!(full, RequestRefusal::Overloaded { .. }) && full.to_string().contains("256"),
            "{full}"
        );
        (0..TENANT_CHECKS_MAX).for_each(|_| state.end_check(&flood));
        drop(state.begin_check(&other).unwrap());
        state.end_check(&other);
        let tenants: Vec<_> = state.tenants.keys().collect();
        assert_eq!(tenants, [&Tenant::Unnamed], "a tenant without checks is removed");
    }

    #[test]
    fn a_result_is_cached_and_names_the_field_in_use() {
        let mut state = CheckerState::default();
        let key = |n: usize| ContentKey(n as u128);
        let bad = CACHED_RESULTS_MAX;
        state.cache_result(key(bad), Err("unclosed group".to_owned()));
        let result = state.cached_result(key(bad), "guided_regex");
        assert!(
            matches!(result, Some(Err(RequestRefusal::Grammar { param: "guided_regex", .. }))),
            "{result:?}"
        );
        assert_eq!(state.cached_result(key(bad + 1), "regex"), None);
        for n in 0..CACHED_RESULTS_MAX - 1 {
            state.cache_result(key(n), Ok(()));
        }
        assert!(state.cached_result(key(bad), "regex").is_some());
        state.cache_result(key(bad + 1), Ok(()));
        let evicted = state.cached_result(key(0), "regex");
        assert_eq!(evicted, None, "the least recently used result is evicted");
        let kept = state.cached_result(key(bad), "regex");
        assert!(kept.is_some() && state.cache.len() == CACHED_RESULTS_MAX);
    }
}
