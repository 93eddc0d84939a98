// SPDX-License-Identifier: Apache-2.0

//! Decides which connections stay open. A plain value.
//!
//! A connection is idle while no request of it runs: before its first request, and between two. At
//! a limit, a new connection replaces the one that has been idle longest. So connections that never
//! send a request cannot keep others out, whatever their number. A replaced connection has its
//! descriptor until its task ends, so only [`CLOSING_MAX`] of them may wait for that.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::client_address::ClientAddress;
use crate::admission::Uptime;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct TcpConnectionId(pub(crate) u64);

#[derive(Clone, Copy, Debug)]
pub(crate) struct ConnectionLimits {
    /// All connections.
    pub(crate) connections_max: usize,
    /// Connections of one address.
    pub(crate) address_max: usize,
}

/// Replaced connections that are not closed yet. As many tasks end while a few connections arrive;
/// with more of them, a flood of connections would get ahead of the tasks that close the old ones.
pub(crate) const CLOSING_MAX: usize = 32;

/// What to do with a new connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Arrival {
    /// Serve it, after closing `replaces`.
    Accept { id: TcpConnectionId, replaces: Option<TcpConnectionId> },
    /// Every connection of this address is busy: close the new one.
    AddressFull,
    /// Every connection is busy, or too many are being closed: wait until one ends.
    Full,
}

#[derive(Debug)]
struct TrackedConnection {
    address: ClientAddress,
    requests: u32,
    /// Meaningless while a request runs.
    idle_since: Uptime,
}

#[derive(Debug, Default)]
struct AddressConnections {
    count: usize,
    idle: BTreeSet<(Uptime, TcpConnectionId)>,
}

#[derive(Debug)]
pub(crate) struct ConnectionTable {
    limits: ConnectionLimits,
    connections: BTreeMap<TcpConnectionId, TrackedConnection>,
    addresses: HashMap<ClientAddress, AddressConnections>,
    idle: BTreeSet<(Uptime, TcpConnectionId)>,
    /// Replaced, and not closed yet.
    closing: BTreeSet<TcpConnectionId>,
    last_id: u64,
}

impl ConnectionTable {
    pub(crate) fn new(limits: ConnectionLimits) -> Self {
        Self {
            limits,
            connections: BTreeMap::new(),
            addresses: HashMap::new(),
            idle: BTreeSet::new(),
            closing: BTreeSet::new(),
            last_id: 0,
        }
    }

    pub(crate) fn arrive(&mut self, address: ClientAddress, now: Uptime) -> Arrival {
        let of_address = self.addresses.get(&address);
        let is_address_full = of_address.is_some_and(|of| of.count >= self.limits.address_max);
        let replaces = match of_address {
            Some(of_address) if is_address_full => match of_address.idle.first() {
                Some(&(_, longest_idle)) => Some(longest_idle),
                None => return Arrival::AddressFull,
            },
            _ if self.connections.len() >= self.limits.connections_max => match self.idle.first() {
                Some(&(_, longest_idle)) => Some(longest_idle),
                None => return Arrival::Full,
            },
            _ => None,
        };
        if let Some(replaced) = replaces {
            if self.closing.len() == CLOSING_MAX {
                return Arrival::Full;
            }
            self.remove(replaced);
            self.closing.insert(replaced);
        }
        self.last_id += 1;
        let id = TcpConnectionId(self.last_id);
        self.connections.insert(id, TrackedConnection { address, requests: 0, idle_since: now });
        let of_address = self.addresses.entry(address).or_default();
        of_address.count += 1;
        of_address.idle.insert((now, id));
        self.idle.insert((now, id));
        Arrival::Accept { id, replaces }
    }

