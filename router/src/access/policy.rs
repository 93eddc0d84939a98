// SPDX-License-Identifier: Apache-2.0

//! Decides whether a request may enter: its key must exist, and have room in its limits.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use super::ApiKey;

const MINUTE: Duration = Duration::from_secs(60);
const DAY: Duration = Duration::from_secs(86_400);

/// Both clocks of an instant.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AccessTime {
    /// Since the router's start.
    pub(crate) uptime: Duration,
    /// Since the Unix epoch. Days in UTC begin at multiples of 86,400 s.
    pub(crate) unix: Duration,
}

impl AccessTime {
    fn day(self) -> u64 {
        self.unix.as_secs() / DAY.as_secs()
    }

    fn until_next_day(self) -> Duration {
        DAY - Duration::from_secs(self.unix.as_secs() % DAY.as_secs())
    }
}

/// Why a request is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum AccessRefusal {
    #[error("no API key is given; send it as `Authorization: Bearer KEY` or `x-api-key: KEY`")]
    NoKey,
    #[error("the API key is not valid")]
    UnknownKey,
    #[error("the API key may send {limit} requests a minute")]
    TooManyRequests { limit: u32, retry_after: Duration },
    #[error("the API key has {limit} requests running, which is its limit")]
    TooManyConcurrent { limit: u32 },
    #[error("the API key has used its {limit} tokens of this day (UTC)")]
    NoTokensLeft { limit: u64, retry_after: Duration },
}

/// A request ends within seconds, usually.
const RETRY_CONCURRENT: Duration = Duration::from_secs(1);

impl AccessRefusal {
    /// Label value for metrics.
    pub(crate) fn reason(&self) -> &'static str {
        match self {
            Self::NoKey => "no_key",
            Self::UnknownKey => "unknown_key",
            Self::TooManyRequests { .. } => "requests_per_minute",
            Self::TooManyConcurrent { .. } => "concurrent_requests",
            Self::NoTokensLeft { .. } => "tokens_per_day",
        }
    }

    /// When the client should try again, in whole seconds. `None` if the refusal is permanent.
    pub(crate) fn retry_after(&self) -> Option<Duration> {
        let exact = match *self {
            Self::NoKey | Self::UnknownKey => return None,
            Self::TooManyConcurrent { .. } => RETRY_CONCURRENT,
            Self::TooManyRequests { retry_after, .. } | Self::NoTokensLeft { retry_after, .. } => retry_after,
        };
        Some(Duration::from_secs(exact.as_secs() + u64::from(exact.subsec_nanos() > 0)))
    }
}

/// What a key has used. Kept by name, so that a new key of the same name continues.
#[derive(Debug, Default)]
struct KeyUsage {
    running: u32,
    /// When the bucket of requests is full again, as uptime (GCRA's theoretical arrival time).
    full_at: Duration,
    day: u64,
    day_tokens: u64,
}

#[derive(Debug, Default)]
pub(crate) struct AccessPolicy {
    keys: Vec<Arc<ApiKey>>,
    usage: HashMap<Arc<str>, KeyUsage>,
}

impl AccessPolicy {
    /// Replaces all keys. What was used under a name stays used.
    pub(crate) fn replace_keys(&mut self, keys: Vec<Arc<ApiKey>>) {
        self.usage.retain(|name, usage| usage.running > 0 || keys.iter().any(|key| key.name == *name));
        self.keys = keys;
    }

    /// Admits a request with the presented key. It runs until [`Self::end_request`].
    pub(crate) fn begin_request(
        &mut self,
        presented: Option<&[u8]>,
        now: AccessTime,
    ) -> Result<Arc<ApiKey>, AccessRefusal> {
        let hash = blake3::hash(presented.ok_or(AccessRefusal::NoKey)?);
        // Every entry is compared, in constant time each.
        let found =
            self.keys.iter().fold(None, |found, key| if key.hash == hash { Some(key) } else { found });
        let key = found.ok_or(AccessRefusal::UnknownKey)?.clone();
        let usage = self.usage.entry(key.name.clone()).or_default();
        usage.start_day(now.day());
        let limits = key.limits;
        if let Some(limit) = limits.tokens_per_day.filter(|&limit| usage.day_tokens >= limit) {
            return Err(AccessRefusal::NoTokensLeft { limit, retry_after: now.until_next_day() });
        }
        if let Some(limit) = limits.concurrent_requests.filter(|&limit| usage.running >= limit) {
            return Err(AccessRefusal::TooManyConcurrent { limit });
        }
        if let Some(limit) = limits.requests_per_minute {
            usage.take_request(limit, now.uptime)?;
        }
        usage.running += 1;
        Ok(key)
    }

    pub(crate) fn end_request(&mut self, key: &ApiKey) {
        let usage = self.usage.get_mut(&key.name).expect("a key with running requests is kept");
        usage.running -= 1;
    }

    /// Counts tokens of a request that runs. The request may exceed the limit, the next one is
    /// refused.
    pub(crate) fn record_tokens(&mut self, key: &ApiKey, tokens: u64, now: AccessTime) {
        let usage = self.usage.get_mut(&key.name).expect("a key with running requests is kept");
        usage.start_day(now.day());
        usage.day_tokens = usage.day_tokens.saturating_add(tokens);
    }
}

impl KeyUsage {
    /// A clock that goes back does not give tokens back.
    fn start_day(&mut self, day: u64) {
        if day > self.day {
            (self.day, self.day_tokens) = (day, 0);
        }
    }

