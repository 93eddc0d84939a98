// SPDX-License-Identifier: Apache-2.0

//! Responses that clients refer to with `previous_response_id`, in memory.
//!
//! 1. Their bytes are bounded, in all and for each tenant. The oldest make room.
//! 2. A tenant finds its own responses only.
//! 3. A restart of the router forgets them.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::admission::Tenant;

/// Bytes of all responses, and of those of one tenant: some thousand conversations.
const BYTES_MAX: usize = 64 << 20;
const TENANT_BYTES_MAX: usize = 16 << 20;
/// What a response costs beside its bytes: its id in two places, and its entry.
const ENTRY_BYTES: usize = 512;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StoredResponse {
    /// The response as JSON.
    pub(crate) body: Arc<[u8]>,
    /// The conversation up to the response, as a JSON list of messages.
    pub(crate) messages: Arc<[u8]>,
}

/// Cheap to clone.
#[derive(Clone, Debug, Default)]
pub(crate) struct ResponseStore(Arc<Mutex<StoredResponses>>);

impl ResponseStore {
    pub(crate) fn insert(&self, id: String, tenant: Tenant, response: StoredResponse) {
        self.lock().insert(id, tenant, response);
    }

    pub(crate) fn get(&self, id: &str, tenant: &Tenant) -> Option<StoredResponse> {
        let responses = self.lock();
        responses.entries.get(id).filter(|entry| entry.tenant == *tenant).map(|entry| entry.response.clone())
    }

    /// Whether the tenant had a response of this id.
    pub(crate) fn remove(&self, id: &str, tenant: &Tenant) -> bool {
        let mut responses = self.lock();
        let is_own = responses.entries.get(id).is_some_and(|entry| entry.tenant == *tenant);
        if is_own {
            responses.remove(id);
        }
        is_own
    }

    fn lock(&self) -> MutexGuard<'_, StoredResponses> {
        // A panic under this lock is a bug that ends the process in release builds (panic = abort).
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug, Default)]
struct StoredResponses {
    entries: HashMap<String, StoredEntry>,
    /// The oldest first. Each tenant has an order of its own.
    order: VecDeque<String>,
    tenants: HashMap<Tenant, TenantResponses>,
    bytes: usize,
}

#[derive(Debug)]
struct StoredEntry {
    tenant: Tenant,
    response: StoredResponse,
}

#[derive(Debug, Default)]
struct TenantResponses {
    order: VecDeque<String>,
    bytes: usize,
}

impl StoredEntry {
    fn bytes(&self) -> usize {
        self.response.body.len() + self.response.messages.len() + ENTRY_BYTES
    }
}

impl StoredResponses {
    fn insert(&mut self, id: String, tenant: Tenant, response: StoredResponse) {
        let entry = StoredEntry { tenant: tenant.clone(), response };
        let bytes = entry.bytes();
        if bytes > TENANT_BYTES_MAX {
            return;
        }
        while self.tenants.get(&tenant).is_some_and(|of| of.bytes + bytes > TENANT_BYTES_MAX) {
            let oldest = self.tenants.get(&tenant).and_then(|of| of.order.front().cloned());
            self.remove(&oldest.expect("a tenant with bytes has a response"));
        }
        while self.bytes + bytes > BYTES_MAX {
            let oldest = self.order.front().cloned();
            self.remove(&oldest.expect("a store with bytes has a response"));
        }
        self.bytes += bytes;
        let of_tenant = self.tenants.entry(tenant).or_default();
        of_tenant.bytes += bytes;
        of_tenant.order.push_back(id.clone());
        self.order.push_back(id.clone());
        self.entries.insert(id, entry);
    }

    fn remove(&mut self, id: &str) {
        let Some(entry) = self.entries.remove(id) else { return };
        self.bytes -= entry.bytes();
        forget(&mut self.order, id);
        let of_tenant = self.tenants.get_mut(&entry.tenant).expect("a response counts for its tenant");
        of_tenant.bytes -= entry.bytes();
        forget(&mut of_tenant.order, id);
        if of_tenant.order.is_empty() {
            self.tenants.remove(&entry.tenant);
        }
    }
}

/// Mostly the oldest is removed.
fn forget(order: &mut VecDeque<String>, id: &str) {
    match order.front().is_some_and(|oldest| oldest == id) {
        true => drop(order.pop_front()),
        false => order.retain(|other| other != id),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tenant(name: &str) -> Tenant {
        Tenant::Named(name.into())
    }

    fn response(bytes: usize) -> StoredResponse {
        StoredResponse { body: vec![0; bytes].into(), messages: Vec::new().into() }
    }

    #[test]
    fn a_tenant_finds_and_removes_its_own_responses_only() {
        let store = ResponseStore::default();
        store.insert("a1".to_owned(), tenant("a"), response(1));
        assert!(store.get("a1", &tenant("a")).is_some() && store.get("a1", &tenant("b")).is_none());
        assert!(!store.remove("a1", &tenant("b")) && store.remove("a1", &tenant("a")));
        assert!(store.get("a1", &tenant("a")).is_none());
        let responses = store.lock();
        assert!(responses.bytes == 0 && responses.order.is_empty() && responses.tenants.is_empty());
    }

    #[test]
    fn the_oldest_responses_make_room_first_those_of_the_same_tenant() {
        const PART: usize = TENANT_BYTES_MAX / 4 - ENTRY_BYTES;
        let store = ResponseStore::default();
        store.insert("b".to_owned(), tenant("b"), response(PART));
        for number in 0..5 {
            store.insert(format!("a{number}"), tenant("a"), response(PART));
        }
        assert!(store.get("a0", &tenant("a")).is_none(), "the oldest of the tenant");
        assert!(store.get("a1", &tenant("a")).is_some() && store.get("b", &tenant("b")).is_some());
        for other in 0..20 {
            store.insert(format!("c{other}"), tenant(&format!("c{other}")), response(PART));
        }
        assert!(store.get("b", &tenant("b")).is_none(), "the oldest of all");
        let responses = store.lock();
        assert!(responses.bytes <= BYTES_MAX);
        let sum: usize = responses.entries.values().map(StoredEntry::bytes).sum();
        let of_tenants: usize = responses.tenants.values().map(|of| of.bytes).sum();
        assert_eq!((sum, of_tenants), (responses.bytes, responses.bytes));
        drop(responses);
        store.insert("huge".to_owned(), tenant("d"), response(TENANT_BYTES_MAX));
        assert!(store.get("huge", &tenant("d")).is_none());
    }
}