    pub(crate) fn begin_request(&mut self, id: TcpConnectionId) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        connection.requests += 1;
        let key = (connection.idle_since, id);
        self.idle.remove(&key);
        if let Some(of_address) = self.addresses.get_mut(&connection.address) {
            of_address.idle.remove(&key);
        }
    }

    pub(crate) fn end_request(&mut self, id: TcpConnectionId, now: Uptime) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        assert!(connection.requests > 0, "every request that began ends once");
        connection.requests -= 1;
        if connection.requests == 0 {
            connection.idle_since = now;
            self.idle.insert((now, id));
            self.addresses.entry(connection.address).or_default().idle.insert((now, id));
        }
    }

    /// The connection is closed.
    pub(crate) fn remove(&mut self, id: TcpConnectionId) {
        self.closing.remove(&id);
        let Some(connection) = self.connections.remove(&id) else { return };
        let key = (connection.idle_since, id);
        self.idle.remove(&key);
        if let Some(of_address) = self.addresses.get_mut(&connection.address) {
            of_address.idle.remove(&key);
            of_address.count -= 1;
            if of_address.count == 0 {
                self.addresses.remove(&connection.address);
            }
        }
    }

    #[cfg(test)]
    fn len(&self) -> usize {
        self.connections.len()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::net::{IpAddr, Ipv4Addr};
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    fn address(n: u8) -> ClientAddress {
        IpAddr::V4(Ipv4Addr::new(10, 0, 0, n)).into()
    }

    fn table(connections_max: usize, address_max: usize) -> ConnectionTable {
        ConnectionTable::new(ConnectionLimits { connections_max, address_max })
    }

    fn at(n: u64) -> Uptime {
        Duration::from_millis(n)
    }

    #[test]
    fn silent_connections_give_way_to_new_ones_and_busy_ones_stay() {
        let mut table = table(3, 3);
        let busy = match table.arrive(address(1), at(0)) {
            Arrival::Accept { id, replaces: None } => id,
            other => panic!("{other:?}"),
        };
        table.begin_request(busy);
        let silent: Vec<_> = (1..3).map(|n| table.arrive(address(2), at(n))).collect();
        let Arrival::Accept { id: oldest, .. } = silent[0] else { panic!("{silent:?}") };
        let next = table.arrive(address(3), at(3));
        assert!(matches!(next, Arrival::Accept { replaces: Some(id), .. } if id == oldest), "{next:?}");
        let Arrival::Accept { id, .. } = next else { panic!("{next:?}") };
        table.begin_request(id);
        let last = table.arrive(address(3), at(4));
        let Arrival::Accept { id, replaces: Some(_) } = last else { panic!("{last:?}") };
        table.begin_request(id);
        assert_eq!(table.arrive(address(4), at(5)), Arrival::Full);
        table.end_request(busy, at(6));
        assert!(
            matches!(table.arrive(address(4), at(7)), Arrival::Accept { replaces: Some(id), .. } if id == busy)
        );
    }

    #[test]
    fn an_address_at_its_limit_replaces_only_its_own_connections() {
        let mut table = table(10, 2);
        let other = table.arrive(address(1), at(0));
        let own = table.arrive(address(2), at(1));
        table.arrive(address(2), at(2));
        let Arrival::Accept { id: own, .. } = own else { panic!("{own:?}") };
        assert!(
            matches!(table.arrive(address(2), at(3)), Arrival::Accept { replaces: Some(id), .. } if id == own)
        );
        assert!(matches!(other, Arrival::Accept { replaces: None, .. }));
        assert_eq!(table.len(), 3);
    }

    #[test]
    fn a_connection_waits_while_too_many_replaced_ones_are_not_closed() {
        let mut table = table(2, 2);
        let arrive = |table: &mut ConnectionTable, n| table.arrive(address(1), at(n));
        let replaced: Vec<_> = (0..2 + CLOSING_MAX as u64)
            .filter_map(|n| match arrive(&mut table, n) {
                Arrival::Accept { replaces, .. } => replaces,
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(replaced.len(), CLOSING_MAX);
        assert_eq!(arrive(&mut table, 100), Arrival::Full);
        table.remove(replaced[7]);
        assert!(matches!(arrive(&mut table, 101), Arrival::Accept { replaces: Some(_), .. }));
        assert_eq!(arrive(&mut table, 102), Arrival::Full);
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn i7_connections_are_bounded_and_no_busy_one_is_closed(
            steps in proptest::collection::vec((0_u8..4, 0_u8..4, any::<prop::sample::Index>()), 1..300),
        ) {
            let mut table = table(8, 4);
            let mut open: HashMap<TcpConnectionId, (ClientAddress, u32)> = HashMap::new();
            for (step, (kind, client, pick)) in steps.into_iter().enumerate() {
                let now = at(step as u64);
                let mut ids: Vec<TcpConnectionId> = open.keys().copied().collect();
                ids.sort();
                let picked = (!ids.is_empty()).then(|| ids[pick.index(ids.len())]);
                match (kind, picked) {
                    (0, _) | (_, None) => {
                        let own = open.values().filter(|(of, _)| *of == address(client)).count();
                        let idle = |of: Option<ClientAddress>| {
                            open.values().any(|&(a, requests)| requests == 0 && of.is_none_or(|of| of == a))
                        };
                        match table.arrive(address(client), now) {
                            Arrival::Accept { id, replaces } => {
                                if let Some(replaced) = replaces {
                                    let (_, requests) = open.remove(&replaced).unwrap();
                                    prop_assert_eq!(requests, 0);
                                    table.remove(replaced);
                                }
                                open.insert(id, (address(client), 0));
                            }
                            Arrival::AddressFull => prop_assert!(own == 4 && !idle(Some(address(client)))),
                            Arrival::Full => prop_assert!(open.len() == 8 && !idle(None)),
                        }
                    }
                    (1, Some(id)) => {
                        table.begin_request(id);
                        open.get_mut(&id).unwrap().1 += 1;
                    }
                    (2, Some(id)) if open[&id].1 > 0 => {
                        table.end_request(id, now);
                        open.get_mut(&id).unwrap().1 -= 1;
                    }
                    (_, Some(id)) => {
                        table.remove(id);
                        open.remove(&id);
                    }
                }
                prop_assert_eq!(table.len(), open.len());
                prop_assert!(open.len() <= 8);
                let idle = open.values().filter(|(_, requests)| *requests == 0).count();
                prop_assert_eq!(table.idle.len(), idle);
                for n in 0..4 {
                    prop_assert!(open.values().filter(|(of, _)| *of == address(n)).count() <= 4);
                }
            }
            open.keys().for_each(|&id| table.remove(id));
            prop_assert!(table.addresses.is_empty() && table.idle.is_empty() && table.closing.is_empty());
        }
    }
}
