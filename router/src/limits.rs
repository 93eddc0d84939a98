// SPDX-License-Identifier: Apache-2.0

//! The configured limits of requests, connections and memory of the router.

use std::net::SocketAddr;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use service::ByteSize;

use crate::intake::{BudgetLimits, ConnectionLimits, PaceLimits};
use crate::listener::ListenerLimits;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
pub struct RouterLimits {
    /// Maximum number of choices that run or wait. The router refuses more.
    pub streams_max: u32,
    /// Maximum duration of a request, also if the request has a later deadline.
    #[serde(with = "service::duration")]
    pub request_timeout: Duration,
    /// How long a request waits for a worker of a model that has none at the moment.
    #[serde(with = "service::duration")]
    pub worker_wait: Duration,
    /// How long streams may continue after the router is told to stop.
    #[serde(with = "service::duration")]
    pub drain: Duration,
    /// How long the router refuses a request that crashes workers ([`crate::quarantine`]).
    #[serde(with = "service::duration")]
    pub quarantine: Duration,
    /// Maximum length of a request body.
    pub body_max: ByteSize,
    /// Time that every body has to arrive, whatever its size, and longest pause within a body.
    #[serde(with = "service::duration")]
    pub body_grace: Duration,
    /// Minimum rate of a body after the grace time, in bytes a second.
    pub body_rate_min: ByteSize,
    /// Bytes of request bodies that the router holds at once: in all, for one client (a tenant, or
    /// an address without one), and for one connection.
    pub bytes_max: ByteSize,
    pub client_bytes_max: ByteSize,
    pub connection_bytes_max: ByteSize,
    /// Open connections in all, and from one address. A new connection replaces the one that has
    /// been idle longest.
    pub connections_max: u32,
    pub address_connections_max: u32,
    /// Time until a connection has sent the headers of its next request.
    #[serde(with = "service::duration")]
    pub head_timeout: Duration,
    /// Maximum number of concurrent requests of one HTTP/2 connection.
    pub http2_streams_max: u32,
    /// A second address, with `/health`, `/ready` and `/metrics` only. It has connections of its
    /// own, so that clients of the API cannot use them up.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub health_listen: Option<SocketAddr>,
    /// Whether HTTP requests with unknown fields are refused. Otherwise the fields are ignored and
    /// named in a header of the response.
    pub strict_requests: bool,
}

impl Default for RouterLimits {
    fn default() -> Self {
        Self {
            streams_max: 1024,
            request_timeout: Duration::from_secs(600),
            // A worker that starts is ready or killed after 30 s. Proxies commonly give up a silent
            // response after 60 s.
            worker_wait: Duration::from_secs(30),
            drain: Duration::from_secs(10),
            quarantine: Duration::from_secs(600),
            // A prompt of a million tokens as text.
            body_max: ByteSize::mib(8),
            body_grace: Duration::from_secs(10),
            // A slow mobile network.
            body_rate_min: ByteSize::kib(64),
            bytes_max: ByteSize::mib(512),
            client_bytes_max: ByteSize::mib(128),
            connection_bytes_max: ByteSize::mib(32),
            connections_max: 2048,
            address_connections_max: 1024,
            head_timeout: Duration::from_secs(30),
            http2_streams_max: 128,
            health_listen: None,
            strict_requests: false,
        }
    }
}

/// Maximum of [`RouterLimits::worker_wait`]: a model that is not back by then needs an operator.
const WORKER_WAIT_MAX: Duration = Duration::from_secs(600);

/// Connections of [`RouterLimits::health_listen`]: some probes and scrapers.
const HEALTH_CONNECTIONS_MAX: usize = 64;

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum RouterLimitsError {
    #[error("`router.{key}` is 0; use 1 or more")]
    Zero { key: &'static str },
    #[error("`router.worker-wait` is {0:?}, the maximum is {WORKER_WAIT_MAX:?}")]
    WorkerWait(Duration),
    #[error("`router.{key}` is {value}, which is less than `router.{smaller}` ({least})")]
    Order { key: &'static str, value: ByteSize, smaller: &'static str, least: ByteSize },
}

impl RouterLimits {
    pub fn check(&self) -> Result<(), RouterLimitsError> {
        let counts = [
            ("streams-max", u64::from(self.streams_max)),
            ("connections-max", u64::from(self.connections_max)),
            ("address-connections-max", u64::from(self.address_connections_max)),
            ("http2-streams-max", u64::from(self.http2_streams_max)),
            ("body-max", self.body_max.0),
            ("body-rate-min", self.body_rate_min.0),
            ("request-timeout", self.request_timeout.as_millis() as u64),
            ("body-grace", self.body_grace.as_millis() as u64),
            ("head-timeout", self.head_timeout.as_millis() as u64),
        ];
        if let Some((key, _)) = counts.into_iter().find(|&(_, value)| value == 0) {
            return Err(RouterLimitsError::Zero { key });
        }
        if self.worker_wait > WORKER_WAIT_MAX {
            return Err(RouterLimitsError::WorkerWait(self.worker_wait));
        }
        // A body of the maximum length must fit every budget.
        let budgets = [
            ("body-max", self.body_max),
            ("connection-bytes-max", self.connection_bytes_max),
            ("client-bytes-max", self.client_bytes_max),
            ("bytes-max", self.bytes_max),
        ];
        match budgets.windows(2).find(|pair| pair[1].1.0 < pair[0].1.0) {
            Some(pair) => Err(RouterLimitsError::Order {
                key: pair[1].0,
                value: pair[1].1,
                smaller: pair[0].0,
                least: pair[0].1,
            }),
            None => Ok(()),
        }
    }

    pub(crate) fn listener(&self) -> ListenerLimits {
        let connections = ConnectionLimits {
            connections_max: self.connections_max as usize,
            address_max: self.address_connections_max as usize,
        };
        let (head_timeout, http2_streams_max) = (self.head_timeout, self.http2_streams_max);
        ListenerLimits { connections, head_timeout, http2_streams_max }
    }

    pub(crate) fn health_listener(&self) -> ListenerLimits {
        let max = HEALTH_CONNECTIONS_MAX;
        let connections = ConnectionLimits { connections_max: max, address_max: max };
        ListenerLimits { connections, ..self.listener() }
    }

    pub(crate) fn pace(&self) -> PaceLimits {
        PaceLimits { grace: self.body_grace, rate_min: self.body_rate_min.0 }
    }

    pub(crate) fn budget(&self) -> BudgetLimits {
        BudgetLimits {
            total: self.bytes_max.0,
            client: self.client_bytes_max.0,
            connection: self.connection_bytes_max.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_valid_and_impossible_values_are_refused() {
        let defaults = RouterLimits::default();
        assert_eq!(defaults.check(), Ok(()));
        let zero = RouterLimits { connections_max: 0, ..defaults.clone() };
        assert_eq!(zero.check(), Err(RouterLimitsError::Zero { key: "connections-max" }));
        let long = RouterLimits { worker_wait: Duration::from_secs(601), ..defaults.clone() };
        assert_eq!(
            long.check().unwrap_err().to_string(),
            "`router.worker-wait` is 601s, the maximum is 600s"
        );
        let none = RouterLimits { worker_wait: Duration::ZERO, ..defaults.clone() };
        assert_eq!(none.check(), Ok(()), "requests do not wait");
        let small = RouterLimits { connection_bytes_max: ByteSize::mib(7), ..defaults };
        let text = small.check().unwrap_err().to_string();
        assert_eq!(
            text,
            "`router.connection-bytes-max` is 7MiB, which is less than `router.body-max` (8MiB)"
        );
    }
}