    /// Takes one request from a bucket that holds `limit` and fills within a minute.
    fn take_request(&mut self, limit: u32, now: Duration) -> Result<(), AccessRefusal> {
        let full_at = self.full_at.max(now) + MINUTE / limit;
        match full_at.checked_sub(now + MINUTE) {
            Some(retry_after) if !retry_after.is_zero() => {
                Err(AccessRefusal::TooManyRequests { limit, retry_after })
            }
            _ => {
                self.full_at = full_at;
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::ModelAccess;
    use super::super::key_file::KeyLimits;
    use super::*;

    fn key(name: &str, secret: &str, limits: KeyLimits) -> Arc<ApiKey> {
        let hash = blake3::hash(secret.as_bytes());
        Arc::new(ApiKey {
            name: name.into(),
            hash,
            models: ModelAccess::default(),
            is_gateway: false,
            limits,
        })
    }

    fn policy(limits: KeyLimits) -> AccessPolicy {
        let mut policy = AccessPolicy::default();
        policy.replace_keys(vec![key("a", "sk-a", limits), key("b", "sk-b", KeyLimits::default())]);
        policy
    }

    fn at(milliseconds: u64) -> AccessTime {
        let uptime = Duration::from_millis(milliseconds);
        AccessTime { uptime, unix: Duration::from_secs(86_400 * 20_000) + uptime }
    }

    #[test]
    fn only_keys_of_the_file_enter() {
        let mut policy = policy(KeyLimits::default());
        assert_eq!(&*policy.begin_request(Some(b"sk-a"), at(0)).unwrap().name, "a");
        assert_eq!(&*policy.begin_request(Some(b"sk-b"), at(0)).unwrap().name, "b");
        assert_eq!(policy.begin_request(None, at(0)), Err(AccessRefusal::NoKey));
        for unknown in ["", "sk-", "sk-a ", "sk-aa"] {
            assert_eq!(policy.begin_request(Some(unknown.as_bytes()), at(0)), Err(AccessRefusal::UnknownKey));
        }
        policy.replace_keys(vec![]);
        assert_eq!(policy.begin_request(Some(b"sk-a"), at(0)), Err(AccessRefusal::UnknownKey));
    }

    #[test]
    fn concurrent_requests_are_limited_also_while_the_file_changes() {
        let limits = KeyLimits { concurrent_requests: Some(2), ..KeyLimits::default() };
        let mut policy = policy(limits);
        let first = policy.begin_request(Some(b"sk-a"), at(0)).unwrap();
        policy.begin_request(Some(b"sk-a"), at(0)).unwrap();
        let full = Err(AccessRefusal::TooManyConcurrent { limit: 2 });
        assert_eq!(policy.begin_request(Some(b"sk-a"), at(0)), full);
        policy.replace_keys(vec![]);
        policy.replace_keys(vec![key("a", "sk-new", limits)]);
        assert_eq!(policy.begin_request(Some(b"sk-new"), at(0)), full, "the two requests still run");
        policy.end_request(&first);
        assert!(policy.begin_request(Some(b"sk-new"), at(0)).is_ok());
    }

    #[test]
    fn a_day_of_tokens_comes_back_at_midnight() {
        let mut policy = policy(KeyLimits { tokens_per_day: Some(100), ..KeyLimits::default() });
        let running = policy.begin_request(Some(b"sk-a"), at(0)).unwrap();
        policy.record_tokens(&running, 99, at(0));
        assert!(policy.begin_request(Some(b"sk-a"), at(0)).is_ok());
        policy.record_tokens(&running, 70, at(1000));
        let refused = policy.begin_request(Some(b"sk-a"), at(3_600_000)).unwrap_err();
        let retry_after = Duration::from_secs(23 * 3600);
        assert_eq!(refused, AccessRefusal::NoTokensLeft { limit: 100, retry_after });
        assert!(policy.begin_request(Some(b"sk-b"), at(0)).is_ok(), "another key has its own tokens");
        assert!(policy.begin_request(Some(b"sk-a"), at(86_400_000)).is_ok());
        assert!(policy.begin_request(Some(b"sk-a"), at(0)).is_ok(), "a clock that goes back");
    }

    proptest! {
        /// In no window of a minute are there more than two buckets of requests, and a client that
        /// waits as told is admitted.
        #[test]
        fn requests_of_a_minute_are_bounded(limit in 1u32..40, gaps in prop::collection::vec(0u64..9_000, 1..300)) {
            let mut policy = policy(KeyLimits { requests_per_minute: Some(limit), ..KeyLimits::default() });
            let (mut now, mut admitted) = (0, Vec::new());
            for gap in gaps {
                now += gap;
                match policy.begin_request(Some(b"sk-a"), at(now)) {
                    Ok(_) => admitted.push(now),
                    Err(AccessRefusal::TooManyRequests { retry_after, .. }) => {
                        now += retry_after.as_millis() as u64 + 1;
                        prop_assert!(policy.begin_request(Some(b"sk-a"), at(now)).is_ok());
                        admitted.push(now);
                    }
                    Err(other) => panic!("{other}"),
                }
            }
            for (index, &from) in admitted.iter().enumerate() {
                let within = admitted[index..].iter().take_while(|&&at| at < from + 60_000).count();
                prop_assert!(within as u32 <= 2 * limit, "{within} requests within a minute, limit {limit}");
            }
        }
    }
}
