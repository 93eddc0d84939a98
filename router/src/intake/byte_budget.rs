// SPDX-License-Identifier: Apache-2.0

//! The budget for bytes of requests: of the whole router, of one client and of one connection.
//!
//! [`ByteBudget`] is a plain value. A [`SharedBudget`] guards it with a lock, and a
//! [`ByteReservation`] releases its bytes when it is dropped.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::client_address::ClientAddress;
use super::connection_table::TcpConnectionId;

#[derive(Clone, Copy, Debug)]
pub(crate) struct BudgetLimits {
    pub(crate) total: u64,
    /// Of one client.
    pub(crate) client: u64,
    pub(crate) connection: u64,
}

/// Who bytes count for: the tenant, or the address of a client without one.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum BudgetKey {
    Tenant(Arc<str>),
    Address(ClientAddress),
    /// The router's Unix socket.
    Local,
}

/// Which limit was reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BudgetScope {
    Connection,
    Client,
    Total,
}

/// The bytes that a reservation asked for are not there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BudgetExceeded {
    pub(crate) scope: BudgetScope,
    pub(crate) limit: u64,
}

#[derive(Debug)]
struct ByteBudget {
    limits: BudgetLimits,
    total: u64,
    clients: HashMap<BudgetKey, u64>,
    connections: HashMap<TcpConnectionId, u64>,
}

impl ByteBudget {
    fn new(limits: BudgetLimits) -> Self {
        Self { limits, total: 0, clients: HashMap::new(), connections: HashMap::new() }
    }

    fn reserve(
        &mut self,
        key: &BudgetKey,
        connection: Option<TcpConnectionId>,
        bytes: u64,
    ) -> Result<(), BudgetExceeded> {
        let used = |found: Option<&u64>| found.copied().unwrap_or(0);
        let of_connection = connection.map_or(0, |connection| used(self.connections.get(&connection)));
        let checks = [
            (BudgetScope::Connection, of_connection, self.limits.connection),
            (BudgetScope::Client, used(self.clients.get(key)), self.limits.client),
            (BudgetScope::Total, self.total, self.limits.total),
        ];
        for (scope, used, limit) in checks {
            if used.saturating_add(bytes) > limit {
                return Err(BudgetExceeded { scope, limit });
            }
        }
        if bytes == 0 {
            return Ok(());
        }
        self.total += bytes;
        *self.clients.entry(key.clone()).or_default() += bytes;
        if let Some(connection) = connection {
            *self.connections.entry(connection).or_default() += bytes;
        }
        Ok(())
    }

    fn release(&mut self, key: &BudgetKey, connection: Option<TcpConnectionId>, bytes: u64) {
        assert!(self.total >= bytes, "reserved bytes are released once");
        self.total -= bytes;
        subtract(&mut self.clients, key, bytes);
        if let Some(connection) = connection {
            subtract(&mut self.connections, &connection, bytes);
        }
    }
}

/// Removes an entry that reaches 0, so that the map holds only clients with bytes.
fn subtract<K: std::hash::Hash + Eq>(map: &mut HashMap<K, u64>, key: &K, bytes: u64) {
    if let Some(used) = map.get_mut(key) {
        *used -= bytes;
        if *used == 0 {
            map.remove(key);
        }
    }
}

/// The budget of this process. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct SharedBudget(Arc<Mutex<ByteBudget>>);

impl SharedBudget {
    pub(crate) fn new(limits: BudgetLimits) -> Self {
        Self(Arc::new(Mutex::new(ByteBudget::new(limits))))
    }

    /// An empty reservation.
    pub(crate) fn open(&self, key: BudgetKey, connection: Option<TcpConnectionId>) -> ByteReservation {
        ByteReservation { budget: self.clone(), key, connection, bytes: 0 }
    }

    /// Bytes of all reservations.
    pub(crate) fn used(&self) -> u64 {
        self.lock().total
    }

