// SPDX-License-Identifier: Apache-2.0

//! Configuration of the router process.

use std::net::SocketAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use service::{Exit, HasExit};
use traces::TracingConfig;

use crate::access::{KeyFileError, read_keys};
use crate::admission::AdmissionLimits;
use crate::http::{AllowedOrigins, HostError, OriginError, OwnNames};
use crate::limits::RouterLimits;
pub use crate::routing::RoutingMode;
use crate::tls::TlsConfig;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct RouterConfig {
    /// TCP address for HTTP and gRPC. If absent, the router serves only gRPC on `router.sock` in
    /// the runtime directory. An inherited listening socket replaces it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub listen: Option<SocketAddr>,
    /// The directory of the workers' sockets.
    pub runtime_dir: PathBuf,
    /// Limits of the waiting queues.
    #[serde(default)]
    pub admission: AdmissionConfig,
    /// How workers are chosen.
    #[serde(default)]
    pub routing: RoutingConfig,
    /// Limits of requests, connections and memory.
    #[serde(default)]
    pub limits: RouterLimits,
    /// Who may call the API over TCP.
    #[serde(default)]
    pub access: AccessConfig,
    /// If absent, the TCP address speaks plain HTTP. `router.sock` and `health-listen` always do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls: Option<TlsConfig>,
    /// Where spans of requests go. If absent, none are recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tracing: Option<TracingConfig>,
}

impl RouterConfig {
    /// Defaults for everything except the address and the directory.
    pub fn new(listen: Option<SocketAddr>, runtime_dir: PathBuf) -> Self {
        let (admission, limits) = (AdmissionConfig::default(), RouterLimits::default());
        let (routing, access) = (RoutingConfig::default(), AccessConfig::default());
        Self { listen, runtime_dir, admission, routing, limits, access, tls: None, tracing: None }
    }
}

/// Admission control: limits of the waiting queue of each model, and reserved floors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
pub struct AdmissionConfig {
    /// Maximum number of waiting requests. The router refuses more with 503.
    pub queue_max: u32,
    /// Maximum number of waiting requests of one tenant. The router refuses more with 429.
    pub tenant_queue_max: u32,
    /// Percent of a model's permits and of its waiting queue that are reserved for the class.
    pub interactive_floor: u32,
    pub batch_floor: u32,
}

impl Default for AdmissionConfig {
    fn default() -> Self {
        Self { queue_max: 256, tenant_queue_max: 128, interactive_floor: 10, batch_floor: 5 }
    }
}

#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub enum AccessConfigError {
    Keys(#[from] KeyFileError),
    Origin(#[from] OriginError),
    Host(#[from] HostError),
}

impl HasExit for AccessConfigError {
    fn exit(&self) -> Exit {
        Exit::Usage
    }
}

/// Access to the API over TCP.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
pub struct AccessConfig {
    /// The file of API keys. If absent, everybody who can connect may call.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keys: Option<PathBuf>,
    /// The file to which a line of JSON is appended for each request that has ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage_log: Option<PathBuf>,
    /// Origins of web pages that may call, beside those of this machine. "*" allows all.
    pub origins: Vec<String>,
    /// Further names by which clients of this machine may call the router.
    pub hosts: Vec<String>,
}

impl AccessConfig {
    /// The same with absolute paths, for a process with another directory. A path that cannot be
    /// made absolute stays as it is.
    pub fn absolute(&self) -> Self {
        let absolute = |path: &PathBuf| std::path::absolute(path).unwrap_or_else(|_| path.clone());
        Self {
            keys: self.keys.as_ref().map(absolute),
            usage_log: self.usage_log.as_ref().map(absolute),
            origins: self.origins.clone(),
            hosts: self.hosts.clone(),
        }
    }

    /// Checks origins and hosts, and reads the key file as the router does.
    pub fn check(&self) -> Result<(), AccessConfigError> {
        OwnNames::new(AllowedOrigins::new(&self.origins)?, &self.hosts)?;
        Ok(self.keys.as_deref().map_or(Ok(()), |keys| read_keys(keys).map(drop))?)
    }
}

/// Choice of the worker for a stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
pub struct RoutingConfig {
    /// "auto", "packed", "prefix-aware", "least-loaded" or "power-of-two".
    pub mode: RoutingMode,
}

/// The default class has no floor and needs a part of the permits.
const FLOORS_MAX: u32 = 90;

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum AdmissionConfigError {
    #[error("`admission.{key}` is 0, so no request could wait; use 1 or more")]
    ZeroQueue { key: &'static str },
    #[error(
        "`admission.interactive-floor` is {interactive} and `admission.batch-floor` {batch} percent, \
         their sum may be at most {FLOORS_MAX}"
    )]
    Floors { interactive: u32, batch: u32 },
}

impl AdmissionConfig {
    pub fn check(&self) -> Result<(), AdmissionConfigError> {
        let queues = [("queue-max", self.queue_max), ("tenant-queue-max", self.tenant_queue_max)];
        if let Some((key, _)) = queues.into_iter().find(|&(_, max)| max == 0) {
            return Err(AdmissionConfigError::ZeroQueue { key });
        }
        let (interactive, batch) = (self.interactive_floor, self.batch_floor);
        if interactive.saturating_add(batch) > FLOORS_MAX {
            return Err(AdmissionConfigError::Floors { interactive, batch });
        }
        Ok(())
    }

    pub(crate) fn limits(&self, router: &RouterLimits) -> AdmissionLimits {
        AdmissionLimits {
            streams_max: router.streams_max,
            worker_wait: router.worker_wait,
            queue_max: self.queue_max,
            tenant_queue_max: self.tenant_queue_max,
            interactive_floor: self.interactive_floor,
            batch_floor: self.batch_floor,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_valid_and_impossible_values_are_refused() {
        let defaults = AdmissionConfig::default();
        assert_eq!(defaults.check(), Ok(()));
        let empty = AdmissionConfig { tenant_queue_max: 0, ..defaults };
        assert_eq!(empty.check(), Err(AdmissionConfigError::ZeroQueue { key: "tenant-queue-max" }));
        let floors = AdmissionConfig { interactive_floor: 60, batch_floor: 31, ..defaults };
        let refused = floors.check().unwrap_err();
        assert_eq!(refused, AdmissionConfigError::Floors { interactive: 60, batch: 31 });
        assert!(refused.to_string().ends_with("31 percent, their sum may be at most 90"), "{refused}");
        assert_eq!(AdmissionConfig { batch_floor: 30, ..floors }.check(), Ok(()));
    }
}
