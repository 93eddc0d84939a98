// SPDX-License-Identifier: Apache-2.0

//! Sessions: requests that a client says belong together.
//!
//! Each session has a home among the targets of routing: the one with the highest hash of session
//! and name (rendezvous hashing). So the router keeps nothing for a session, a restarted router
//! finds the same home, and a worker that is lost moves only its own sessions.

use xxhash_rust::xxh3::xxh3_64_with_seed;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionKey(u64);

impl SessionKey {
    /// Equal names of two tenants are two sessions.
    pub fn new(tenant: &str, name: &[u8]) -> Self {
        Self(xxh3_64_with_seed(name, xxh3_64_with_seed(tenant.as_bytes(), 0)))
    }

    /// The home is the target with the highest value.
    pub(super) fn affinity(self, target: &str) -> u64 {
        xxh3_64_with_seed(target.as_bytes(), self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn home(session: SessionKey, targets: &[&'static str]) -> &'static str {
        targets.iter().max_by_key(|target| session.affinity(target)).unwrap()
    }

    #[test]
    fn sessions_spread_and_a_lost_target_moves_only_its_own() {
        let targets = ["worker-0", "worker-1", "worker-2", "worker-3"];
        let sessions = |tenant: &'static str| {
            (0..400).map(move |n: u32| SessionKey::new(tenant, n.to_string().as_bytes()))
        };
        for target in targets {
            let count = sessions("a").filter(|&session| home(session, &targets) == target).count();
            assert!((60..140).contains(&count), "{target}: {count} of 400");
        }
        for session in sessions("a").filter(|&session| home(session, &targets) != "worker-3") {
            assert_eq!(home(session, &targets), home(session, &targets[..3]));
        }
        assert!(sessions("a").zip(sessions("b")).all(|(a, b)| a != b));
    }
}