    fn lock(&self) -> MutexGuard<'_, ByteBudget> {
        // A panic under this lock is a bug that ends the process in release builds (panic = abort).
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Bytes that a request holds. Dropping it releases them.
#[derive(Debug)]
pub(crate) struct ByteReservation {
    budget: SharedBudget,
    key: BudgetKey,
    connection: Option<TcpConnectionId>,
    bytes: u64,
}

impl ByteReservation {
    pub(crate) fn grow(&mut self, bytes: u64) -> Result<(), BudgetExceeded> {
        self.budget.lock().reserve(&self.key, self.connection, bytes)?;
        self.bytes += bytes;
        Ok(())
    }

    /// Releases everything above `bytes`.
    pub(crate) fn shrink_to(&mut self, bytes: u64) {
        let excess = self.bytes.saturating_sub(bytes);
        if excess > 0 {
            self.budget.lock().release(&self.key, self.connection, excess);
            self.bytes -= excess;
        }
    }
}

impl Drop for ByteReservation {
    fn drop(&mut self) {
        self.shrink_to(0);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LIMITS: BudgetLimits = BudgetLimits { total: 100, client: 60, connection: 30 };

    fn tenant(name: &str) -> BudgetKey {
        BudgetKey::Tenant(name.into())
    }

    #[test]
    fn each_limit_is_named_when_it_is_reached() {
        let budget = SharedBudget::new(LIMITS);
        let mut reservations: Vec<_> =
            (0..4).map(|n| budget.open(tenant(["a", "b"][n / 2]), Some(TcpConnectionId(n as u64)))).collect();
        let exceeded = |scope, limit| Err(BudgetExceeded { scope, limit });
        assert_eq!(reservations[0].grow(31), exceeded(BudgetScope::Connection, 30));
        reservations[0].grow(30).unwrap();
        reservations[1].grow(30).unwrap();
        let mut third = budget.open(tenant("a"), Some(TcpConnectionId(9)));
        assert_eq!(third.grow(1), exceeded(BudgetScope::Client, 60));
        reservations[2].grow(30).unwrap();
        assert_eq!(reservations[3].grow(11), exceeded(BudgetScope::Total, 100));
        drop(reservations);
        assert_eq!(budget.used(), 0);
        assert_eq!(third.grow(30), Ok(()));
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn i7_bytes_stay_within_every_limit_and_all_come_back(
            steps in proptest::collection::vec((0_usize..12, 0_u64..40, any::<bool>()), 1..200),
        ) {
            let budget = SharedBudget::new(LIMITS);
            let key = |n: usize| tenant(["a", "b", "c"][n % 3]);
            let mut open: Vec<ByteReservation> =
                (0..12).map(|n| budget.open(key(n), Some(TcpConnectionId(n as u64 / 2)))).collect();
            for (n, bytes, grows) in steps {
                let before = open[n].bytes;
                if grows {
                    let grown = open[n].grow(bytes);
                    prop_assert_eq!(open[n].bytes, before + if grown.is_ok() { bytes } else { 0 });
                } else {
                    open[n].shrink_to(bytes);
                    prop_assert_eq!(open[n].bytes, before.min(bytes));
                }
                let sum = |of: &dyn Fn(usize) -> bool| -> u64 {
                    open.iter().enumerate().filter(|&(n, _)| of(n)).map(|(_, r)| r.bytes).sum()
                };
                prop_assert!(sum(&|_| true) <= LIMITS.total && budget.used() == sum(&|_| true));
                for client in 0..3 {
                    prop_assert!(sum(&|n| n % 3 == client) <= LIMITS.client);
                }
                for connection in 0..6 {
                    prop_assert!(sum(&|n| n / 2 == connection) <= LIMITS.connection);
                }
            }
            drop(open);
            let state = budget.lock();
            prop_assert!(state.total == 0 && state.clients.is_empty() && state.connections.is_empty());
        }
    }
}
