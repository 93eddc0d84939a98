//! Configuration of the router process.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use service::ByteSize;

use crate::admission::Limits;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Config {
    /// Where HTTP and gRPC are served; absent: on `router.sock` in the runtime directory only. An inherited listening
    /// socket takes its place.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub listen: Option<SocketAddr>,
    /// Where workers are found.
    pub runtime_dir: PathBuf,
    /// Continuations that run or wait; more are refused.
    #[serde(default = "streams_max")]
    pub streams_max: u32,
    /// Who waits for a model's workers.
    #[serde(default)]
    pub admission: AdmissionConfig,
    /// Length of a request's body.
    #[serde(default = "body_max")]
    pub body_max: ByteSize,
    /// The longest that a request may take, whatever deadline it names.
    #[serde(default = "request_timeout", with = "service::duration")]
    pub request_timeout: Duration,
    /// How long streams may go on after the request to stop.
    #[serde(default = "drain", with = "service::duration")]
    pub drain: Duration,
}

impl Config {
    /// Defaults for everything but the places.
    pub fn new(listen: Option<SocketAddr>, runtime_dir: PathBuf) -> Self {
        Self {
            listen,
            runtime_dir,
            streams_max: streams_max(),
            admission: AdmissionConfig::default(),
            body_max: body_max(),
            request_timeout: request_timeout(),
            drain: drain(),
        }
    }
}

/// The queues' bounds and floors, of each model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
pub struct AdmissionConfig {
    /// Requests that wait; more are refused with 503.
    pub queue_max: u32,
    /// Of one tenant; more are refused with 429.
    pub tenant_queue_max: u32,
    /// Percent of a model's places and of its queue that are kept free for requests of that class.
    pub interactive_floor: u32,
    pub batch_floor: u32,
}

impl Default for AdmissionConfig {
    fn default() -> Self {
        Self { queue_max: 256, tenant_queue_max: 128, interactive_floor: 10, batch_floor: 5 }
    }
}

/// Ordinary requests have to get anywhere, too.
const FLOORS_MAX: u32 = 90;

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum AdmissionConfigError {
    #[error("`admission.{key}` is 0: nobody could wait; allowed are 1 and more")]
    NoQueue { key: &'static str },
    #[error(
        "`admission.interactive-floor` is {interactive} and `admission.batch-floor` {batch} percent, \
         together they may be at most {FLOORS_MAX}"
    )]
    Floors { interactive: u32, batch: u32 },
}

impl AdmissionConfig {
    pub fn check(&self) -> Result<(), AdmissionConfigError> {
        let queues = [("queue-max", self.queue_max), ("tenant-queue-max", self.tenant_queue_max)];
        if let Some((key, _)) = queues.into_iter().find(|&(_, max)| max == 0) {
            return Err(AdmissionConfigError::NoQueue { key });
        }
        let (interactive, batch) = (self.interactive_floor, self.batch_floor);
        if interactive.saturating_add(batch) > FLOORS_MAX {
            return Err(AdmissionConfigError::Floors { interactive, batch });
        }
        Ok(())
    }

    pub(crate) fn limits(&self, streams_max: u32) -> Limits {
        Limits {
            streams_max,
            queue_max: self.queue_max,
            tenant_queue_max: self.tenant_queue_max,
            interactive_floor: self.interactive_floor,
            batch_floor: self.batch_floor,
        }
    }
}

fn streams_max() -> u32 {
    1024
}

/// A prompt of a million tokens as text, or of 256k token ids.
fn body_max() -> ByteSize {
    ByteSize::mib(8)
}

fn request_timeout() -> Duration {
    Duration::from_secs(600)
}

fn drain() -> Duration {
    Duration::from_secs(10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_allowed_and_impossible_figures_are_not() {
        let sound = AdmissionConfig::default();
        assert_eq!(sound.check(), Ok(()));
        let empty = AdmissionConfig { tenant_queue_max: 0, ..sound };
        assert_eq!(empty.check(), Err(AdmissionConfigError::NoQueue { key: "tenant-queue-max" }));
        let floors = AdmissionConfig { interactive_floor: 60, batch_floor: 31, ..sound };
        let refused = floors.check().unwrap_err();
        assert_eq!(refused, AdmissionConfigError::Floors { interactive: 60, batch: 31 });
        assert!(refused.to_string().ends_with("31 percent, together they may be at most 90"), "{refused}");
        assert_eq!(AdmissionConfig { batch_floor: 30, ..floors }.check(), Ok(()));
    }
}
